//! librdmacm's `rping`: a text goes to a server, which reads it from the client's memory and writes it back there.

#![forbid(unsafe_code)]

#[path = "../common/failure.rs"]
mod failure;
#[path = "../common/number.rs"]
mod number;
mod ping;
#[path = "../common/soft.rs"]
mod soft;

use std::error::Error;
use std::io::Write as _;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use rdma_safe::Endpoint;
use rdma_safe::cm::{Connector, Listener, Request};

use number::within;
use ping::{Client, MAX_SIZE, MIN_SIZE, Server};

const EXAMPLES: &str = "\
Either end may be the C program.

Examples:
  rping -s -v                             serve one client, on any address
  rping -s -P                             serve any number, until it is ended
  rping -c -a 10.0.0.2 -v -C 10           ten pings to a server there
  rping -c -a fe80::1%eth0 -S 4096 -V     as many as can be, of 4096 bytes, and see that they come back as they were";

/// Asks by address for a connection, and lets texts go to and fro by reads and writes
#[derive(Debug, Clone, Parser)]
#[command(name = "rping", after_help = EXAMPLES, max_term_width = 100, args_override_self = true,
          group = clap::ArgGroup::new("end").required(true).args(["server", "client"]))]
struct Options {
    /// Serve
    #[arg(short = 's')]
    server: bool,

    /// Be a client
    #[arg(short = 'c', requires = "address")]
    client: bool,

    /// Address or name of the server; of the server itself, the address to listen at [default: any]
    #[arg(short = 'a', value_name = "ADDRESS")]
    address: Option<String>,

    /// Address that the client connects from [default: as the network has it]
    #[arg(short = 'I', value_name = "ADDRESS", conflicts_with = "server")]
    source: Option<IpAddr>,

    /// Port
    #[arg(short = 'p', value_name = "PORT", default_value = "7174", value_parser = |text: &str| within(text, 1..=65535_u16))]
    port: u16,

    /// Bytes of a text, its NUL among them
    #[arg(short = 'S', value_name = "BYTES", default_value = "64",
          value_parser = |text: &str| within(text, MIN_SIZE..=MAX_SIZE))]
    size: u32,

    /// Pings; 0 is as many as can be
    #[arg(short = 'C', value_name = "COUNT", default_value = "0", value_parser = |text: &str| within(text, 0..=i32::MAX as u32))]
    count: u32,

    /// Show the texts
    #[arg(short = 'v')]
    verbose: bool,

    /// See that texts come back as they were
    #[arg(short = 'V')]
    validate: bool,

    /// Serve clients until the program is ended, any number at a time
    #[arg(short = 'P', conflicts_with = "client")]
    persistent: bool,

    /// Show what happens
    #[arg(short = 'd')]
    debug: bool,

    /// Queue pairs of one's own instead of librdmacm's, which they always are here
    #[arg(short = 'q')]
    own_queue_pair: bool,
}

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

fn main() -> ExitCode {
    let options = Options::parse();
    soft::or_soft(None);
    let result = match options.client {
        true => run_client(&options),
        false => run_server(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rping: {}", failure::one_line(&*error));
            ExitCode::FAILURE
        }
    }
}

impl Options {
    fn log(&self, line: impl FnOnce() -> String) {
        if self.debug {
            eprintln!("rping: {}", line());
        }
    }

    /// One line of output, at once also where that is a pipe.
    fn show(&self, line: &str) -> Result<()> {
        if !self.verbose {
            return Ok(());
        }
        let mut out = std::io::stdout().lock();
        writeln!(out, "{line}")?;
        Ok(out.flush()?)
    }
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
            return Err("the server has ended the connection".into());
        };
        options.show(&format!("ping data: {text}"))?;
        number = number.wrapping_add(1);
    }
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
        // It serves until it is ended; a wait that comes to nothing begins again.
        let Some(request) = listener.next(Duration::from_secs(3600))? else { continue };
        options.log(|| format!("asked by {:?}", request.peer_address()));
        if !options.persistent {
            return serve(request, options);
        }
        let options = options.clone();
        let body = move || {
            if let Err(error) = serve(request, &options) {
                eprintln!("rping: {}", failure::one_line(&*error));
            }
        };
        // Those who are served go on.
        if let Err(error) = std::thread::Builder::new().name("client".into()).spawn(body) {
            eprintln!("rping: a client was refused: no thread can be started: {error}");
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
    options.log(|| "the client has ended the connection".to_owned());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(std::iter::once("rping").chain(arguments.split_whitespace()))
    }

    #[test]
    fn options_are_those_of_the_c_program() {
        let client = parse("-c -vV -a 10.0.0.2 -I 10.0.0.1 -p 7175 -S 100 -C 3 -d -q").unwrap();
        assert!(client.client && client.verbose && client.validate && client.debug && client.own_queue_pair);
        assert_eq!((client.port, client.size, client.count), (7175, 100, 3));
        let server = parse("-s -P -a ::0").unwrap();
        assert!(server.server && server.persistent);
        assert_eq!((server.port, server.size, server.count), (7174, 64, 0));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for arguments in ["", "-c", "-s -c -a ::1", "-s -I ::1", "-c -a ::1 -P", "-s -S 3", "-s -S 65537", "-s -p 0"] {
            assert!(parse(arguments).is_err(), "{arguments}");
        }
    }
}
