//! The roles of the two ends, which run in two processes or in one.

use std::fmt::Display;
use std::io::{self, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use super::{PeerOptions, exchange};
use crate::pingpong::address::Address;
use crate::{Result, failure};

pub(super) enum Role {
    Client {
        host: String,
        port: u16,
    },
    Server {
        port: u16,
    },
    /// The server in the process of its client.
    LoopbackServer(TcpListener),
}

impl Role {
    pub(super) fn new(options: &PeerOptions) -> Role {
        let port = options.port;
        match options.host.clone() {
            Some(host) => Role::Client { host, port },
            None => Role::Server { port },
        }
    }

    pub(super) fn is_client(&self) -> bool {
        matches!(self, Role::Client { .. })
    }

    /// Exchanges addresses. A server calls `connect` with the client's addresses before it sends its own.
    pub(super) fn exchange(
        &self,
        local: &[Address],
        timeout: Duration,
        connect: impl FnOnce(&[Address]) -> Result<()>,
    ) -> Result<Vec<Address>> {
        match self {
            Role::Client { host, port } => exchange::client(host, *port, local, timeout),
            Role::Server { port } => exchange::server(*port, local, timeout, connect),
            Role::LoopbackServer(listener) => exchange::serve(listener.accept()?.0, local, timeout, connect),
        }
    }
}

/// Standard output, with a label at the start of each line when two ends share it.
#[derive(Default)]
pub(super) struct Output {
    label: &'static str,
}

impl Output {
    /// Prints one or more lines.
    pub(super) fn line(&self, lines: impl Display) -> Result<()> {
        let lines: String = lines.to_string().lines().map(|line| format!("{}{line}\n", self.label)).collect();
        // Not `println`, which panics when the reader has closed the pipe.
        io::stdout().write_all(lines.as_bytes()).map_err(|error| format!("cannot print: {error}").into())
    }
}

/// Runs both ends, each in a thread. Returns whether the data that both received is valid.
pub(super) fn both(name: &str, run: impl Fn(&Role, &Output) -> Result<bool> + Sync) -> Result<bool> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let client = Role::Client { host: Ipv4Addr::LOCALHOST.to_string(), port: listener.local_addr()?.port() };
    let (sender, results) = channel();
    thread::scope(|scope| {
        for (label, role) in [("[server] ", Role::LoopbackServer(listener)), ("[client] ", client)] {
            let (sender, run) = (sender.clone(), &run);
            scope.spawn(move || sender.send((label, run(&role, &Output { label }))));
        }
        drop(sender);
        let mut is_valid = true;
        for (label, result) in results {
            match result {
                Ok(valid) => is_valid &= valid,
                Err(error) => {
                    eprintln!("{name}: {label}{}", failure::one_line(&*error));
                    // The other end would wait for this one.
                    std::process::exit(1);
                }
            }
        }
        Ok(is_valid)
    })
}
