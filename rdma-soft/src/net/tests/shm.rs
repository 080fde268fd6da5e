//! Shared memory between peers on this host.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use super::loopback::{START, numbered, received, send_runs};
use super::*;
use crate::faults::Faults;
use crate::net::shm::Shm;
use crate::net::sockaddr::SockAddr;
use crate::net::unix::{self, AcceptError, Reserve};
use crate::net::{Inbox, Readable};
use crate::wire::UDP_PORT;

pub(super) fn open() -> Socket {
    Socket::open(None).unwrap()
}

/// Bytes that wait in the UDP socket.
pub(super) fn udp_bytes(socket: &Socket) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the number is valid for writes.
    assert_eq!(unsafe { libc::ioctl(socket.fd().as_raw_fd(), libc::FIONREAD as _, &raw mut bytes) }, 0);
    bytes as usize
}

/// Whether a thread that sleeps at the shared-memory descriptor is woken.
pub(super) fn is_woken(socket: &Socket) -> bool {
    is_readable(socket.shm_fd().unwrap())
}

/// Receives packets and flushes the sender until `count` packets have arrived.
fn all_received(inbox: &mut Inbox, to: &Socket, outbox: &mut Outbox, from: &Socket, count: usize) -> Vec<(u32, usize)> {
    let (mut packets, mut now) = (Vec::new(), START);
    while packets.len() < count {
        inbox.receive(to, each_packet(|_, datagram| packets.push(parse_checked(datagram))));
        now = now + Duration::from_millis(1);
        outbox.flush(from, now);
        assert!(now < START + Duration::from_secs(10), "{} of {count}", packets.len());
    }
    packets
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn the_packets_of_a_run_arrive_in_order_through_memory() {
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    send_runs(&from, &to, &mut inbox, Faults::default());
    assert_eq!(inbox.shm_peers(), 1);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_run_that_exceeds_the_ring_waits_in_order() {
    const COUNT: u32 = 600;
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    let mut outbox = Outbox::new(Faults::default());
    let data: Vec<u8> = (0..COUNT).flat_map(|psn| payload(psn, 4096)).collect();
    let (mut headers, parts) = (header(0, 4096).encode(4096), [part(&data)]);
    let run = Run::new(&mut headers, &parts, 4096, COUNT);
    // SAFETY: the data is valid.
    unsafe { outbox.push(&from, super::to(to.address()), run, START) };
    assert!(outbox.is_blocked_for(&to.address()));
    let lens = [4096; COUNT as usize];
    assert_eq!(all_received(&mut inbox, &to, &mut outbox, &from, lens.len()), numbered(&lens));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn no_packet_to_a_slow_peer_is_lost() {
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    let mut outbox = Outbox::new(Faults::default());
    for lens in [vec![4096; 3500], (0..3000).map(|at| at % 700).collect()] {
        send(&mut outbox, &from, to.address(), &lens, START);
        assert_eq!(udp_bytes(&to), 0);
        assert_eq!(all_received(&mut inbox, &to, &mut outbox, &from, lens.len()), numbered(&lens));
        assert!(!outbox.is_blocked_for(&to.address()));
    }
    assert_eq!(inbox.damaged(), 0);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_peer_that_has_made_room_wakes_a_sender_that_sleeps() {
    let _lock = without_new_processes();
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    let (mut outbox, mut own) = (Outbox::new(Faults::default()), Inbox::new());
    let lens = vec![4096; 300];
    send(&mut outbox, &from, to.address(), &lens, START);
    let mut arrived = Vec::new();
    let mut receive = || inbox.receive(&to, each_packet(|_, datagram| arrived.push(parse_checked(datagram))));
    for is_readable in [true, false] {
        assert!(outbox.is_blocked_for(&to.address()) && outbox.arm_wakeup() && !is_woken(&from));
        while !is_woken(&from) {
            assert!(receive());
        }
        match is_readable {
            true => own.receive_readable(&from, Readable { udp: false, shm: true }, |_, _| {}),
            false => own.receive(&from, |_, _| {}),
        };
        own.take_ready_senders().for_each(|number| outbox.handle_ready_sender(number, START));
        assert!(!is_woken(&from));
        outbox.flush(&from, START);
    }
    let later = START + Duration::from_millis(1);
    while receive() || outbox.is_blocked_for(&to.address()) {
        outbox.flush(&from, later);
    }
    assert!(arrived == numbered(&lens));

    // A sender that does not sleep is not woken. The backlog for a peer that is gone is dropped.
    send(&mut outbox, &from, to.address(), &[4096; 600], START);
    while inbox.receive(&to, |_, _| {}) {}
    assert!(outbox.is_blocked_for(&to.address()) && !is_woken(&from));
    outbox.flush(&from, later);
    assert!(outbox.is_blocked_for(&to.address()) && outbox.arm_wakeup());
    drop((inbox, to));
    assert!(is_woken(&from));
    own.receive(&from, |_, _| {});
    own.take_ready_senders().for_each(|number| outbox.handle_ready_sender(number, START));
    assert_eq!(outbox.shm_peers(), 0);
    assert!(outbox.arm_wakeup() && !is_woken(&from));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_peer_that_connects_while_another_one_wakes_the_receiver_is_accepted() {
    let (from, other, to, mut inbox) = (open(), open(), open(), Inbox::new());
    let [mut outbox, mut others] = [(); 2].map(|()| Outbox::new(Faults::default()));
    send(&mut outbox, &from, to.address(), &[64], START);
    assert_eq!(received(&mut inbox, &to, 1), numbered(&[64]));
    assert!(inbox.arm_wakeup() && !is_woken(&to));
    send(&mut outbox, &from, to.address(), &[64], START);
    // A thread that polls takes the packet, so the scan for the wake-up finds none.
    while !inbox.poll(&to, |_, _| {}) {}
    send(&mut others, &other, to.address(), &[64], START);
    let mut arrived = 0;
    while is_woken(&to) {
        inbox.receive_readable(&to, Readable { udp: false, shm: true }, each_packet(|_, _| arrived += 1));
        inbox.arm_wakeup();
    }
    assert_eq!((arrived, inbox.shm_peers()), (1, 2));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_stalled_peer_delays_no_other_and_loses_packets_after_the_timeout() {
    let (from, stopped, to) = (open(), open(), open());
    let (mut inbox, mut outbox) = (Inbox::new(), Outbox::new(Faults::default()));
    send(&mut outbox, &from, stopped.address(), &vec![4096; 6000], START);
    assert!(outbox.is_blocked_for(&stopped.address()) && !outbox.is_blocked());
    let wake_at = outbox.wake_at().unwrap();
    assert!(wake_at > START && wake_at < START + Duration::from_millis(1));
    send(&mut outbox, &from, to.address(), &[4096; 10], START);
    assert!(!outbox.is_blocked_for(&to.address()));
    assert_eq!(received(&mut inbox, &to, 10), numbered(&[4096; 10]));

    let late = START + Duration::from_secs(1);
    outbox.flush(&from, late);
    assert!(!outbox.is_blocked_for(&stopped.address()), "the backlog must be dropped");
    send(&mut outbox, &from, stopped.address(), &[4096; 100], late);
    assert!(!outbox.is_blocked_for(&stopped.address()), "later packets must be dropped at once");
    assert!(outbox.wake_at().unwrap() > late + Duration::from_secs(1), "nothing is to be retried");

    let mut count = 0;
    while inbox.receive(
        &stopped,
        each_packet(|_, datagram| {
            assert_eq!(parse_checked(datagram).0, count);
            count += 1;
        }),
    ) {}
    assert!((100..6000).contains(&count), "{count}");
    send(&mut outbox, &from, stopped.address(), &vec![4096; 6000], late);
    assert!(outbox.is_blocked_for(&stopped.address()), "the peer accepts packets again");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_new_process_at_an_address_receives_later_packets() {
    let _lock = without_new_processes();
    let (from, first) = (open(), open());
    let mut outbox = Outbox::new(Faults::default());
    let address = first.address();
    send(&mut outbox, &from, address, &[10], START);
    assert_eq!(received(&mut Inbox::new(), &first, 1), numbered(&[10]));
    drop(first);
    send(&mut outbox, &from, address, &[10, 20], START);
    let second = Socket::open(Some(address)).unwrap();
    let mut inbox = Inbox::new();
    send(&mut outbox, &from, address, &[30], START);
    assert_eq!(received(&mut inbox, &second, 1), numbered(&[30]));
    assert_eq!(udp_bytes(&second), 0);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn packets_for_peers_without_shared_memory_are_sent_over_udp() {
    let _lock = without_new_processes();
    let (from, to) = (open(), open());
    let mut outbox = Outbox::new(Faults::default());
    let address = to.address();
    let to = to.without_shm();
    send(&mut outbox, &from, address, &[10, 20], START);
    assert!(udp_bytes(&to) > 0);
    // Packets that may still be in a UDP socket are not overtaken.
    let shm = Shm::open(address).unwrap();
    send(&mut outbox, &from, address, &[30], START + Duration::from_millis(9));
    send(&mut outbox, &from, address, &[40], START + Duration::from_millis(18));
    let numbers: Vec<_> = received(&mut Inbox::new(), &to, 4).into_iter().map(|(_, len)| len).collect();
    assert_eq!(numbers, [10, 20, 30, 40]);
    send(&mut outbox, &from, address, &[50], START + Duration::from_millis(28));
    assert_eq!(udp_bytes(&to), 0);
    assert!(shm.accept(&mut Reserve::default()).is_ok());
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn faults_apply_to_shared_memory() {
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    let mut outbox = Outbox::new("seed=5,drop=0.2,corrupt=0.1,dup=0.1".parse().unwrap());
    send(&mut outbox, &from, to.address(), &[100; 1000], START);
    assert_eq!(udp_bytes(&to), 0);
    let (mut received_packets, mut now) = (0, START);
    while inbox.receive(
        &to,
        each_packet(|_, datagram| {
            // Damage to the byte that routers may change is not detected.
            assert!(Packet::parse(datagram).is_ok());
            received_packets += 1;
        }),
    ) || outbox.is_blocked_for(&to.address())
    {
        now = now + Duration::from_millis(1);
        outbox.flush(&from, now);
    }
    assert!((700..900).contains(&received_packets), "{received_packets}");
    assert!((40..150).contains(&inbox.damaged()), "{}", inbox.damaged());
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_peer_with_a_foreign_address_is_rejected_and_a_closed_one_is_drained() {
    let _lock = without_new_processes();
    let (to, mut inbox) = (open(), Inbox::new());
    let remote = Shm::open(Ipv4Addr::new(203, 0, 113, 5).into()).unwrap();
    let mut stranger = remote.connect(to.address(), 0, START).unwrap();
    assert!(stranger.add(b"x", START).is_ok());
    // The peer claims an address of another host.
    assert!(!inbox.receive(&to, |_, _| unreachable!()));
    let later = START + Duration::from_millis(2);
    assert_eq!(stranger.add(b"x", later).unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    let from = open();
    let mut outbox = Outbox::new(Faults::default());
    send(&mut outbox, &from, to.address(), &[7], START);
    drop((outbox, from));
    assert_eq!(received(&mut inbox, &to, 1), numbered(&[7]), "packets sent before the close must arrive");
    assert!(!inbox.receive(&to, |_, _| unreachable!()));
    assert_eq!(to.shm().unwrap().ready().count(), 0, "a closed connection must not be reported again");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn packets_to_an_address_without_a_peer_are_lost() {
    let _lock = without_new_processes();
    let from = open();
    let mut outbox = Outbox::new(Faults::default());
    let nobody = UdpSocket::bind(SocketAddr::new(Ipv4Addr::new(127, 200, 1, 77).into(), UDP_PORT)).unwrap();
    let address: IpAddr = nobody.local_addr().unwrap().ip();
    drop(nobody);
    for at in 0..3 {
        send(&mut outbox, &from, address, &[4096; 20], START + Duration::from_millis(20 * at));
        outbox.flush(&from, START + Duration::from_millis(20 * at));
    }
    assert!(!outbox.is_blocked_for(&address));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn receiving_does_not_consume_the_wakeup_of_a_sleeping_thread() {
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    let mut outbox = Outbox::new(Faults::default());
    send(&mut outbox, &from, to.address(), &[1], START);
    assert_eq!(received(&mut inbox, &to, 1), numbered(&[1]));
    assert!(inbox.arm_wakeup() && !is_woken(&to));
    // Another thread receives while the first one sleeps.
    for _ in 0..3 {
        send(&mut outbox, &from, to.address(), &[7], START);
        assert_eq!(received(&mut inbox, &to, 1), numbered(&[7]));
        assert!(is_woken(&to), "the wake-up must not be consumed");
    }
    assert!(inbox.arm_wakeup() && !is_woken(&to));
    send(&mut outbox, &from, to.address(), &[8], START);
    assert!(is_woken(&to) && !inbox.arm_wakeup());
    assert_eq!(received(&mut inbox, &to, 1), numbered(&[8]));
    assert!(inbox.arm_wakeup() && !is_woken(&to));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_kick_wakes_a_peer_that_is_not_armed() {
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    let mut outbox = Outbox::new(Faults::default());
    send(&mut outbox, &from, to.address(), &[1], START);
    assert_eq!(received(&mut inbox, &to, 1), numbered(&[1]));
    assert!(inbox.arm_wakeup());
    inbox.disarm_wakeup();
    send(&mut outbox, &from, to.address(), &[2], START);
    assert!(!is_woken(&to));
    outbox.kick();
    assert!(is_woken(&to));
    assert_eq!(received(&mut inbox, &to, 1), numbered(&[2]));
    inbox.disarm_wakeup();
    outbox.kick();
    assert!(!is_woken(&to), "nothing was sent since the last kick");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn only_readable_sources_are_received_from() {
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    let mut outbox = Outbox::new(Faults::default());
    outbox.connect(&from, to.address(), START);
    let shm = Readable { udp: false, shm: true };
    let mut count = 0;
    // The peer connects, and then sends packets.
    assert!(!inbox.receive_readable(&to, shm, each_packet(|_, _| count += 1)));
    send(&mut outbox, &from, to.address(), &[1], START);
    assert!(!inbox.receive_readable(&to, Readable { udp: true, shm: false }, each_packet(|_, _| count += 1)));
    assert!(inbox.receive_readable(&to, shm, each_packet(|_, _| count += 1)) && !inbox.is_drained());
    assert_eq!(count, 1);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_peer_that_connects_while_a_thread_sleeps_wakes_it() {
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    let mut outbox = Outbox::new(Faults::default());
    assert!(inbox.arm_wakeup());
    outbox.connect(&from, to.address(), START);
    // Another thread accepts the connection.
    assert!(!inbox.receive(&to, |_, _| unreachable!()));
    assert!(!is_woken(&to));
    send(&mut outbox, &from, to.address(), &[7], START);
    assert!(is_woken(&to));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn closed_peers_leave_nothing_behind() {
    let _lock = without_new_processes();
    let (from, mut inbox) = (open(), Inbox::new());
    let mut outbox = Outbox::new(Faults::default());
    let stays = open();
    send(&mut outbox, &from, stays.address(), &[7], START);
    for round in 1..4 {
        let peers: Vec<_> = (0..20).map(|_| (open(), Inbox::new())).collect();
        for (peer, mut theirs) in peers {
            send(&mut outbox, &from, peer.address(), &[round], START);
            assert_eq!(received(&mut theirs, &peer, 1), numbered(&[round]));
        }
        assert_eq!(outbox.shm_peers(), 21);
        while outbox.shm_peers() > 1 {
            assert!(!inbox.receive(&from, |_, _| unreachable!()));
            let closed: Vec<_> = inbox.take_ready_senders().collect();
            assert!(!closed.is_empty(), "{} are left", outbox.shm_peers());
            closed.into_iter().for_each(|number| outbox.handle_ready_sender(number, START));
        }
        assert!(!is_woken(&from));
    }
    send(&mut outbox, &from, stays.address(), &[8], START);
    assert_eq!(received(&mut Inbox::new(), &stays, 2).len(), 2);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_peer_that_closes_the_connection_receives_packets_over_udp() {
    let _lock = without_new_processes();
    let (from, to) = (open(), open());
    let (mut outbox, address) = (Outbox::new(Faults::default()), to.address());
    let to = to.without_shm();
    // The peer behaves like a process without free descriptors.
    let shm = Shm::open(address).unwrap();
    send(&mut outbox, &from, address, &[10], START);
    drop(shm.accept(&mut Reserve::default()).unwrap());
    let mut now = START + Duration::from_millis(2);
    send(&mut outbox, &from, address, &[20], now);
    for len in 30..40 {
        // Each packet follows after more than the reconnect time.
        now = now + Duration::from_millis(70);
        send(&mut outbox, &from, address, &[len], now);
        assert_eq!(received(&mut Inbox::new(), &to, 1), numbered(&[len]));
    }
    send(&mut outbox, &from, address, &[50], now + Duration::from_secs(10));
    assert!(shm.accept(&mut Reserve::default()).is_ok(), "after the timeout, shared memory must be tried again");
    assert_eq!(udp_bytes(&to), 0);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn peers_are_served_in_turn() {
    const EACH: usize = 40;
    let (to, mut inbox) = (open(), Inbox::new());
    let mut senders: Vec<_> = (0..9).map(|_| (open(), Outbox::new(Faults::default()))).collect();
    // Accept the connections one by one.
    for (from, outbox) in &mut senders {
        outbox.connect(from, to.address(), START);
        assert!(!inbox.receive(&to, |_, _| unreachable!()));
    }
    for (from, outbox) in &mut senders {
        (0..EACH).for_each(|_| send(outbox, from, to.address(), &[LONG], START));
    }
    let (mut received_packets, mut rounds) = (Vec::new(), 0);
    while received_packets.len() < senders.len() * EACH {
        let before = received_packets.len();
        inbox.receive(&to, each_packet(|origin, _| received_packets.push(origin.address)));
        rounds += 1;
        assert!(
            received_packets.len() - before <= 64 && rounds < 100,
            "{} in {rounds}",
            received_packets.len() - before
        );
    }
    let first = |address: &IpAddr| received_packets.iter().position(|from| from == address);
    let last = senders.iter().filter_map(|(from, _)| first(&from.address())).max();
    assert!(last.unwrap() < 9 * 16, "{last:?}");
    assert!(!inbox.receive(&to, |_, _| unreachable!()) && inbox.is_drained());
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn unread_bytes_do_not_hide_a_closed_connection() {
    let _lock = without_new_processes();
    let (from, to) = (open(), open());
    let mut sender = from.shm().unwrap().connect(to.address(), 0, START).unwrap();
    let connection = to.shm().unwrap().accept(&mut Reserve::default()).unwrap();
    // SAFETY: the byte is valid.
    assert_eq!(unsafe { libc::send(connection.as_raw_fd(), [0_u8].as_ptr().cast(), 1, 0) }, 1);
    let later = |milliseconds| START + Duration::from_millis(milliseconds);
    assert!(sender.add(b"x", later(2)).is_ok());
    drop(connection);
    assert_eq!(sender.add(b"x", later(4)).unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_process_without_free_descriptors_receives_over_udp_until_it_has_some() {
    in_own_process("shm::a_process_without_free_descriptors_receives_over_udp_until_it_has_some", || {
        let (early, late, to, mut inbox) = (open(), open(), open(), Inbox::new());
        let [mut from_early, mut from_late] = [(); 2].map(|()| Outbox::new(Faults::default()));
        send(&mut from_early, &early, to.address(), &[1], START);
        assert_eq!(received(&mut inbox, &to, 1), numbered(&[1]));
        assert!(inbox.arm_wakeup() && !is_woken(&to));
        from_late.connect(&late, to.address(), START);
        let limit = exhaust_descriptors();
        assert!(is_woken(&to) && !inbox.receive(&to, |_, _| unreachable!()));
        assert!(!is_woken(&to), "the server would spin");
        // The sender notices the end of the connection with the first packet after a millisecond.
        for (len, milliseconds) in [(2, 2), (3, 3)] {
            send(&mut from_late, &late, to.address(), &[len], START + Duration::from_millis(milliseconds));
        }
        assert!(udp_bytes(&to) > 0);
        assert_eq!(received(&mut inbox, &to, 1), numbered(&[3]));
        send(&mut from_early, &early, to.address(), &[4], START);
        assert_eq!(received(&mut inbox, &to, 1), numbered(&[4]), "connected peers are not affected");
        limit_descriptors(limit);
        send(&mut from_late, &late, to.address(), &[5], START + Duration::from_secs(11));
        assert_eq!(udp_bytes(&to), 0);
        assert_eq!(received(&mut inbox, &to, 1), numbered(&[5]));
    });
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_handshake_of_another_version_is_refused_and_both_sides_use_udp() {
    let _lock = without_new_processes();
    let mut sides = [(); 2].map(|()| (open(), Inbox::new(), Outbox::new(Faults::default())));
    sides.iter_mut().for_each(|(socket, ..)| socket.shm_mut().unwrap().require_later_version());
    for _ in 0..2 {
        let [(from, _, outbox), (to, inbox, _)] = &mut sides;
        send(outbox, from, to.address(), &[1], START);
        assert!(!inbox.receive(to, |_, _| unreachable!()), "the ring must not be mapped");
        let refused = START + Duration::from_millis(2);
        send(outbox, from, to.address(), &[2], refused);
        for milliseconds in [3, 100, 200] {
            send(outbox, from, to.address(), &[3, 4], START + Duration::from_millis(milliseconds));
            assert!(udp_bytes(to) > 0);
            assert_eq!(received(inbox, to, 2), numbered(&[3, 4]));
        }
        assert_eq!(outbox.shm_peers(), 0);
        sides.reverse();
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_peer_without_versions_gets_its_first_packet_over_udp() {
    let _lock = without_new_processes();
    let (from, to) = (open(), open());
    let (address, to) = (to.address(), to.without_shm());
    // Before there was a version, the name was only the address.
    let name = SockAddr::unix(&address.to_string());
    let old = unix::bind(libc::SOCK_SEQPACKET, &name).unwrap();
    unix::listen(old.as_fd()).unwrap();
    send(&mut Outbox::new(Faults::default()), &from, address, &[10, 20], START);
    assert_eq!(received(&mut Inbox::new(), &to, 2), numbered(&[10, 20]));
    assert!(matches!(unix::accept(old.as_fd(), &mut Reserve::default()), Err(AcceptError::Retry(_))));
    // The old peer does not find this process either.
    let connection = unix::socket(libc::SOCK_SEQPACKET).unwrap();
    let refused = unix::connect(connection.as_fd(), &SockAddr::unix(&from.address().to_string())).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn packets_for_one_peer_do_not_wait_until_all_others_have_theirs() {
    let (from, first, second) = (open(), open(), open());
    let (mut outbox, mut inbox) = (Outbox::new(Faults::default()), Inbox::new());
    push(&mut outbox, &from, first.address(), 0, 64, START);
    assert!(!inbox.receive(&first, |_, _| {}));
    (0..15).for_each(|psn| push(&mut outbox, &from, second.address(), psn, 4096, START));
    assert!(!inbox.receive(&first, |_, _| {}));
    push(&mut outbox, &from, second.address(), 15, 4096, START);
    assert_eq!(received(&mut inbox, &first, 1), [(0, 64)]);
    outbox.flush(&from, START);
    assert_eq!(received(&mut Inbox::new(), &second, 16), numbered(&[4096; 16]));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn packets_of_a_peer_that_leaves_before_they_are_sent_reach_no_other() {
    let _lock = without_new_processes();
    let (from, leaving, staying, late) = (open(), open(), open(), open());
    let (mut outbox, mut inbox) = (Outbox::new(Faults::default()), Inbox::new());
    for psn in 0..3 {
        push(&mut outbox, &from, leaving.address(), psn, 100, START);
        push(&mut outbox, &from, staying.address(), psn, 200, START);
    }
    drop(leaving);
    let mut own = Inbox::new();
    own.receive(&from, |_, _| {});
    own.take_ready_senders().for_each(|number| outbox.handle_ready_sender(number, START));
    // The new peer gets the place of the one that has left.
    push(&mut outbox, &from, late.address(), 0, 300, START);
    outbox.flush(&from, START);
    assert_eq!(received(&mut inbox, &staying, 3), numbered(&[200; 3]));
    assert_eq!(received(&mut Inbox::new(), &late, 1), [(0, 300)]);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn packets_before_a_change_of_faults_are_not_overtaken() {
    let (from, to) = (open(), open());
    let mut outbox = Outbox::new(Faults::default());
    push(&mut outbox, &from, to.address(), 0, 100, START);
    outbox.set_faults(&from, "seed=1,dup=0.000001".parse().unwrap(), START);
    push(&mut outbox, &from, to.address(), 1, 200, START);
    outbox.set_faults(&from, Faults::default(), START);
    push(&mut outbox, &from, to.address(), 2, 300, START);
    outbox.flush(&from, START);
    assert_eq!(received(&mut Inbox::new(), &to, 3), numbered(&[100, 200, 300]));
}
