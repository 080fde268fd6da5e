//! UDP sockets of this machine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::*;
use crate::faults::Faults;
use crate::net::socket::set;
use crate::net::{Inbox, OpenError};
use crate::wire::{ICRC, IcrcSeed, Path, UDP_PORT};

pub(super) const START: Time = Time(1_000_000);

/// Receives packets until at least `count` have arrived and no more are queued. Returns their numbers and lengths.
pub(super) fn received(inbox: &mut Inbox, socket: &Socket, count: usize) -> Vec<(u32, usize)> {
    let (mut packets, start) = (Vec::new(), Instant::now());
    while inbox.receive(socket, each_packet(|_, datagram| packets.push(parse_checked(datagram))))
        || packets.len() < count
    {
        assert!(start.elapsed() < Duration::from_secs(60), "{} of {count}", packets.len());
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
    let [from, to] = [(); 2].map(|()| Socket::open(None).unwrap().without_shm());
    Pair { from, to, inbox: Inbox::new() }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn each_socket_has_an_address_of_its_own() {
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
fn packets_of_all_sizes_arrive_in_order() {
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
fn a_payload_may_have_several_parts() {
    let Pair { from, to, mut inbox } = pair();
    let mut outbox = Outbox::new(Faults::default());
    let mut count = 0;
    let payloads: Vec<Vec<u8>> = (0..6).map(|psn| payload(psn, LONG)).collect();
    for (psn, (payload, size)) in (0..).zip(payloads.iter().zip([1, 3, 100, 511, 1000, 2000])) {
        let mut parts: Vec<_> = payload.chunks(size).map(part).collect();
        parts.insert(0, Part { address: std::ptr::null(), len: 0, is_exposed: true });
        // SAFETY: the payload is valid.
        unsafe {
            outbox.push(
                &from,
                super::to(to.address()),
                Run::new(&mut header(psn, LONG).encode(LONG), &parts, LONG, 1),
                START,
            )
        };
        count += 1;
    }
    outbox.flush(&from, START);
    assert_eq!(received(&mut inbox, &to, count), numbered(&[LONG; 6]));
}

/// Sends runs of packets, and checks what arrives. Most parts of a payload end in the middle of a packet.
pub(super) fn send_runs(from: &Socket, to: &Socket, inbox: &mut Inbox, faults: Faults) {
    let mut outbox = Outbox::new(faults);
    for (len, count) in [(LONG, 1), (LONG, 2), (1, 70), (100, 100), (4096, 16), (4096, 100)] {
        let data: Vec<u8> = (0..count).flat_map(|psn| payload(psn, len)).collect();
        let mut parts: Vec<_> = data.chunks(len / 2 + 77).map(part).collect();
        parts.insert(1, Part { address: std::ptr::null(), len: 0, is_exposed: false });
        let mut headers = header(0, len).encode(len);
        // SAFETY: the data is valid.
        unsafe { outbox.push(from, super::to(to.address()), Run::new(&mut headers, &parts, len, count), START) };
        // Packets that are delayed are sent by the second call.
        outbox.flush(from, START);
        outbox.flush(from, START + Duration::from_millis(1));
        assert_eq!(received(inbox, to, count as usize), numbered(&vec![len; count as usize]));
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn the_packets_of_a_run_arrive_in_order() {
    let Pair { from, to, mut inbox } = pair();
    send_runs(&from, &to, &mut inbox, Faults::default());
    send_runs(&from, &to, &mut inbox, Faults { delay: Duration::from_nanos(1), ..Faults::default() });
}

/// Opens a socket at `::1`, and locks the address.
fn ipv6_socket() -> Option<(MutexGuard<'static, ()>, Socket)> {
    let guard = IPV6_LOOPBACK.lock().unwrap_or_else(PoisonError::into_inner);
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
fn packets_travel_over_ipv6() {
    let Some((_guard, socket)) = ipv6_socket() else { return };
    let socket = socket.without_shm();
    assert_eq!((socket.mtu(), socket.address().is_loopback()), (4096, true));
    let (mut inbox, mut outbox) = (Inbox::new(), Outbox::new(Faults::default()));
    let lens = [0, 1, 2, 3, 4, LONG, LONG, LONG, 4096, 4096];
    send(&mut outbox, &socket, socket.address(), &lens, START);
    // There is no path to an address of another family.
    send(&mut outbox, &socket, Ipv4Addr::LOCALHOST.into(), &[1], START);
    assert_eq!(received(&mut inbox, &socket, lens.len()), numbered(&lens));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn an_ipv6_packet_without_a_udp_checksum_arrives() {
    let Some((_guard, socket)) = ipv6_socket() else { return };
    let other = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
    set(&other, libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, 1).unwrap();
    let source_port = other.local_addr().unwrap().port();
    let path = Path::V6 { source: Ipv6Addr::LOCALHOST, dest: Ipv6Addr::LOCALHOST, source_port };
    other.send_to(&packet(&path, 0, 0), (Ipv6Addr::LOCALHOST, UDP_PORT)).unwrap();
    assert_eq!(received(&mut Inbox::new(), &socket, 1), [(0, 4)]);
}

/// Encodes packet `psn` with four bytes of payload.
fn packet(path: &Path, psn: u32, identification: u16) -> Vec<u8> {
    let mut packet = [&header(psn, 4).encode(4)[..], &payload(psn, 4), &[0; ICRC]].concat();
    IcrcSeed::new(path).write(identification, &mut packet);
    packet
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn packets_keep_their_traffic_class() {
    let _guard = IPV6_LOOPBACK.lock().unwrap_or_else(PoisonError::into_inner);
    for (address, is_udp_only) in [(None, true), (None, false), (Some(Ipv6Addr::LOCALHOST.into()), true)] {
        let Ok(socket) = Socket::open(address).map(|socket| if is_udp_only { socket.without_shm() } else { socket })
        else {
            println!("skipped: this machine has no {address:?}");
            continue;
        };
        socket.report_headers();
        let (mut inbox, mut outbox) = (Inbox::new(), Outbox::new(Faults::default()));
        let payload = payload(0, LONG);
        let classes = [0, 0, 8, 8, 8, 0xb8, 0];
        for class in classes {
            let to = To { address: socket.address(), class };
            // SAFETY: the payload is valid.
            unsafe {
                outbox.push(&socket, to, Run::new(&mut header(0, LONG).encode(LONG), &[part(&payload)], LONG, 1), START)
            };
        }
        outbox.flush(&socket, START);
        let mut received = Vec::new();
        while inbox.receive(
            &socket,
            each_packet(|origin, datagram| {
                parse_checked(datagram);
                assert_eq!((origin.address, origin.hops), (socket.address(), 64));
                received.push(origin.class);
            }),
        ) {}
        assert_eq!(received, classes);
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn damaged_packets_are_dropped_and_counted() {
    let Pair { from, to, mut inbox } = pair();
    // Another RoCEv2 implementation, with its own source port and IPv4 identifications.
    let other = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let IpAddr::V4(dest) = to.address() else { unreachable!("loopback addresses are IPv4") };
    let path = Path::V4 { source: Ipv4Addr::LOCALHOST, dest, source_port: other.local_addr().unwrap().port() };
    let packet = |psn, identification| packet(&path, psn, identification);
    let mut damaged = packet(2, 0);
    damaged[14] ^= 1;
    for packet in [&packet(0, 0)[..], &packet(1, 0x1234), &damaged, b"hello", b""] {
        other.send_to(packet, (dest, UDP_PORT)).unwrap();
    }
    send(&mut Outbox::new(Faults::default()), &from, to.address(), &[8], START);
    assert_eq!(received(&mut inbox, &to, 3), [(0, 4), (1, 4), (0, 8)]);
    assert_eq!(inbox.damaged(), 2, "an empty datagram has no packet");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_peer_that_does_not_read_loses_packets_without_blocking_the_sender() {
    let Pair { from, to, mut inbox } = pair();
    let mut outbox = Outbox::new(Faults::default());
    let count = 2 * to.receive_buffer() / 4096;
    send(&mut outbox, &from, to.address(), &vec![4096; count], START);
    assert!(!outbox.is_blocked());
    let (mut received, mut last) = (0, None);
    while inbox.receive(
        &to,
        each_packet(|source, datagram| {
            assert_eq!(source.address, from.address());
            let (psn, _) = parse_checked(datagram);
            assert!(last < Some(psn), "in order");
            last = Some(psn);
            received += 1;
        }),
    ) {}
    assert!(received > 0 && received < count, "{received} of {count}");
}
