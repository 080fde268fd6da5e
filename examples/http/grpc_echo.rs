//! gRPC over RDMA with tonic: `grpc_echo serve [ADDRESS]`, and `grpc_echo call URI MESSAGE...`, whose messages come back.
//!
//! Programs usually generate clients and services from `.proto` files. This service of one method is written by hand, and needs no
//! protoc.

use std::convert::Infallible;
use std::error::Error;
use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, BufMut};
use clap::Parser;
use http::uri::PathAndQuery;
use rdma_msg::StreamListener;
use rdma_msg::tonic::{CONNECTION_WINDOW, STREAM_WINDOW, UriConnector};
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};
use tower_service::Service;

/// gRPC over RDMA.
#[derive(Parser)]
#[command(version)]
enum Role {
    /// Serves until Ctrl-C.
    Serve {
        /// Address to listen at.
        #[arg(default_value = "0.0.0.0:7471")]
        address: String,
    },
    /// Sends messages, and prints the replies.
    Call {
        /// URI of the server, such as http://127.0.0.1:7471.
        uri: String,
        /// Messages to send.
        #[arg(required = true)]
        messages: Vec<String>,
    },
}

/// Messages are plain text.
#[derive(Clone, Copy)]
struct Text;

impl Codec for Text {
    type Encode = String;
    type Decode = String;
    type Encoder = Text;
    type Decoder = Text;

    fn encoder(&mut self) -> Text {
        Text
    }

    fn decoder(&mut self) -> Text {
        Text
    }
}

impl Encoder for Text {
    type Item = String;
    type Error = Status;

    fn encode(&mut self, item: String, target: &mut EncodeBuf<'_>) -> Result<(), Status> {
        target.put(item.as_bytes());
        Ok(())
    }
}

impl Decoder for Text {
    type Item = String;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let bytes = source.copy_to_bytes(source.remaining());
        String::from_utf8(bytes.into()).map(Some).map_err(|_| Status::invalid_argument("the message is not UTF-8"))
    }
}

/// Sends each message back.
#[derive(Clone)]
struct Echo;

impl tonic::server::StreamingService<String> for Echo {
    type Response = String;
    type ResponseStream = Streaming<String>;
    type Future = Ready<Result<Response<Streaming<String>>, Status>>;

    fn call(&mut self, request: Request<Streaming<String>>) -> Self::Future {
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
            Ok(match request.uri().path() {
                "/example.Echo/Echo" => tonic::server::Grpc::new(Text).streaming(Echo, request).await,
                _ => Status::unimplemented("the only method is /example.Echo/Echo").into_http(),
            })
        })
    }
}

async fn serve(address: String) -> Result<(), Box<dyn Error>> {
    let listener = StreamListener::bind(address).await?;
    println!("listening at http://{}", listener.local_address());
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .serve_with_incoming_shutdown(Echo, listener.incoming(), async { _ = tokio::signal::ctrl_c().await })
        .await?;
    Ok(())
}

async fn call(uri: String, messages: Vec<String>) -> Result<(), Box<dyn Error>> {
    let endpoint = Endpoint::from_shared(uri)?
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW);
    let mut client = tonic::client::Grpc::new(endpoint.connect_with_connector(UriConnector::new()?).await?);
    client.ready().await?;
    let path = PathAndQuery::from_static("/example.Echo/Echo");
    let replies = client.streaming(Request::new(tokio_stream::iter(messages)), path, Text).await?;
    let mut replies = replies.into_inner();
    while let Some(reply) = replies.message().await? {
        println!("{reply}");
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let role = Role::parse();
    rdma_safe::soft::install_by_default();
    match role {
        Role::Serve { address } => serve(address).await,
        Role::Call { uri, messages } => call(uri, messages).await,
    }
}
