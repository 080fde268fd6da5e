//! A counter in the memory of one host that many others count up, each without the help of its processor: `ibv_post_send(3)`
//! with fetch-and-add and compare-and-swap, by [`rdma_safe::Endpoint`]. See `--help`.

#![forbid(unsafe_code)]

mod client;
#[path = "../common/device.rs"]
mod device;
#[path = "../common/failure.rs"]
mod failure;
#[path = "../common/number.rs"]
mod number;
mod server;
mod wire;

use std::error::Error;
use std::net::{Ipv4Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Parser;
use rdma_safe::{AtomicCapability, Context, Endpoint, EndpointBuilder, ProtectionDomain};
use signal_hook::consts::{SIGINT, SIGTERM};

use client::Counted;
use number::within;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const EXAMPLES: &str = "\
Examples:
  atomics --clients 2          server: serves two clients, prints the total and ends
  atomics 10.0.0.1             client of the server at 10.0.0.1: adds 1000 and swaps 100
  atomics --loopback -c 4      both ends in this process, with four clients at a time";

/// How soon a signal is noticed.
const TICK: Duration = Duration::from_millis(100);

/// Counts up one number from many hosts at once, and shows that no step is lost
///
/// Without HOST it is the server, which has the number in its memory; with HOST a client. A client counts by one with each
/// fetch-and-add, and with each compare-and-swap that succeeds. The server compares the number with what its clients say they have
/// counted, and ends with status 1 if it differs. Addresses are exchanged over TCP.
#[derive(Debug, Parser)]
#[command(name = "atomics", after_help = EXAMPLES, max_term_width = 100, args_override_self = true)]
struct Options {
    /// Server to connect to: a name, an IPv4 or an IPv6 address; without it, this is the server
    #[arg(conflicts_with = "loopback")]
    host: Option<String>,

    /// Be the server and all clients
    #[arg(long)]
    loopback: bool,

    /// Clients that the server serves before it ends, 1 to 1000
    #[arg(short, long, value_name = "COUNT", default_value = "1", value_parser = |text: &str| within(text, 1..=1000_usize))]
    clients: usize,

    /// Additions of a client
    #[arg(short, long, value_name = "COUNT", default_value = "1000", value_parser = |text: &str| within(text, 0..=u64::MAX >> 16))]
    adds: u64,

    /// Swaps of a client that succeed
    #[arg(short, long, value_name = "COUNT", default_value = "100", value_parser = |text: &str| within(text, 0..=u64::MAX >> 16))]
    swaps: u64,

    /// TCP port to listen on or connect to, 1 to 65535
    #[arg(short, long, value_name = "PORT", default_value = "18515", value_parser = |text: &str| within(text, 1..=65535_u16))]
    port: u16,

    /// RDMA device, such as mlx5_0 or rxe0, or soft0, which is everywhere [default: the first one]
    #[arg(short = 'd', long, value_name = "DEVICE")]
    ib_dev: Option<String>,

    /// Port of the device, counted from 1
    #[arg(short = 'i', long, value_name = "PORT", default_value = "1", value_parser = |text: &str| within(text, 1..=255_u8))]
    ib_port: u8,

    /// Index of the GID to connect from [default: the best one]
    #[arg(short, long, value_name = "INDEX", value_parser = |text: &str| within(text, 0..=255_u32))]
    gid_idx: Option<u32>,

    /// Seconds to wait for the server to accept, for an answer of the peer, and for each operation, 1 to 86400
    ///
    /// A server waits for its clients, and for them to finish, without a limit; Ctrl-C ends that.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = timeout)]
    timeout: Duration,
}

fn timeout(text: &str) -> std::result::Result<Duration, String> {
    within(text, 1..=86400_u64).map(Duration::from_secs)
}

/// Set by Ctrl-C.
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

    /// # Errors
    /// When Ctrl-C was pressed.
    fn check(&self) -> Result<()> {
        if self.is_set() { Err("interrupted".into()) } else { Ok(()) }
    }
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("atomics: {}", failure::one_line(&*error));
            ExitCode::FAILURE
        }
    }
}

/// Whether nothing was lost.
fn run(options: &Options) -> Result<bool> {
    let stop = Stop::register()?;
    let device = device::find(options.ib_dev.as_deref())?;
    let context = device.open()?;
    if context.attributes().atomic_capability() == AtomicCapability::NONE {
        return Err(format!("{} has no atomic operations", context.device_name()).into());
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

/// The server and its clients, each with a thread of its own.
fn loopback(context: &Context, options: &Options, stop: &Stop) -> Result<bool> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    std::thread::scope(|scope| {
        // Errors are turned into text, which may move between threads.
        let client = || -> std::result::Result<Counted, String> {
            let counted = TcpStream::connect_timeout(&address, options.timeout)
                .map_err(Box::from)
                .and_then(|stream| client::run(context, stream, options, stop));
            counted.map_err(|error| failure::one_line(&*error))
        };
        let clients: Vec<_> = (0..options.clients).map(|_| scope.spawn(client)).collect();
        let served = server::run(context, &listener, options, stop);
        // Whoever is not served yet is refused.
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

/// An endpoint as the options have it.
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

    fn parse(arguments: &str) -> std::result::Result<Options, clap::Error> {
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
