//! HTTP/2 streams of one connection that carry bytes in both directions until a time has passed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use http::{Request, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Bytes, Frame};
use tokio::task::JoinSet;

use crate::http2::{open_connection, pair_with_windows, streams};
use crate::server::{Body, pattern};
use crate::transport::Transport;

/// Bytes of the window of a stream.
const WINDOW: u32 = 8192;
/// Bytes of a frame.
const PIECE: usize = 3000;
/// Frames that a stream carries at least, three windows.
const LEAST: u64 = 9;
/// Bytes after which the contents of a stream repeat.
const PERIOD: usize = 1 << 20;
/// No frame is longer.
const LONGEST: usize = 1 << 14;

/// Length of the test in seconds.
fn seconds() -> u64 {
    std::env::var("RDMA_MSG_HTTP_SECONDS").map_or(2, |seconds| seconds.parse().unwrap())
}

/// The bytes of all streams. They differ by the position at which a stream begins.
#[derive(Clone)]
struct Contents(Bytes);

impl Contents {
    fn new() -> Self {
        let mut bytes = pattern(7, PERIOD).to_vec();
        bytes.extend_from_within(..LONGEST);
        Contents(bytes.into())
    }

    fn part(&self, stream: usize, at: u64, len: usize) -> Bytes {
        let start = (stream * 997 + at as usize) % PERIOD;
        self.0.slice(start..start + len)
    }
}

/// What a stream has sent, and whether it ends.
#[derive(Default)]
struct Sending {
    pieces: AtomicU64,
    stop: Arc<AtomicBool>,
}

/// A body that ends after at least [`LEAST`] frames once `stop` is set.
fn body(contents: Contents, stream: usize, sending: Arc<Sending>) -> Body {
    let frames = (0..).map_while(move |piece| {
        let goes_on = piece < LEAST || !sending.stop.load(Ordering::Relaxed);
        goes_on.then(|| {
            sending.pieces.store(piece + 1, Ordering::Relaxed);
            Ok(Frame::data(contents.part(stream, piece * PIECE as u64, PIECE)))
        })
    });
    StreamBody::new(tokio_stream::iter(frames)).boxed_unsync()
}

/// All streams are open before the time begins, and each gets back what it has sent.
pub(crate) async fn streams_stay_busy<T: Transport>() {
    let count = streams();
    let (server, client) = pair_with_windows::<T>(WINDOW, (WINDOW * count as u32).max(65_535), count as u32).await;
    open_connection::<T>(&server, &client).await;

    let (contents, stop) = (Contents::new(), Arc::new(AtomicBool::new(false)));
    let mut opening = JoinSet::new();
    for stream in 0..count {
        let sending = Arc::new(Sending { stop: stop.clone(), ..Sending::default() });
        let request = Request::post(server.uri("/echo")).body(body(contents.clone(), stream, sending.clone())).unwrap();
        let (response, contents) = (client.request(request), contents.clone());
        opening.spawn(async move {
            let response = response.await.unwrap_or_else(|error| panic!("stream {stream}: {error:?}"));
            assert_eq!(response.status(), StatusCode::OK);
            let received = tokio::spawn(async move {
                let (mut body, mut at) = (response.into_body(), 0);
                while let Some(frame) = body.frame().await {
                    let data = frame.unwrap_or_else(|error| panic!("stream {stream} at {at}: {error:?}")).into_data();
                    let data = data.unwrap();
                    assert!(data == contents.part(stream, at, data.len()), "stream {stream} differs after byte {at}");
                    at += data.len() as u64;
                }
                at
            });
            (stream, sending, received)
        });
    }
    let streams = opening.join_all().await;
    // Every response has begun, and no body has ended.
    let (start, open) = (Instant::now(), streams.iter().filter(|(_, _, received)| !received.is_finished()).count());
    assert_eq!(open, count, "streams that are open at the same time");
    tokio::time::sleep(Duration::from_secs(seconds())).await;
    stop.store(true, Ordering::Relaxed);

    let (mut total, mut least, mut most) = (0, u64::MAX, 0);
    for (stream, sending, received) in streams {
        let received = received.await.unwrap();
        assert_eq!(received, sending.pieces.load(Ordering::Relaxed) * PIECE as u64, "stream {stream}");
        (total, least, most) = (total + received, least.min(received), most.max(received));
    }
    assert_eq!(server.connections(), 1);
    println!(
        "{count} streams for {:.1} s: {total} bytes in each direction, {least} to {most} for a stream",
        start.elapsed().as_secs_f64()
    );
    drop(client);
    server.shut_down().await.unwrap();
}
