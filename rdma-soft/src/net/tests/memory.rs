//! Packets between addresses in memory.

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsRawFd;

use super::loopback::{START, numbered, received};
use super::*;
use crate::faults::Faults;
use crate::net::{Inbox, OpenError, Origin};

fn pair() -> [Socket; 2] {
    [(); 2].map(|()| Socket::in_memory(None).unwrap())
}

/// Whether the server thread would wake up for packets.
fn is_readable(socket: &Socket) -> bool {
    let mut poll = libc::pollfd { fd: socket.fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer and the count are of one entry.
    (unsafe { libc::poll(&raw mut poll, 1, 0) }) == 1
}

#[test]
fn an_address_in_memory_has_one_owner_at_a_time() {
    let [first, second] = pair();
    assert_ne!(first.address(), second.address());
    let address = first.address();
    let taken = Socket::in_memory(Some(address)).err().unwrap();
    assert!(matches!(taken, OpenError::InUse(of) if of == address), "{taken}");
    drop(first);
    assert_eq!(Socket::in_memory(Some(address)).unwrap().address(), address);
}

#[test]
fn packets_in_memory_arrive_in_order_and_make_the_descriptor_readable() {
    let [from, to] = pair();
    let (mut outbox, mut inbox) = (Outbox::new(Faults::default()), Inbox::new());
    assert!(!is_readable(&to));
    for lens in [vec![0, 1, 100], vec![300, 300, 300, 10], vec![4096, 5]] {
        send(&mut outbox, &from, to.address(), &lens, START);
        assert!(is_readable(&to) && !is_readable(&from));
        assert_eq!(received(&mut inbox, &to, lens.len()), numbered(&lens));
        assert!(!is_readable(&to));
    }
    assert_eq!(inbox.damaged(), 0);
}

#[test]
fn a_packet_in_memory_has_its_class_and_comes_from_the_address_of_its_sender() {
    const CLASS: u8 = 0xb8;
    let six = |last| IpAddr::from(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last));
    for [from, to] in [pair(), [six(1), six(2)].map(|address| Socket::in_memory(Some(address)).unwrap())] {
        let mut outbox = Outbox::new(Faults::default());
        let destination = To { address: to.address(), class: CLASS };
        // SAFETY: there is no payload.
        unsafe { outbox.push(&from, destination, Run::new(&mut header(0, 0).encode(0), &[], 0, 1), START) };
        outbox.flush(&from, START);
        let mut origins = Vec::new();
        Inbox::new().receive(&to, |origin, _| origins.push(origin));
        assert_eq!(origins, [Origin { address: from.address(), class: CLASS, hops: Origin::HOPS }]);
    }
}

#[test]
fn packets_in_memory_to_an_address_that_nobody_has_are_lost() {
    let [from, to] = pair();
    let mut outbox = Outbox::new(Faults::default());
    send(&mut outbox, &from, "203.0.113.9".parse().unwrap(), &[1, 2], START);
    assert!(!outbox.is_blocked());
    send(&mut outbox, &from, to.address(), &[3], START);
    assert_eq!(received(&mut Inbox::new(), &to, 1), [(0, 3)]);
}

#[test]
#[cfg_attr(miri, ignore = "it copies six megabytes")]
fn packets_in_memory_are_lost_if_too_many_wait() {
    let [from, to] = pair();
    let (mut outbox, mut inbox) = (Outbox::new(Faults::default()), Inbox::new());
    for _ in 0..8 {
        send(&mut outbox, &from, to.address(), &[4096; 200], START);
    }
    let mut count = 0;
    while inbox.receive(&to, each_packet(|_, _| count += 1)) {}
    assert!((1000..1600).contains(&count), "{count}");
}
