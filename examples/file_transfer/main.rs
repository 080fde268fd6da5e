//! Sends files to an IP address, by RDMA writes into memory that the receiver exposes.

#![forbid(unsafe_code)]

mod link;
mod message;
mod progress;
mod receiver;
mod sender;
mod store;

use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand};
use common::number::within;
use common::{Result, device, failure};
use rdma_safe::cm::Listener;

use progress::Progress;
use receiver::Destination;

const EXAMPLES: &str = "\
A partial file is kept in .NAME.incoming. When an interrupted transfer is repeated, the ends compare checksums of this part, and
the transfer resumes after it.

Examples:
  file_transfer receive -d /srv/incoming             receive files from any host, until Ctrl-C
  file_transfer send backup.tar 10.0.0.2             send a file to 10.0.0.2
  file_transfer send core.1234 fe80::1%eth0 --name core";

/// Sends files to an address, or receives them
#[derive(Debug, Parser)]
#[command(name = "file_transfer", after_help = EXAMPLES, max_term_width = 132)]
struct Options {
    #[command(subcommand)]
    role: Role,

    /// Port of the receiver
    #[arg(short, long, global = true, default_value = "7475", value_parser = within(1..=65535_u16))]
    port: u16,

    /// Do not show the progress
    #[arg(short, long, global = true)]
    quiet: bool,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Send a file
    Send {
        /// File to send
        file: PathBuf,
        /// Address or name of the receiver
        host: String,
        /// Name of the file at the receiver [default: as here]
        #[arg(long)]
        name: Option<String>,
    },
    /// Receive files, up to 32 at a time
    Receive {
        /// Existing directory for the files
        #[arg(short, long, default_value = ".")]
        directory: PathBuf,
        /// Address to listen on [default: any]
        #[arg(short, long)]
        address: Option<String>,
        /// Replace existing files of the same name
        #[arg(long)]
        overwrite: bool,
        /// Exit after the first file
        #[arg(long)]
        once: bool,
    },
}

/// Maximum number of concurrent transfers. Each has a thread, file descriptors, and memory for chunks.
const MAX_TRANSFERS: usize = 32;

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    common::main(run)
}

fn run(options: &Options) -> Result<()> {
    let Options { role, port, quiet } = options;
    let progress = Progress::new(*quiet);
    device::install_soft(None);
    match role {
        Role::Send { file, host, name } => send(file, name.clone(), host, *port, &progress),
        Role::Receive { directory, address, overwrite, once } => {
            let destination = Destination { directory: directory.clone(), overwrite: *overwrite };
            receive(destination, address.as_deref(), *port, *once, &progress)
        }
    }
}

fn print_error(error: &Failure) {
    failure::print("file_transfer", &**error);
}

/// Prints a line, and flushes it for readers of a pipe.
fn show(progress: &Progress, line: &str) {
    progress.print(|| {
        let mut out = std::io::stdout().lock();
        // Fails if the reader has closed the pipe: that does not stop the transfer.
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    });
}

fn send(file: &Path, name: Option<String>, host: &str, port: u16, progress: &Progress) -> Result<()> {
    let own_name = || file.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    let name = name.or_else(own_name).ok_or("the file's name is not valid UTF-8: give another with --name")?;
    let sent = sender::send(file, &name, host, port, progress)?;
    show(progress, &format!("sent {sent}"));
    Ok(())
}

fn receive(destination: Destination, address: Option<&str>, port: u16, once: bool, progress: &Progress) -> Result<()> {
    if !destination.directory.is_dir() {
        return Err(format!("{} is not a directory", destination.directory.display()).into());
    }
    let mut listener = match address {
        Some(address) => Listener::bind((address, port))?,
        None => Listener::bind((Ipv4Addr::UNSPECIFIED, port))?,
    };
    show(progress, &format!("listening at {}", listener.local_address()));
    // Each transfer holds a reference.
    let transfers = Arc::new(());
    loop {
        // After a timeout, wait again.
        let Some(request) = listener.next(Duration::from_secs(3600))? else { continue };
        if Arc::strong_count(&transfers) > MAX_TRANSFERS {
            progress.print(|| print_error(&"a sender was rejected: too many transfers are in progress".into()));
            // Fails if the sender has already gone.
            let _ = request.reject(b"too many transfers are in progress; try again later");
            continue;
        }
        let transfer = {
            let (destination, progress) = (destination.clone(), progress.clone());
            move || {
                receiver::receive(request, &destination, &progress)
                    .map(|summary| show(&progress, &format!("received {summary}")))
            }
        };
        if once {
            return transfer();
        }
        let body = {
            let (progress, reference) = (progress.clone(), Arc::clone(&transfers));
            move || {
                if let Err(error) = transfer() {
                    progress.print(|| print_error(&error));
                }
                drop(reference);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("transfer".into()).spawn(body) {
            progress.print(|| print_error(&format!("cannot start a thread for a transfer: {error}").into()));
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
    fn each_role_has_its_options() {
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
