//! The directory of listeners, with peers that violate its protocol.

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use super::directory::{SPACE, at, ip, look_up, new_port};
use super::{in_own_process, is_readable, open_descriptors};
use crate::net::directory::{ClaimError, Directory, LookupError, test_names};
use crate::net::shm_handshake::{self, Descriptors};
use crate::net::sockaddr::SockAddr;
use crate::net::unix::{self, Accepted, Reserve};

const ADDRESS: &str = "127.0.0.1";

/// A process that has bound the name of a listener, and speaks another protocol.
struct Impostor(OwnedFd);

impl Impostor {
    fn at(name: &SockAddr) -> Impostor {
        let socket = unix::bind(libc::SOCK_SEQPACKET, name).unwrap();
        unix::listen(socket.as_fd()).unwrap();
        Impostor(socket)
    }

    fn accept(&self) -> OwnedFd {
        match unix::accept(self.0.as_fd(), &mut Reserve::default()) {
            Ok(Accepted::Normal(connection)) => connection,
            _ => panic!("no client"),
        }
    }
}

fn send(connection: &OwnedFd, bytes: &[u8]) -> isize {
    // SAFETY: the pointer and the length describe the bytes.
    unsafe { libc::send(connection.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) }
}

/// The result of a lookup that gets these bytes as its answer.
fn answered(client: &Directory, impostor: &Impostor, port: u16, bytes: &[u8]) -> Result<IpAddr, LookupError> {
    let _lookup = client.lookup(SPACE, ip(ADDRESS), port).unwrap();
    let connection = impostor.accept();
    assert_eq!(send(&connection, bytes), bytes.len() as isize);
    let mut results = Vec::new();
    client.handle_events(&[ip("127.7.7.7")], &mut |event| results.push(event.result.map(|process| process.address)));
    results.pop().expect("the lookup ends with the first message")
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn garbage_and_other_versions_end_a_lookup() {
    let (client, port) = (Directory::new(1).unwrap(), new_port());
    let impostor = Impostor::at(&test_names::one(SPACE, port, ip(ADDRESS)));
    let mut valid = b"rdma\x02\x02\x01\0 a GUID ".to_vec();
    valid.extend("::ffff:127.9.9.9".parse::<std::net::Ipv6Addr>().unwrap().octets());
    assert_eq!(answered(&client, &impostor, port, &valid).unwrap(), ip("127.9.9.9"));
    let later = answered(&client, &impostor, port, &[b"rdma\x09\x02", &valid[6..], &[5; 3000]].concat());
    assert_eq!(later.unwrap(), ip("127.9.9.9"), "a later version that this one understands");
    for (start, version) in [(b"rdma\x09\x03", 9), (b"rdma\x01\x01", 1)] {
        let other = answered(&client, &impostor, port, &[start, &valid[6..]].concat());
        assert!(matches!(other, Err(LookupError::OtherVersion { version: of }) if of == version), "{other:?}");
    }
    for garbage in [&b"x"[..], b"rdma", b"127.0.0.1", &[0xff; 1024], &[0; 60_000], &valid[..28]] {
        let result = answered(&client, &impostor, port, garbage);
        assert!(matches!(result, Err(LookupError::NobodyListens)), "{result:?}");
    }
    assert!(!is_readable(client.fd()));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_listener_that_closes_or_stays_silent_leaves_nothing_behind() {
    in_own_process("directory_hostile::a_listener_that_closes_or_stays_silent_leaves_nothing_behind", || {
        let (client, port) = (Directory::new(1).unwrap(), new_port());
        let impostors = [test_names::one(SPACE, port, ip(ADDRESS)), test_names::all_ipv4(SPACE, port)]
            .map(|name| Impostor::at(&name));
        let before = open_descriptors();
        let lookup = client.lookup(SPACE, ip(ADDRESS), port).unwrap();
        drop(impostors[0].accept());
        // The client asks the second one, which closes the connection, too.
        client.handle_events(&[], &mut |_| unreachable!("the second one has not answered"));
        drop(impostors[1].accept());
        let mut results = Vec::new();
        client.handle_events(&[], &mut |event| results.push((event.lookup, event.result.is_err())));
        assert_eq!(results, [(lookup.number(), true)]);
        let silent = client.lookup(SPACE, ip(ADDRESS), port).unwrap();
        let connection = impostors[0].accept();
        client.handle_events(&[], &mut |_| unreachable!());
        assert!(!is_readable(client.fd()), "a silent listener costs no time");
        drop((silent, connection));
        assert_eq!(open_descriptors(), before);
    });
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn passed_descriptors_are_closed() {
    in_own_process("directory_hostile::passed_descriptors_are_closed", || {
        let (client, port) = (Directory::new(1).unwrap(), new_port());
        let impostor = Impostor::at(&test_names::one(SPACE, port, ip(ADDRESS)));
        let before = open_descriptors();
        let lookup = client.lookup(SPACE, ip(ADDRESS), port).unwrap();
        let connection = impostor.accept();
        let passed = Descriptors { memory: connection.as_fd(), wakeup: connection.as_fd() };
        shm_handshake::send(connection.as_fd(), b"garbage", &passed).unwrap();
        let mut ended = 0;
        client.handle_events(&[], &mut |_| ended += 1);
        drop((lookup, connection));
        assert_eq!((ended, open_descriptors()), (1, before));
    });
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn clients_that_send_garbage_or_vanish_do_not_disturb_others() {
    in_own_process("directory_hostile::clients_that_send_garbage_or_vanish_do_not_disturb_others", || {
        let (listener, client, port) = (Directory::new(1).unwrap(), Directory::new(1).unwrap(), new_port());
        let mut claim = listener.claim(SPACE, at(ADDRESS), port).unwrap();
        claim.listen().unwrap();
        let before = open_descriptors();
        let name = test_names::one(SPACE, port, ip(ADDRESS));
        let clients: Vec<OwnedFd> = (0..300)
            .map(|number| {
                let connection = unix::socket(libc::SOCK_SEQPACKET).unwrap();
                unix::connect(connection.as_fd(), &name).unwrap();
                assert_eq!(send(&connection, &vec![1; number]), number as isize);
                connection
            })
            .enumerate()
            .filter_map(|(number, connection)| (number % 3 != 0).then_some(connection))
            .collect();
        let mut calls = 0;
        while is_readable(listener.fd()) {
            listener.handle_events(&[ip("127.66.6.6")], &mut |_| unreachable!());
            calls += 1;
        }
        assert!((300 / 64..=300 / 64 + 2).contains(&calls), "a call is bounded: {calls}");
        assert_eq!(look_up(&client, &listener, ADDRESS, port).unwrap(), ip("127.66.6.6"));
        drop(clients);
        assert_eq!(open_descriptors(), before);
    });
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn names_that_mark_claims_accept_no_messages() {
    let (directory, port) = (Directory::new(1).unwrap(), new_port());
    let _claim = directory.claim(SPACE, at("0.0.0.0"), port).unwrap();
    let other = unix::socket(libc::SOCK_DGRAM).unwrap();
    unix::connect(other.as_fd(), &test_names::all_ipv4(SPACE, port)).unwrap();
    assert_eq!(send(&other, b"garbage"), -1);
    let taken = Directory::new(1).unwrap().claim(SPACE, at(ADDRESS), port);
    assert!(matches!(taken, Err(ClaimError::Overlap)), "a mark that is connected to still counts");
}
