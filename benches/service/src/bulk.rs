//! Transfers of a mebibyte: RDMA reads and writes, beside requests and replies of that size over TCP.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdma_async::{Connection, Connector, Listener};
use rdma_safe::{Access, RemoteMemory};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::{Latencies, Result, Transport, usage};

/// Bytes of a transfer.
pub(crate) const LEN: usize = 1 << 20;

/// The direction of transfers, as the client sees it.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    Read,
    Write,
}

pub(crate) async fn serve(transport: Transport) -> Result<SocketAddr> {
    match transport {
        Transport::Rdma => serve_rdma().await,
        Transport::Tcp => serve_tcp().await,
    }
}

async fn serve_rdma() -> Result<SocketAddr> {
    let listener = Listener::bind("127.0.0.1:0").await?;
    let address = listener.local_address().ip().ok_or("the listener has no IP address")?;
    tokio::spawn(async move {
        while let Ok(connection) = listener.accept().await {
            tokio::spawn(offer(connection));
        }
    });
    Ok(address)
}

async fn serve_tcp() -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(transfer(stream));
        }
    });
    Ok(address)
}

/// Exposes memory, and tells the client where it is.
async fn offer(connection: Connection) -> Result<()> {
    let region = connection.pd().expose(vec![7; LEN].into_boxed_slice(), Access::REMOTE)?;
    let RemoteMemory { address, len, rkey } = region.remote();
    connection.send(connection.buffer_of(format!("{address} {len} {rkey}").as_bytes()).await?).await?;
    // Until the client leaves.
    while connection.receive().await?.is_some() {}
    Ok(())
}

/// Sends or receives what the client asks for.
async fn transfer(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut memory = vec![7; LEN];
    loop {
        match stream.read_u8().await? {
            b'r' => stream.write_all(&memory).await?,
            _ => {
                stream.read_exact(&mut memory).await?;
                stream.write_u8(b'w').await?;
            }
        }
    }
}

/// Transfers one after another for `time`.
pub(crate) async fn ask(
    transport: Transport,
    direction: Direction,
    address: SocketAddr,
    time: Duration,
) -> Result<Latencies> {
    let mut latencies = Vec::new();
    match transport {
        Transport::Rdma => {
            let connection = Connector::new()?.connect(address).await?;
            let hello = connection.receive().await?.ok_or("the server has gone")?;
            let mut numbers = std::str::from_utf8(&hello)?.split(' ');
            let mut next = || numbers.next().ok_or("a number is missing");
            let remote = RemoteMemory { address: next()?.parse()?, len: next()?.parse()?, rkey: next()?.parse()? };
            let mut buffer = connection.pool().get_async(rdma_pool::Budget::Bulk, LEN).await?;
            let (start, cpu) = (Instant::now(), usage::processor_seconds());
            while start.elapsed() < time {
                let sent = Instant::now();
                buffer = match direction {
                    Direction::Read => connection.read(buffer, remote).await?,
                    Direction::Write => connection.write(buffer, remote).await?,
                };
                latencies.push(sent.elapsed().as_nanos() as u32);
            }
            Ok((latencies, start.elapsed(), usage::processor_seconds() - cpu))
        }
        Transport::Tcp => {
            let mut stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let mut memory = vec![0; LEN];
            let (start, cpu) = (Instant::now(), usage::processor_seconds());
            while start.elapsed() < time {
                let sent = Instant::now();
                match direction {
                    Direction::Read => {
                        stream.write_u8(b'r').await?;
                        stream.read_exact(&mut memory).await?;
                    }
                    Direction::Write => {
                        stream.write_u8(b'w').await?;
                        stream.write_all(&memory).await?;
                        stream.read_u8().await?;
                    }
                }
                latencies.push(sent.elapsed().as_nanos() as u32);
            }
            Ok((latencies, start.elapsed(), usage::processor_seconds() - cpu))
        }
    }
}
