//! Messages over rdma-msg, TCP, Unix sockets and UCX, and gRPC over rdma-msg and TCP, measured side by side.
//!
//! Client and server are two processes. Over byte streams, a message is its length in four bytes and its bytes, by buffered
//! readers and writers. A buffer has 64 KiB, or 8 KiB to read messages of at least 64 KiB or a stream of rdma-msg.

#[path = "../../service/src/child.rs"]
mod child;
mod compare;
mod count;
mod grpc;
#[path = "../../../rdma-msg/tests/http/plain.rs"]
mod plain;
mod transport;
mod ucx;
#[path = "../../service/src/usage.rs"]
mod usage;

use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::{Parser, Subcommand, ValueEnum};
use rdma_msg::Channel;
use serde::{Deserialize, Serialize};

use transport::{FILLING, Link, Listener, Transport};
use usage::processor_seconds;

pub(crate) type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Measures messages over rdma-msg, TCP, Unix sockets and UCX, and gRPC over rdma-msg and TCP.
#[derive(Parser, Debug)]
#[command(version)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Measure all transports in alternating rounds, and print a table.
    Compare(compare::Options),
    /// Serve until the standard input ends.
    Server {
        #[arg(long)]
        transport: Transport,
        /// Serve gRPC.
        #[arg(long)]
        grpc: bool,
        /// Length of a message in bytes.
        #[arg(long, default_value_t = 64)]
        size: usize,
    },
    /// Exchange messages, and print a line of JSON.
    Client {
        #[arg(long)]
        transport: Transport,
        #[arg(long)]
        address: String,
        #[arg(long)]
        pattern: Pattern,
        /// Length of a message in bytes.
        #[arg(long, default_value_t = 64)]
        size: usize,
        /// Connections; concurrent calls of one connection for gRPC.
        #[arg(long, default_value_t = 1)]
        connections: usize,
        #[arg(long, default_value_t = 1.0)]
        seconds: f64,
    },
    /// Serve one connection of `count-client`.
    CountServer(count::Server),
    /// Exchange a number of messages, and print the nanoseconds of one: the instructions, if the clock counts them.
    CountClient(count::Client),
}

/// What the client does on each connection.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Pattern {
    /// Sends a message, and waits for it to come back.
    PingPong,
    /// Sends messages without waiting, and in the end waits until the server has all of them.
    OneWay,
    /// Makes gRPC calls of one message, and waits for each reply.
    Unary,
    /// Sends messages in gRPC calls with streams in both directions, and waits for each to come back.
    Stream,
}

impl Pattern {
    fn is_grpc(self) -> bool {
        matches!(self, Pattern::Unary | Pattern::Stream)
    }
}

/// The name of a value on the command line.
fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// What a client has measured.
#[derive(Serialize, Deserialize, Clone, Debug)]
struct Measured {
    messages: u64,
    seconds: f64,
    p50_us: f64,
    p99_us: f64,
    cpu_seconds: f64,
}

/// What a server prints in the end.
#[derive(Serialize, Deserialize, Clone, Debug)]
struct Served {
    cpu_seconds: f64,
}

fn main() -> Result<()> {
    match Options::parse().command {
        Command::Compare(options) => compare::run(&options),
        Command::Server { transport, grpc, size } => {
            rdma_safe::soft::install_by_default();
            let runtime = runtime()?;
            runtime.block_on(async {
                if grpc {
                    println!("{}", grpc::serve(transport).await?);
                    return Ok(());
                }
                let listener = Listener::bind(transport, "127.0.0.1:0", None, size).await?;
                println!("{}", listener.address()?);
                tokio::spawn(async move {
                    while let Ok(link) = listener.accept().await {
                        tokio::spawn(serve(link));
                    }
                });
                Result::<()>::Ok(())
            })?;
            // Serves until the end of the input. Reading it blocks a thread.
            let input = || std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            runtime.block_on(runtime.spawn_blocking(input))??;
            println!("{}", serde_json::to_string(&Served { cpu_seconds: processor_seconds() })?);
            std::process::exit(0);
        }
        Command::Client { transport, address, pattern, size, connections, seconds } => {
            rdma_safe::soft::install_by_default();
            let time = Duration::from_secs_f64(seconds);
            let runtime = runtime()?;
            let measured = runtime.block_on(run(transport, address, pattern, size, connections, time))?;
            println!("{}", serde_json::to_string(&measured)?);
            // The runtime is not shut down, since that takes time.
            std::process::exit(0);
        }
        Command::CountServer(server) => server.run(),
        Command::CountClient(client) => client.run(),
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?)
}

