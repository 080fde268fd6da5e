//! The exchange of addresses over TCP, message for message as rdma-core's ping-pongs do it:
//!
//! ```text
//! client                         server
//!        address ------------->         connects its queue pair
//!                <------------- address
//!        "done"  ------------->
//! ```

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use crate::address::Address;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// With its NUL, as C sends it.
const DONE: &[u8; 5] = b"done\0";

/// Connects to the server, which may be started a little later, and exchanges addresses.
pub(crate) fn client(host: &str, port: u16, local: &Address, timeout: Duration) -> Result<Address> {
    let stream = connect(host, port, timeout)?;
    let mut peer = Peer::new(stream, timeout)?;
    peer.write(&local.encode(), "the local address")?;
    let remote = Address::decode(&peer.read("its address")?)?;
    peer.write(DONE, "the end of the exchange")?;
    Ok(remote)
}

/// Waits for a client, without a limit, and exchanges addresses. `connect` gets the client's address before the client
/// gets ours: a client sends as soon as it has that.
pub(crate) fn server(
    port: u16,
    local: &Address,
    timeout: Duration,
    connect: impl FnOnce(&Address) -> Result<()>,
) -> Result<Address> {
    let listener = listen(port)?;
    let (stream, _) = listener.accept().map_err(|error| format!("cannot accept on TCP port {port}: {error}"))?;
    drop(listener);
    let mut peer = Peer::new(stream, timeout)?;
    let remote = Address::decode(&peer.read("its address")?)?;
    connect(&remote)?;
    peer.write(&local.encode(), "the local address")?;
    let done: [u8; DONE.len()] = peer.read("the end of the exchange")?;
    match &done == DONE {
        true => Ok(remote),
        false => Err(format!("{} sent \"{}\" instead of \"done\"", peer.name, done.escape_ascii()).into()),
    }
}

fn connect(host: &str, port: u16, timeout: Duration) -> Result<TcpStream> {
    /// Between two rounds over the addresses of a host that refuses.
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
fn listen(port: u16) -> Result<TcpListener> {
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|error| match error.kind() {
            io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => Err(error),
            _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        })
        .map_err(|error| format!("cannot listen on TCP port {port}: {error}; choose another with --port").into())
}

/// The other end, with a deadline for the whole exchange.
struct Peer {
    stream: TcpStream,
    name: String,
    start: Instant,
    timeout: Duration,
}

impl Peer {
    fn new(stream: TcpStream, timeout: Duration) -> Result<Self> {
        let name = stream.peer_addr().map_or_else(|_| "the peer".into(), |address| address.to_string());
        // Each message is one segment, as C expects: it reads each by one call.
        stream.set_nodelay(true)?;
        Ok(Peer { stream, name, start: Instant::now(), timeout })
    }

    fn write(&mut self, message: &[u8], what: &str) -> Result<()> {
        self.stream.set_write_timeout(Some(self.left()))?;
        self.stream.write_all(message).map_err(|error| self.failure("send", what, "to", &error))
    }

    fn read<const LEN: usize>(&mut self, what: &str) -> Result<[u8; LEN]> {
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

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(5);

    fn address(qp_num: u32) -> Address {
        Address { lid: 0, qp_num, psn: 7, gid: "::ffff:10.9.9.1".parse().unwrap() }
    }

    fn free_port() -> u16 {
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
    }

    #[test]
    fn both_ends_learn_the_address_of_the_other_and_the_server_connects_first() {
        for host in ["127.0.0.1", "localhost"] {
            let port = free_port();
            let server = thread::spawn(move || {
                let mut connected = None;
                let remote = server(port, &address(1), TIMEOUT, |remote| {
                    connected = Some(*remote);
                    Ok(())
                });
                (remote.map_err(|error| error.to_string()), connected)
            });
            assert_eq!(client(host, port, &address(2), TIMEOUT).unwrap(), address(1));
            let (remote, connected) = server.join().unwrap();
            assert_eq!(remote.unwrap(), address(2));
            assert_eq!(connected, Some(address(2)));
        }
    }

    #[test]
    fn a_server_that_is_not_there_is_an_error_in_time() {
        let error = client("127.0.0.1", free_port(), &address(1), Duration::from_millis(200)).unwrap_err().to_string();
        assert!(error.contains("start the server there first"), "{error}");
    }

    #[test]
    fn a_peer_that_says_nothing_or_goes_away_is_an_error_in_time() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let silent = client("127.0.0.1", port, &address(1), Duration::from_millis(100)).unwrap_err().to_string();
        assert!(silent.contains("cannot receive its address from 127.0.0.1"), "{silent}");

        let closing = thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            while !matches!(stream.read(&mut [0; 64]), Ok(0)) {}
            let mut stream = listener.accept().unwrap().0;
            stream.read_exact(&mut [0; Address::LEN]).unwrap();
        });
        let closed = client("127.0.0.1", port, &address(1), TIMEOUT).unwrap_err().to_string();
        assert!(closed.contains("closed the connection before it had sent its address"), "{closed}");
        closing.join().unwrap();
    }
}
