//! Many clients increment a number in the memory of a server, by RDMA fetch-and-add and compare-and-swap. See `--help`.

#![forbid(unsafe_code)]

mod client;
mod server;
mod wire;

use std::net::{Ipv4Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Parser;
use common::number::{seconds, within};
use common::{Result, device};
use rdma_safe::device::AtomicCapability;
use rdma_safe::{Context, Endpoint, EndpointBuilder, ProtectionDomain};
use signal_hook::consts::{SIGINT, SIGTERM};

use client::Counted;

const EXAMPLES: &str = "\
Examples:
  atomics --clients 2          server: serves two clients, then prints the total
  atomics 10.0.0.1             client of the server at 10.0.0.1: adds 1000 and swaps 100
  atomics --loopback -c 4      both ends in this process, with four clients at a time";

/// Longest time until a signal is noticed.
const TICK: Duration = Duration::from_millis(100);

/// Increments one number from many hosts at once, and checks that no increment is lost
///
/// Without HOST this is the server, which has the number in its memory; with HOST a client. Each fetch-and-add and each successful
/// compare-and-swap of a client adds one. The server compares the number with the sum of its clients' reports; if they differ, the
/// exit status is 1. The ends exchange addresses over TCP.
#[derive(Debug, Parser)]
#[command(name = "atomics", after_help = EXAMPLES, max_term_width = 100, args_override_self = true)]
struct Options {
    /// Server to connect to: a name, an IPv4 or an IPv6 address; without it, this is the server
    #[arg(conflicts_with = "loopback")]
    host: Option<String>,

    /// Run the server and all clients in this process
    #[arg(long)]
    loopback: bool,

    /// Number of clients that the server serves, 1 to 1000
    #[arg(short, long, value_name = "COUNT", default_value = "1", value_parser = within(1..=1000_usize))]
    clients: usize,

    /// Fetch-and-adds of a client
    #[arg(short, long, value_name = "COUNT", default_value = "1000", value_parser = within(0..=u64::MAX >> 16))]
    adds: u64,

    /// Successful compare-and-swaps of a client
    #[arg(short, long, value_name = "COUNT", default_value = "100", value_parser = within(0..=u64::MAX >> 16))]
    swaps: u64,

    /// TCP port to listen on or connect to, 1 to 65535
    #[arg(short, long, value_name = "PORT", default_value = "18515", value_parser = within(1..=65535_u16))]
    port: u16,

    /// RDMA device, such as mlx5_0 or rxe0, or soft0, which every machine has [default: the first one]
    #[arg(short = 'd', long, value_name = "DEVICE")]
    ib_dev: Option<String>,

    /// Port of the device, counted from 1
    #[arg(short = 'i', long, value_name = "PORT", default_value = "1", value_parser = within(1..=255_u8))]
    ib_port: u8,

    /// Index of the GID to connect from [default: the best one]
    #[arg(short, long, value_name = "INDEX", value_parser = within(0..=255_u32))]
    gid_idx: Option<u32>,

    /// Seconds to wait for the server to accept, for an answer of the peer, and for each operation, 1 to 86400
    ///
    /// A server waits for its clients to connect and to finish without a limit, until Ctrl-C.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds(1..=86400))]
    timeout: Duration,
}

/// A flag that Ctrl-C sets.
#[derive(Clone, Debug, Default)]
struct Stop(Arc<AtomicBool>);

impl Stop {
    fn register() -> Result<Self> {
        let stop = Stop::default();
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&stop.0))?;
        }
        Ok(stop)
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Fails after Ctrl-C.
    fn check(&self) -> Result<()> {
        if self.is_set() { Err("interrupted".into()) } else { Ok(()) }
    }
}

fn main() -> ExitCode {
    common::main(run)
}

fn run(options: &Options) -> Result<ExitCode> {
    Ok(if count(options)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs one end, or both. Returns whether no increment was lost.
fn count(options: &Options) -> Result<bool> {
    let stop = Stop::register()?;
    let device = device::find(options.ib_dev.as_deref())?;
    let context = device.open()?;
    if context.attributes().atomic_capability() == AtomicCapability::NONE {
        return Err(format!("{} does not support atomic operations", context.device_name()).into());
    }
    if options.loopback {
        return loopback(&context, options, &stop);
    }
    match &options.host {
        Some(host) => {
            let stream = connect(host, options.port, options.timeout)?;
            println!("{}", client::run(&context, stream, options, &stop)?);
            Ok(true)
        }
        None => {
            let listener = TcpListener::bind(("::", options.port))
                .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, options.port)))
                .map_err(|error| format!("cannot listen on TCP port {}: {error}; see --port", options.port))?;
            println!("serving {} clients on TCP port {}", options.clients, options.port);
            server::run(&context, &listener, options, &stop)
        }
    }
}

/// Runs the server and its clients, each in its own thread.
fn loopback(context: &Context, options: &Options, stop: &Stop) -> Result<bool> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    std::thread::scope(|scope| {
        let client = || -> Result<Counted> {
            client::run(context, TcpStream::connect_timeout(&address, options.timeout)?, options, stop)
        };
        let clients: Vec<_> = (0..options.clients).map(|_| scope.spawn(client)).collect();
        let served = server::run(context, &listener, options, stop);
        // Connections that are not accepted yet are refused.
        drop(listener);
        for client in clients {
            let counted = client.join().map_err(|_| "a client panicked")??;
            println!("{counted}");
        }
        served
    })
}

fn connect(host: &str, port: u16, timeout: Duration) -> Result<TcpStream> {
    let addresses = (host, port)
        .to_socket_addrs()
        .map_err(|error| format!("cannot find the host {host}: {error}; give a name or an IPv4 or IPv6 address"))?;
    let mut failed = "no address".to_owned();
    for address in addresses {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = format!("{address}: {error}"),
        }
    }
    Err(format!(
        "cannot connect to {host} TCP port {port} ({failed}); start the server there first, and compare --port"
    )
    .into())
}

/// An endpoint with the port and GID of the options.
fn endpoint<'a>(pd: &'a ProtectionDomain, options: &Options) -> EndpointBuilder<'a> {
    let builder = Endpoint::builder(pd).port(options.ib_port).send_depth(1).recv_depth(1);
    match options.gid_idx {
        Some(index) => builder.gid_index(index),
        None => builder,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(arguments: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(format!("atomics {arguments}").split_whitespace())
    }

    #[test]
    fn options_have_their_defaults_and_limits() {
        Options::command().debug_assert();
        let options = parse("").unwrap();
        assert_eq!((options.clients, options.adds, options.swaps, options.port), (1, 1000, 100, 18515));
        for arguments in ["--loopback host", "-c 0", "-c 1001", "-p 0", "--timeout 0", "one two", "-a -1"] {
            assert_eq!(parse(arguments).map(|_| ()).map_err(|error| error.exit_code()), Err(2), "{arguments}");
        }
    }
}
