//! Scenarios of HTTP/2.

use std::sync::Arc;

use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::client::legacy::{self, Client};
use hyper_util::rt::TokioExecutor;
use hyper_util::server::conn::auto;
use rdma_msg::hyper::{client_windows, server_windows};
use tokio::task::JoinSet;

use crate::record::Record;
use crate::server::{Body, HttpClient, Server, empty, full, pattern, pieces, trailers};
use crate::transport::Transport;

/// A server and a client with the windows for RDMA.
async fn pair<T: Transport>() -> (Server, HttpClient<T>) {
    let server = Server::start::<T>(|builder| _ = server_windows(builder)).await;
    let client = client_windows(&mut Client::builder(TokioExecutor::new())).http2_only(true).build(T::connector());
    (server, client)
}

/// A server and a client with these windows for streams and connections.
pub(crate) async fn pair_with_windows<T: Transport>(
    stream: u32,
    connection: u32,
    streams: u32,
) -> (Server, HttpClient<T>) {
    let configure = |builder: &mut auto::Builder<TokioExecutor>| {
        builder
            .http2()
            .initial_stream_window_size(stream)
            .initial_connection_window_size(connection)
            .max_concurrent_streams(streams);
    };
    let server = Server::start::<T>(configure).await;
    let client = Client::builder(TokioExecutor::new())
        .http2_only(true)
        .http2_initial_stream_window_size(stream)
        .http2_initial_connection_window_size(connection)
        .build(T::connector());
    (server, client)
}

async fn get<T: Transport>(
    server: &Server,
    client: &HttpClient<T>,
    path: &str,
) -> Result<Response<Incoming>, legacy::Error> {
    client.get(server.uri(path).parse().unwrap()).await
}

/// The records of tasks, in the order of their numbers.
async fn all(mut tasks: JoinSet<(usize, Record)>) -> Record {
    let mut records = Vec::new();
    while let Some(task) = tasks.join_next().await {
        records.push(task.unwrap());
    }
    records.sort_by_key(|(number, _)| *number);
    let mut all = Record::default();
    records.into_iter().for_each(|(_, record)| {
        record.assert_no_error();
        all.append(record);
    });
    all
}

/// Opens the connection. Requests that start before it is open would open further ones.
pub(crate) async fn open_connection<T: Transport>(server: &Server, client: &HttpClient<T>) {
    let mut record = Record::default();
    record.response("first", get::<T>(server, client, "/hello").await).await;
    record.assert_no_error();
}

/// Sends `count` requests at once.
async fn at_once<T: Transport>(
    client: &HttpClient<T>,
    count: usize,
    request: impl Fn(usize) -> Request<Body>,
) -> JoinSet<(usize, Record)> {
    let mut tasks = JoinSet::new();
    for index in 0..count {
        let response = client.request(request(index));
        tasks.spawn(async move {
            let mut record = Record::default();
            record.response(&format!("request {index}"), response.await).await;
            (index, record)
        });
    }
    tasks
}

pub(crate) async fn many_requests_at_once<T: Transport>() -> Record {
    let (server, client) = pair::<T>().await;
    open_connection::<T>(&server, &client).await;
    let tasks = at_once::<T>(&client, 150, |index| {
        let uri = server.uri(if index % 3 == 0 { "/hello" } else { "/echo" });
        Request::post(uri).header("x-request", index).body(full(pattern(index as u64, index * 100))).unwrap()
    });
    let mut record = all(tasks.await).await;
    record.line(format_args!("connections: {}", server.connections()));
    drop(client);
    server.shut_down().await.unwrap();
    record
}

/// Bodies of several MiB with trailers, in both directions at once.
pub(crate) async fn large_bodies<T: Transport>() -> Record {
    let (server, client) = pair::<T>().await;
    let tasks = at_once::<T>(&client, 3, |index| {
        let body = pieces(pattern(index as u64, 2_000_000), 50_000 << index, Some(trailers("sum")));
        Request::post(server.uri("/echo")).body(body).unwrap()
    });
    let record = all(tasks.await).await;
    drop(client);
    server.shut_down().await.unwrap();
    record
}

