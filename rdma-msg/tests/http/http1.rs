//! Scenarios of HTTP/1.1.

use http::{Method, Request};
use http_body_util::BodyExt;
use hyper::client::conn::http1;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tower_service::Service;

use crate::record::Record;
use crate::server::{Body, HttpClient, Server, empty, full, pattern, pieces, trailers};
use crate::transport::Transport;

fn client<T: Transport>() -> HttpClient<T> {
    Client::builder(TokioExecutor::new()).build(T::connector())
}

/// Requests of all kinds of bodies, one after the other on one connection.
pub(crate) async fn keep_alive<T: Transport>() -> Record {
    let mut record = Record::default();
    let server = Server::start::<T>(|_| {}).await;
    let stream = T::connector().call(server.uri("/").parse().unwrap()).await.unwrap();
    let (mut requests, connection) = http1::handshake::<_, Body>(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    for round in 0..5 {
        let bytes = pattern(round, 1 << (4 * round));
        let bodies = [
            ("GET", "/hello", empty()),
            ("HEAD", "/hello", empty()),
            ("POST", "/echo", full(bytes.clone())),
            ("POST", "/echo", pieces(bytes.clone(), 1 + bytes.len() / 7, None)),
            ("PUT", "/echo", pieces(bytes.clone(), 1000, Some(trailers("of a chunked body")))),
            ("POST", "/length", pieces(bytes.clone(), 5000, None)),
            ("GET", "/bytes/3/100000", empty()),
            ("DELETE", "/nothing", empty()),
        ];
        for (method, path, body) in bodies {
            let request = Request::builder().method(method.parse::<Method>().unwrap()).uri(path);
            let request = request.header("x-request", round).header("te", "trailers").header("trailer", "x-checksum");
            requests.ready().await.unwrap();
            let response = requests.send_request(request.header("host", "test").body(body).unwrap()).await;
            record.response(&format!("{method} {path}"), response).await;
        }
    }
    drop(requests);
    connection.await.unwrap().unwrap();
    record.line(format_args!("connections: {}", server.connections()));
    server.shut_down().await.unwrap();
    record
}

/// Bodies of several MiB in both directions at once, on several connections.
pub(crate) async fn large_bodies<T: Transport>() -> Record {
    let mut record = Record::default();
    let server = Server::start::<T>(|_| {}).await;
    let client = client::<T>();
    let requests: Vec<_> = (0..3)
        .map(|index| {
            let body = pieces(pattern(index, 2_000_000), 1 << (12 + index), None);
            let request = Request::post(server.uri("/echo")).header("x-request", index).body(body).unwrap();
            let response = client.request(request);
            tokio::spawn(async move {
                let mut record = Record::default();
                record.response("echo", response.await).await;
                record
            })
        })
        .collect();
    for request in requests {
        record.append(request.await.unwrap());
    }
    drop(client);
    server.shut_down().await.unwrap();
    record
}

/// The client drops a body midway, and the server fails midway. The next request works.
pub(crate) async fn aborted_bodies<T: Transport>() -> Record {
    let mut record = Record::default();
    let mut server = Server::start::<T>(|_| {}).await;
    let client = client::<T>();
    let mut response = client.get(server.uri("/endless").parse().unwrap()).await.unwrap();
    for _ in 0..3 {
        response.frame().await.unwrap().unwrap();
    }
    drop(response);
    record.line(server.dropped.recv().await.unwrap());
    record.response("after a dropped body", client.get(server.uri("/hello").parse().unwrap()).await).await;
    record.response("a body that fails", server.failing_response::<T>(&client).await).await;
    record.response("after a body that fails", client.get(server.uri("/hello").parse().unwrap()).await).await;
    drop(client);
    server.shut_down().await.unwrap();
    record
}
