//! Scenarios of gRPC, with messages of plain bytes.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::uri::PathAndQuery;
use hyper::body::Bytes;
use rdma_msg::tonic::{CONNECTION_WINDOW, STREAM_WINDOW};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status, Streaming};
use tower_service::Service;

use crate::plain::Plain;
use crate::record::Record;
use crate::server::pattern;
use crate::transport::Transport;

type Messages = Pin<Box<dyn tokio_stream::Stream<Item = Result<Bytes, Status>> + Send>>;
type Reply<T> = Pin<Box<dyn Future<Output = Result<Response<T>, Status>> + Send>>;

/// The service. Each method is a path.
#[derive(Clone)]
struct Methods {
    /// Reports events that a client cannot observe.
    events: mpsc::UnboundedSender<&'static str>,
}

struct Unary;
struct Fail;
struct Stuck(Methods);
struct ServerStream;
struct FailMidway;
struct ClientStream;
struct Bidirectional(Methods);

/// Reports that a call was dropped.
struct Guard(Methods);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.events.send("the call was dropped");
    }
}

fn failure() -> Status {
    let mut metadata = MetadataMap::new();
    metadata.insert("x-reason", "a test".parse().unwrap());
    Status::with_details_and_metadata(Code::ResourceExhausted, "no more: ü%\n", pattern(5, 100), metadata)
}

impl tonic::server::UnaryService<Bytes> for Unary {
    type Response = Bytes;
    type Future = Reply<Bytes>;

    fn call(&mut self, request: Request<Bytes>) -> Reply<Bytes> {
        Box::pin(async {
            let (metadata, _, message) = request.into_parts();
            let mut response = Response::new(message);
            if let Some(value) = metadata.get("x-request") {
                response.metadata_mut().insert("x-response", value.clone());
            }
            Ok(response)
        })
    }
}

impl tonic::server::UnaryService<Bytes> for Fail {
    type Response = Bytes;
    type Future = Reply<Bytes>;

    fn call(&mut self, _: Request<Bytes>) -> Reply<Bytes> {
        Box::pin(async { Err(failure()) })
    }
}

impl tonic::server::UnaryService<Bytes> for Stuck {
    type Response = Bytes;
    type Future = Reply<Bytes>;

    fn call(&mut self, _: Request<Bytes>) -> Reply<Bytes> {
        let guard = Guard(self.0.clone());
        let _ = self.0.events.send("the call has begun");
        Box::pin(async {
            let _guard = guard;
            std::future::pending().await
        })
    }
}

impl tonic::server::ServerStreamingService<Bytes> for ServerStream {
    type Response = Bytes;
    type ResponseStream = Messages;
    type Future = Reply<Messages>;

    fn call(&mut self, request: Request<Bytes>) -> Reply<Messages> {
        let len = request.into_inner().len() as u64;
        let messages = tokio_stream::iter((0..50).map(move |index| Ok(pattern(len + index, 1000 * index as usize))));
        Box::pin(async { Ok(Response::new(Box::pin(messages) as Messages)) })
    }
}

impl tonic::server::ServerStreamingService<Bytes> for FailMidway {
    type Response = Bytes;
    type ResponseStream = Messages;
    type Future = Reply<Messages>;

    fn call(&mut self, request: Request<Bytes>) -> Reply<Messages> {
        let message = request.into_inner();
        let messages = tokio_stream::iter([Ok(message.clone()), Ok(message), Err(failure())]);
        Box::pin(async { Ok(Response::new(Box::pin(messages) as Messages)) })
    }
}

impl tonic::server::ClientStreamingService<Bytes> for ClientStream {
    type Response = Bytes;
    type Future = Reply<Bytes>;

    fn call(&mut self, request: Request<Streaming<Bytes>>) -> Reply<Bytes> {
        Box::pin(async {
            let (mut messages, mut all) = (request.into_inner(), Vec::new());
            while let Some(message) = messages.message().await? {
                all.extend_from_slice(&message);
            }
            Ok(Response::new(all.into()))
        })
    }
}

