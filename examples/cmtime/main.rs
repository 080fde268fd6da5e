//! librdmacm's `cmtime`: measures each step of making and closing connections by IP address, many at a time.

#![forbid(unsafe_code)]

mod peers;
mod round;
mod run;
mod sockets;
mod table;

use std::net::{IpAddr, SocketAddr, SocketAddrV6, ToSocketAddrs};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use common::number::within;
use common::{Result, device};

const EXAMPLES: &str = "\
Columns: total(us) is the time from the first connection's start of a step to the last one's end, avg/conn that time divided by the
connections. us/conn, sum(us), max(us) and min(us) are of the times that each connection took. A step that an end does not do is 0.

Any end may be the C program: up to rdma-core 58 without -C, from 59 on with -C. Give all ends the same -c, -P and -S. On one host,
the -q of two ends must differ by at least -c.

Examples:
  cmtime                                        serve one client, on any address
  cmtime -s 10.0.0.2 -c 1000                    make 1000 connections to the server, with queue pairs and without
  cmtime -b 10.0.0.2 -C 10.0.0.2 -P 3 -L        be the server, and the controller of it and two clients
  cmtime -b 10.0.0.1 -C 10.0.0.2 -P 3           be one of the clients";

/// Interval of the checks that the other instances still run.
const TICK: Duration = Duration::from_millis(200);

/// Measures each step of making and closing connections by IP address
#[derive(Debug, Clone, Parser)]
#[command(name = "cmtime", after_help = EXAMPLES, max_term_width = 100, args_override_self = true,
          group = clap::ArgGroup::new("own").args(["bind", "interface"]))]
struct Options {
    /// Address or name of the server; without it, this is the server
    #[arg(short = 's', value_name = "ADDRESS", conflicts_with = "controller")]
    server: Option<String>,

    /// Address of this end
    #[arg(short = 'b', value_name = "ADDRESS")]
    bind: Option<String>,

    /// Network interface of an RDMA device, whose address this end uses
    #[arg(short = 'B', value_name = "INTERFACE")]
    interface: Option<String>,

    /// Address or name of the controller, for any number of servers and clients; the first instance at this address becomes it
    #[arg(short = 'C', value_name = "ADDRESS", requires = "own")]
    controller: Option<String>,

    /// With -C: be a server
    #[arg(short = 'L', requires = "controller")]
    listen: bool,

    /// With -C: number of servers and clients
    #[arg(short = 'P', value_name = "COUNT", default_value = "2", requires = "controller",
          value_parser = within(2..=4096_u64))]
    peers: u64,

    /// Connections of each client to each server
    #[arg(short = 'c', value_name = "COUNT", default_value = "100", value_parser = within(1..=1_000_000_u64))]
    connections: u64,

    /// Port of the server, for connections and for TCP; with -C, TCP port of the controller
    #[arg(short = 'p', value_name = "PORT", default_value = "7471", value_parser = within(1..=65535_u16))]
    port: u16,

    /// First queue pair number to use for connections without queue pairs
    #[arg(short = 'q', value_name = "NUMBER", default_value = "1000", value_parser = within(1..=0xff_ffff_u32))]
    base_number: u32,

    /// Pause for so many microseconds instead of creating and modifying queue pairs
    #[arg(short = 'm', value_name = "MICROSECONDS", value_parser = within(0..=999_999_u32))]
    mimic: Option<u32>,

    /// Threads that work on connections
    #[arg(short = 'n', value_name = "COUNT", default_value = "1", value_parser = within(1..=1024_u64))]
    threads: u64,

    /// Retries of resolving an address or a route
    #[arg(short = 'r', value_name = "COUNT", default_value = "2", value_parser = within(0..=1000_u32))]
    retries: u32,

    /// Measure TCP connections, for comparison
    #[arg(short = 'S', conflicts_with = "controller")]
    sockets: bool,

    /// Timeout of resolving an address or a route, in milliseconds
    #[arg(short = 't', value_name = "MILLISECONDS", default_value = "2000",
          value_parser = within(1..=0x7fff_ffff_u64))]
    timeout: u64,
}

