//! TCP connections between the two ends, with a deadline for each exchange.

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use crate::Result;

/// Connects to a host, which may start to listen a little later.
pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<TcpStream> {
    /// Pause between two attempts.
    const PAUSE: Duration = Duration::from_millis(50);

    let addresses: Vec<_> = (host, port)
        .to_socket_addrs()
        .map_err(|error| format!("cannot find the host {host}: {error}; give a name or an IPv4 or IPv6 address"))?
        .collect();
    let start = Instant::now();
    let mut last = None;
    loop {
        for address in &addresses {
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                break;
            }
            match TcpStream::connect_timeout(address, left) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = Some((address, error)),
            }
        }
        if start.elapsed() + PAUSE >= timeout {
            let why = last.map_or("no address".into(), |(address, error)| format!("{address}: {error}"));
            let advice = "start the server there first (the same program without a host), and compare --port";
            return Err(format!(
                "cannot connect to {host} TCP port {port} within {} s ({why}); {advice}",
                timeout.as_secs()
            )
            .into());
        }
        thread::sleep(PAUSE);
    }
}

/// Listens for IPv6 and IPv4 clients, or for IPv4 clients alone if this machine has no IPv6.
pub fn listen(port: u16) -> Result<TcpListener> {
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|error| match error.kind() {
            io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => Err(error),
            _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        })
        .map_err(|error| format!("cannot listen on TCP port {port}: {error}; choose another with --port").into())
}

/// A connection to the other end, with one deadline for the whole exchange.
#[derive(Debug)]
pub struct Peer {
    stream: TcpStream,
    pub name: String,
    start: Instant,
    timeout: Duration,
}

impl Peer {
    pub fn new(stream: TcpStream, timeout: Duration) -> Result<Self> {
        let name = stream.peer_addr().map_or_else(|_| "the peer".into(), |address| address.to_string());
        // Each message must be one segment: the C programs read it with one call.
        stream.set_nodelay(true)?;
        Ok(Peer { stream, name, start: Instant::now(), timeout })
    }

    pub fn write(&mut self, message: &[u8], what: &str) -> Result<()> {
        self.stream.set_write_timeout(Some(self.left()))?;
        self.stream.write_all(message).map_err(|error| self.failure("send", what, "to", &error))
    }

    pub fn read<const LEN: usize>(&mut self, what: &str) -> Result<[u8; LEN]> {
        let mut message = [0; LEN];
        let mut filled = 0;
        while filled < LEN {
            self.stream.set_read_timeout(Some(self.left()))?;
            match self.stream.read(&mut message[filled..]) {
                Ok(0) => {
                    let error =
                        format!("{} closed the connection before it had sent {what}; see its output", self.name);
                    return Err(error.into());
                }
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failure("receive", what, "from", &error)),
            }
        }
        Ok(message)
    }

    /// Time left. Never zero, which would mean no limit for a socket.
    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.start.elapsed()).max(Duration::from_millis(1))
    }

    fn failure(&self, verb: &str, what: &str, preposition: &str, error: &io::Error) -> Box<dyn Error + Send + Sync> {
        let name = &self.name;
        match error.kind() {
            // The errors of a socket timeout.
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                let seconds = self.timeout.as_secs();
                format!("cannot {verb} {what} {preposition} {name} within {seconds} s: it may have stopped").into()
            }
            _ => format!("cannot {verb} {what} {preposition} {name}: {error}").into(),
        }
    }
}
