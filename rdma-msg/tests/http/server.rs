//! The HTTP server of the tests, and the bodies that both ends send.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::client::legacy::{self, Client};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;

use crate::transport::{BoxError, Transport};

pub(crate) type Body = UnsyncBoxBody<Bytes, BoxError>;
pub(crate) type HttpClient<T> = Client<<T as Transport>::Connector, Body>;

pub(crate) fn empty() -> Body {
    Empty::new().map_err(Into::into).boxed_unsync()
}

pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(Into::into).boxed_unsync()
}

/// A body without a known length, in frames of `piece` bytes, perhaps with trailers.
pub(crate) fn pieces(bytes: Bytes, piece: usize, trailers: Option<HeaderMap>) -> Body {
    let frames = (0..bytes.len()).step_by(piece).map(move |at| bytes.slice(at..(at + piece).min(bytes.len())));
    let frames = frames.map(Frame::data).chain(trailers.map(Frame::trailers)).map(Ok);
    StreamBody::new(tokio_stream::iter(frames)).boxed_unsync()
}

/// Bytes that differ between seeds and positions.
pub(crate) fn pattern(seed: u64, len: usize) -> Bytes {
    let byte = |at| ((at as u64 + seed * 1_000_003).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8;
    (0..len).map(byte).collect::<Vec<u8>>().into()
}

pub(crate) fn trailers(value: &str) -> HeaderMap {
    HeaderMap::from_iter([(http::header::HeaderName::from_static("x-checksum"), HeaderValue::from_str(value).unwrap())])
}

/// Reports that a value of the server was dropped.
struct Guard(&'static str, mpsc::UnboundedSender<&'static str>);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.1.send(self.0);
    }
}

/// Chunks without end.
struct Endless(#[allow(dead_code, reason = "only dropped")] Guard);

impl futures_core::Stream for Endless {
    type Item = Result<Frame<Bytes>, BoxError>;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[b'e'; 10_000])))))
    }
}

/// The service.
pub(crate) struct App {
    /// Permits for requests to `/gate`, which wait for one.
    pub(crate) gate: Semaphore,
    /// Requests to `/gate` that have started.
    pub(crate) at_gate: Semaphore,
    dropped: mpsc::UnboundedSender<&'static str>,
    connections: AtomicUsize,
}

impl App {
    async fn handle(self: Arc<Self>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        let (head, body) = request.into_parts();
        let number = |index| head.uri.path().split('/').nth(index).and_then(|part| part.parse().ok()).unwrap_or(0);
        let body = match head.uri.path().split('/').nth(1).unwrap() {
            "hello" => full(format!("{} {}", head.method, head.uri.path())),
            "echo" => body.map_err(Into::into).boxed_unsync(),
            // Echoes once the gate is open.
            "gate" => {
                self.at_gate.add_permits(1);
                self.gate.acquire().await.unwrap().forget();
                body.map_err(Into::into).boxed_unsync()
            }
            "bytes" => pieces(pattern(number(2) as u64, number(3)), 30_000, None),
            "length" => match body.collect().await {
                Ok(body) => full(body.to_bytes().len().to_string()),
                Err(error) => full(error.to_string()),
            },
            // Fails once the gate is open.
            "fail" => {
                let frames = tokio_stream::iter([false, true]).then(move |fail| {
                    let app = self.clone();
                    async move {
                        if fail {
                            app.gate.acquire().await.unwrap().forget();
                            return Err("the handler has failed".into());
                        }
                        Ok(Frame::data(pattern(1, 1000)))
                    }
                });
                StreamBody::new(frames).boxed_unsync()
            }
            "endless" => StreamBody::new(Endless(Guard("endless", self.dropped.clone()))).boxed_unsync(),
            "stuck" => {
                let _guard = Guard("stuck", self.dropped.clone());
                self.at_gate.add_permits(1);
                std::future::pending().await
            }
            _ => {
                let mut response = Response::new(empty());
                *response.status_mut() = StatusCode::NOT_FOUND;
                return Ok(response);
            }
        };
        let mut response = Response::new(body);
        if let Some(value) = head.headers.get("x-request") {
            response.headers_mut().insert("x-response", value.clone());
        }
        if head.headers.contains_key("te") {
            response.headers_mut().insert("trailer", HeaderValue::from_static("x-checksum"));
        }
        Ok(response)
    }
}

pub(crate) struct Server {
    pub(crate) app: Arc<App>,
    /// What the server has dropped.
    pub(crate) dropped: mpsc::UnboundedReceiver<&'static str>,
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start<T: Transport>(configure: impl FnOnce(&mut auto::Builder<TokioExecutor>)) -> Self {
        let (mut incoming, address) = T::listen().await;
        let (sender, dropped) = mpsc::unbounded_channel();
        let (gate, at_gate) = (Semaphore::new(0), Semaphore::new(0));
        let app = Arc::new(App { gate, at_gate, dropped: sender, connections: AtomicUsize::new(0) });
        let (stop, mut stopped) = oneshot::channel::<()>();
        let mut builder = auto::Builder::new(TokioExecutor::new());
        configure(&mut builder);
        let service = app.clone();
        let task = tokio::spawn(async move {
            let graceful = GracefulShutdown::new();
            loop {
                let stream = tokio::select! {
                    stream = incoming.next() => stream.unwrap().unwrap(),
                    _ = &mut stopped => break,
                };
                service.connections.fetch_add(1, Ordering::Relaxed);
                let app = service.clone();
                let handle = service_fn(move |request| app.clone().handle(request));
                let connection = builder.serve_connection(TokioIo::new(stream), handle).into_owned();
                tokio::spawn(graceful.watch(connection));
            }
            drop(incoming);
            graceful.shutdown().await;
        });
        Server { app, dropped, address, stop, task }
    }

    pub(crate) fn uri(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Number of connections that were accepted.
    pub(crate) fn connections(&self) -> usize {
        self.app.connections.load(Ordering::Relaxed)
    }

    /// A response whose body fails in the middle, after the client has read the first part. If a server fails at once, it may drop
    /// what it has not sent yet, and the client may see the failure before the response.
    pub(crate) async fn failing_response<T: Transport>(
        &self,
        client: &HttpClient<T>,
    ) -> Result<Response<Incoming>, legacy::Error> {
        let mut response = client.get(self.uri("/fail").parse().unwrap()).await?;
        let first = response.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(first, pattern(1, 1000));
        self.app.gate.add_permits(1);
        Ok(response)
    }

    /// Starts a graceful shutdown. The handle ends with it.
    pub(crate) fn shut_down(self) -> JoinHandle<()> {
        let _ = self.stop.send(());
        self.task
    }
}
