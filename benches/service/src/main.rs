//! The same key-value service over rdma-async and over TCP, measured side by side.
//!
//! Client and server are two processes. A client process has several connections with several requests in flight on each.

mod bulk;
mod child;
mod compare;
mod frames;
mod rdma;
mod store;
mod tcp;
mod usage;

use std::time::{Duration, Instant};

use clap::{Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};

pub(crate) type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Measures a key-value service over rdma-async and over TCP.
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
        /// Over RDMA: send a message for each reply.
        #[arg(long)]
        one_by_one: bool,
        /// Threads of the runtime; 0 for tokio's current_thread.
        #[arg(long, default_value_t = 1)]
        workers: usize,
        /// Serve transfers of a mebibyte instead of requests.
        #[arg(long)]
        bulk: bool,
    },
    /// Send requests, and print a line of JSON.
    Client {
        #[arg(long)]
        transport: Transport,
        /// Over RDMA: send a message for each request.
        #[arg(long)]
        one_by_one: bool,
        #[arg(long, default_value_t = 1)]
        workers: usize,
        #[arg(long)]
        address: std::net::SocketAddr,
        #[arg(long, default_value_t = 1)]
        clients: usize,
        /// Requests in flight on each connection.
        #[arg(long, default_value_t = 1)]
        depth: usize,
        #[arg(long, default_value_t = 1.0)]
        seconds: f64,
        /// Transfer a mebibyte at a time instead of sending requests.
        #[arg(long)]
        bulk: Option<bulk::Direction>,
    },
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Transport {
    Tcp,
    Rdma,
}

/// What a client has measured.
#[derive(Serialize, Deserialize, Clone, Debug)]
struct Measured {
    operations: u64,
    seconds: f64,
    p50_us: f64,
    p99_us: f64,
    /// Processor time of the client.
    cpu_seconds: f64,
}

/// What a server prints in the end.
#[derive(Serialize, Deserialize, Debug)]
struct Served {
    cpu_seconds: f64,
}

fn main() -> Result<()> {
    match Options::parse().command {
        Command::Compare(options) => compare::run(&options),
        Command::Server { transport, one_by_one, workers, bulk } => {
            rdma_safe::soft::install_by_default();
            let runtime = runtime(workers)?;
            let address = runtime.block_on(async {
                match transport {
                    _ if bulk => bulk::serve(transport).await,
                    Transport::Tcp => tcp::serve().await,
                    Transport::Rdma => rdma::serve(one_by_one).await,
                }
            })?;
            println!("{address}");
            // Serves until the end of the input. Reading it blocks a thread.
            let input = || std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            runtime.block_on(runtime.spawn_blocking(input))??;
            println!("{}", serde_json::to_string(&Served { cpu_seconds: usage::processor_seconds() })?);
            std::process::exit(0);
        }
        Command::Client { transport, one_by_one, workers, address, clients, depth, seconds, bulk } => {
            rdma_safe::soft::install_by_default();
            let time = Duration::from_secs_f64(seconds);
            let (mut latencies, took, cpu) = runtime(workers)?.block_on(async {
                match (bulk, transport) {
                    (Some(direction), _) => bulk::ask(transport, direction, address, time).await,
                    (None, Transport::Tcp) => tcp::ask(address, clients, depth, time).await,
                    (None, Transport::Rdma) => rdma::ask(address, one_by_one, clients, depth, time).await,
                }
            })?;
            latencies.sort_unstable();
            let at = |share: f64| {
                let index = (latencies.len() as f64 * share) as usize;
                latencies.get(index).map_or(0.0, |nanos| f64::from(*nanos) / 1000.0)
            };
            let (operations, seconds) = (latencies.len() as u64, took.as_secs_f64());
            let measured = Measured { operations, seconds, p50_us: at(0.5), p99_us: at(0.99), cpu_seconds: cpu };
            println!("{}", serde_json::to_string(&measured)?);
            // The runtime is not shut down, since that takes time.
            std::process::exit(0);
        }
    }
}

fn runtime(workers: usize) -> Result<tokio::runtime::Runtime> {
    let mut builder = match workers {
        0 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    Ok(builder.worker_threads(workers.max(1)).enable_all().build()?)
}

/// Latencies in nanoseconds, the time of the measurement, and the processor time.
type Latencies = (Vec<u32>, Duration, f64);

/// Joins the tasks of all requests, which measure from `start` on.
async fn collect(tasks: Vec<tokio::task::JoinHandle<Result<Vec<u32>>>>, start: Instant, cpu: f64) -> Result<Latencies> {
    let mut latencies = Vec::new();
    for task in tasks {
        latencies.extend(task.await??);
    }
    Ok((latencies, start.elapsed(), usage::processor_seconds() - cpu))
}
