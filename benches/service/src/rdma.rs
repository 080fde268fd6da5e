//! The service over rdma-async.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_async::{Connection, Connector, Listener};

use crate::store::{Requests, Store, VALUE};
use crate::{Latencies, Result, collect, usage};

pub(crate) async fn serve() -> Result<SocketAddr> {
    let listener = Listener::builder().message_size(128).bind("127.0.0.1:0").await?;
    let address = listener.local_address().ip().ok_or("the listener has no IP address")?;
    let store = Arc::new(Store::default());
    tokio::spawn(async move {
        while let Ok(connection) = listener.accept().await {
            let store = store.clone();
            tokio::spawn(async move { serve_one(connection, &store).await });
        }
    });
    Ok(address)
}

async fn serve_one(connection: Connection, store: &Store) -> Result<()> {
    while let Some(request) = connection.receive().await? {
        // Requests that have arrived together are answered together.
        let mut batch = connection.batch().send(connection.buffer_of(&store.answer(&request)).await?);
        while batch.len() < 16 {
            let Some(request) = connection.try_receive() else { break };
            batch = batch.send(connection.buffer_of(&store.answer(&request)).await?);
        }
        batch.posted().await?;
    }
    Ok(())
}

pub(crate) async fn ask(address: SocketAddr, clients: usize, depth: usize, time: Duration) -> Result<Latencies> {
    let connector = Connector::new()?.message_size(128);
    let mut connections = Vec::new();
    for _ in 0..clients {
        connections.push(connector.connect(address).await?);
    }
    let (start, cpu) = (Instant::now(), usage::processor_seconds());
    let ask = |(seed, connection)| tokio::spawn(ask_one(connection, Requests(seed), depth, start + time));
    collect((1..).zip(connections).map(ask).collect(), start, cpu).await
}

async fn ask_one(connection: Connection, mut requests: Requests, depth: usize, end: Instant) -> Result<Vec<u32>> {
    let mut latencies = Vec::new();
    let mut sent = VecDeque::new();
    loop {
        let mut batch = connection.batch();
        while sent.len() < depth {
            let now = Instant::now();
            if now >= end {
                break;
            }
            let (request, len) = requests.next();
            batch = batch.send(connection.buffer_of(&request[..len]).await?);
            sent.push_back(now);
        }
        batch.posted().await?;
        if sent.is_empty() {
            return Ok(latencies);
        }
        let Some(mut reply) = connection.receive().await? else { return Err("the server has gone".into()) };
        loop {
            if reply.len() != VALUE {
                return Err("a reply has another length".into());
            }
            let sent = sent.pop_front().ok_or("a reply without a request")?;
            latencies.push(sent.elapsed().as_nanos() as u32);
            match connection.try_receive() {
                Some(next) => reply = next,
                None => break,
            }
        }
    }
}
