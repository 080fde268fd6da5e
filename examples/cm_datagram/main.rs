//! librdmacm's `udaddy`: a client finds the server by its IP address and sends datagrams, and the server sends as many back.

#![forbid(unsafe_code)]

mod node;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use common::number::within;
use common::{Result, device};
use rdma_safe::cm::{Connector, DatagramListener};
use rdma_safe::{Endpoint, EndpointBuilder, ProtectionDomain};

use node::Node;

const EXAMPLES: &str = "\
Either end may be the C program. Give both ends the same -c, -C and -S.

Examples:
  cm_datagram                      serve one client
  cm_datagram -s 10.0.0.2          send ten datagrams to the server and receive ten
  cm_datagram -s 10.0.0.2 -c 4 -C 100 -S 1000";

/// Longest duration of one step.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Sends datagrams to a server, found by its IP address, and receives as many
#[derive(Debug, Parser)]
#[command(name = "cm_datagram", after_help = EXAMPLES, max_term_width = 100, args_override_self = true)]
struct Options {
    /// Address or name of the server; without it, this is the server
    #[arg(short = 's', value_name = "ADDRESS")]
    server: Option<String>,

    /// Local address, to send from or to serve at [default: any]
    #[arg(short = 'b', value_name = "ADDRESS")]
    bind: Option<IpAddr>,

    /// Queue pairs at each end
    #[arg(short = 'c', value_name = "COUNT", default_value = "1", value_parser = within(1..=1000_u32))]
    connections: u32,

    /// Datagrams each way on each queue pair
    #[arg(short = 'C', value_name = "COUNT", default_value = "10", value_parser = within(0..=10_000_u32))]
    count: u32,

    /// Bytes of a datagram
    #[arg(short = 'S', value_name = "BYTES", default_value = "100", value_parser = within(0..=65_535_u32))]
    size: u32,

    /// Type of service
    #[arg(short = 't', value_name = "TOS", value_parser = within(0..=255_u8))]
    tos: Option<u8>,

    /// Port
    #[arg(long, value_name = "PORT", default_value = "7174", value_parser = within(1..=65535_u16))]
    port: u16,
}

impl Options {
    /// Number of datagrams each way on each queue pair; none if they are empty.
    fn count(&self) -> u32 {
        if self.size == 0 { 0 } else { self.count }
    }

    /// An endpoint with room for all datagrams each way.
    fn endpoint<'a>(&self, pd: &'a ProtectionDomain) -> EndpointBuilder<'a> {
        let depth = self.count().max(1);
        Endpoint::builder(pd).send_depth(depth).recv_depth(depth).events(true)
    }
}

fn main() -> ExitCode {
    common::main(run)
}

fn run(options: &Options) -> Result<()> {
    device::install_soft(None);
    match &options.server {
        Some(server) => run_client(options, server)?,
        None => run_server(options)?,
    }
    println!("test complete\nreturn status 0");
    Ok(())
}

fn run_server(options: &Options) -> Result<()> {
    println!("cm_datagram: starting server");
    let own = (options.bind.unwrap_or(Ipv4Addr::UNSPECIFIED.into()), options.port);
    let mut listener = DatagramListener::bind_with(own, options.connections)?;
    println!("listening at {}", listener.local_address());
    let mut nodes = Vec::new();
    while nodes.len() < options.connections as usize {
        // The server waits for its clients without a limit.
        let Some(request) = listener.next(TIMEOUT)? else { continue };
        let pd = request.pd()?;
        let node = Node::new(request.endpoint(options.endpoint(&pd))?, options)?;
        request.accept(node.endpoint(), b"")?;
        nodes.push(node);
    }
    if options.count() > 0 {
        println!("receiving data transfers");
        nodes.iter_mut().try_for_each(Node::receive_all)?;
        println!("sending replies");
        nodes.iter_mut().try_for_each(Node::send_all)?;
        println!("data transfers complete");
    }
    Ok(())
}

fn run_client(options: &Options, server: &str) -> Result<()> {
    println!("cm_datagram: starting client\ncm_datagram: connecting");
    let is_same_family = |address: &SocketAddr| options.bind.is_none_or(|own| own.is_ipv4() == address.is_ipv4());
    let server = (server, options.port)
        .to_socket_addrs()?
        .find(is_same_family)
        .ok_or("the server has no address of this family")?;
    let mut connector = Connector::new().timeout(TIMEOUT);
    if let Some(own) = options.bind {
        connector = connector.source((own, 0));
    }
    if let Some(tos) = options.tos {
        connector = connector.type_of_service(tos);
    }
    let mut nodes = Vec::new();
    for _ in 0..options.connections {
        let route = connector.resolve_datagrams(server)?;
        let mut node = Node::new(route.endpoint(options.endpoint(route.pd()))?, options)?;
        let service = route.find(node.endpoint(), b"")?;
        node.set_peer(service.peer);
        nodes.push(node);
    }
    if options.count() > 0 {
        println!("initiating data transfers");
        nodes.iter_mut().try_for_each(Node::send_all)?;
        println!("receiving data transfers");
        nodes.iter_mut().try_for_each(Node::receive_all)?;
        println!("data transfers complete");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_those_of_the_c_program() {
        let parse = |text: &str| Options::try_parse_from(std::iter::once("cm_datagram").chain(text.split_whitespace()));
        let options = parse("-s 10.0.0.2 -b 10.0.0.1 -c 4 -C 0x10 -S 1000 -t 32").unwrap();
        assert_eq!((options.connections, options.count, options.size, options.tos), (4, 16, 1000, Some(32)));
        let options = parse("").unwrap();
        assert_eq!((options.connections, options.count, options.size, options.port), (1, 10, 100, 7174));
        assert!(parse("-c 0").is_err() && parse("-b nowhere").is_err());
    }
}
