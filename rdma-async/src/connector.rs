//! Connecting to an address.

use rdma_safe::{ProtectionDomain, cm};

use crate::opening::{Plan, complete, post_receives_in};
use crate::options::{Options, setters};
use crate::{Connection, Destination, Driver, Error, Result, SharedReceives, Sharing, Threads};

/// Connects to addresses.
///
/// Its connections share a driver. All connections of a driver share a protection domain for each device, and with it memory.
#[derive(Clone, Debug)]
#[must_use = "a connector connects only when asked to"]
pub struct Connector<S: Sharing = Threads> {
    pub(crate) driver: Driver<S>,
    connector: cm::Connector,
    pub(crate) options: Options,
    pub(crate) shared: Option<SharedReceives<S>>,
}

impl Connector {
    /// A connector with the driver of the current runtime.
    ///
    /// # Errors
    /// The errors of [`Driver::current`].
    pub fn new() -> Result<Self> {
        Ok(Connector::with_driver(&Driver::current()?))
    }
}

impl<S: Sharing> Connector<S> {
    /// A connector with this driver.
    pub fn with_driver(driver: &Driver<S>) -> Self {
        let connector = cm::Connector::new().devices(&driver.shared.devices);
        Connector { driver: driver.clone(), connector, options: Options::default(), shared: None }
    }

    setters!(
        "At most 56 bytes that the request carries, for the [private data](crate::Connection::private_data) of the peer."
    );

    /// Connections share these receives with others. Each reserves [`receives`](Connector::receives) of them.
    pub fn shared_receives(mut self, shared: &SharedReceives<S>) -> Self {
        self.shared = Some(shared.clone());
        self
    }

    /// Uses this domain for connections on its device, instead of opening the device.
    pub fn pd(mut self, pd: &ProtectionDomain) -> Self {
        self.connector = self.connector.pd(pd);
        self
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &Driver<S> {
        &self.driver
    }

    /// Connects to the first address of `peer` that accepts.
    ///
    /// # Errors
    /// [`Error::Rdma`] with the step of the handshake that has failed and the cause, for the last address; [`Error::Name`];
    /// [`Error::Memory`]; [`Error::NoReceives`]; [`Error::DriverStopped`].
    pub async fn connect(&self, peer: impl Into<Destination>) -> Result<Connection<S>> {
        let mut last = None;
        for address in peer.into().addresses().await? {
            match self.connect_to(address).await {
                Ok(connection) => return Ok(connection),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(Error::no_address))
    }

    async fn connect_to(&self, address: cm::Address) -> Result<Connection<S>> {
        let events = &self.driver.shared.events;
        let resolving = self.connector.clone().timeout(self.options.timeout).start_resolve(address)?;
        let route = complete::<S, _>(events, resolving).await?;
        let plan = Plan::new(&self.driver, &self.options, self.shared.as_ref(), route.pd())?.with_memory().await?;
        let private_data = &self.options.private_data;
        let opening = plan.start(|builder, set, receives| {
            let handshake = route.start_connect_in(builder, set, private_data)?;
            post_receives_in(set, handshake.key(), receives)?;
            Ok(handshake)
        });
        opening?.await
    }
}

/// Connects to `peer` with the driver of the current runtime and default options: [`Connector::connect`].
///
/// # Errors
/// Like [`Connector::new`] and [`Connector::connect`].
pub async fn connect(peer: impl Into<Destination>) -> Result<Connection> {
    Connector::new()?.connect(peer).await
}
