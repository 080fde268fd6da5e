//! Fault injection.

use std::collections::HashSet;
use std::time::Duration;

use super::link::Recorder;
use super::*;
use crate::faults::Faults;
use crate::net::socket::Link;

const COUNT: usize = 1000;

/// Sends packets with these faults. Returns the numbers of the packets that arrive, in order. `None` is a damaged packet.
fn sent(faults: &str) -> Vec<Option<u32>> {
    let (link, mut outbox) = (Recorder::default(), Outbox::new(faults.parse().unwrap()));
    for psn in 0..COUNT as u32 {
        push(&mut outbox, &link, psn, Time(u64::from(psn)));
        outbox.flush(&link, Time(u64::from(psn)));
    }
    let end = Time(COUNT as u64) + Duration::from_secs(1);
    outbox.flush(&link, end);
    assert_eq!(outbox.wake_at(), None);
    link.packets().iter().map(|packet| link.has_valid_icrc(packet).then(|| parse_checked(packet.into()).0)).collect()
}

fn push(outbox: &mut Outbox, link: &Recorder, psn: u32, now: Time) {
    super::push(outbox, link, Recorder::PEER, psn, 100, now);
}

#[test]
#[cfg_attr(miri, ignore = "it sends many packets")]
fn drop_loses_packets() {
    let sent = sent("seed=1,drop=0.2");
    assert!((700..900).contains(&sent.len()), "{}", sent.len());
    assert!(sent.is_sorted() && sent.iter().all(Option::is_some));
}

#[test]
#[cfg_attr(miri, ignore = "it sends many packets")]
fn dup_duplicates_packets() {
    let sent = sent("seed=1,dup=0.2");
    assert!((COUNT + 100..COUNT + 300).contains(&sent.len()), "{}", sent.len());
    assert!(sent.is_sorted() && sent.iter().flatten().collect::<HashSet<_>>().len() == COUNT);
}

#[test]
#[cfg_attr(miri, ignore = "it sends many packets")]
fn reorder_moves_packets_by_a_few_places() {
    let sent = sent("seed=1,reorder=0.2");
    assert_eq!(sent.iter().flatten().collect::<HashSet<_>>().len(), COUNT);
    let late = sent.windows(2).filter(|two| two[0] > two[1]).count();
    assert!((50..250).contains(&late), "{late}");
    for (at, psn) in (0..).zip(sent) {
        assert!(psn.unwrap().abs_diff(at) <= 20, "{psn:?} at {at}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "it sends many packets")]
fn corrupt_damages_packets() {
    let sent = sent("seed=1,corrupt=0.2");
    let wrong = sent.iter().filter(|psn| psn.is_none()).count();
    // Damage to the byte that routers may change is not detected.
    assert!(sent.len() == COUNT && (100..300).contains(&wrong), "{wrong}");
}

#[test]
fn a_delayed_packet_is_sent_when_it_is_due() {
    let (link, mut outbox) = (Recorder::default(), Outbox::new("delay=50us".parse().unwrap()));
    for (psn, now) in [(0, Time(1000)), (1, Time(2000))] {
        push(&mut outbox, &link, psn, now);
        outbox.flush(&link, now);
    }
    assert!(link.packets().is_empty() && !outbox.is_blocked());
    assert_eq!(outbox.wake_at(), Some(Time(51_000)));
    outbox.flush(&link, Time(51_000));
    assert_eq!((link.packets().len(), outbox.wake_at()), (1, Some(Time(52_000))));
    outbox.flush(&link, Time(99_000));
    assert_eq!((link.packets().len(), outbox.wake_at()), (2, None));
}

#[test]
fn a_reordered_packet_that_nothing_overtakes_is_sent_after_a_millisecond() {
    let (link, mut outbox) = (Recorder::default(), Outbox::new("reorder=1".parse().unwrap()));
    push(&mut outbox, &link, 0, Time(5));
    outbox.flush(&link, Time(5));
    assert!(link.packets().is_empty());
    assert_eq!(outbox.wake_at(), Some(Time(1_000_005)));
    outbox.flush(&link, Time(1_000_005));
    assert_eq!((link.packets().len(), outbox.wake_at()), (1, None));
}

#[test]
fn a_seed_alone_causes_no_faults() {
    let (link, mut outbox) = (Recorder::default(), Outbox::new(Faults { seed: 3, ..Faults::default() }));
    for _ in 0..2 {
        super::push(&mut outbox, &link, Recorder::PEER, 0, LONG, Time(0));
    }
    outbox.flush(&link, Time(0));
    assert!(link.supports_gso() && link.messages() == 1);
}
