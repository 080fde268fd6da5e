//! The transports of the tests: TCP, and streams over soft0.

use std::error::Error;
use std::future::Future;
use std::io;
use std::net::SocketAddr;

use http::Uri;
use hyper_util::client::legacy::connect::{Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use rdma_msg::hyper::UriConnector;
use rdma_msg::{Incoming, StreamListener};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tonic::transport::server::{Connected, TcpIncoming};
use tower_service::Service;

/// The errors of bodies and connectors.
pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

/// Byte streams between a client and a server.
pub(crate) trait Transport: Send + Sync + 'static {
    type Io: AsyncRead + AsyncWrite + Connected + Connection + Unpin + Send + 'static;
    type Incoming: futures_core::Stream<Item = io::Result<Self::Io>> + Unpin + Send + 'static;
    type Connector: Service<Uri, Response = TokioIo<Self::Io>, Error: Error + Send + Sync + 'static, Future: Unpin + Send>
        + Clone
        + Send
        + Sync
        + 'static;

    /// Listens at a free port.
    fn listen() -> impl Future<Output = (Self::Incoming, SocketAddr)> + Send;

    fn connector() -> Self::Connector;
}

pub(crate) struct Tcp;

impl Transport for Tcp {
    type Io = TcpStream;
    type Incoming = TcpIncoming;
    type Connector = HttpConnector;

    async fn listen() -> (TcpIncoming, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (TcpIncoming::from(listener).with_nodelay(Some(true)), address)
    }

    fn connector() -> HttpConnector {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector
    }
}

pub(crate) struct Rdma;

impl Transport for Rdma {
    type Io = rdma_msg::Stream;
    type Incoming = Incoming;
    type Connector = UriConnector;

    async fn listen() -> (Incoming, SocketAddr) {
        let listener = StreamListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_address().ip().unwrap();
        (listener.incoming().on_error(|error| panic!("accepting a stream: {error}")), address)
    }

    fn connector() -> UriConnector {
        UriConnector::new().unwrap()
    }
}