fn main() -> ExitCode {
    common::main(run_role)
}

fn run_role(options: &Options) -> Result<()> {
    if !options.sockets {
        device::install_soft(None);
    }
    match (&options.controller, &options.server) {
        (Some(controller), _) => run::among_peers(options, controller),
        (None, server) if options.sockets => sockets::run(options, server.as_deref()),
        (None, Some(server)) => run::client(options, server),
        (None, None) => run::server(options),
    }
}

impl Options {
    fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout)
    }

    /// The address of this end with port 0, if it was given.
    fn source(&self) -> Result<Option<SocketAddr>> {
        match (&self.bind, &self.interface) {
            (Some(host), _) => address_of(host, 0, None).map(Some),
            (None, Some(interface)) => address_of_interface(interface).map(Some),
            (None, None) => Ok(None),
        }
    }
}

/// The first address of `host`, of the same family as `source`.
fn address_of(host: &str, port: u16, source: Option<SocketAddr>) -> Result<SocketAddr> {
    let is_same_family = |address: &SocketAddr| source.is_none_or(|own| own.is_ipv4() == address.is_ipv4());
    let found = (host, port).to_socket_addrs().map_err(|error| format!("{host}: {error}"))?.find(is_same_family);
    found.ok_or_else(|| format!("{host} has no address of this family").into())
}

/// The address of an RDMA device on the network interface, an IPv4 address if there is one.
fn address_of_interface(name: &str) -> Result<SocketAddr> {
    let index = std::fs::read_to_string(format!("/sys/class/net/{name}/ifindex"))
        .map_err(|error| format!("there is no interface {name}: {error}"))?;
    let index: u32 = index.trim().parse()?;
    let mut found = Vec::new();
    for device in &rdma_safe::devices()? {
        let context = device.open()?;
        let ports = 1..=context.attributes().ports();
        for entry in ports.flat_map(|port| context.gids(port).unwrap_or_default()) {
            if entry.interface_index == index {
                found.push(match entry.gid.ipv4() {
                    Some(address) => SocketAddr::new(IpAddr::V4(address), 0),
                    None => SocketAddrV6::new(entry.gid.into(), 0, 0, index).into(),
                });
            }
        }
    }
    found.sort_by_key(|address| !address.is_ipv4());
    found
        .first()
        .copied()
        .ok_or_else(|| format!("no RDMA device has an address on {name}: give the address with -b").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(std::iter::once("cmtime").chain(arguments.split_whitespace()))
    }

    #[test]
    fn options_are_those_of_c() {
        let client = parse("-s 10.0.0.2 -b 10.0.0.1 -c 10 -p 7472 -q 5000 -m 20 -n 4 -r 1 -t 500").unwrap();
        assert_eq!((client.connections, client.port, client.base_number, client.mimic), (10, 7472, 5000, Some(20)));
        assert_eq!((client.threads, client.retries, client.timeout()), (4, 1, Duration::from_millis(500)));
        assert_eq!(client.source().unwrap(), Some(([10, 0, 0, 1], 0).into()));
        let server = parse("").unwrap();
        assert_eq!((server.connections, server.port, server.base_number, server.mimic), (100, 7471, 1000, None));
        assert_eq!((server.threads, server.retries, server.peers), (1, 2, 2));
        let member = parse("-C 10.0.0.2 -B eth0 -L -P 5").unwrap();
        assert!(member.listen && member.peers == 5);
        assert!(parse("-S -s 10.0.0.2").unwrap().sockets);
    }

    #[test]
    fn conflicts_and_values_out_of_range_are_rejected() {
        for arguments in [
            "-C ::1",
            "-L",
            "-P 3",
            "-b ::1 -B eth0",
            "-s ::1 -C ::1 -b ::1",
            "-c 0",
            "-C ::1 -b ::1 -P 1",
            "-C ::1 -b ::1 -S",
        ] {
            assert!(parse(arguments).is_err(), "{arguments}");
        }
        let error = parse("-B nothing0").unwrap().source().unwrap_err();
        assert!(error.to_string().starts_with("there is no interface nothing0"), "{error}");
    }
}
