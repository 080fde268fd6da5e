//! The two ends of a game: each in a process of its own, or both in one.

use std::error::Error;
use std::io::{self, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use crate::address::Address;
use crate::common::Common;
use crate::{exchange, failure};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[derive(Debug, clap::Args)]
pub(crate) struct Ends {
    /// Be both ends, each in a thread of this process
    #[arg(long, conflicts_with = "host")]
    pub(crate) loopback: bool,
}

/// How an end finds the other one.
pub(crate) enum End {
    Client {
        host: String,
        port: u16,
    },
    Server {
        port: u16,
    },
    /// A server in the process of its client.
    Listening(TcpListener),
}

impl End {
    fn of(common: &Common) -> End {
        let port = common.port;
        match common.host.clone() {
            Some(host) => End::Client { host, port },
            None => End::Server { port },
        }
    }

    pub(crate) fn is_client(&self) -> bool {
        matches!(self, End::Client { .. })
    }

    /// Exchanges addresses. A server has to `connect` to those of the client before the client has its own.
    pub(crate) fn exchange<const N: usize>(
        &self,
        local: &[Address; N],
        timeout: Duration,
        connect: impl FnOnce(&[Address; N]) -> Result<()>,
    ) -> Result<[Address; N]> {
        match self {
            End::Client { host, port } => exchange::client(host, *port, local, timeout),
            End::Server { port } => exchange::server(*port, local, timeout, connect),
            End::Listening(listener) => exchange::serve(listener.accept()?.0, local, timeout, connect),
        }
    }
}

/// Lets `run` play the end that the command line says, or both. It writes what it has to say, and returns whether it got what the
/// other end has sent.
pub(crate) fn play(
    name: &str,
    common: &Common,
    ends: &Ends,
    run: impl Fn(&End, &mut dyn Write) -> Result<bool> + Sync,
) -> ExitCode {
    let played = match ends.loopback {
        true => both(name, run),
        false => run(&End::of(common), &mut io::stdout()),
    };
    match played {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{name}: {}", failure::one_line(&*error));
            ExitCode::FAILURE
        }
    }
}

fn both(name: &str, run: impl Fn(&End, &mut dyn Write) -> Result<bool> + Sync) -> Result<bool> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let client = End::Client { host: Ipv4Addr::LOCALHOST.to_string(), port: listener.local_addr()?.port() };
    let (sender, results) = channel();
    thread::scope(|scope| {
        for (label, end) in [("server", End::Listening(listener)), ("client", client)] {
            let (sender, run) = (sender.clone(), &run);
            scope.spawn(move || {
                // Errors are turned into text, which may move between threads.
                let result = run(&end, &mut Labelled::new(label)).map_err(|error| failure::one_line(&*error));
                sender.send((label, result))
            });
        }
        drop(sender);
        let mut is_right = true;
        for (label, result) in results {
            match result {
                Ok(right) => is_right &= right,
                Err(error) => {
                    eprintln!("{name}: the {label}: {error}");
                    // The other end would wait for this one.
                    std::process::exit(1);
                }
            }
        }
        Ok(is_right)
    })
}

/// Lines of one end among those of the other.
struct Labelled {
    label: &'static str,
    line: Vec<u8>,
}

impl Labelled {
    fn new(label: &'static str) -> Self {
        Labelled { label, line: Vec::new() }
    }

    /// What is there of the next line, beginning with the label.
    fn begun(&mut self) -> &mut Vec<u8> {
        if self.line.is_empty() {
            self.line.extend([b"[", self.label.as_bytes(), b"] "].concat());
        }
        &mut self.line
    }
}

impl Write for Labelled {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.begun().extend(part);
            if part.ends_with(b"\n") {
                io::stdout().write_all(&std::mem::take(&mut self.line))?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush()
    }
}
