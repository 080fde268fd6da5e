//! Sends files to an address: by RDMA writes from registered buffers into memory that the receiver offers.

#![forbid(unsafe_code)]

#[path = "../common/failure.rs"]
mod failure;
mod link;
mod message;
#[path = "../common/number.rs"]
mod number;
mod progress;
mod receiver;
mod sender;
#[path = "../common/soft.rs"]
mod soft;
mod store;

use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand};
use rdma_safe::cm::Listener;

use number::within;
use progress::Progress;
use receiver::Into;

const EXAMPLES: &str = "\
A transfer that breaks off, also because one of the ends was ended by Ctrl-C, is gone on with when the file is sent again: what has
arrived waits in a file of its own, .NAME.incoming, and is compared by checksum.

Examples:
  file_transfer receive -d /srv/incoming             take files from anybody, until it is ended
  file_transfer send backup.tar 10.0.0.2             send one there
  file_transfer send core.1234 fe80::1%eth0 --name core";

/// Sends files to an address, or receives them
#[derive(Debug, Parser)]
#[command(name = "file_transfer", after_help = EXAMPLES, max_term_width = 132)]
struct Options {
    #[command(subcommand)]
    role: Role,

    /// Port of the receiver
    #[arg(short, long, global = true, default_value = "7475", value_parser = |text: &str| within(text, 1..=65535_u16))]
    port: u16,

    /// Show no progress
    #[arg(short, long, global = true)]
    quiet: bool,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Send a file
    Send {
        /// The file
        file: PathBuf,
        /// Address or name of the host that receives
        host: String,
        /// What it is called there [default: as here]
        #[arg(long)]
        name: Option<String>,
    },
    /// Receive files, up to 32 at a time
    Receive {
        /// Where they go; it must be there
        #[arg(short, long, default_value = ".")]
        directory: PathBuf,
        /// Address to listen at [default: any]
        #[arg(short, long)]
        address: Option<String>,
        /// Let files replace others of their names
        #[arg(long)]
        overwrite: bool,
        /// End after the first
        #[arg(long)]
        once: bool,
    },
}

/// Transfers at a time that files are received by: each has a thread, descriptors, and memory for pieces.
const MOST: usize = 32;

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Result<T, E = Failure> = std::result::Result<T, E>;

fn main() -> ExitCode {
    let Options { role, port, quiet } = Options::parse();
    let progress = Progress::new(quiet);
    soft::or_soft(None);
    let result = match role {
        Role::Send { file, host, name } => send(&file, name, &host, port, &progress),
        Role::Receive { directory, address, overwrite, once } => {
            receive(Into { directory, overwrite }, address.as_deref(), port, once, &progress)
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

fn complain(error: &Failure) {
    eprintln!("file_transfer: {}", failure::one_line(&**error));
}

/// A line of output, at once also where that is a pipe.
fn show(progress: &Progress, line: &str) {
    progress.say(|| {
        let mut out = std::io::stdout().lock();
        // Whoever has closed it does not want to see it.
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    });
}

fn send(file: &Path, name: Option<String>, host: &str, port: u16, progress: &Progress) -> Result<()> {
    let own_name = || file.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    let name = name.or_else(own_name).ok_or("the file's name is not text: say what it is to be called, with --name")?;
    let sent = sender::send(file, &name, host, port, progress)?;
    show(progress, &format!("sent {sent}"));
    Ok(())
}

fn receive(into: Into, address: Option<&str>, port: u16, once: bool, progress: &Progress) -> Result<()> {
    if !into.directory.is_dir() {
        return Err(format!("{} is not a directory", into.directory.display()).into());
    }
    let mut listener = match address {
        Some(address) => Listener::bind((address, port))?,
        None => Listener::bind((Ipv4Addr::UNSPECIFIED, port))?,
    };
    show(progress, &format!("listening at {}", listener.local_address()));
    // Each transfer that is going on has one of these.
    let places = Arc::new(());
    loop {
        // It listens until it is ended; a wait that comes to nothing begins again.
        let Some(request) = listener.next(Duration::from_secs(3600))? else { continue };
        if Arc::strong_count(&places) > MOST {
            progress.say(|| complain(&"somebody was refused: as many transfers are going on as may".into()));
            // Whoever has gone meanwhile need not be told.
            let _ = request.reject(b"too many transfers are going on; try again later");
            continue;
        }
        let one = {
            let (into, progress) = (into.clone(), progress.clone());
            move || {
                receiver::receive(request, &into, &progress)
                    .map(|summary| show(&progress, &format!("received {summary}")))
            }
        };
        if once {
            return one();
        }
        let body = {
            let (progress, place) = (progress.clone(), Arc::clone(&places));
            move || {
                if let Err(error) = one() {
                    progress.say(|| complain(&error));
                }
                drop(place);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("transfer".into()).spawn(body) {
            progress.say(|| complain(&format!("somebody was refused: no thread can be started: {error}").into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(std::iter::once("file_transfer").chain(line.split_whitespace()))
    }

    #[test]
    fn a_role_has_what_it_needs() {
        assert!(matches!(
            parse("send a b --name c -p 1").unwrap(),
            Options { role: Role::Send { .. }, port: 1, quiet: false }
        ));
        let options = parse("receive -d /x --once --overwrite -q").unwrap();
        assert!(matches!(options.role, Role::Receive { once: true, overwrite: true, address: None, .. }));
        assert_eq!(options.port, 7475);
        for line in ["", "send", "send a", "receive a", "send a b --once", "receive -p 0"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
