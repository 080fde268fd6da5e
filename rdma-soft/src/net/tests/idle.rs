//! Closing of rings that are not used.

use std::net::IpAddr;
use std::time::Duration;

use super::loopback::{START, numbered, received};
use super::shm::{is_woken, open, udp_bytes};
use super::*;
use crate::faults::Faults;
use crate::net::Inbox;

/// Interval of the checks for unused rings.
const INTERVAL: Duration = Duration::from_secs(10);

/// A socket of a process.
struct Side {
    socket: Socket,
    inbox: Inbox,
    outbox: Outbox,
}

impl Side {
    fn open() -> Side {
        Side { socket: open(), inbox: Inbox::new(), outbox: Outbox::new(Faults::default()) }
    }

    fn address(&self) -> IpAddr {
        self.socket.address()
    }

    fn send(&mut self, to: IpAddr, lens: &[usize], now: Time) {
        send(&mut self.outbox, &self.socket, to, lens, now);
    }

    fn received(&mut self, count: usize) -> Vec<(u32, usize)> {
        received(&mut self.inbox, &self.socket, count)
    }

    /// Fires the timer if it has expired.
    fn fire(&mut self, now: Time) {
        if self.outbox.wake_at().is_some_and(|at| at <= now) {
            assert!(!self.outbox.is_idle(now));
            self.outbox.flush(&self.socket, now);
        }
    }
}

