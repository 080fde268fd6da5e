//! The exchange of addresses over TCP, message for message as rdma-core's ping-pongs do it:
//!
//! ```text
//! client                         server
//!        address ------------->         connects its queue pair
//!                <------------- address
//!        "done"  ------------->
//! ```
//!
//! Those with several queue pairs send as many addresses at a time.

#[path = "tcp.rs"]
mod tcp;

use std::error::Error;
use std::net::TcpStream;
use std::time::Duration;

use rdma_safe::Gid;

use crate::address::Address;
use tcp::{Peer, connect, listen};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// With its NUL, as C sends it.
const DONE: &[u8; 5] = b"done\0";

/// Connects to the server, which may be started a little later, and exchanges addresses.
pub(crate) fn client<const N: usize>(
    host: &str,
    port: u16,
    local: &[Address; N],
    timeout: Duration,
) -> Result<[Address; N]> {
    let stream = connect(host, port, timeout)?;
    let mut peer = Peer::new(stream, timeout)?;
    write_addresses(&mut peer, local)?;
    let remote = read_addresses(&mut peer)?;
    peer.write(DONE, "the end of the exchange")?;
    Ok(remote)
}

/// Waits for a client, without a limit, and exchanges addresses. `connect` gets the client's address before the client
/// gets ours: a client sends as soon as it has that.
pub(crate) fn server<const N: usize>(
    port: u16,
    local: &[Address; N],
    timeout: Duration,
    connect: impl FnOnce(&[Address; N]) -> Result<()>,
) -> Result<[Address; N]> {
    let listener = listen(port)?;
    let (stream, _) = listener.accept().map_err(|error| format!("cannot accept on TCP port {port}: {error}"))?;
    drop(listener);
    serve(stream, local, timeout, connect)
}

/// As [`server`], of a client that has come.
pub(crate) fn serve<const N: usize>(
    stream: TcpStream,
    local: &[Address; N],
    timeout: Duration,
    connect: impl FnOnce(&[Address; N]) -> Result<()>,
) -> Result<[Address; N]> {
    let mut peer = Peer::new(stream, timeout)?;
    let remote = read_addresses(&mut peer)?;
    connect(&remote)?;
    write_addresses(&mut peer, local)?;
    let done: [u8; DONE.len()] = peer.read("the end of the exchange")?;
    match &done == DONE {
        true => Ok(remote),
        false => Err(format!("{} sent \"{}\" instead of \"done\"", peer.name, done.escape_ascii()).into()),
    }
}

fn write_addresses(peer: &mut Peer, addresses: &[Address]) -> Result<()> {
    addresses.iter().try_for_each(|address| peer.write(&address.encode(), "the local address"))
}

fn read_addresses<const N: usize>(peer: &mut Peer) -> Result<[Address; N]> {
    let mut addresses = [Address { lid: 0, qp_num: 0, psn: 0, gid: Gid::ZERO }; N];
    for address in &mut addresses {
        *address = Address::decode(&peer.read("its address")?)?;
    }
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{Ipv4Addr, TcpListener};
    use std::thread;

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
                let remote = server(port, &[address(1), address(3)], TIMEOUT, |remote| {
                    connected = Some(*remote);
                    Ok(())
                });
                (remote.map_err(|error| error.to_string()), connected)
            });
            let theirs = [address(2), address(4)];
            assert_eq!(client(host, port, &theirs, TIMEOUT).unwrap(), [address(1), address(3)]);
            let (remote, connected) = server.join().unwrap();
            assert_eq!(remote.unwrap(), theirs);
            assert_eq!(connected, Some(theirs));
        }
    }

    #[test]
    fn a_server_that_is_not_there_is_an_error_in_time() {
        let error =
            client("127.0.0.1", free_port(), &[address(1)], Duration::from_millis(200)).unwrap_err().to_string();
        assert!(error.contains("start the server there first"), "{error}");
    }

    #[test]
    fn a_peer_that_says_nothing_or_goes_away_is_an_error_in_time() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let silent = client("127.0.0.1", port, &[address(1)], Duration::from_millis(100)).unwrap_err().to_string();
        assert!(silent.contains("cannot receive its address from 127.0.0.1"), "{silent}");

        let closing = thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            while !matches!(stream.read(&mut [0; 64]), Ok(0)) {}
            let mut stream = listener.accept().unwrap().0;
            stream.read_exact(&mut [0; Address::LEN]).unwrap();
        });
        let closed = client("127.0.0.1", port, &[address(1)], TIMEOUT).unwrap_err().to_string();
        assert!(closed.contains("closed the connection before it had sent its address"), "{closed}");
        closing.join().unwrap();
    }
}
