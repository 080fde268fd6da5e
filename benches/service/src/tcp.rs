//! The service over tokio's TCP: frames are written and read in batches.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::frames;
use crate::store::{Requests, Store, VALUE};
use crate::{Latencies, Result, collect, usage};

/// Frames of a stream.
#[derive(Default)]
struct FrameReader {
    bytes: Vec<u8>,
    start: usize,
}

impl FrameReader {
    async fn read(&mut self, from: &mut (impl AsyncReadExt + Unpin)) -> Result<usize> {
        self.bytes.drain(..self.start);
        self.start = 0;
        self.bytes.reserve(16 << 10);
        Ok(from.read_buf(&mut self.bytes).await?)
    }

    fn next(&mut self) -> Option<&[u8]> {
        let mut rest = &self.bytes[self.start..];
        let frame = frames::take(&mut rest)?;
        self.start = self.bytes.len() - rest.len();
        Some(frame)
    }
}

pub(crate) async fn serve() -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let store = Arc::new(Store::default());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            let store = store.clone();
            tokio::spawn(async move { serve_one(stream, &store).await });
        }
    });
    Ok(address)
}

async fn serve_one(mut stream: TcpStream, store: &Store) -> Result<()> {
    let (mut reader, mut replies) = (FrameReader::default(), Vec::new());
    while reader.read(&mut stream).await? != 0 {
        while let Some(request) = reader.next() {
            frames::put(&mut replies, &store.answer(request));
        }
        stream.write_all(&replies).await?;
        replies.clear();
    }
    Ok(())
}

pub(crate) async fn ask(address: SocketAddr, clients: usize, depth: usize, time: Duration) -> Result<Latencies> {
    let mut streams = Vec::new();
    for _ in 0..clients {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        streams.push(stream);
    }
    let (start, cpu) = (Instant::now(), usage::processor_seconds());
    let ask = |(seed, stream)| tokio::spawn(ask_one(stream, Requests(seed), depth, start + time));
    collect((1..).zip(streams).map(ask).collect(), start, cpu).await
}

/// One task has all requests of a connection in flight, which is the cheapest way over TCP.
async fn ask_one(mut stream: TcpStream, mut requests: Requests, depth: usize, end: Instant) -> Result<Vec<u32>> {
    let (mut latencies, mut reader, mut batch) = (Vec::new(), FrameReader::default(), Vec::new());
    let mut sent = VecDeque::new();
    loop {
        let now = Instant::now();
        while sent.len() < depth && now < end {
            let (request, len) = requests.next();
            frames::put(&mut batch, &request[..len]);
            sent.push_back(now);
        }
        if sent.is_empty() {
            return Ok(latencies);
        }
        stream.write_all(&batch).await?;
        batch.clear();
        reader.read(&mut stream).await?;
        let now = Instant::now();
        while let Some(reply) = reader.next() {
            if reply.len() != VALUE {
                return Err("a reply has another length".into());
            }
            let Some(sent) = sent.pop_front() else { return Err("there are more replies than requests".into()) };
            latencies.push((now - sent).as_nanos() as u32);
        }
    }
}
