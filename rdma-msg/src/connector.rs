//! Connecting to an address.

use rdma_async::{Destination, Driver};
use rdma_safe::ProtectionDomain;

use crate::channel::{Channel, Handle};
use crate::error::Result;
use crate::options::{Options, setters, transport};
use crate::stream::Stream;
use crate::wire::Purpose;

/// Connects channels and streams to addresses.
#[derive(Clone, Debug)]
#[must_use = "a connector connects only when asked to"]
pub struct Connector {
    transport: rdma_async::Connector,
    options: Options,
}

impl Connector {
    /// A connector with the driver of the current runtime.
    ///
    /// # Errors
    /// The errors of [`Driver::current`].
    pub fn new() -> Result<Self> {
        Ok(Connector { transport: rdma_async::Connector::new()?, options: Options::default() })
    }

    /// A connector with this driver.
    pub fn with_driver(driver: &Driver) -> Self {
        Connector { transport: rdma_async::Connector::with_driver(driver), options: Options::default() }
    }

    setters!();

    /// Uses this domain for connections on its device, instead of opening the device.
    pub fn pd(mut self, pd: &ProtectionDomain) -> Self {
        self.transport = self.transport.pd(pd);
        self
    }

    /// Connects a channel to the first address of `peer` that accepts.
    ///
    /// # Errors
    /// [`Error::Connection`](crate::Error::Connection), and [`Error::Incompatible`](crate::Error::Incompatible) when the peer uses
    /// another protocol; [`Error::Protocol`](crate::Error::Protocol) when the values of its handshake are impossible.
    pub async fn connect(&self, peer: impl Into<Destination>) -> Result<Channel> {
        Ok(Channel::new(self.connect_for(Purpose::Messages, peer).await?))
    }

    /// Connects a stream to the first address of `peer` that accepts.
    ///
    /// # Errors
    /// Like [`Connector::connect`].
    pub async fn connect_stream(&self, peer: impl Into<Destination>) -> Result<Stream> {
        Ok(Stream::new(self.connect_for(Purpose::Stream, peer).await?))
    }

    async fn connect_for(&self, purpose: Purpose, peer: impl Into<Destination>) -> Result<Handle> {
        let hello = self.options.hello(purpose);
        let connector = transport!(&self.options, hello, self.transport.clone());
        let connection = connector.connect(peer).await?;
        Handle::start(&self.options, connection, &hello, true).await
    }
}

/// Connects a channel to `peer` with the driver of the current runtime and default options: [`Connector::connect`].
///
/// # Errors
/// Like [`Connector::new`] and [`Connector::connect`].
pub async fn connect(peer: impl Into<Destination>) -> Result<Channel> {
    Connector::new()?.connect(peer).await
}

/// Connects a stream to `peer` with the driver of the current runtime and default options: [`Connector::connect_stream`].
///
/// # Errors
/// Like [`Connector::new`] and [`Connector::connect`].
pub async fn connect_stream(peer: impl Into<Destination>) -> Result<Stream> {
    Connector::new()?.connect_stream(peer).await
}
