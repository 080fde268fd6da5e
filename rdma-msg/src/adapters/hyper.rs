//! hyper over RDMA: a connector for clients, and HTTP/2 windows for both ends. Feature `hyper`.
//!
//! A client:
//!
//! ```no_run
//! use hyper_util::client::legacy::Client;
//! use hyper_util::rt::TokioExecutor;
//! use rdma_msg::hyper::{UriConnector, client_windows};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let mut builder = Client::builder(TokioExecutor::new());
//! let client = client_windows(&mut builder).http2_only(true).build(UriConnector::new()?);
//! # let client: Client<UriConnector, http_body_util::Empty<hyper::body::Bytes>> = client;
//! let response = client.get("http://10.0.0.2:7471/".parse()?).await?;
//! println!("{}", response.status());
//! # Ok(())
//! # }
//! ```
//!
//! A server serves each [`Stream`] of [`StreamListener::incoming`](crate::StreamListener::incoming):
//!
//! ```no_run
//! use hyper::service::service_fn;
//! use hyper_util::rt::{TokioExecutor, TokioIo};
//! use hyper_util::server::conn::auto;
//! # async fn hello(
//! #     _: hyper::Request<hyper::body::Incoming>,
//! # ) -> hyper::Result<hyper::Response<http_body_util::Empty<hyper::body::Bytes>>> {
//! #     Ok(Default::default())
//! # }
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let mut incoming = rdma_msg::StreamListener::bind("0.0.0.0:7471").await?.incoming();
//! let mut builder = auto::Builder::new(TokioExecutor::new());
//! rdma_msg::hyper::server_windows(&mut builder);
//! while let Some(stream) = incoming.next().await.transpose()? {
//!     let builder = builder.clone();
//!     tokio::spawn(async move { builder.serve_connection(TokioIo::new(stream), service_fn(hello)).await.map_err(drop) });
//! }
//! # Ok(())
//! # }
//! ```

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::Uri;
use http::uri::Scheme;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto;
use rdma_async::Destination;
use rdma_safe::cm::Address;

use crate::connector::Connector;
use crate::error::Result;
use crate::stream::Stream;

/// Bytes of one HTTP/2 stream that an end receives ahead of its program: 4 MiB.
///
/// The 65,535 bytes of the HTTP/2 standard stall a fast link once per round trip. A window is renewed when half of it is consumed,
/// so one stream fills a link of 200 Gb/s with a round trip of 80 µs.
pub const STREAM_WINDOW: u32 = 4 << 20;

/// Bytes of all HTTP/2 streams of a connection that an end receives ahead of its program: 16 MiB.
///
/// It bounds the memory that one peer can fill by streams that the program does not read.
pub const CONNECTION_WINDOW: u32 = 16 << 20;

/// Sets [`STREAM_WINDOW`] and [`CONNECTION_WINDOW`] for the HTTP/2 connections of a client.
pub fn client_windows(builder: &mut legacy::Builder) -> &mut legacy::Builder {
    builder.http2_initial_stream_window_size(STREAM_WINDOW).http2_initial_connection_window_size(CONNECTION_WINDOW)
}

/// Sets [`STREAM_WINDOW`] and [`CONNECTION_WINDOW`] for the HTTP/2 connections of a server.
pub fn server_windows<E>(builder: &mut auto::Builder<E>) -> &mut auto::Builder<E> {
    builder.http2().initial_stream_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
    builder
}

/// Connects streams to the host and port of a URI: the connector of hyper's and tonic's clients.
///
/// The port is 80 if the URI names none. The scheme `https` is refused, since RDMA has no TLS.
#[derive(Clone, Debug)]
#[must_use = "a connector connects only when asked to"]
pub struct UriConnector {
    connector: Connector,
    destination: Option<Destination>,
}

impl UriConnector {
    /// A connector with the driver of the current runtime and default options.
    ///
    /// # Errors
    /// Those of [`Connector::new`].
    pub fn new() -> Result<Self> {
        Ok(Connector::new()?.into())
    }

    /// Connects to `destination` for every URI, for example to a native InfiniBand address.
    pub fn destination(mut self, destination: impl Into<Destination>) -> Self {
        self.destination = Some(destination.into());
        self
    }

    fn destination_of(&self, uri: &Uri) -> io::Result<Destination> {
        if uri.scheme() == Some(&Scheme::HTTPS) {
            return Err(unusable(uri, "https needs TLS, which this connector does not have; use http"));
        }
        if let Some(destination) = &self.destination {
            return Ok(destination.clone());
        }
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| unusable(uri, "it has no host"))?;
        Ok(format!("{host}:{}", uri.port_u16().unwrap_or(80)).into())
    }
}

fn unusable(uri: &Uri, reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("cannot connect to {uri}: {reason}"))
}

/// Connects with the options of the [`Connector`].
impl From<Connector> for UriConnector {
    fn from(connector: Connector) -> Self {
        UriConnector { connector, destination: None }
    }
}

impl tower_service::Service<Uri> for UriConnector {
    type Response = TokioIo<Stream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<Stream>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let (connector, destination) = (self.connector.clone(), self.destination_of(&uri));
        Box::pin(async move { Ok(TokioIo::new(connector.connect_stream(destination?).await?)) })
    }
}

/// The addresses of a connection, in the extensions of hyper's responses and tonic's requests.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ConnectInfo {
    /// The address of this end.
    pub local: Option<Address>,
    /// The address of the peer.
    pub peer: Option<Address>,
}

impl ConnectInfo {
    pub(super) fn of(stream: &Stream) -> Self {
        ConnectInfo { local: stream.local_address(), peer: stream.peer_address() }
    }
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        Connected::new().extra(ConnectInfo::of(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connector() -> UriConnector {
        rdma_safe::soft::install().unwrap();
        UriConnector::new().unwrap()
    }

    #[tokio::test]
    async fn the_destination_is_the_host_and_port_of_the_uri() {
        let connector = connector();
        for (uri, destination) in [
            ("http://10.0.0.2:7471/path?query", "10.0.0.2:7471"),
            ("http://user@[fe80::1]:7471", "[fe80::1]:7471"),
            ("http://server.example/", "server.example:80"),
        ] {
            assert_eq!(connector.destination_of(&uri.parse().unwrap()).unwrap(), Destination::from(destination));
        }
        let fixed = connector.destination("10.0.0.3:1");
        assert_eq!(fixed.destination_of(&"http://name".parse().unwrap()).unwrap(), Destination::from("10.0.0.3:1"));
    }

    #[tokio::test]
    async fn a_uri_without_host_or_with_tls_is_refused() {
        let connector = connector();
        for uri in ["/path", "https://10.0.0.2:7471/"] {
            let error = connector.destination_of(&uri.parse().unwrap()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            assert!(error.to_string().contains(uri), "{error}");
        }
    }
}
