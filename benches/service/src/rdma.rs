//! The service over rdma-async.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma_async::{Connection, Connector, Listener};
use rdma_safe::Buffer;

use crate::frames;
use crate::store::{Requests, Store, VALUE};
use crate::{Latencies, Result, collect, usage};

/// The longest message in bytes.
const MESSAGE: usize = 4096;

/// Messages after which a server posts its replies.
const TOGETHER: usize = 16;

/// Collects frames in messages, and posts these together.
struct Outgoing<'c> {
    connection: &'c Connection,
    messages: Vec<Buffer>,
    /// The frames of the next message.
    bytes: &'c mut Vec<u8>,
    /// Whether a message carries one frame only.
    one_by_one: bool,
}

impl<'c> Outgoing<'c> {
    fn new(connection: &'c Connection, bytes: &'c mut Vec<u8>, one_by_one: bool) -> Self {
        Outgoing { connection, messages: Vec::new(), bytes, one_by_one }
    }

    async fn put(&mut self, frame: &[u8]) -> Result<()> {
        if self.one_by_one || self.bytes.len() + 2 + frame.len() > MESSAGE {
            self.end_message().await?;
        }
        frames::put(self.bytes, frame);
        Ok(())
    }

    async fn end_message(&mut self) -> Result<()> {
        if !self.bytes.is_empty() {
            self.messages.push(self.connection.buffer_of(self.bytes).await?);
            self.bytes.clear();
        }
        Ok(())
    }

    async fn post(mut self) -> Result<()> {
        self.end_message().await?;
        let batch = self.messages.into_iter().fold(self.connection.batch(), |batch, message| batch.send(message));
        Ok(batch.posted().await?)
    }
}

pub(crate) async fn serve(one_by_one: bool) -> Result<SocketAddr> {
    let listener = Listener::builder().message_size(MESSAGE).bind("127.0.0.1:0").await?;
    let address = listener.local_address().ip().ok_or("the listener has no IP address")?;
    let store = Arc::new(Store::default());
    tokio::spawn(async move {
        while let Ok(connection) = listener.accept().await {
            let store = store.clone();
            tokio::spawn(async move { serve_one(connection, &store, one_by_one).await });
        }
    });
    Ok(address)
}

async fn serve_one(connection: Connection, store: &Store, one_by_one: bool) -> Result<()> {
    let mut bytes = Vec::new();
    while let Some(mut message) = connection.receive().await? {
        // Requests that have arrived together are answered together.
        let mut replies = Outgoing::new(&connection, &mut bytes, one_by_one);
        loop {
            let mut requests = &message[..];
            while let Some(request) = frames::take(&mut requests) {
                replies.put(&store.answer(request)).await?;
            }
            if replies.messages.len() >= TOGETHER {
                break;
            }
            let Some(next) = connection.try_receive() else { break };
            message = next;
        }
        replies.post().await?;
    }
    Ok(())
}

pub(crate) async fn ask(
    address: SocketAddr,
    one_by_one: bool,
    clients: usize,
    depth: usize,
    time: Duration,
) -> Result<Latencies> {
    let connector = Connector::new()?.message_size(MESSAGE);
    let mut connections = Vec::new();
    for _ in 0..clients {
        connections.push(connector.connect(address).await?);
    }
    let (start, cpu) = (Instant::now(), usage::processor_seconds());
    let ask = |(seed, connection)| tokio::spawn(ask_one(connection, Requests(seed), one_by_one, depth, start + time));
    collect((1..).zip(connections).map(ask).collect(), start, cpu).await
}

async fn ask_one(
    connection: Connection,
    mut requests: Requests,
    one_by_one: bool,
    depth: usize,
    end: Instant,
) -> Result<Vec<u32>> {
    let (mut latencies, mut bytes) = (Vec::new(), Vec::new());
    let mut sent = VecDeque::new();
    loop {
        let now = Instant::now();
        let mut outgoing = Outgoing::new(&connection, &mut bytes, one_by_one);
        while sent.len() < depth && now < end {
            let (request, len) = requests.next();
            outgoing.put(&request[..len]).await?;
            sent.push_back(now);
        }
        outgoing.post().await?;
        if sent.is_empty() {
            return Ok(latencies);
        }
        let Some(mut message) = connection.receive().await? else { return Err("the server has gone".into()) };
        loop {
            let now = Instant::now();
            let mut replies = &message[..];
            while let Some(reply) = frames::take(&mut replies) {
                if reply.len() != VALUE {
                    return Err("a reply has another length".into());
                }
                let sent = sent.pop_front().ok_or("a reply without a request")?;
                latencies.push((now - sent).as_nanos() as u32);
            }
            match connection.try_receive() {
                Some(next) => message = next,
                None => break,
            }
        }
    }
}