/// Rings that this process has mapped.
fn mapped_rings() -> usize {
    let mappings = std::fs::read_to_string("/proc/self/maps").unwrap();
    // Each ring has two mappings: one from the start, and one of the messages only.
    mappings.lines().filter(|line| line.contains("memfd:rdma-soft") && line.contains(" 00000000 ")).count()
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn an_unused_ring_is_closed_and_opened_again_for_the_next_packet() {
    let [mut from, mut to] = [(); 2].map(|()| Side::open());
    assert_eq!(from.outbox.wake_at(), None);
    let mut now = START;
    for round in 1..4 {
        from.send(to.address(), &[round, 4096, 0], now);
        assert_eq!(udp_bytes(&to.socket), 0);
        assert_eq!(to.received(3), numbered(&[round, 4096, 0]));
        assert_eq!(to.inbox.shm_peers(), 1);
        assert!(to.inbox.arm_wakeup() && !is_woken(&to.socket));
        let check = from.outbox.wake_at().unwrap();
        assert_eq!(check, now + INTERVAL);
        // The ring was used shortly before the check, so it stays until the next one.
        now = now + INTERVAL / 2;
        from.send(to.address(), &[7], now);
        assert_eq!(to.received(1), numbered(&[7]));
        assert!(!from.outbox.is_idle(check));
        from.fire(check);
        assert_eq!((from.outbox.shm_peers(), from.outbox.wake_at()), (1, Some(check + INTERVAL)));
        now = check + INTERVAL;
        from.fire(now);
        assert_eq!((from.outbox.shm_peers(), from.outbox.wake_at()), (0, None), "an idle process is not woken again");
        assert!(is_woken(&to.socket), "the peer must free the ring");
        assert!(!to.inbox.receive(&to.socket, |_, _| unreachable!()));
        assert_eq!(to.inbox.shm_peers(), 0);
        assert!(to.inbox.arm_wakeup() && !is_woken(&to.socket) && !is_woken(&from.socket));
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_ring_stays_until_a_stopped_peer_has_taken_all_packets() {
    let [mut from, mut to] = [(); 2].map(|()| Side::open());
    let lens = vec![4096; 200];
    from.send(to.address(), &lens, START);
    let check = |number: u32| START + INTERVAL * number;
    for number in 1..5 {
        from.fire(check(number));
        assert_eq!(from.outbox.wake_at(), Some(check(number + 1)), "once for each interval");
    }
    // The backlog was dropped after a second. The ring keeps its packets.
    let in_ring = to.received(1);
    assert!(in_ring.len() > 100, "{}", in_ring.len());
    assert_eq!(in_ring, numbered(&lens[..in_ring.len()]));
    from.fire(check(5));
    assert_eq!((from.outbox.shm_peers(), from.outbox.wake_at()), (0, None));
    from.send(to.address(), &[1], check(5));
    assert_eq!(to.received(1), numbered(&[1]));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn packets_that_are_about_to_be_sent_keep_the_ring() {
    let [mut from, mut to, mut other] = [(); 3].map(|()| Side::open());
    from.send(to.address(), &[1], START);
    assert_eq!(to.received(1), numbered(&[1]));
    from.send(other.address(), &[1], START);
    assert_eq!(other.received(1), numbered(&[1]));
    let mut push = |to: IpAddr, psn| push(&mut from.outbox, &from.socket, to, psn, 1024, START + 2 * INTERVAL);
    // The batch for the other peer is full, so the packet for this peer flushes it while the check is due.
    (0..300).for_each(|_| push(other.address(), 0));
    push(to.address(), 0);
    from.outbox.flush(&from.socket, START + 2 * INTERVAL);
    assert_eq!(to.received(1).len(), 1);
    let mut count = 0;
    for milliseconds in 1..1000 {
        other.inbox.receive(&other.socket, each_packet(|_, _| count += 1));
        from.outbox.flush(&from.socket, START + 2 * INTERVAL + Duration::from_millis(milliseconds));
    }
    assert_eq!(count, 300);
    assert_eq!([&to, &other].map(|side| udp_bytes(&side.socket)), [0, 0]);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn the_ring_of_a_process_to_itself_stays_and_wakes_nobody() {
    let mut side = Side::open();
    side.outbox.connect(&side.socket, side.socket.address(), START);
    assert_eq!(side.outbox.wake_at(), None);
    side.send(side.address(), &[1], START + 3 * INTERVAL);
    assert_eq!(side.received(1), numbered(&[1]));
    assert_eq!((side.outbox.shm_peers(), side.outbox.wake_at()), (1, None));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn after_64_sockets_have_all_talked_to_each_other_no_ring_is_left() {
    const COUNT: usize = 64;
    const PAUSE: Duration = Duration::from_secs(4);
    // Other tests of this process have rings, too.
    in_own_process("idle::after_64_sockets_have_all_talked_to_each_other_no_ring_is_left", || {
        limit_descriptors(libc::RLIM_INFINITY);
        let mut sides: Vec<Side> = (0..COUNT).map(|_| Side::open()).collect();
        let addresses: Vec<IpAddr> = sides.iter().map(Side::address).collect();
        let (mut now, mut most) = (START, 0);
        for distance in 1..COUNT {
            for (at, side) in sides.iter_mut().enumerate() {
                side.send(addresses[(at + distance) % COUNT], &[distance, 0], now);
            }
            sides.iter_mut().for_each(|side| assert_eq!(side.received(2), numbered(&[distance, 0])));
            most = most.max(mapped_rings());
            now = now + PAUSE;
            sides.iter_mut().for_each(|side| side.fire(now));
        }
        // Each ring is mapped twice, and lives for one to two intervals.
        assert!((2 * COUNT..=2 * COUNT * 6).contains(&most), "{most}");
        let mut wakeups = 0;
        while let Some(next) = sides.iter().filter_map(|side| side.outbox.wake_at()).min() {
            wakeups += sides.iter().filter(|side| side.outbox.wake_at() == Some(next)).count();
            sides.iter_mut().for_each(|side| side.fire(next));
        }
        assert!(wakeups <= 2 * COUNT, "{wakeups}");
        for side in &mut sides {
            while is_woken(&side.socket) {
                assert!(!side.inbox.receive(&side.socket, |_, _| unreachable!()));
            }
        }
        assert_eq!(mapped_rings(), 0);
    });
}
