//! Accepting channels and streams.

use rdma_async::{Destination, Driver};
use rdma_safe::ProtectionDomain;
use rdma_safe::cm::Address;

use crate::channel::{Channel, Handle};
use crate::error::{Error, Result};
use crate::options::{Options, setters, transport};
use crate::stream::Stream;
use crate::wire::{Hello, Purpose};

/// Listens at an address for channels. Dropping it refuses further requests; accepted channels go on.
///
/// ```no_run
/// # async fn serve(_: rdma_msg::Channel) {}
/// # async fn example() -> rdma_msg::Result<()> {
/// let listener = rdma_msg::Listener::bind("0.0.0.0:7471").await?;
/// loop {
///     match listener.accept().await {
///         Ok(channel) => drop(tokio::spawn(serve(channel))),
///         Err(error) => {
///             eprintln!("a client cannot be accepted: {error}");
///             tokio::time::sleep(std::time::Duration::from_millis(10)).await;
///         }
///     }
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct Listener(Acceptor);

/// Listens at an address for streams.
#[derive(Debug)]
pub struct StreamListener(Acceptor);

#[derive(Debug)]
struct Acceptor {
    transport: rdma_async::Listener,
    options: Options,
    hello: Hello,
}

/// Options of a listener. Made by [`Listener::builder`].
#[derive(Clone, Debug)]
#[must_use = "a builder creates nothing until `bind`"]
pub struct ListenerBuilder {
    transport: rdma_async::ListenerBuilder,
    options: Options,
}

impl ListenerBuilder {
    setters!();

    /// Uses this driver. The default is the driver of the current runtime.
    pub fn driver(mut self, driver: &Driver) -> Self {
        self.transport = self.transport.driver(driver);
        self
    }

    /// Requests that wait to be accepted; 128 by default. Further ones are dropped, and retried by the peers.
    pub fn backlog(mut self, requests: u32) -> Self {
        self.transport = self.transport.backlog(requests);
        self
    }

    /// Uses this domain for connections on its device, instead of opening the device.
    pub fn pd(mut self, pd: &ProtectionDomain) -> Self {
        self.transport = self.transport.pd(pd);
        self
    }

    /// Listens for channels at the first of these addresses that is available.
    ///
    /// # Errors
    /// Like [`Listener::bind`].
    pub async fn bind(self, address: impl Into<Destination>) -> Result<Listener> {
        Ok(Listener(self.bind_for(Purpose::Messages, address).await?))
    }

    /// Listens for streams at the first of these addresses that is available.
    ///
    /// # Errors
    /// Like [`Listener::bind`].
    pub async fn bind_streams(self, address: impl Into<Destination>) -> Result<StreamListener> {
        Ok(StreamListener(self.bind_for(Purpose::Stream, address).await?))
    }

    async fn bind_for(self, purpose: Purpose, address: impl Into<Destination>) -> Result<Acceptor> {
        let ListenerBuilder { transport, options } = self;
        let hello = options.hello(purpose);
        let transport = transport!(&options, hello, transport).bind(address).await?;
        Ok(Acceptor { transport, options, hello })
    }
}

impl Acceptor {
    async fn accept(&self) -> Result<Handle> {
        loop {
            let connection = self.transport.accept().await?;
            match Handle::start(&self.options, connection, &self.hello, false).await {
                // The peer finds out by the private data of this end.
                Err(Error::Incompatible(_) | Error::Protocol(_)) => {}
                started => return started,
            }
        }
    }
}

macro_rules! accepts {
    ($name:ident, $item:ident, $what:literal) => {
        impl $name {
            /// The address that it listens at, including the actual port.
            #[must_use]
            pub fn local_address(&self) -> Address {
                self.0.transport.local_address()
            }

            #[doc = concat!("The next ", $what, ".")]
            ///
            /// A peer with which this end cannot talk is skipped, and learns why. Dropping the future may lose a connection whose
            /// handshake is complete; its peer then learns that it has ended.
            ///
            /// # Errors
            /// [`Error::Connection`] when one request cannot be used, for example because the process has no file descriptor left
            /// (`EMFILE`). The listener goes on: log the error, wait for some milliseconds, and call this again. After the device
            /// of the address was removed, or the driver has stopped, each call fails: end the loop.
            pub async fn accept(&self) -> Result<$item> {
                Ok($item::new(self.0.accept().await?))
            }
        }
    };
}

accepts!(Listener, Channel, "channel");
accepts!(StreamListener, Stream, "stream");

impl Listener {
    /// Listens for channels with the driver of the current runtime and default options.
    ///
    /// An unspecified IP address stands for all addresses of this host, on any device. Port 0 selects a free port.
    ///
    /// # Errors
    /// Those of [`rdma_async::Listener::bind`].
    pub async fn bind(address: impl Into<Destination>) -> Result<Self> {
        Listener::builder().bind(address).await
    }

    /// Options of a listener for channels or streams.
    pub fn builder() -> ListenerBuilder {
        ListenerBuilder { transport: rdma_async::Listener::builder(), options: Options::default() }
    }
}

impl StreamListener {
    /// Listens for streams with the driver of the current runtime and default options.
    ///
    /// # Errors
    /// Like [`Listener::bind`].
    pub async fn bind(address: impl Into<Destination>) -> Result<Self> {
        Listener::builder().bind_streams(address).await
    }
}
