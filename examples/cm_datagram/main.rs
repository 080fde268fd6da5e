//! librdmacm's `udaddy`: datagrams to who is found by address, and as many back.

#![forbid(unsafe_code)]

#[path = "../common/failure.rs"]
mod failure;
mod node;
#[path = "../common/number.rs"]
mod number;
#[path = "../common/soft.rs"]
mod soft;

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use rdma_safe::cm::{Connector, DatagramListener};
use rdma_safe::{Endpoint, EndpointBuilder, ProtectionDomain};

use node::Node;
use number::within;

const EXAMPLES: &str = "\
Either end may be the C program. Both have to say the same of -c, -C and -S.

Examples:
  cm_datagram                      serve one client
  cm_datagram -s 10.0.0.2          ten datagrams there, and ten back
  cm_datagram -s 10.0.0.2 -c 4 -C 100 -S 1000";

/// How long a step may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Sends datagrams to a server that is found by its address, which sends as many back
#[derive(Debug, Parser)]
#[command(name = "cm_datagram", after_help = EXAMPLES, max_term_width = 100, args_override_self = true)]
struct Options {
    /// Address or name of the server; the program is a server without it
    #[arg(short = 's', value_name = "ADDRESS")]
    server: Option<String>,

    /// Address to send from or, of a server, to be found at [default: any]
    #[arg(short = 'b', value_name = "ADDRESS")]
    bind: Option<IpAddr>,

    /// Queue pairs at each end
    #[arg(short = 'c', value_name = "COUNT", default_value = "1", value_parser = |text: &str| within(text, 1..=1000_u32))]
    connections: u32,

    /// Datagrams each way and queue pair
    #[arg(short = 'C', value_name = "COUNT", default_value = "10", value_parser = |text: &str| within(text, 0..=10_000_u32))]
    count: u32,

    /// Bytes of a datagram
    #[arg(short = 'S', value_name = "BYTES", default_value = "100", value_parser = |text: &str| within(text, 0..=65_535_u32))]
    size: u32,

    /// Type of service
    #[arg(short = 't', value_name = "TOS", value_parser = |text: &str| within(text, 0..=255_u8))]
    tos: Option<u8>,

    /// Port
    #[arg(long, value_name = "PORT", default_value = "7174", value_parser = |text: &str| within(text, 1..=65535_u16))]
    port: u16,
}

impl Options {
    /// With a place for each datagram.
    fn endpoint<'a>(&self, pd: &'a ProtectionDomain) -> EndpointBuilder<'a> {
        let depth = self.count.max(1);
        Endpoint::builder(pd).send_depth(depth).recv_depth(depth).events(true)
    }
}

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

fn main() -> ExitCode {
    let mut options = Options::parse();
    soft::or_soft(None);
    if options.size == 0 {
        options.count = 0;
    }
    let result = match &options.server {
        Some(server) => run_client(&options, server),
        None => run_server(&options),
    };
    match result {
        Ok(()) => {
            println!("test complete\nreturn status 0");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cm_datagram: {}", failure::one_line(&*error));
            ExitCode::FAILURE
        }
    }
}

fn run_server(options: &Options) -> Result<()> {
    println!("cm_datagram: starting server");
    let own = (options.bind.unwrap_or(Ipv4Addr::UNSPECIFIED.into()), options.port);
    let mut listener = DatagramListener::bind_with(own, options.connections)?;
    println!("listening at {}", listener.local_address());
    let mut nodes = Vec::new();
    while nodes.len() < options.connections as usize {
        // A server waits for its clients until it is ended.
        let Some(request) = listener.next(PATIENCE)? else { continue };
        let pd = request.pd()?;
        let node = Node::new(request.endpoint(options.endpoint(&pd))?, options)?;
        request.answer(node.endpoint(), b"")?;
        nodes.push(node);
    }
    if options.count > 0 {
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
    let is_like = |address: &SocketAddr| options.bind.is_none_or(|own| own.is_ipv4() == address.is_ipv4());
    let server = (server, options.port).to_socket_addrs()?.find(is_like).ok_or("the server has no such address")?;
    let mut connector = Connector::new().timeout(PATIENCE);
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
        node.know(service.peer);
        nodes.push(node);
    }
    if options.count > 0 {
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
