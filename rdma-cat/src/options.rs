//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};

use crate::address::Address;

const EXAMPLES: &str = "\
Standard input goes to the peer, and what the peer sends goes to standard output. The program ends when both directions have ended.

Examples:
  rdma-cat -l 7471 > copy.tar               receive at any address of this host
  rdma-cat 10.0.0.2:7471 < backup.tar       send to it
  rdma-cat -l 7471 --receive copy.tar       receive a file, which gets its name only when it is complete
  rdma-cat 10.0.0.2 7471 --send backup.tar  send a file

Exit status: 0 when both directions have ended in order, 1 after an error, 2 for a wrong command line, 130 after Ctrl-C.";

/// Copies standard input and output, or files, between two hosts over RDMA
#[derive(Debug, Parser)]
#[command(name = "rdma-cat", version, after_help = EXAMPLES, max_term_width = 132)]
struct Arguments {
    /// HOST:PORT or HOST PORT to connect to; with --listen ADDRESS:PORT or PORT
    #[arg(required = true, num_args = 1..=2, value_name = "ADDRESS")]
    address: Vec<String>,

    /// Listen and accept one connection. Port 0 selects a free port
    #[arg(short, long)]
    listen: bool,

    /// Accept further connections, one after another
    #[arg(short, long, requires = "listen")]
    keep: bool,

    /// Send this file instead of standard input
    #[arg(long, value_name = "FILE")]
    send: Option<PathBuf>,

    /// Write to this file instead of standard output. Replaces it when the peer has sent everything. A terminal as standard input
    /// is then not read
    #[arg(long, value_name = "FILE")]
    receive: Option<PathBuf>,

    /// Show the progress on standard error [default: with files, if it is a terminal]
    #[arg(long)]
    progress: bool,

    /// Longest time to connect
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds, conflicts_with = "listen")]
    timeout: Duration,

    /// Print only errors
    #[arg(short, long, conflicts_with = "progress")]
    quiet: bool,
}

/// What the program is to do.
#[derive(Debug)]
pub(crate) struct Options {
    /// The address of the peer, or to listen at.
    pub(crate) address: Address,
    pub(crate) listen: bool,
    /// Accept further connections.
    pub(crate) keep: bool,
    pub(crate) send: Option<PathBuf>,
    pub(crate) receive: Option<PathBuf>,
    pub(crate) progress: bool,
    /// Longest time to connect.
    pub(crate) timeout: Duration,
    pub(crate) quiet: bool,
}

impl Options {
    /// Parses the command line of this process. Exits if it is wrong, or asks for help.
    pub(crate) fn parse() -> Self {
        Options::of(Arguments::parse()).unwrap_or_else(|error| error.exit())
    }

    fn of(arguments: Arguments) -> Result<Self, clap::Error> {
        let Arguments { address, listen, keep, send, receive, progress, timeout, quiet } = arguments;
        let parse = if listen { Address::of_listener } else { Address::of_peer };
        let address =
            parse(&address).map_err(|reason| Arguments::command().error(ErrorKind::ValueValidation, reason))?;
        Ok(Options { address, listen, keep, send, receive, progress, timeout, quiet })
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().map_err(|_| "not a number".to_owned())?;
    let duration = Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())?;
    // A longer one overflows timers.
    let allowed = Duration::from_millis(1)..=Duration::from_secs(86_400);
    if allowed.contains(&duration) { Ok(duration) } else { Err("not in 0.001 to 86400".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, clap::Error> {
        Options::of(Arguments::try_parse_from(std::iter::once("rdma-cat").chain(line.split_whitespace()))?)
    }

    #[test]
    fn each_role_has_its_options() {
        let options = parse("-l 0 -k --receive a -q").unwrap();
        assert!(options.listen && options.keep && options.quiet && !options.progress);
        assert_eq!(options.receive.unwrap().as_os_str(), "a");
        let options = parse("host 1 --send a --timeout 0.5 --progress").unwrap();
        assert!(!options.listen && options.progress);
        assert_eq!((options.timeout, options.send.unwrap().as_os_str()), (Duration::from_millis(500), "a".as_ref()));
        for line in
            ["", "a", "-l", "-l a", "a:1 -k", "a:1 -q --progress", "-l 1 --timeout 3", "a:1 --timeout 0", "a 1 2"]
        {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn the_command_is_consistent() {
        Arguments::command().debug_assert();
    }
}