impl tonic::server::StreamingService<Bytes> for Bidirectional {
    type Response = Bytes;
    type ResponseStream = Messages;
    type Future = Reply<Messages>;

    fn call(&mut self, request: Request<Streaming<Bytes>>) -> Reply<Messages> {
        let guard = Guard(self.0.clone());
        let messages = request.into_inner().map(move |message| {
            let _ = &guard;
            message
        });
        Box::pin(async { Ok(Response::new(Box::pin(messages) as Messages)) })
    }
}

impl Service<http::Request<tonic::body::Body>> for Methods {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        let methods = self.clone();
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(Plain);
            Ok(match request.uri().path() {
                "/test/Unary" => grpc.unary(Unary, request).await,
                "/test/Fail" => grpc.unary(Fail, request).await,
                "/test/Stuck" => grpc.unary(Stuck(methods), request).await,
                "/test/ServerStream" => grpc.server_streaming(ServerStream, request).await,
                "/test/FailMidway" => grpc.server_streaming(FailMidway, request).await,
                "/test/ClientStream" => grpc.client_streaming(ClientStream, request).await,
                "/test/Bidirectional" => grpc.streaming(Bidirectional(methods), request).await,
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

/// A client of a server.
struct Pair {
    client: tonic::client::Grpc<Channel>,
    events: mpsc::UnboundedReceiver<&'static str>,
    stop: oneshot::Sender<()>,
    server: JoinHandle<()>,
}

impl Pair {
    async fn new<T: Transport>() -> Self {
        let (incoming, address): (_, SocketAddr) = T::listen().await;
        let (stop, stopped) = oneshot::channel();
        let (sender, events) = mpsc::unbounded_channel();
        let server = tokio::spawn(async move {
            Server::builder()
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .serve_with_incoming_shutdown(Methods { events: sender }, incoming, async { _ = stopped.await })
                .await
                .unwrap();
        });
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        let channel = endpoint
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .connect_with_connector(T::connector())
            .await
            .unwrap();
        Pair { client: tonic::client::Grpc::new(channel), events, stop, server }
    }

    async fn end(self) {
        let _ = self.stop.send(());
        drop(self.client);
        self.server.await.unwrap();
    }

    async fn unary(&mut self, path: &'static str, request: Request<Bytes>) -> Result<Response<Bytes>, Status> {
        self.client.ready().await.unwrap();
        self.client.unary(request, PathAndQuery::from_static(path), Plain).await
    }

    async fn server_streaming(&mut self, path: &'static str, message: Bytes) -> Response<Streaming<Bytes>> {
        self.client.ready().await.unwrap();
        let path = PathAndQuery::from_static(path);
        self.client.server_streaming(Request::new(message), path, Plain).await.unwrap()
    }

    async fn bidirectional(&mut self, messages: mpsc::Receiver<Bytes>) -> Streaming<Bytes> {
        self.client.ready().await.unwrap();
        let messages = tokio_stream::wrappers::ReceiverStream::new(messages);
        let path = PathAndQuery::from_static("/test/Bidirectional");
        self.client.streaming(Request::new(messages), path, Plain).await.unwrap().into_inner()
    }
}

fn record_status(record: &mut Record, status: &Status) {
    record.line(format_args!("status {:?}: {}", status.code(), status.message().escape_debug()));
    record.bytes("details", status.details());
    record.headers("metadata", &status.metadata().clone().into_headers());
}

fn record_unary(record: &mut Record, result: Result<Response<Bytes>, Status>) {
    match result {
        Ok(response) => {
            record.headers("metadata", &response.metadata().clone().into_headers());
            record.bytes("message", response.get_ref());
        }
        Err(status) => record_status(record, &status),
    }
}

async fn record_messages(record: &mut Record, mut messages: Streaming<Bytes>) {
    loop {
        match messages.message().await {
            Ok(Some(message)) => record.bytes("message", &message),
            Ok(None) => break,
            Err(status) => return record_status(record, &status),
        }
    }
    if let Some(trailers) = messages.trailers().await.unwrap() {
        record.headers("trailer", &trailers.into_headers());
    }
}

/// Calls of one message.
pub(crate) async fn unary<T: Transport>() -> Record {
    let mut record = Record::default();
    let mut pair = Pair::new::<T>().await;
    for (index, len) in [0, 1, 1000, 100_000, 3_000_000].into_iter().enumerate() {
        let mut request = Request::new(pattern(index as u64, len));
        request.metadata_mut().insert("x-request", index.into());
        record_unary(&mut record, pair.unary("/test/Unary", request).await);
    }
    for path in ["/test/Fail", "/test/Nothing"] {
        record_unary(&mut record, pair.unary(path, Request::new(Bytes::new())).await);
    }
    pair.end().await;
    record
}

/// Calls with streams of messages: of the server, of the client, and of both at once.
pub(crate) async fn streaming<T: Transport>() -> Record {
    let mut record = Record::default();
    let mut pair = Pair::new::<T>().await;
    for path in ["/test/ServerStream", "/test/FailMidway"] {
        let response = pair.server_streaming(path, pattern(1, 500)).await;
        record.headers("metadata", &response.metadata().clone().into_headers());
        record_messages(&mut record, response.into_inner()).await;
    }
    let messages = tokio_stream::iter((0..40).map(|index| pattern(index, 3000 * index as usize)));
    pair.client.ready().await.unwrap();
    let path = PathAndQuery::from_static("/test/ClientStream");
    record_unary(&mut record, pair.client.client_streaming(Request::new(messages), path, Plain).await);

    // One message at a time, and then many ahead.
    let (sender, receiver) = mpsc::channel(4);
    let mut replies = pair.bidirectional(receiver).await;
    for round in 0..10 {
        sender.send(pattern(round, 100)).await.unwrap();
        record.bytes("message", &replies.message().await.unwrap().unwrap());
    }
    let writer = tokio::spawn(async move {
        for round in 0..100 {
            sender.send(pattern(round, 30_000)).await.unwrap();
        }
    });
    record_messages(&mut record, replies).await;
    writer.await.unwrap();
    pair.end().await;
    record
}

/// A deadline, a cancelled call, and a stream that the client drops. The server learns of each.
pub(crate) async fn cancellation<T: Transport>() -> Record {
    let mut record = Record::default();
    let mut pair = Pair::new::<T>().await;
    let mut request = Request::new(Bytes::new());
    // Long enough for the call to reach the service.
    request.set_timeout(Duration::from_secs(1));
    let status = pair.unary("/test/Stuck", request).await.unwrap_err();
    // Either end may notice first.
    record.line(format_args!("{:?} {}", status.code(), status.message()));
    for _ in 0..2 {
        record.line(pair.events.recv().await.unwrap());
    }

    let mut client = pair.client.clone();
    let call = tokio::spawn(async move {
        client.ready().await.unwrap();
        client.unary(Request::new(Bytes::new()), PathAndQuery::from_static("/test/Stuck"), Plain).await
    });
    record.line(pair.events.recv().await.unwrap());
    call.abort();
    record.line(pair.events.recv().await.unwrap());

    let (sender, receiver) = mpsc::channel(4);
    let mut replies = pair.bidirectional(receiver).await;
    sender.send(pattern(1, 100_000)).await.unwrap();
    record.bytes("message", &replies.message().await.unwrap().unwrap());
    // hyper resets the HTTP/2 stream once both directions are dropped.
    drop((replies, sender));
    record.line(pair.events.recv().await.unwrap());

    record_unary(&mut record, pair.unary("/test/Unary", Request::new(pattern(9, 10))).await);
    pair.end().await;
    record
}
