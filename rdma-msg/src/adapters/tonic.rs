//! gRPC over RDMA with tonic. Feature `tonic`.
//!
//! A server serves [`StreamListener::incoming`](crate::StreamListener::incoming):
//!
//! ```no_run
//! use rdma_msg::tonic::{CONNECTION_WINDOW, STREAM_WINDOW};
//! use tonic::transport::Server;
//! # #[derive(Clone)]
//! # struct Greeter;
//! # impl tower_service::Service<http::Request<tonic::body::Body>> for Greeter {
//! #     type Response = http::Response<tonic::body::Body>;
//! #     type Error = std::convert::Infallible;
//! #     type Future = std::future::Ready<Result<Self::Response, Self::Error>>;
//! #     fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Self::Error>> {
//! #         std::task::Poll::Ready(Ok(()))
//! #     }
//! #     fn call(&mut self, _: http::Request<tonic::body::Body>) -> Self::Future {
//! #         std::future::ready(Ok(Default::default()))
//! #     }
//! # }
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let listener = rdma_msg::StreamListener::bind("0.0.0.0:7471").await?;
//! Server::builder()
//!     .initial_stream_window_size(STREAM_WINDOW)
//!     .initial_connection_window_size(CONNECTION_WINDOW)
//!     .serve_with_incoming(Greeter, listener.incoming())
//!     .await?;
//! # Ok(())
//! # }
//! ```
//!
//! A client, with tonic's feature `channel`:
//!
//! ```no_run
//! use rdma_msg::tonic::{CONNECTION_WINDOW, STREAM_WINDOW, UriConnector};
//! use tonic::transport::Endpoint;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let channel = Endpoint::from_static("http://10.0.0.2:7471")
//!     .initial_stream_window_size(STREAM_WINDOW)
//!     .initial_connection_window_size(CONNECTION_WINDOW)
//!     .connect_with_connector(UriConnector::new()?)
//!     .await?;
//! # Ok(())
//! # }
//! ```
//!
//! A handler finds the addresses of its client in the extensions of the request: `request.extensions().get::<ConnectInfo>()`.

use tonic::transport::server::Connected;

pub use super::hyper::{CONNECTION_WINDOW, ConnectInfo, STREAM_WINDOW, UriConnector};
use crate::stream::Stream;

impl Connected for Stream {
    type ConnectInfo = ConnectInfo;

    fn connect_info(&self) -> ConnectInfo {
        ConnectInfo::of(self)
    }
}
