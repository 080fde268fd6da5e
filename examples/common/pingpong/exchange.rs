//! The exchange of addresses over TCP, with the messages of rdma-core's ping-pongs:
//!
//! ```text
//! client                         server
//!        address ------------->         connects its queue pair
//!                <------------- address
//!        "done"  ------------->
//! ```
//!
//! A program with several queue pairs sends all of their addresses where the figure has one.

use std::net::TcpStream;
use std::time::Duration;

use super::address::Address;
use super::tcp::{Peer, connect, listen};
use crate::Result;

/// With the NUL that the C programs send.
const DONE: &[u8; 5] = b"done\0";

/// Connects to the server, which may start a little later, and exchanges addresses.
pub(super) fn client(host: &str, port: u16, local: &[Address], timeout: Duration) -> Result<Vec<Address>> {
    let stream = connect(host, port, timeout)?;
    let mut peer = Peer::new(stream, timeout)?;
    write_addresses(&mut peer, local)?;
    let remote = read_addresses(&mut peer, local.len())?;
    peer.write(DONE, "the end of the exchange")?;
    Ok(remote)
}

/// Waits for a client, without a limit, and exchanges addresses.
///
/// Calls `connect` with the client's addresses before it sends the local ones: the client sends messages as soon as it has them.
pub(super) fn server(
    port: u16,
    local: &[Address],
    timeout: Duration,
    connect: impl FnOnce(&[Address]) -> Result<()>,
) -> Result<Vec<Address>> {
    let listener = listen(port)?;
    let (stream, _) = listener.accept().map_err(|error| format!("cannot accept on TCP port {port}: {error}"))?;
    drop(listener);
    serve(stream, local, timeout, connect)
}

/// Like [`server`], for a client that has connected.
pub(super) fn serve(
    stream: TcpStream,
    local: &[Address],
    timeout: Duration,
    connect: impl FnOnce(&[Address]) -> Result<()>,
) -> Result<Vec<Address>> {
    let mut peer = Peer::new(stream, timeout)?;
    let remote = read_addresses(&mut peer, local.len())?;
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

fn read_addresses(peer: &mut Peer, count: usize) -> Result<Vec<Address>> {
    (0..count).map(|_| Ok(Address::decode(&peer.read("its address")?)?)).collect()
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
    fn both_ends_get_all_addresses_and_the_server_connects_first() {
        for host in ["127.0.0.1", "localhost"] {
            let port = free_port();
            let server = thread::spawn(move || {
                let mut connected = None;
                let remote = server(port, &[address(1), address(3)], TIMEOUT, |remote| {
                    connected = Some(remote.to_vec());
                    Ok(())
                });
                (remote, connected)
            });
            let theirs = [address(2), address(4)];
            assert_eq!(client(host, port, &theirs, TIMEOUT).unwrap(), [address(1), address(3)]);
            let (remote, connected) = server.join().unwrap();
            assert_eq!(remote.unwrap(), theirs);
            assert_eq!(connected, Some(theirs.to_vec()));
        }
    }

    #[test]
    fn a_missing_server_is_an_error_after_the_timeout() {
        let error =
            client("127.0.0.1", free_port(), &[address(1)], Duration::from_millis(200)).unwrap_err().to_string();
        assert!(error.contains("start the server there first"), "{error}");
    }

    #[test]
    fn a_peer_that_is_silent_or_closes_is_an_error_in_time() {
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
