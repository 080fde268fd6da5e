//! Connections between the two ends, which nobody waits for without a limit.

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Connects to a host that may begin to listen a little later.
pub(crate) fn connect(host: &str, port: u16, timeout: Duration) -> Result<TcpStream> {
    /// Between two rounds over the addresses of a host that refuses: nobody tells when it begins to listen.
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

/// Listens for both families where there is IPv6, which has the IPv4 clients as mapped addresses.
pub(crate) fn listen(port: u16) -> Result<TcpListener> {
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|error| match error.kind() {
            io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => Err(error),
            _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        })
        .map_err(|error| format!("cannot listen on TCP port {port}: {error}; choose another with --port").into())
}

/// The other end, with a deadline for the whole exchange.
pub(crate) struct Peer {
    stream: TcpStream,
    pub(crate) name: String,
    start: Instant,
    timeout: Duration,
}

impl Peer {
    pub(crate) fn new(stream: TcpStream, timeout: Duration) -> Result<Self> {
        let name = stream.peer_addr().map_or_else(|_| "the peer".into(), |address| address.to_string());
        // Each message is one segment, as C expects: it reads each by one call.
        stream.set_nodelay(true)?;
        Ok(Peer { stream, name, start: Instant::now(), timeout })
    }

    pub(crate) fn write(&mut self, message: &[u8], what: &str) -> Result<()> {
        self.stream.set_write_timeout(Some(self.left()))?;
        self.stream.write_all(message).map_err(|error| self.failure("send", what, "to", &error))
    }

    pub(crate) fn read<const LEN: usize>(&mut self, what: &str) -> Result<[u8; LEN]> {
        let mut message = [0; LEN];
        let mut filled = 0;
        while filled < LEN {
            self.stream.set_read_timeout(Some(self.left()))?;
            match self.stream.read(&mut message[filled..]) {
                Ok(0) => {
                    let error =
                        format!("{} closed the connection before it had sent {what}; see what it says", self.name);
                    return Err(error.into());
                }
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failure("receive", what, "from", &error)),
            }
        }
        Ok(message)
    }

    /// Never zero, which sockets take for no limit.
    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.start.elapsed()).max(Duration::from_millis(1))
    }

    fn failure(&self, verb: &str, what: &str, preposition: &str, error: &io::Error) -> Box<dyn Error> {
        let name = &self.name;
        match error.kind() {
            // What a socket with a timeout says.
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                let seconds = self.timeout.as_secs();
                format!("cannot {verb} {what} {preposition} {name} within {seconds} s: it may have stopped").into()
            }
            _ => format!("cannot {verb} {what} {preposition} {name}: {error}").into(),
        }
    }
}
