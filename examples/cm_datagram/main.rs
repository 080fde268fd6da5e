//! librdmacm's `udaddy`: datagrams to who is found by address, and as many back.

#![forbid(unsafe_code)]

#[path = "../common/failure.rs"]
mod failure;
mod node;
#[path = "../common/number.rs"]
mod number;

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use rdma_safe::cm::{EventChannel, EventKind, Id, Parameters, PortSpace};

use node::{Domains, Node};
use number::within;

const EXAMPLES: &str = "\
Either end may be the C program. Both have to say the same of -c, -C and -S.

Examples:
  cm_datagram                      serve one client
  cm_datagram -s 10.0.0.2          ten datagrams there, and ten back
  cm_datagram -s 10.0.0.2 -c 4 -C 100 -S 1000";

/// How long a step may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long an address and the way there are looked for.
const RESOLVE: Duration = Duration::from_secs(2);

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

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

fn main() -> ExitCode {
    let mut options = Options::parse();
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

/// The next event, of whichever id.
fn next(channel: &EventChannel, what: &str) -> Result<rdma_safe::cm::Event> {
    channel.wait(PATIENCE)?.ok_or_else(|| format!("{what}: nothing within {PATIENCE:?}").into())
}

fn run_server(options: &Options) -> Result<()> {
    println!("cm_datagram: starting server");
    let channel = EventChannel::new()?;
    let mut listener = Id::new(&channel, PortSpace::UDP)?;
    listener.bind((options.bind.unwrap_or(Ipv4Addr::UNSPECIFIED.into()), options.port))?;
    listener.listen(options.connections)?;
    println!("listening at {}", listener.local_address().ok_or("the server has no address")?);
    let (mut domains, mut nodes) = (Domains::default(), Vec::new());
    while nodes.len() < options.connections as usize {
        // A server waits for its clients until it is ended.
        let Some(event) = channel.wait(PATIENCE)? else { continue };
        if let EventKind::ConnectRequest(mut id, _) = event.kind {
            let node = Node::new(&mut domains, &id, options.count, options.size)?;
            id.accept(&node.parameters())?;
            nodes.push((id, node));
        }
    }
    if options.count > 0 {
        println!("receiving data transfers");
        for (_, node) in &mut nodes {
            node.receive_all()?;
        }
        println!("sending replies");
        for (_, node) in &mut nodes {
            node.send_all()?;
        }
        println!("data transfers complete");
    }
    Ok(())
}

fn run_client(options: &Options, server: &str) -> Result<()> {
    println!("cm_datagram: starting client\ncm_datagram: connecting");
    let is_like = |address: &SocketAddr| options.bind.is_none_or(|own| own.is_ipv4() == address.is_ipv4());
    let server = (server, options.port).to_socket_addrs()?.find(is_like).ok_or("the server has no such address")?;
    let mut domains = Domains::default();
    let mut nodes = Vec::new();
    for _ in 0..options.connections {
        nodes.push(find(options, server, &mut domains)?);
    }
    if options.count > 0 {
        println!("initiating data transfers");
        for (_, node) in &mut nodes {
            node.send_all()?;
        }
        println!("receiving data transfers");
        for (_, node) in &mut nodes {
            node.receive_all()?;
        }
        println!("data transfers complete");
    }
    Ok(())
}

/// A queue pair that knows one of the server's.
fn find(options: &Options, server: SocketAddr, domains: &mut Domains) -> Result<(Id, Node)> {
    let channel = EventChannel::new()?;
    let mut id = Id::new(&channel, PortSpace::UDP)?;
    if let Some(tos) = options.tos {
        id.set_type_of_service(tos)?;
    }
    id.resolve_address(options.bind.map(|own| (own, 0).into()), server, RESOLVE)?;
    let mut node = None;
    loop {
        let event = next(&channel, "looking for the server")?;
        match (event.kind, &mut node) {
            (EventKind::AddressResolved, _) => id.resolve_route(RESOLVE)?,
            (EventKind::RouteResolved, node) => {
                let node = node.insert(Node::new(domains, &id, options.count, options.size)?);
                id.connect(&node.parameters())?;
            }
            (EventKind::Established(Parameters::Datagrams(found)), Some(found_by)) => {
                found_by.know(&found)?;
                break;
            }
            (EventKind::Rejected(..) | EventKind::Unreachable(_), _) => {
                return Err("the server has refused, or nobody listens at that port".into());
            }
            (other, _) => return Err(format!("looking for the server: {other:?}").into()),
        }
    }
    Ok((id, node.ok_or("found before it was looked for")?))
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
