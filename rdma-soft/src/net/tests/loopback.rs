//! Between UDP sockets of this machine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::*;
use crate::faults::Faults;
use crate::net::socket::set;
use crate::net::{Inbox, OpenError};
use crate::wire::{ICRC, Icrc, Path, UDP_PORT};

pub(super) const START: Time = Time(1_000_000);

/// Numbers and lengths of the packets that come, until there are so many and no more.
pub(super) fn received(inbox: &mut Inbox, socket: &Socket, count: usize) -> Vec<(u32, usize)> {
    let (mut packets, begun) = (Vec::new(), Instant::now());
    while inbox.receive(socket, |_, datagram| packets.push(checked(datagram))) || packets.len() < count {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} of {count}", packets.len());
    }
    packets
}

pub(super) fn numbered(lens: &[usize]) -> Vec<(u32, usize)> {
    (0..).zip(lens.iter().copied()).collect()
}

struct Pair {
    from: Socket,
    to: Socket,
    inbox: Inbox,
}

fn pair() -> Pair {
    let [from, to] = [(); 2].map(|()| Socket::open(None).unwrap().far());
    Pair { from, to, inbox: Inbox::new() }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_socket_is_at_an_address_of_its_own() {
    let Pair { from, to, .. } = pair();
    assert!(from.address().is_loopback() && from.address() != to.address());
    assert_ne!(from.interface(), 0);
    assert_eq!(from.mtu(), 4096);
    assert!(from.receive_buffer() >= 64 << 10, "{}", from.receive_buffer());
    let taken = Socket::open(Some(to.address())).err().unwrap();
    assert!(matches!(taken, OpenError::InUse(address) if address == to.address()), "{taken}");
    for nowhere in [Ipv4Addr::new(203, 0, 113, 77), Ipv4Addr::UNSPECIFIED] {
        let error = Socket::open(Some(nowhere.into())).err().unwrap();
        assert!(matches!(error, OpenError::NotLocal(_)), "{error}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn packets_of_all_sizes_come_in_their_order() {
    let Pair { from, to, mut inbox } = pair();
    let mut outbox = Outbox::new(Faults::default());
    for lens in [
        (0..600).collect::<Vec<_>>(),
        (600..=4096).step_by(13).collect(),
        vec![0; 300],
        vec![LONG; 200],
        vec![4096, 4096, 10, 4096, 0, 0, 300, 300, 299, 301],
    ] {
        send(&mut outbox, &from, to.address(), &lens, START);
        assert!(!outbox.is_blocked());
        assert_eq!(received(&mut inbox, &to, lens.len()), numbered(&lens));
    }
    assert_eq!(inbox.damaged(), 0);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_payload_may_be_in_parts() {
    let Pair { from, to, mut inbox } = pair();
    let mut outbox = Outbox::new(Faults::default());
    let mut count = 0;
    let payloads: Vec<Vec<u8>> = (0..6).map(|psn| payload(psn, LONG)).collect();
    for (psn, (payload, size)) in (0..).zip(payloads.iter().zip([1, 3, 100, 511, 1000, 2000])) {
        let mut parts: Vec<_> = payload.chunks(size).map(part).collect();
        parts.insert(0, Part { address: std::ptr::null(), len: 0, is_exposed: true });
        // SAFETY: the payload is there.
        unsafe { outbox.push(&from, super::to(to.address()), &header(psn, LONG).encode(LONG), &parts, START) };
        count += 1;
    }
    outbox.flush(&from, START);
    assert_eq!(received(&mut inbox, &to, count), numbered(&[LONG; 6]));
}

/// At ::1, of which there is one.
fn by_ipv6() -> Option<(MutexGuard<'static, ()>, Socket)> {
    let guard = SIX.lock().unwrap_or_else(PoisonError::into_inner);
    match Socket::open(Some(Ipv6Addr::LOCALHOST.into())) {
        Ok(socket) => Some((guard, socket)),
        Err(OpenError::NotLocal(_)) => {
            println!("skipped: this machine has no IPv6");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn packets_go_by_ipv6_too() {
    let Some((_guard, socket)) = by_ipv6() else { return };
    let socket = socket.far();
    assert_eq!((socket.mtu(), socket.address().is_loopback()), (4096, true));
    let (mut inbox, mut outbox) = (Inbox::new(), Outbox::new(Faults::default()));
    let lens = [0, 1, 2, 3, 4, LONG, LONG, LONG, 4096, 4096];
    send(&mut outbox, &socket, socket.address(), &lens, START);
    // Of another kind: there is no way there.
    send(&mut outbox, &socket, Ipv4Addr::LOCALHOST.into(), &[1], START);
    assert_eq!(received(&mut inbox, &socket, lens.len()), numbered(&lens));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn by_ipv6_a_packet_without_the_checksum_of_udp_comes_too() {
    let Some((_guard, socket)) = by_ipv6() else { return };
    let other = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
    set(&other, libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, 1).unwrap();
    let source_port = other.local_addr().unwrap().port();
    let path = Path::V6 { source: Ipv6Addr::LOCALHOST, dest: Ipv6Addr::LOCALHOST, source_port };
    other.send_to(&packet(&path, 0, 0), (Ipv6Addr::LOCALHOST, UDP_PORT)).unwrap();
    assert_eq!(received(&mut Inbox::new(), &socket, 1), [(0, 4)]);
}

/// A packet of that number with four bytes in it.
fn packet(path: &Path, psn: u32, identification: u16) -> Vec<u8> {
    let mut packet = [&header(psn, 4).encode(4)[..], &payload(psn, 4)].concat();
    let mut icrc = Icrc::new(path, identification, packet.len() + ICRC);
    icrc.headers(&packet);
    packet.extend(icrc.finish());
    packet
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn packets_come_in_their_class_of_traffic() {
    let _six = SIX.lock().unwrap_or_else(PoisonError::into_inner);
    for (address, is_far) in [(None, true), (None, false), (Some(Ipv6Addr::LOCALHOST.into()), true)] {
        let Ok(socket) = Socket::open(address).map(|socket| if is_far { socket.far() } else { socket }) else {
            println!("skipped: this machine has no {address:?}");
            continue;
        };
        socket.report_headers();
        let (mut inbox, mut outbox) = (Inbox::new(), Outbox::new(Faults::default()));
        let payload = payload(0, LONG);
        let classes = [0, 0, 8, 8, 8, 0xb8, 0];
        for class in classes {
            let to = To { address: socket.address(), class };
            // SAFETY: the payload is there.
            unsafe { outbox.push(&socket, to, &header(0, LONG).encode(LONG), &[part(&payload)], START) };
        }
        outbox.flush(&socket, START);
        let mut came = Vec::new();
        while inbox.receive(&socket, |origin, datagram| {
            checked(datagram);
            assert_eq!((origin.address, origin.hops), (socket.address(), 64));
            came.push(origin.class);
        }) {}
        assert_eq!(came, classes);
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn what_is_wrong_is_dropped_and_counted() {
    let Pair { from, to, mut inbox } = pair();
    // Another that speaks RoCEv2: from another port, and with identifications of its own.
    let other = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let IpAddr::V4(dest) = to.address() else { unreachable!("of loopback") };
    let path = Path::V4 { source: Ipv4Addr::LOCALHOST, dest, source_port: other.local_addr().unwrap().port() };
    let packet = |psn, identification| packet(&path, psn, identification);
    let mut damaged = packet(2, 0);
    damaged[14] ^= 1;
    for packet in [&packet(0, 0)[..], &packet(1, 0x1234), &damaged, b"hello", b""] {
        other.send_to(packet, (dest, UDP_PORT)).unwrap();
    }
    send(&mut Outbox::new(Faults::default()), &from, to.address(), &[8], START);
    assert_eq!(received(&mut inbox, &to, 3), [(0, 4), (1, 4), (0, 8)]);
    assert_eq!(inbox.damaged(), 2, "one of no bytes has no packet in it");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_peer_that_does_not_read_loses_packets_and_does_not_block() {
    let Pair { from, to, mut inbox } = pair();
    let mut outbox = Outbox::new(Faults::default());
    let count = 2 * to.receive_buffer() / 4096;
    send(&mut outbox, &from, to.address(), &vec![4096; count], START);
    assert!(!outbox.is_blocked());
    let (mut came, mut last) = (0, None);
    while inbox.receive(&to, |source, datagram| {
        assert_eq!(source.address, from.address());
        let (psn, _) = checked(datagram);
        assert!(last < Some(psn), "in order");
        last = Some(psn);
        came += 1;
    }) {}
    assert!(came > 0 && came < count, "{came} of {count}");
}
