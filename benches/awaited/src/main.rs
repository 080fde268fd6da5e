//! The same ping-pong with and without `await`: two threads of this process exchange messages, and sleep while they wait.
//!
//! Prints the time of a round trip in nanoseconds. In a guest whose clock counts instructions, these are the instructions of both
//! ends and of the kernel.

mod awaited;
mod sync;

use std::sync::Barrier;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use rdma_safe::{Device, ProtectionDomain, QueuePairAddress};

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Bytes of each message.
const SIZE: usize = 64;

/// Measures a ping-pong with and without `await`.
#[derive(Debug, Parser)]
struct Args {
    /// Round trips of a run
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
    messages: u32,
    /// Runs of each kind, in turns
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Only this kind
    #[arg(long)]
    only: Option<Kind>,
}

/// How a thread waits for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    /// `Endpoint::wait` of rdma-safe
    Endpoint,
    /// `EndpointSet::wait` of rdma-safe
    Set,
    /// `Runner::block_on` of rdma-async
    BlockOn,
    /// A tokio runtime of the thread
    Tokio,
}

/// One of the two threads.
struct End<'a> {
    /// Whether this end sends first.
    is_client: bool,
    messages: u32,
    addresses: (Sender<QueuePairAddress>, Receiver<QueuePairAddress>),
    barrier: &'a Barrier,
}

impl End<'_> {
    /// Tells the other end the address, and returns its address.
    fn exchange(&self, address: QueuePairAddress) -> Result<QueuePairAddress> {
        self.addresses.0.send(address)?;
        Ok(self.addresses.1.recv()?)
    }

    /// Round trips before the clock starts.
    fn warmup(&self) -> u32 {
        self.messages / 10
    }
}

fn open() -> Result<ProtectionDomain> {
    Ok(Device::first()?.open()?.alloc_pd()?)
}

/// The time of the round trips of the client.
fn measure(kind: Kind, messages: u32) -> Result<Duration> {
    let barrier = Barrier::new(2);
    let (to_server, at_server) = channel();
    let (to_client, at_client) = channel();
    let end = |is_client, addresses| End { is_client, messages, addresses, barrier: &barrier };
    let run = |end: End<'_>| match kind {
        Kind::Endpoint => sync::endpoint(&end),
        Kind::Set => sync::set(&end),
        Kind::BlockOn => awaited::on_this_thread(&end),
        Kind::Tokio => awaited::on_tokio(&end),
    };
    let [client, server] = [end(true, (to_server, at_client)), end(false, (to_client, at_server))];
    thread::scope(|scope| {
        let server = scope.spawn(|| run(server));
        let time = run(client);
        server.join().map_err(|_| "the server has panicked")??;
        time
    })
}

/// Runs the round trips of one end with `exchange`, which exchanges so many messages.
fn timed<'a>(end: &End<'a>, mut exchange: impl FnMut(u32) -> Result<()>) -> Result<Duration> {
    // A send needs the queue pair of the peer.
    end.barrier.wait();
    exchange(end.warmup())?;
    let start = Instant::now();
    exchange(end.messages)?;
    let time = start.elapsed();
    end.barrier.wait();
    Ok(time)
}

fn main() -> Result<()> {
    let args = Args::parse();
    rdma_safe::soft::install_by_default();
    for _ in 0..args.runs {
        for kind in [Kind::Endpoint, Kind::Set, Kind::BlockOn, Kind::Tokio] {
            if args.only.is_none_or(|only| only == kind) {
                println!("{kind:?}\t{}", measure(kind, args.messages)?.as_nanos() / u128::from(args.messages));
            }
        }
    }
    Ok(())
}
