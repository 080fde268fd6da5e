//! Echoes over gRPC, with messages of plain bytes.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::uri::PathAndQuery;
use rdma_msg::StreamListener;
use rdma_msg::tonic::{CONNECTION_WINDOW, STREAM_WINDOW, UriConnector};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::server::{StreamingService, UnaryService};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};
use tower_service::Service;

use crate::plain::Plain;
use crate::transport::Transport;
use crate::{Pattern, Result};

const UNARY: &str = "/bench.Echo/Unary";
const STREAM: &str = "/bench.Echo/Stream";

/// Sends each message back.
#[derive(Clone)]
struct Echo;

impl UnaryService<Bytes> for Echo {
    type Response = Bytes;
    type Future = Ready<Result<Response<Bytes>, Status>>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        ready(Ok(Response::new(request.into_inner())))
    }
}

impl StreamingService<Bytes> for Echo {
    type Response = Bytes;
    type ResponseStream = Streaming<Bytes>;
    type Future = Ready<Result<Response<Streaming<Bytes>>, Status>>;

    fn call(&mut self, request: Request<Streaming<Bytes>>) -> Self::Future {
        ready(Ok(Response::new(request.into_inner())))
    }
}

impl Service<http::Request<Body>> for Echo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(Plain);
            Ok(match request.uri().path() {
                UNARY => grpc.unary(Echo, request).await,
                STREAM => grpc.streaming(Echo, request).await,
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

/// Serves in a task. Returns the address.
pub(crate) async fn serve(transport: Transport) -> Result<String> {
    let server =
        Server::builder().initial_stream_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
    match transport {
        Transport::Stream => {
            let listener = StreamListener::bind("127.0.0.1:0").await?;
            let address = listener.local_address().to_string();
            tokio::spawn(async move { server.serve_with_incoming(Echo, listener.incoming()).await });
            Ok(address)
        }
        Transport::Tcp => {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            let address = listener.local_addr()?.to_string();
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            tokio::spawn(async move { server.serve_with_incoming(Echo, incoming).await });
            Ok(address)
        }
        Transport::Channel | Transport::Many | Transport::Owned | Transport::FixedLength | Transport::Unix => {
            Err("gRPC is measured over streams and TCP".into())
        }
    }
}

/// Calls one after the other. Several of them share a connection.
pub(crate) struct Calls {
    message: Bytes,
    kind: Kind,
}

enum Kind {
    Unary(Grpc<Channel>),
    Stream(mpsc::Sender<Bytes>, Streaming<Bytes>),
}

impl Calls {
    /// Connects, and makes the first call of each.
    pub(crate) async fn connect(
        transport: Transport,
        address: &str,
        pattern: Pattern,
        size: usize,
        count: usize,
    ) -> Result<Vec<Calls>> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?
            .tcp_nodelay(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
        let channel = match transport {
            Transport::Stream => endpoint.connect_with_connector(UriConnector::new()?).await?,
            _ => endpoint.connect().await?,
        };
        let message = Bytes::from(vec![7; size]);
        let mut all = Vec::new();
        for _ in 0..count {
            let mut client = Grpc::new(channel.clone());
            let kind = match pattern {
                Pattern::Stream => {
                    let (sender, receiver) = mpsc::channel(1);
                    client.ready().await?;
                    let messages = Request::new(ReceiverStream::new(receiver));
                    let replies = client.streaming(messages, PathAndQuery::from_static(STREAM), Plain).await?;
                    Kind::Stream(sender, replies.into_inner())
                }
                _ => Kind::Unary(client),
            };
            let mut calls = Calls { message: message.clone(), kind };
            calls.call().await?;
            all.push(calls);
        }
        Ok(all)
    }

    /// Sends the message, and waits for its echo.
    async fn call(&mut self) -> Result<()> {
        let message = self.message.clone();
        let echo = match &mut self.kind {
            Kind::Unary(client) => {
                client.ready().await?;
                client.unary(Request::new(message), PathAndQuery::from_static(UNARY), Plain).await?.into_inner()
            }
            Kind::Stream(sender, replies) => {
                sender.send(message).await?;
                replies.message().await?.ok_or("the stream has ended")?
            }
        };
        if echo != self.message {
            return Err("the echo differs".into());
        }
        Ok(())
    }

    /// Number of calls until `end`, and their times in nanoseconds.
    pub(crate) async fn run(mut self, end: Instant) -> Result<(u64, Vec<u32>)> {
        let mut latencies = Vec::new();
        loop {
            let now = Instant::now();
            if now >= end {
                return Ok((latencies.len() as u64, latencies));
            }
            self.call().await?;
            latencies.push(now.elapsed().as_nanos() as u32);
        }
    }
}
