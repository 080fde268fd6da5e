//! The directory of listeners, within one process.

use std::cell::Cell;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Barrier, Mutex};

use super::{
    exhaust_descriptors, in_own_process, is_readable, limit_descriptors, open_descriptors, without_new_processes,
};
use crate::net::directory::{Addresses, BEFORE_LOOKING, Claim, ClaimError, Directory, Lookup, LookupError};

/// `RDMA_PS_TCP`.
pub(super) const SPACE: u16 = 0x0106;

/// Returns a port below the ephemeral range that no other test of this process uses.
pub(super) fn new_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Test processes that run at the same time use different ports, with high probability.
    10_000 + (std::process::id() as u16).wrapping_mul(64).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000
}

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(super) fn at(text: &str) -> Addresses {
    Addresses::new(ip(text), false)
}

/// Address of the device of a process that listens.
fn device() -> Vec<IpAddr> {
    vec![ip("127.66.6.6")]
}

/// A directory with a claim that listens.
fn listening(address: &str, port: u16) -> (Directory, Claim) {
    let directory = Directory::new(1).unwrap();
    let mut claim = directory.claim(SPACE, at(address), port).unwrap();
    claim.listen().unwrap();
    (directory, claim)
}

/// The result of a lookup, while `listener` answers.
pub(super) fn look_up(
    client: &Directory,
    listener: &Directory,
    address: &str,
    port: u16,
) -> Result<IpAddr, LookupError> {
    let lookup = client.lookup(SPACE, ip(address), port)?;
    let mut result = None;
    for _ in 0..100 {
        listener.handle_events(&device(), &mut |_| unreachable!("it has no lookups"));
        client.handle_events(&[ip("127.7.7.7")], &mut |event| {
            assert_eq!(event.lookup, lookup.number());
            assert!(result.replace(event.result.map(|process| process.address)).is_none(), "a lookup ends once");
        });
        if let Some(result) = result.take() {
            assert!(!is_readable(client.fd()) && !is_readable(listener.fd()));
            return result;
        }
    }
    panic!("no answer");
}

