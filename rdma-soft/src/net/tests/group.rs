//! Multicast groups between sockets of this machine.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use super::loopback::START;
use super::*;
use crate::faults::Faults;
use crate::net::{Group, Inbox, Membership, Origin};

/// Receives packets of a group until at least `count` have arrived and no more are queued.
fn received(group: &Group, count: usize) -> Vec<(Origin, usize)> {
    let (mut packets, mut inbox, start) = (Vec::new(), Inbox::new(), Instant::now());
    while inbox.receive_group(group, each_packet(|origin, datagram| packets.push((origin, parse_checked(datagram).1))))
        || packets.len() < count
    {
        assert!(start.elapsed() < Duration::from_secs(60), "{} of {count}", packets.len());
    }
    packets
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn each_group_member_receives_a_message_once() {
    let [from, to] = [(); 2].map(|()| Socket::open(None).unwrap());
    let address = Ipv4Addr::new(239, 4, 79, 1).into();
    let other = Group::join(&to, Ipv4Addr::new(239, 4, 79, 2).into()).unwrap();
    let members = [&from, &to].map(|socket| Group::join(socket, address).unwrap());
    let (mut outbox, payload) = (Outbox::new(Faults::default()), payload(0, LONG));
    for class in [0, 0, 8] {
        let to = To { address, class };
        // SAFETY: the payload lives until the outbox is flushed.
        unsafe {
            outbox.push(&from, to, Run::new(&mut header(0, LONG).encode(LONG), &[part(&payload)], LONG, 1), START)
        };
    }
    outbox.flush(&from, START);
    for member in &members {
        let received = received(member, 3);
        assert!(received.iter().all(|(origin, len)| (origin.address, *len) == (from.address(), LONG)));
        assert_eq!(received.iter().map(|(origin, _)| origin.class).collect::<Vec<_>>(), [0, 0, 8]);
    }
    assert!(received(&other, 0).is_empty());
    assert!(!Inbox::new().receive(&to, |_, _| unreachable!()), "only the group receives it");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_group_of_another_address_family_is_rejected() {
    let link = Socket::open(None).unwrap();
    assert!(Group::join(&link, Ipv6Addr::new(0xff0e, 0, 0, 0, 0, 0, 0, 0x479).into()).is_err());
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_membership_without_packets_lasts_until_it_is_dropped() {
    let _lock = without_new_processes();
    let link = Socket::open(None).unwrap();
    let group = Ipv4Addr::new(239, 4, 79, 3);
    // The kernel prints the address as a number of the processor's byte order.
    let number = format!("{:08X}", u32::from_ne_bytes(group.octets()));
    let is_member = || std::fs::read_to_string("/proc/net/igmp").unwrap().contains(&number);
    assert!(!is_member());
    let members = [(); 2].map(|()| Membership::join(&link, group.into()).unwrap());
    assert!(is_member());
    let [first, second] = members;
    drop(first);
    assert!(is_member());
    drop(second);
    assert!(!is_member());
    assert!(Membership::join(&link, Ipv6Addr::new(0xff0e, 0, 0, 0, 0, 0, 0, 0x479).into()).is_err());
}
