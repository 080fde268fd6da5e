//! Binding sockets for datagrams.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_safe::cm::{self, Address, CmError, DATAGRAM_QKEY, DatagramListener, Devices};
use rdma_safe::{PortState, ProtectionDomain};

use super::{Datagrams, Socket};
use crate::connection::Facts;
use crate::driver::events::Source;
use crate::driver::lookups::Lookups;
use crate::driver::queue::Queue;
use crate::opening::{Plan, post_receives_in};
use crate::options::{Options, queue_setters};
use crate::{Destination, Driver, Error, Local, Result, Sharing, Threads};

/// Options of a socket for datagrams. Made by [`Datagrams::builder`].
#[derive(Clone, Debug)]
#[must_use = "a builder creates nothing until `bind`"]
pub struct DatagramsBuilder<S: Sharing = Threads> {
    driver: Option<Driver<S>>,
    options: Options,
    backlog: u32,
    pd: Option<ProtectionDomain>,
}

impl Datagrams {
    /// Binds to the first of these addresses that is available, with the driver of the current runtime.
    ///
    /// Peers find the socket there. Port 0 selects a free port.
    ///
    /// # Errors
    /// [`Error::Rdma`], [`Error::Name`], [`Error::Memory`] and the errors of [`Driver::current`].
    pub async fn bind(address: impl Into<Destination>) -> Result<Self> {
        Datagrams::builder().bind(address).await
    }

    /// Options, for the driver of the current runtime.
    pub fn builder() -> DatagramsBuilder {
        let options = Options { keepalive: None, send_elements: 1, ..Options::default() };
        DatagramsBuilder { driver: None, options, backlog: 128, pd: None }
    }
}

impl DatagramsBuilder {
    /// Binds to the first of these addresses that is available.
    ///
    /// # Errors
    /// Like [`Datagrams::bind`].
    pub async fn bind(self, address: impl Into<Destination>) -> Result<Datagrams> {
        let driver = match &self.driver {
            Some(driver) => driver.clone(),
            None => Driver::current()?,
        };
        self.bind_with(driver, address).await
    }

    /// Uses this driver, of one thread or of any.
    pub fn driver<S: Sharing>(self, driver: &Driver<S>) -> DatagramsBuilder<S> {
        let DatagramsBuilder { options, backlog, pd, .. } = self;
        DatagramsBuilder { driver: Some(driver.clone()), options, backlog, pd }
    }
}

impl DatagramsBuilder<Local> {
    /// Like [`Datagrams::bind`], with a driver of one thread.
    ///
    /// # Errors
    /// Like [`Datagrams::bind`].
    pub async fn bind(self, address: impl Into<Destination>) -> Result<Datagrams<Local>> {
        let driver = self.driver.clone().ok_or(Error::DriverStopped)?;
        self.bind_with(driver, address).await
    }
}

impl<S: Sharing> DatagramsBuilder<S> {
    queue_setters!();

    /// Time for a service to answer a lookup, and to join a group; 10 s by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.options.timeout = timeout;
        self
    }

    /// Lookups by peers that wait to be answered; 128 by default. Further ones are dropped, and retried by the peers.
    pub fn backlog(mut self, lookups: u32) -> Self {
        self.backlog = lookups;
        self
    }

    /// Uses this domain, instead of opening the device. Its device must have the address, else `bind` fails with
    /// [`CmError::OtherDevice`](rdma_safe::cm::CmError::OtherDevice).
    ///
    /// By default, all sockets and connections of a driver on a device share a domain. A socket reaches only peers and groups that
    /// were found in its domain. It answers senders whose datagrams arrived at its port.
    pub fn pd(mut self, pd: &ProtectionDomain) -> Self {
        self.pd = Some(pd.clone());
        self
    }

    async fn bind_with(self, driver: Driver<S>, address: impl Into<Destination>) -> Result<Datagrams<S>> {
        let mut last = None;
        for address in address.into().addresses().await? {
            match DatagramListener::bind_with(address, self.backlog) {
                Ok(listener) => return self.open(&driver, listener).await,
                Err(error) => last = Some(error.into()),
            }
        }
        Err(last.unwrap_or_else(Error::no_address))
    }

    async fn open(self, driver: &Driver<S>, listener: DatagramListener) -> Result<Datagrams<S>> {
        let devices = &driver.shared.devices;
        let mut listener = listener.devices(devices);
        if let Some(pd) = &self.pd {
            listener = listener.pd(pd);
        }
        let (pd, port) = match (listener.device()?, &self.pd) {
            (Some((found, _)), Some(pd)) if !found.is_same(pd) => return Err(other_device(&found, pd)),
            (Some(device), _) => device,
            (None, Some(pd)) => (pd.clone(), active_port(pd)?.unwrap_or(1)),
            (None, None) => first_active(devices)?,
        };
        let mtu = pd.context().query_port(port)?.active_mtu().bytes().unwrap_or(4096);
        // So no datagram is too long for a receive.
        let options = Options { message_size: mtu as usize, ..self.options };
        let mut plan = Plan::new(driver, &options, None, &pd)?.with_memory().await?;
        let (mut guard, identity) = plan.open(|builder, set, receives| {
            let key = builder.port(port).build_datagrams_in(set, DATAGRAM_QKEY)?;
            post_receives_in(set, key, receives)?;
            let identity = set.endpoint(key).and_then(|endpoint| endpoint.datagram_identity());
            Ok((key, identity.ok_or(rdma_safe::Error::NoSuchEndpoint)?))
        })?;
        let (queue, key, local) = (guard.queue.clone(), guard.key, listener.local_address());
        let source = Source::<S>::channel(&driver.shared.events, listener.channel())?;
        queue.set_exchanged(key);
        guard.is_done = true;
        let inner = plan.inner(&queue, key, Facts { local: Some(local), peer: None, private_data: Vec::new() });
        Queue::set_datagrams(&queue, key, Lookups::new(listener, &identity), source);
        let mut connector = cm::Connector::new().pd(&pd).timeout(options.timeout);
        if let Some(source) = source_of(&local) {
            connector = connector.source(source);
        }
        let handles = S::cell(super::Handles::default());
        let socket = Socket { inner, identity, connector, handles, local, max_datagram: mtu };
        Ok(Datagrams { socket: S::rc(socket) })
    }
}

/// The address from which to look up others. The port is left open, because the socket occupies its own.
fn source_of(local: &Address) -> Option<SocketAddr> {
    let mut source = local.ip().filter(|address| !address.ip().is_unspecified())?;
    source.set_port(0);
    Some(source)
}

fn other_device(found: &ProtectionDomain, own: &ProtectionDomain) -> Error {
    let [device, endpoint] = [found, own].map(|pd| pd.context().device_name().to_owned());
    rdma_safe::Error::from(CmError::OtherDevice { device, endpoint }).into()
}

/// The domain of the first device with an active port, and this port.
fn first_active(devices: &Devices) -> Result<(ProtectionDomain, u8)> {
    let mut first = None;
    for device in rdma_safe::devices()? {
        let pd = devices.domain(&device.name())?;
        if let Some(port) = active_port(&pd)? {
            return Ok((pd, port));
        }
        first = first.or(Some(pd));
    }
    match first {
        Some(pd) => Ok((pd, 1)),
        None => Ok((devices.domain(&rdma_safe::Device::first()?.name())?, 1)),
    }
}

fn active_port(pd: &ProtectionDomain) -> Result<Option<u8>> {
    for port in 1..=pd.context().attributes().ports() {
        if pd.context().query_port(port)?.state() == PortState::ACTIVE {
            return Ok(Some(port));
        }
    }
    Ok(None)
}