fn finds_nobody(client: &Directory, address: &str, port: u16) -> bool {
    matches!(client.lookup(SPACE, ip(address), port), Err(LookupError::NobodyListens))
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn claims_of_one_address_or_of_all_conflict_as_in_linux() {
    let _lock = without_new_processes();
    let own = Directory::new(1).unwrap();
    let ipv6_only = Addresses::new(ip("::"), true);
    let all = [at("127.0.0.1"), at("127.0.0.2"), at("::1"), at("0.0.0.0"), ipv6_only, at("::")];
    for first in all {
        for second in all {
            let port = new_port();
            let _first = own.claim(SPACE, first, port).unwrap();
            let expected = first.check_conflict(second).err().map(|error| error.errno());
            // Another directory is like another process: only the names of sockets exclude it.
            for directory in [&own, &Directory::new(1).unwrap()] {
                let refused = directory.claim(SPACE, second, port).err().map(|error| error.errno());
                assert_eq!(refused, expected, "{second:?} after {first:?}");
            }
            assert!(own.claim(SPACE + 1, second, port).is_ok(), "another port space");
            assert!(own.claim(SPACE, second, port + 20_000).is_ok(), "another port");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_dropped_claim_frees_its_port_and_all_descriptors() {
    in_own_process("directory::a_dropped_claim_frees_its_port_and_all_descriptors", || {
        let (one, two) = (Directory::new(1).unwrap(), Directory::new(1).unwrap());
        let (before, port) = (open_descriptors(), new_port());
        for address in ["127.0.0.1", "::", "::1", "0.0.0.0"] {
            for directory in [&one, &two, &one] {
                let mut claim = directory.claim(SPACE, at(address), port).unwrap();
                assert_eq!(claim.port(), port);
                claim.listen().unwrap();
                claim.listen().unwrap();
                assert!(two.claim(SPACE, at(address), port).is_err(), "a refused claim must free its names, too");
            }
        }
        assert_eq!(open_descriptors(), before);
    });
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn only_a_listening_claim_is_found() {
    let _lock = without_new_processes();
    let client = Directory::new(1).unwrap();
    let port = new_port();
    assert!(finds_nobody(&client, "127.0.0.1", port));
    let directory = Directory::new(1).unwrap();
    let mut claim = directory.claim(SPACE, at("127.0.0.1"), port).unwrap();
    assert!(finds_nobody(&client, "127.0.0.1", port));
    claim.listen().unwrap();
    assert_eq!(look_up(&client, &directory, "127.0.0.1", port).unwrap(), device()[0]);
    assert_eq!(look_up(&client, &directory, "::ffff:127.0.0.1", port).unwrap(), device()[0]);
    assert_eq!(look_up(&client, &directory, "0.0.0.0", port).unwrap(), device()[0], "this host");
    assert!(finds_nobody(&client, "127.0.0.2", port) && finds_nobody(&client, "127.0.0.1", port + 20_000));
    assert!(matches!(client.lookup(SPACE + 1, ip("127.0.0.1"), port), Err(LookupError::NobodyListens)));
    drop(claim);
    assert!(finds_nobody(&client, "127.0.0.1", port));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_claim_of_all_addresses_is_found_at_each_of_its_family() {
    let client = Directory::new(1).unwrap();
    let (four, six) = (["127.0.0.1", "192.0.2.7"], ["::1", "2001:db8::7"]);
    for (all, found, others) in [
        (at("0.0.0.0"), &four[..], &six[..]),
        (Addresses::new(ip("::"), true), &six, &four),
        (at("::"), &["127.0.0.1", "192.0.2.7", "::1", "2001:db8::7"], &[]),
    ] {
        let (directory, port) = (Directory::new(1).unwrap(), new_port());
        let mut claim = directory.claim(SPACE, all, port).unwrap();
        assert!(finds_nobody(&client, "127.0.0.1", port) && finds_nobody(&client, "::1", port));
        claim.listen().unwrap();
        for address in found {
            assert_eq!(look_up(&client, &directory, address, port).unwrap(), device()[0], "{address}");
        }
        assert!(others.iter().all(|address| finds_nobody(&client, address, port)), "{all:?}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn port_0_is_a_free_ephemeral_port() {
    let directories = [(); 3].map(|()| Directory::new(1).unwrap());
    let mut claims = Vec::new();
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    let range: Vec<u16> = range.split_whitespace().map(|number| number.parse().unwrap()).collect();
    // Another space, so that the ports of other tests do not matter.
    for address in ["127.0.0.1", "0.0.0.0", "::", "::1"].repeat(8) {
        for directory in &directories {
            let claim = directory.claim(SPACE + 2, at(address), 0).unwrap();
            assert!((range[0]..=range[1]).contains(&claim.port()), "{}", claim.port());
            claims.push((claim, at(address)));
        }
    }
    for (index, (claim, addresses)) in claims.iter().enumerate() {
        for (other, others) in &claims[..index] {
            assert!(claim.port() != other.port() || addresses.check_conflict(*others).is_ok());
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn source_ports_are_unique_in_a_process_and_take_no_descriptors() {
    in_own_process("directory::source_ports_are_unique_in_a_process_and_take_no_descriptors", || {
        let directory = Directory::new(1).unwrap();
        let claimed = directory.claim(SPACE, at("127.0.0.1"), 0).unwrap();
        let wild = directory.claim(SPACE, at("0.0.0.0"), 0).unwrap();
        let before = open_descriptors();
        let mut ports = Vec::new();
        let error = loop {
            match directory.source_port(SPACE, ip("127.0.0.1")) {
                Ok(port) => ports.push(port),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, ClaimError::NoFreePort) && error.errno() == libc::EADDRNOTAVAIL);
        assert_eq!(open_descriptors(), before);
        let mut numbers: Vec<u16> = ports.iter().map(|port| port.get()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), ports.len());
        assert!(numbers.len() > 1000 && !numbers.contains(&claimed.port()) && !numbers.contains(&wild.port()));
        // Claims and source ports exclude each other in both directions.
        let port = ports[0].get();
        assert!(matches!(directory.claim(SPACE, at("127.0.0.1"), port), Err(ClaimError::InUse)));
        assert!(matches!(directory.claim(SPACE, at("0.0.0.0"), port), Err(ClaimError::Overlap)));
        assert!(directory.claim(SPACE, at("127.0.0.2"), port).is_ok());
        assert!(
            directory.source_port(SPACE, ip("127.0.0.2")).is_ok()
                && directory.source_port(SPACE + 1, ip("127.0.0.1")).is_ok()
        );
        ports.swap_remove(0);
        assert_eq!(directory.source_port(SPACE, ip("127.0.0.1")).unwrap().get(), port);
    });
}

const RACES: usize = 50;

/// Runs `one` in two threads at the same time, many times. Each thread has its own directory.
fn race<T: Send>(mut check: impl FnMut(Vec<T>), one: impl Fn(&Directory, usize, u16) -> T + Sync) {
    let directories = [(); 2].map(|()| Directory::new(1).unwrap());
    for _ in 0..RACES {
        let (barrier, results, port) = (Barrier::new(2), Mutex::new(Vec::new()), new_port());
        std::thread::scope(|scope| {
            for (index, directory) in directories.iter().enumerate() {
                let (barrier, results, one) = (&barrier, &results, &one);
                scope.spawn(move || {
                    barrier.wait();
                    let result = one(directory, index, port);
                    results.lock().unwrap().push(result);
                });
            }
        });
        check(results.into_inner().unwrap());
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn of_two_racing_claims_at_most_one_succeeds() {
    let _lock = without_new_processes();
    for (first, second) in [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "0.0.0.0"),
        ("0.0.0.0", "0.0.0.0"),
        ("::", "127.0.0.1"),
        ("::1", "::"),
    ] {
        let mut winners = 0;
        let check = |results: Vec<Option<Claim>>| {
            let count = results.iter().flatten().count();
            assert!(count <= 1, "{first} and {second}");
            winners += count;
        };
        race(check, |directory, index, port| directory.claim(SPACE, at([first, second][index]), port).ok());
        assert!(first != second || winners == RACES, "equal claims exclude each other by one name");
    }
    let check = |results: Vec<Option<Claim>>| assert_eq!(results.iter().flatten().count(), 2);
    race(check, |directory, index, port| directory.claim(SPACE, at(["127.0.0.1", "127.0.0.2"][index]), port).ok());
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_claim_excludes_others_before_it_looks_for_them() {
    let _lock = without_new_processes();
    for (first, second) in
        [("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::", "0.0.0.0"), ("::1", "::")]
    {
        let port = new_port();
        let has_raced = Rc::new(Cell::new(false));
        let race = {
            let has_raced = Rc::clone(&has_raced);
            move || {
                let refused = Directory::new(1).unwrap().claim(SPACE, at(second), port);
                assert!(matches!(refused, Err(ClaimError::Overlap)), "{second} during {first}");
                has_raced.set(true);
            }
        };
        BEFORE_LOOKING.set(Some(Box::new(race)));
        assert!(Directory::new(1).unwrap().claim(SPACE, at(first), port).is_ok());
        assert!(has_raced.get());
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn many_addresses_have_claims_of_one_port_up_to_the_limit() {
    in_own_process("directory::many_addresses_have_claims_of_one_port_up_to_the_limit", || {
        limit_descriptors(libc::RLIM_INFINITY);
        let (directory, port) = (Directory::new(1).unwrap(), new_port());
        let claim = |number: u32| directory.claim(SPACE, Addresses::One(IpAddr::from(number.to_be_bytes())), port);
        let first = 0x7f01_0000;
        let mut claims: Vec<Claim> = (0..1024).map(|number| claim(first + number).unwrap()).collect();
        assert!(matches!(claim(first + 1024), Err(ClaimError::Crowded)));
        assert!(matches!(claim(first + 77), Err(ClaimError::InUse)));
        for at_end in [false, true] {
            // Any single claim is enough to exclude a claim of all addresses.
            claims.truncate(if at_end { 1 } else { 1023 });
            assert!(matches!(Directory::new(1).unwrap().claim(SPACE, at("0.0.0.0"), port), Err(ClaimError::Overlap)));
        }
        claims.clear();
        assert!(directory.claim(SPACE, at("0.0.0.0"), port).is_ok());
    });
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn thousands_of_lookups_are_answered() {
    in_own_process("directory::thousands_of_lookups_are_answered", || {
        limit_descriptors(libc::RLIM_INFINITY);
        let port = new_port();
        let (listener, claim) = listening("127.0.0.1", port);
        let client = Directory::new(1).unwrap();
        let before = open_descriptors();
        let (mut lookups, mut found, mut busy) = (Vec::<Lookup>::new(), 0, 0);
        while found < 5000 {
            while found + lookups.len() < 5000 {
                match client.lookup(SPACE, ip("127.0.0.1"), port) {
                    Ok(lookup) => lookups.push(lookup),
                    Err(LookupError::Busy) => {
                        busy += 1;
                        break;
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            assert!(is_readable(listener.fd()));
            while is_readable(listener.fd()) {
                listener.handle_events(&device(), &mut |_| unreachable!());
            }
            while is_readable(client.fd()) {
                client.handle_events(&device(), &mut |event| {
                    assert_eq!(event.result.unwrap().address, device()[0]);
                    let at = lookups.iter().position(|lookup| lookup.number() == event.lookup).unwrap();
                    lookups.swap_remove(at);
                    found += 1;
                });
            }
            assert!(lookups.is_empty());
        }
        assert!(busy > 0, "the kernel limits pending connections");
        drop(claim);
        assert_eq!(open_descriptors() + 2, before, "a claim of one address has two descriptors");
    });
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_dropped_lookup_is_never_reported() {
    in_own_process("directory::a_dropped_lookup_is_never_reported", || {
        let port = new_port();
        let (listener, _claim) = listening("127.0.0.1", port);
        let client = Directory::new(1).unwrap();
        let before = open_descriptors();
        for is_answered in [false, true] {
            let [dropped, kept] = [(); 2].map(|()| client.lookup(SPACE, ip("127.0.0.1"), port).unwrap());
            if is_answered {
                listener.handle_events(&device(), &mut |_| unreachable!());
            }
            drop(dropped);
            listener.handle_events(&device(), &mut |_| unreachable!());
            let mut reported = Vec::new();
            client.handle_events(&device(), &mut |event| reported.push(event.lookup));
            assert_eq!(reported, [kept.number()]);
            assert!(!is_readable(client.fd()) && !is_readable(listener.fd()));
        }
        assert_eq!(open_descriptors(), before);
    });
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_lookup_in_flight_ends_when_the_claim_is_dropped() {
    // Other tests start processes, which hold the descriptors of this one until they execute a program.
    in_own_process("directory::a_lookup_in_flight_ends_when_the_claim_is_dropped", || {
        let (port, client) = (new_port(), Directory::new(1).unwrap());
        for address in ["127.0.0.1", "0.0.0.0", "::"] {
            let (_listener, claim) = listening(address, port);
            let _lookups = [(); 100].map(|()| client.lookup(SPACE, ip("127.0.0.1"), port).unwrap());
            assert!(!is_readable(client.fd()));
            drop(claim);
            let mut ended = 0;
            while is_readable(client.fd()) {
                client.handle_events(&device(), &mut |event| {
                    assert!(matches!(event.result, Err(LookupError::NobodyListens)), "{event:?}");
                    ended += 1;
                });
            }
            assert_eq!(ended, 100);
        }
        // A listener at all addresses may follow one at this address.
        let (_listener, claim) = listening("127.0.0.1", port);
        let lookup = client.lookup(SPACE, ip("127.0.0.1"), port).unwrap();
        drop(claim);
        let (listener, _claim) = listening("0.0.0.0", port);
        client.handle_events(&device(), &mut |_| unreachable!("it asks the next listener"));
        listener.handle_events(&device(), &mut |_| unreachable!());
        let mut results = Vec::new();
        client.handle_events(&device(), &mut |event| results.push((event.lookup, event.result.unwrap().address)));
        assert_eq!(results, [(lookup.number(), device()[0])]);
    });
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_lookup_ends_although_a_child_process_holds_the_listener() {
    in_own_process("directory::a_lookup_ends_although_a_child_process_holds_the_listener", || {
        let (port, client) = (new_port(), Directory::new(1).unwrap());
        let (_listener, claim) = listening("127.0.0.1", port);
        let _lookup = client.lookup(SPACE, ip("127.0.0.1"), port).unwrap();
        // SAFETY: the child only makes system calls.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: the child waits until its parent ends it.
            unsafe {
                libc::pause();
                libc::_exit(0);
            }
        }
        drop(claim);
        let mut ended = 0;
        client.handle_events(&device(), &mut |event| ended += u32::from(event.result.is_err()));
        assert!(ended == 1 && finds_nobody(&client, "127.0.0.1", port));
        // SAFETY: the arguments are numbers. The child exists until its parent waits for it.
        unsafe {
            assert_eq!(libc::kill(child, libc::SIGKILL), 0);
            assert_eq!(libc::waitpid(child, std::ptr::null_mut(), 0), child);
        }
    });
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_process_finds_its_own_listener() {
    let port = new_port();
    let (directory, _claim) = listening("127.0.0.1", port);
    let lookup = directory.lookup(SPACE, ip("127.0.0.1"), port).unwrap();
    let mut results = Vec::new();
    // The first call answers, and the second one receives the answer at the latest.
    (0..2).for_each(|_| {
        directory.handle_events(&device(), &mut |event| results.push((event.lookup, event.result.unwrap().address)))
    });
    assert_eq!(results, [(lookup.number(), device()[0])]);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_forked_child_does_not_end_what_its_parent_has() {
    in_own_process("directory::a_forked_child_does_not_end_what_its_parent_has", || {
        let port = new_port();
        let (directory, claim) = listening("127.0.0.1", port);
        let source_port = directory.source_port(SPACE, ip("127.0.0.1")).unwrap();
        let lookup = directory.lookup(SPACE, ip("127.0.0.1"), port).unwrap();
        // SAFETY: this process has no other thread that could hold a lock, except the harness, which waits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            drop((lookup, source_port, claim, directory));
            // SAFETY: the argument is a number.
            unsafe { libc::_exit(7) };
        }
        let mut status = 0;
        // SAFETY: the status is valid for writes.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 7);
        let mut found = Vec::new();
        for _ in 0..2 {
            directory.handle_events(&device(), &mut |event| found.push((event.lookup, event.result.unwrap().address)));
        }
        assert_eq!(found, [(lookup.number(), device()[0])]);
    });
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_process_without_free_descriptors_answers_and_reports_it() {
    in_own_process("directory::a_process_without_free_descriptors_answers_and_reports_it", || {
        let port = new_port();
        let (listener, _claim) = listening("127.0.0.1", port);
        let client = Directory::new(1).unwrap();
        let lookups = [(); 3].map(|()| client.lookup(SPACE, ip("127.0.0.1"), port).unwrap());
        let limit = exhaust_descriptors();
        listener.handle_events(&device(), &mut |_| unreachable!());
        assert!(!is_readable(listener.fd()), "the reserve is enough for any number of lookups");
        let mut found = Vec::new();
        client.handle_events(&device(), &mut |event| found.push((event.lookup, event.result.unwrap().address)));
        assert_eq!(found, lookups.each_ref().map(|lookup| (lookup.number(), device()[0])));
        // These lookups have closed their connections, so three descriptors are free.
        let kept: Vec<_> = (0..3).map(|_| client.lookup(SPACE, ip("127.0.0.1"), port).unwrap()).collect();
        match client.lookup(SPACE, ip("127.0.0.1"), port) {
            Err(LookupError::System { call: "socket", source }) => {
                assert_eq!(source.raw_os_error(), Some(libc::EMFILE))
            }
            result => panic!("{:?}", result.err()),
        }
        for address in ["127.0.0.3", "0.0.0.0"] {
            let error = client.claim(SPACE, at(address), port + 20_000).err().unwrap();
            assert_eq!(error.errno(), libc::EMFILE, "{error}");
        }
        drop(kept);
        // A claim that gets only some of its descriptors frees them.
        let claim = |address| client.claim(SPACE, at(address), port + 20_000);
        assert_eq!(claim("::").err().unwrap().errno(), libc::EMFILE);
        assert!(claim("127.0.0.3").is_ok());
        limit_descriptors(limit);
        assert!(claim("::").is_ok());
    });
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_listener_that_can_accept_nothing_does_not_spin() {
    in_own_process("directory::a_listener_that_can_accept_nothing_does_not_spin", || {
        let port = new_port();
        let (listener, _claim) = listening("127.0.0.1", port);
        let client = Directory::new(1).unwrap();
        let handle = || listener.handle_events(&device(), &mut |_| unreachable!());
        let mut lookups = vec![client.lookup(SPACE, ip("127.0.0.1"), port).unwrap()];
        // Even the number of the reserve descriptor is above the limit.
        let limit = limit_descriptors(0);
        let mut calls = 0;
        while is_readable(listener.fd()) {
            handle();
            calls += 1;
            assert!(calls < 5);
        }
        assert!(!is_readable(client.fd()));
        limit_descriptors(limit);
        // A new lookup wakes the listener, which then answers all.
        lookups.push(client.lookup(SPACE, ip("127.0.0.1"), port).unwrap());
        assert!(is_readable(listener.fd()));
        handle();
        assert!(!is_readable(listener.fd()));
        let mut found = 0;
        client.handle_events(&device(), &mut |event| found += u32::from(event.result.is_ok()));
        assert_eq!(found, 2);
        // So does any other event.
        lookups.push(client.lookup(SPACE, ip("127.0.0.1"), port).unwrap());
        limit_descriptors(0);
        (0..3).for_each(|_| handle());
        assert!(!is_readable(listener.fd()));
        limit_descriptors(limit);
        handle();
        client.handle_events(&device(), &mut |event| found += u32::from(event.result.is_ok()));
        assert_eq!(found, 3);
        // The listener is level-triggered again: a call that answers nothing leaves the event.
        lookups.push(client.lookup(SPACE, ip("127.0.0.1"), port).unwrap());
        assert!(is_readable(listener.fd()) && is_readable(listener.fd()));
        handle();
        assert!(!is_readable(listener.fd()));
    });
}
