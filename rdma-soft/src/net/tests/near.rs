//! Between peers on this host, by the shorter way.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use super::loopback::{START, numbered, received};
use super::*;
use crate::faults::Faults;
use crate::net::near::Near;
use crate::net::{Inbox, Readable};
use crate::wire::UDP_PORT;

fn open() -> Socket {
    Socket::open(None).unwrap()
}

/// Bytes that the peer's UDP socket holds: those of packets that have come the longer way.
fn waiting(socket: &Socket) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the number is there.
    assert_eq!(unsafe { libc::ioctl(socket.fd().as_raw_fd(), libc::FIONREAD as _, &raw mut bytes) }, 0);
    bytes as usize
}

/// Whether who sleeps there is woken.
fn is_woken(socket: &Socket) -> bool {
    let mut poll = libc::pollfd { fd: socket.near_fd().unwrap().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, and it is there.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}

/// Takes packets, and sends what was kept of them, until so many have come.
fn all_received(inbox: &mut Inbox, to: &Socket, outbox: &mut Outbox, from: &Socket, count: usize) -> Vec<(u32, usize)> {
    let (mut packets, mut now) = (Vec::new(), START);
    while packets.len() < count {
        inbox.receive(to, |_, datagram| packets.push(checked(datagram)));
        now = now + Duration::from_millis(1);
        outbox.flush(from, now);
        assert!(now < START + Duration::from_secs(10), "{} of {count}", packets.len());
    }
    packets
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn nothing_gets_lost_on_the_way_to_a_slow_peer() {
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    let mut outbox = Outbox::new(Faults::default());
    for lens in [vec![4096; 3500], (0..3000).map(|at| at % 700).collect()] {
        send(&mut outbox, &from, to.address(), &lens, START);
        assert_eq!(waiting(&to), 0);
        assert_eq!(all_received(&mut inbox, &to, &mut outbox, &from, lens.len()), numbered(&lens));
        assert!(!outbox.is_blocked_for(&to.address()));
    }
    assert_eq!(inbox.damaged(), 0);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_peer_that_takes_nothing_holds_up_nobody_else_and_loses_packets_at_last() {
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
    assert!(!outbox.is_blocked_for(&stopped.address()), "what was kept is lost");
    send(&mut outbox, &from, stopped.address(), &[4096; 100], late);
    assert!(!outbox.is_blocked_for(&stopped.address()), "and what comes later at once");
    assert_eq!(outbox.wake_at(), None);

    let mut count = 0;
    while inbox.receive(&stopped, |_, datagram| {
        assert_eq!(checked(datagram).0, count);
        count += 1;
    }) {}
    assert!((100..6000).contains(&count), "{count}");
    send(&mut outbox, &from, stopped.address(), &vec![4096; 6000], late);
    assert!(outbox.is_blocked_for(&stopped.address()), "it takes packets again");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn who_comes_to_be_at_an_address_gets_what_is_sent_there() {
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
    assert_eq!(waiting(&second), 0);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn packets_for_peers_without_the_shorter_way_go_by_udp() {
    let (from, to) = (open(), open());
    let mut outbox = Outbox::new(Faults::default());
    let address = to.address();
    let to = to.far();
    send(&mut outbox, &from, address, &[10, 20], START);
    assert!(waiting(&to) > 0);
    // Nothing overtakes what may be under way still.
    let near = Near::open(address).unwrap();
    send(&mut outbox, &from, address, &[30], START + Duration::from_millis(9));
    send(&mut outbox, &from, address, &[40], START + Duration::from_millis(18));
    let numbers: Vec<_> = received(&mut Inbox::new(), &to, 4).into_iter().map(|(_, len)| len).collect();
    assert_eq!(numbers, [10, 20, 30, 40]);
    send(&mut outbox, &from, address, &[50], START + Duration::from_millis(28));
    assert_eq!(waiting(&to), 0);
    assert!(near.accept().is_ok());
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn trouble_is_met_with_on_the_shorter_way_too() {
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    let mut outbox = Outbox::new("seed=5,drop=0.2,corrupt=0.1,dup=0.1".parse().unwrap());
    send(&mut outbox, &from, to.address(), &[100; 1000], START);
    assert_eq!(waiting(&to), 0);
    let (mut came, mut now) = (0, START);
    while inbox.receive(&to, |_, datagram| {
        // Damage to what routers may change is none.
        assert!(Packet::parse(datagram).is_ok());
        came += 1;
    }) || outbox.is_blocked_for(&to.address())
    {
        now = now + Duration::from_millis(1);
        outbox.flush(&from, now);
    }
    assert!((700..900).contains(&came), "{came}");
    assert!((40..150).contains(&inbox.damaged()), "{}", inbox.damaged());
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_caller_says_who_it_is_and_goes() {
    let (to, mut inbox) = (open(), Inbox::new());
    let remote = Near::open(Ipv4Addr::new(203, 0, 113, 5).into()).unwrap();
    let mut stranger = remote.connect(to.address(), 0, START).unwrap();
    assert!(stranger.add(b"x", START).is_ok());
    // It says that it is of another host.
    assert!(!inbox.receive(&to, |_, _| unreachable!()));
    let later = START + Duration::from_millis(2);
    assert_eq!(stranger.add(b"x", later).unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    let from = open();
    let mut outbox = Outbox::new(Faults::default());
    send(&mut outbox, &from, to.address(), &[7], START);
    drop((outbox, from));
    assert_eq!(received(&mut inbox, &to, 1), numbered(&[7]), "what was sent before comes");
    assert!(!inbox.receive(&to, |_, _| unreachable!()));
    assert_eq!(to.near().unwrap().ready().count(), 0, "nothing more comes of who has gone");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn what_nobody_answers_to_is_lost() {
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
fn nobody_takes_a_sleeper_what_wakes_it() {
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    let mut outbox = Outbox::new(Faults::default());
    send(&mut outbox, &from, to.address(), &[1], START);
    assert_eq!(received(&mut inbox, &to, 1), numbered(&[1]));
    assert!(inbox.sleep() && !is_woken(&to));
    // Somebody else looks while it sleeps, and goes.
    for _ in 0..3 {
        send(&mut outbox, &from, to.address(), &[7], START);
        assert_eq!(received(&mut inbox, &to, 1), numbered(&[7]));
        assert!(is_woken(&to), "it will not know what comes later");
    }
    assert!(inbox.sleep() && !is_woken(&to));
    send(&mut outbox, &from, to.address(), &[8], START);
    assert!(is_woken(&to) && !inbox.sleep());
    assert_eq!(received(&mut inbox, &to, 1), numbered(&[8]));
    assert!(inbox.sleep() && !is_woken(&to));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_peer_that_has_not_asked_to_be_woken_is_by_a_kick() {
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    let mut outbox = Outbox::new(Faults::default());
    send(&mut outbox, &from, to.address(), &[1], START);
    assert_eq!(received(&mut inbox, &to, 1), numbered(&[1]));
    assert!(inbox.sleep());
    inbox.wake_up();
    send(&mut outbox, &from, to.address(), &[2], START);
    assert!(!is_woken(&to));
    outbox.kick();
    assert!(is_woken(&to));
    assert_eq!(received(&mut inbox, &to, 1), numbered(&[2]));
    inbox.wake_up();
    outbox.kick();
    assert!(!is_woken(&to), "nothing was sent since");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_thread_that_waited_finds_what_it_was_woken_for_and_looks_nowhere_else() {
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    let mut outbox = Outbox::new(Faults::default());
    outbox.meet(&from, to.address(), START);
    let near = Readable { wire: false, near: true };
    let mut count = 0;
    // A new peer, and then its packets.
    assert!(!inbox.receive_from(&to, near, |_, _| count += 1));
    send(&mut outbox, &from, to.address(), &[1], START);
    assert!(!inbox.receive_from(&to, Readable { wire: true, near: false }, |_, _| count += 1));
    assert!(inbox.receive_from(&to, near, |_, _| count += 1) && !inbox.has_all());
    assert_eq!(count, 1);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_sleeper_is_woken_by_who_came_while_it_slept() {
    let (from, to, mut inbox) = (open(), open(), Inbox::new());
    let mut outbox = Outbox::new(Faults::default());
    assert!(inbox.sleep());
    outbox.meet(&from, to.address(), START);
    // Somebody else lets the peer in, and goes.
    assert!(!inbox.receive(&to, |_, _| unreachable!()));
    assert!(!is_woken(&to));
    send(&mut outbox, &from, to.address(), &[7], START);
    assert!(is_woken(&to));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn nothing_stays_of_peers_that_are_gone() {
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
        assert_eq!(outbox.neighbours(), 21);
        while outbox.neighbours() > 1 {
            assert!(!inbox.receive(&from, |_, _| unreachable!()));
            let ended: Vec<_> = inbox.ended().collect();
            assert!(!ended.is_empty(), "{} are left", outbox.neighbours());
            ended.into_iter().for_each(|number| outbox.end(number, START));
        }
        assert!(!is_woken(&from));
    }
    send(&mut outbox, &from, stays.address(), &[8], START);
    assert_eq!(received(&mut Inbox::new(), &stays, 2).len(), 2);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_peer_that_does_not_take_the_shorter_way_up_gets_packets_by_udp() {
    let (from, to) = (open(), open());
    let (mut outbox, address) = (Outbox::new(Faults::default()), to.address());
    let to = to.far();
    // As of a process that may open no more descriptors.
    let near = Near::open(address).unwrap();
    send(&mut outbox, &from, address, &[10], START);
    drop(near.accept().unwrap());
    let mut now = START + Duration::from_millis(2);
    send(&mut outbox, &from, address, &[20], now);
    for len in 30..40 {
        // Each time after longer than the way is quiet.
        now = now + Duration::from_millis(70);
        send(&mut outbox, &from, address, &[len], now);
        assert_eq!(received(&mut Inbox::new(), &to, 1), numbered(&[len]));
    }
    send(&mut outbox, &from, address, &[50], now + Duration::from_secs(10));
    assert!(near.accept().is_ok(), "it may want it by now");
    assert_eq!(waiting(&to), 0);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn of_many_callers_each_has_its_turn() {
    const EACH: usize = 40;
    let (to, mut inbox) = (open(), Inbox::new());
    let mut callers: Vec<_> = (0..9).map(|_| (open(), Outbox::new(Faults::default()))).collect();
    // They are let in one by one.
    for (from, outbox) in &mut callers {
        outbox.meet(from, to.address(), START);
        assert!(!inbox.receive(&to, |_, _| unreachable!()));
    }
    for (from, outbox) in &mut callers {
        (0..EACH).for_each(|_| send(outbox, from, to.address(), &[LONG], START));
    }
    let (mut came, mut looks) = (Vec::new(), 0);
    while came.len() < callers.len() * EACH {
        let before = came.len();
        inbox.receive(&to, |origin, _| came.push(origin.address));
        looks += 1;
        assert!(came.len() - before <= 64 && looks < 100, "{} in {looks}", came.len() - before);
    }
    let first = |address: &IpAddr| came.iter().position(|of| of == address);
    let last = callers.iter().filter_map(|(from, _)| first(&from.address())).max();
    assert!(last.unwrap() < 9 * 16, "{last:?}");
    assert!(!inbox.receive(&to, |_, _| unreachable!()) && inbox.has_all());
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn what_a_peer_has_said_does_not_hide_that_it_is_gone() {
    let (from, to) = (open(), open());
    let mut lane = from.near().unwrap().connect(to.address(), 0, START).unwrap();
    let connection = to.near().unwrap().accept().unwrap();
    // SAFETY: the byte is there.
    assert_eq!(unsafe { libc::send(connection.as_raw_fd(), [0_u8].as_ptr().cast(), 1, 0) }, 1);
    let later = |milliseconds| START + Duration::from_millis(milliseconds);
    assert!(lane.add(b"x", later(2)).is_ok());
    drop(connection);
    assert_eq!(lane.add(b"x", later(4)).unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
}