/// The first message says what to do: echo, or swallow until a message of one byte.
async fn serve(mut link: Link) -> Result<()> {
    let Some(first) = link.receive(|bytes| bytes.first().copied()).await? else { return Ok(()) };
    let is_echo = first == Some(0);
    if let Link::Owned(channel) = &link {
        return serve_in_place(channel, is_echo).await;
    }
    if let (Link::Many(channel), false) = (&link, is_echo) {
        return serve_many(channel).await;
    }
    if is_echo {
        while link.echo().await? {}
        return Ok(());
    }
    while let Some(len) = link.receive(<[u8]>::len).await? {
        if len == 1 {
            link.send(&Bytes::from_static(&[1])).await?;
            link.flush().await?;
        }
    }
    Ok(())
}

/// Receives one-way messages, several at once.
async fn serve_many(channel: &Channel) -> Result<()> {
    while let Some(messages) = channel.receive_many().await? {
        for message in &messages {
            if message.len() == 1 {
                channel.send(&[1][..]).await?;
            }
        }
    }
    Ok(())
}

/// Echoes messages in place, or offers memory for one-way messages.
async fn serve_in_place(channel: &Channel, is_echo: bool) -> Result<()> {
    let mut offers = 0;
    while let Some(message) = channel.receive().await? {
        if is_echo || message.len() == 1 {
            channel.send(message).await?;
            continue;
        }
        match message.into_offered() {
            Ok(memory) => _ = channel.offer(memory).await?,
            Err(message) if message.len() >= LONG && offers < OFFERS => {
                offers += 1;
                channel.offer(vec![0; message.len()]).await?;
            }
            Err(_) => {}
        }
    }
    Ok(())
}

/// Least length in bytes of messages for which memory is offered, and the number of offers.
const LONG: usize = 64 << 10;
const OFFERS: u32 = 4;

async fn run(
    transport: Transport,
    address: String,
    pattern: Pattern,
    size: usize,
    connections: usize,
    time: Duration,
) -> Result<Measured> {
    let (mut links, mut calls) = (Vec::new(), Vec::new());
    if pattern.is_grpc() {
        calls = grpc::Calls::connect(transport, &address, pattern, size, connections).await?;
    } else {
        for _ in 0..connections {
            links.push(Link::connect(transport, &address, None, size).await?);
        }
    }
    let (start, cpu) = (Instant::now(), processor_seconds());
    let links = links.into_iter().map(|link| tokio::spawn(exchange(link, pattern, size, start + time)));
    let calls = calls.into_iter().map(|calls| tokio::spawn(calls.run(start + time)));
    let tasks: Vec<_> = links.chain(calls).collect();
    let (mut messages, mut latencies) = (0, Vec::new());
    for task in tasks {
        let (count, nanos) = task.await??;
        messages += count;
        latencies.extend(nanos);
    }
    let (seconds, cpu_seconds) = (start.elapsed().as_secs_f64(), processor_seconds() - cpu);
    latencies.sort_unstable();
    let at = |share: f64| {
        let index = (latencies.len() as f64 * share) as usize;
        latencies.get(index).map_or(0.0, |nanos| f64::from(*nanos) / 1000.0)
    };
    Ok(Measured { messages, seconds, p50_us: at(0.5), p99_us: at(0.99), cpu_seconds })
}

/// Number of messages, and the round-trip times in nanoseconds.
async fn exchange(mut link: Link, pattern: Pattern, size: usize, end: Instant) -> Result<(u64, Vec<u32>)> {
    let message = Bytes::from(vec![FILLING; size.max(2)]);
    let (mut count, mut latencies) = (0, Vec::new());
    link.send(&Bytes::from(vec![pattern as u8])).await?;
    match pattern {
        Pattern::PingPong => loop {
            let now = Instant::now();
            if now >= end {
                return Ok((count, latencies));
            }
            link.send(&message).await?;
            link.flush().await?;
            link.receive(<[u8]>::len).await?.filter(|len| *len == message.len()).ok_or("the echo differs")?;
            latencies.push(now.elapsed().as_nanos() as u32);
            count += 1;
        },
        Pattern::OneWay => {
            // The clock is read for every 64 KiB.
            let chunk = ((64 << 10) / message.len()).max(1) as u64;
            while Instant::now() < end {
                link.send_repeated(&message, chunk).await?;
                count += chunk;
            }
            link.send(&Bytes::from_static(&[1])).await?;
            link.flush().await?;
            link.receive(|_| ()).await?.ok_or("the server has ended")?;
            Ok((count, latencies))
        }
        Pattern::Unary | Pattern::Stream => Err("gRPC has calls instead of links".into()),
    }
}
