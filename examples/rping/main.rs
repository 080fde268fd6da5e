//! librdmacm's `rping`: the server reads a text from the client's memory and writes it back there.

#![forbid(unsafe_code)]

mod ping;

use std::io::Write as _;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use common::number::{MAX_INT, within};
use common::{Result, device, failure};
use rdma_safe::Endpoint;
use rdma_safe::cm::{Connector, Listener, Request};

use ping::{Client, MAX_SIZE, MIN_SIZE, Server};

const EXAMPLES: &str = "\
Either end may be the C program.

Examples:
  rping -s -v                             serve one client, on any address
  rping -s -P                             serve any number of clients, until Ctrl-C
  rping -c -a 10.0.0.2 -v -C 10           send ten pings to the server at 10.0.0.2
  rping -c -a fe80::1%eth0 -S 4096 -V     send pings of 4096 bytes until Ctrl-C, and check the answers";

/// Pings a server by RDMA reads and writes, over a connection that is made by IP address
#[derive(Debug, Clone, Parser)]
#[command(name = "rping", after_help = EXAMPLES, max_term_width = 100, args_override_self = true,
          group = clap::ArgGroup::new("end").required(true).args(["server", "client"]))]
struct Options {
    /// Be the server
    #[arg(short = 's')]
    server: bool,

    /// Be the client
    #[arg(short = 'c', requires = "address")]
    client: bool,

    /// Address or name of the server; for the server, the address to listen on [default: any]
    #[arg(short = 'a', value_name = "ADDRESS")]
    address: Option<String>,

    /// Address that the client connects from [default: chosen by the network]
    #[arg(short = 'I', value_name = "ADDRESS", conflicts_with = "server")]
    source: Option<IpAddr>,

    /// Port
    #[arg(short = 'p', value_name = "PORT", default_value = "7174", value_parser = within(1..=65535_u16))]
    port: u16,

    /// Length of a text in bytes, with its NUL
    #[arg(short = 'S', value_name = "BYTES", default_value = "64",
          value_parser = within(MIN_SIZE..=MAX_SIZE))]
    size: u32,

    /// Number of pings; 0 means no limit
    #[arg(short = 'C', value_name = "COUNT", default_value = "0", value_parser = within(0..=MAX_INT))]
    count: u32,

    /// Print the texts
    #[arg(short = 'v')]
    verbose: bool,

    /// Check that texts come back unchanged
    #[arg(short = 'V')]
    validate: bool,

    /// Serve any number of clients at a time, until Ctrl-C
    #[arg(short = 'P', conflicts_with = "client")]
    persistent: bool,

    /// Print debug messages
    #[arg(short = 'd')]
    debug: bool,

    /// Create queue pairs without librdmacm; no effect: this program always does
    #[arg(short = 'q')]
    own_queue_pair: bool,
}

fn main() -> ExitCode {
    common::main(run)
}

impl Options {
    fn log(&self, line: impl FnOnce() -> String) {
        if self.debug {
            eprintln!("rping: {}", line());
        }
    }

    /// Prints a line with -v, and flushes it for readers of a pipe.
    fn show(&self, line: &str) -> Result<()> {
        if !self.verbose {
            return Ok(());
        }
        let mut out = std::io::stdout().lock();
        writeln!(out, "{line}")?;
        Ok(out.flush()?)
    }
}

fn run(options: &Options) -> Result<()> {
    device::install_soft(None);
    if options.client { run_client(options) } else { run_server(options) }
}

fn run_client(options: &Options) -> Result<()> {
    let host = options.address.as_deref().unwrap_or_default();
    let mut connector = Connector::new();
    if let Some(source) = options.source {
        connector = connector.source((source, 0));
    }
    let route = connector.resolve_first((host, options.port))?;
    let pd = route.pd().clone();
    let mut client = Client::new(&pd, options.size)?;
    let mut prepared = route.prepare(ping::endpoint(Endpoint::builder(&pd)))?;
    ping::post_receives(&mut prepared)?;
    let mut connection = prepared.connect(&[])?;
    options.log(|| format!("connected from {:?} to {:?}", connection.local_address(), connection.peer_address()));
    let mut number = 0;
    while options.count == 0 || number < options.count {
        let Some(text) = client.ping(&mut connection, number, options.validate)? else {
            return Err("the server has closed the connection".into());
        };
        options.show(&format!("ping data: {text}"))?;
        number = number.wrapping_add(1);
    }
    ping::finish_sends(&mut connection)?;
    connection.disconnect()?;
    Ok(())
}

fn run_server(options: &Options) -> Result<()> {
    let mut listener = match &options.address {
        Some(address) => Listener::bind((address.as_str(), options.port))?,
        None => Listener::bind((std::net::Ipv4Addr::UNSPECIFIED, options.port))?,
    };
    options.log(|| format!("listening at {}", listener.local_address()));
    loop {
        // After a timeout, wait again.
        let Some(request) = listener.next(Duration::from_secs(3600))? else { continue };
        options.log(|| format!("connection request from {:?}", request.peer_address()));
        if !options.persistent {
            return serve(request, options);
        }
        let options = options.clone();
        let body = move || {
            if let Err(error) = serve(request, &options) {
                failure::print("rping", &*error);
            }
        };
        // The other clients are still served.
        if let Err(error) = std::thread::Builder::new().name("client".into()).spawn(body) {
            eprintln!("rping: cannot start a thread for a client: {error}");
        }
    }
}

fn serve(request: Request, options: &Options) -> Result<()> {
    let pd = request.pd()?;
    let mut server = Server::new(&pd)?;
    let mut prepared = request.prepare(ping::endpoint(Endpoint::builder(&pd)))?;
    ping::post_receives(&mut prepared)?;
    let mut connection = prepared.accept(&[])?;
    options.log(|| format!("connected to {:?}", connection.peer_address()));
    while let Some(text) = server.pong(&mut connection)? {
        options.show(&format!("server ping data: {text}"))?;
    }
    options.log(|| "the client has closed the connection".to_owned());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(std::iter::once("rping").chain(arguments.split_whitespace()))
    }

    #[test]
    fn options_are_those_of_c() {
        let client = parse("-c -vV -a 10.0.0.2 -I 10.0.0.1 -p 7175 -S 100 -C 3 -d -q").unwrap();
        assert!(client.client && client.verbose && client.validate && client.debug && client.own_queue_pair);
        assert_eq!((client.port, client.size, client.count), (7175, 100, 3));
        let server = parse("-s -P -a ::0").unwrap();
        assert!(server.server && server.persistent);
        assert_eq!((server.port, server.size, server.count), (7174, 64, 0));
    }

    #[test]
    fn conflicts_and_values_out_of_range_are_rejected() {
        for arguments in ["", "-c", "-s -c -a ::1", "-s -I ::1", "-c -a ::1 -P", "-s -S 3", "-s -S 65537", "-s -p 0"] {
            assert!(parse(arguments).is_err(), "{arguments}");
        }
    }
}