/// A body dropped by the client, a request that is cancelled, and a stream that the server resets. Others go on.
pub(crate) async fn resets_and_cancellation<T: Transport>() -> Record {
    let mut record = Record::default();
    let (mut server, client) = pair::<T>().await;
    let mut kept = get::<T>(&server, &client, "/endless").await.unwrap();
    for _ in 0..3 {
        let mut dropped = get::<T>(&server, &client, "/endless").await.unwrap();
        for _ in 0..5 {
            dropped.frame().await.unwrap().unwrap();
        }
        drop(dropped);
        record.line(server.dropped.recv().await.unwrap());

        let stuck = tokio::spawn(client.get(server.uri("/stuck").parse().unwrap()));
        server.app.at_gate.acquire().await.unwrap().forget();
        stuck.abort();
        record.line(server.dropped.recv().await.unwrap());

        record.response("reset", server.failing_response::<T>(&client).await).await;
        record.response("hello", get::<T>(&server, &client, "/hello").await).await;
        for _ in 0..30 {
            let data = kept.frame().await.unwrap().unwrap().into_data().unwrap();
            assert!(data.iter().all(|byte| *byte == b'e'));
        }
    }
    drop(kept);
    record.line(server.dropped.recv().await.unwrap());
    record.line(format_args!("connections: {}", server.connections()));
    drop(client);
    server.shut_down().await.unwrap();
    record
}

/// Small windows. Some responses are not read at first, while others go on.
pub(crate) async fn slow_readers<T: Transport>() -> Record {
    let mut record = Record::default();
    const SLOW: u32 = 4;
    let (server, client) = pair_with_windows::<T>(20_000, (SLOW + 1) * 20_000, 200).await;
    let mut slow = Vec::new();
    for index in 0..SLOW {
        slow.push(get::<T>(&server, &client, &format!("/bytes/{index}/300000")).await);
    }
    for index in 0..3 {
        record.response("fast", get::<T>(&server, &client, &format!("/bytes/{index}/500000")).await).await;
        let body = pieces(pattern(index, 200_000), 7000, Some(trailers("echo")));
        record.response("echo", client.request(Request::post(server.uri("/echo")).body(body).unwrap()).await).await;
    }
    for response in slow {
        record.response("slow", response).await;
    }
    drop(client);
    server.shut_down().await.unwrap();
    record
}

/// Requests in flight are answered after a shutdown has begun, and new ones are refused.
pub(crate) async fn graceful_shutdown<T: Transport>() -> Record {
    let mut record = Record::default();
    let (server, client) = pair::<T>().await;
    let app = server.app.clone();
    let uri = server.uri("/hello");
    let mut tasks = at_once::<T>(&client, 5, |index| {
        Request::post(server.uri("/gate")).body(pieces(pattern(index as u64, 300_000), 20_000, None)).unwrap()
    })
    .await;
    app.at_gate.acquire_many(5).await.unwrap().forget();
    let mut shutdown = server.shut_down();
    tokio::select! {
        biased;
        _ = &mut shutdown => record.line("the shutdown did not wait"),
        () = tokio::task::yield_now() => {}
    }
    assert!(tasks.try_join_next().is_none());
    app.gate.add_permits(5);
    record.append(all(tasks).await);
    shutdown.await.unwrap();
    let refused = client.get(uri.parse().unwrap()).await.unwrap_err();
    record.line(format_args!("refused: {} {}", refused.is_connect(), app.gate.available_permits()));
    record
}

/// Number of streams of [`flood`] and of [`crate::busy`].
pub(crate) fn streams() -> usize {
    std::env::var("RDMA_MSG_HTTP_STREAMS").map_or(300, |count| count.parse().unwrap())
}

/// Many streams on one connection, all open before the first is answered, with both directions full: each body is longer than the
/// window of its stream. The window of the connection has room for all of them, because h2 ends connections with many tiny frames.
pub(crate) async fn flood<T: Transport>() -> Record {
    const WINDOW: u32 = 8192;
    let count = streams();
    let (server, client) = pair_with_windows::<T>(WINDOW, (WINDOW * count as u32).max(65_535), count as u32).await;
    open_connection::<T>(&server, &client).await;
    let tasks = at_once::<T>(&client, count, |index| {
        Request::post(server.uri("/gate")).body(pieces(pattern(index as u64, 3 * WINDOW as usize), 3000, None)).unwrap()
    })
    .await;
    let app: Arc<_> = server.app.clone();
    app.at_gate.acquire_many(count as u32).await.unwrap().forget();
    app.gate.add_permits(count);
    let mut record = all(tasks).await;
    record.line(format_args!("connections: {}", server.connections()));
    drop(client);
    server.shut_down().await.unwrap();
    record
}

/// A request to a server that is gone, and a request whose URI cannot be reached at all.
pub(crate) async fn unreachable<T: Transport>() -> Record {
    let mut record = Record::default();
    let (server, client) = pair::<T>().await;
    let uri = server.uri("/hello");
    server.shut_down().await.unwrap();
    for request in [Request::get(&uri).body(empty()).unwrap(), Request::post(&uri).body(full("body")).unwrap()] {
        let error = client.request(request).await.unwrap_err();
        record.line(format_args!("{error}, is_connect: {}", error.is_connect()));
    }
    record
}
