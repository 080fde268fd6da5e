//! Explores the state machines of the connection manager: breadth-first with faults up to a bound, and with random faults.
//!
//! `RDMA_TEST_SCALE=full` explores the states of a handshake and its end with all faults, and 100 000 random runs.
//! `RDMA_TEST_SCALE=soak` has higher bounds of faults, and 3 000 000 random runs. If another test covers a test at one of these
//! scales, the latter prints the name of the former. `RDMA_TEST_SEED` replays a random run.

#[path = "../cm_support/mod.rs"]
#[allow(dead_code)]
mod support;

mod invariants;

mod random;
mod search;
mod world;

use std::time::Duration;

use rdma_soft::cm::{Backoff, Config};
use rdma_soft::wire::cm::timeout;

use crate::search::{Report, search};
use crate::support::host::{Op, Stage};
use crate::support::plant::Plant;
use crate::support::{SERVICE_TIMEOUT, Scale, scale};
use crate::world::{Faults, Settings};

/// Retransmissions. With one more transmission than losses, one of them arrives.
const RETRIES: u8 = 2;

const NONE: Faults = Faults { losses: 0, duplicates: 0, delays: 0, crashes: 0, early: 0 };

/// Two losses, a duplicate, a delay and a crash.
const ALL: Faults = Faults { losses: 2, duplicates: 1, delays: 1, crashes: 1, early: 0 };

/// One connection, whose ends do all that a program can do.
fn one(faults: Faults) -> Settings {
    // An MRA permits one more retransmission. Outside of `willing`, the order of timers does not depend on their times.
    let interval = timeout(SERVICE_TIMEOUT);
    let backoff = Backoff { first: interval, longest: interval, retries: RETRIES };
    Settings {
        config: Config { backoff, ..Config::new(0, 0x5eed) },
        plant: Plant::None,
        starts: [1, 0],
        is_sequential: false,
        is_eager: false,
        looks_up: false,
        may: |_, _| true,
        faults,
        must_connect: false,
    }
}

/// Whether an orderly program takes this step: it establishes each connection, ends some of them, and abandons none.
fn is_orderly(stage: Stage, op: Op) -> bool {
    match stage {
        Stage::Requested => op == Op::Accept,
        Stage::Replied => op == Op::Establish,
        Stage::Established => matches!(op, Op::Send | Op::Disconnect),
        Stage::Ended { .. } => op == Op::Release,
        Stage::Connecting | Stage::Accepted | Stage::Disconnecting => false,
    }
}

/// Two connections, one after the other. The second one reuses the queue pair numbers of the first one as soon as it may.
fn two(faults: Faults) -> Settings {
    Settings { starts: [2, 0], is_sequential: true, is_eager: true, may: is_orderly, ..one(faults) }
}

/// Both hosts connect to each other at the same time.
fn crossing(faults: Faults) -> Settings {
    Settings { starts: [1, 1], may: is_orderly, ..one(faults) }
}

/// The programs want the connection, and do not end it.
fn willing(faults: Faults) -> Settings {
    let may = |stage, op| is_orderly(stage, op) && stage != Stage::Established;
    let mut settings = Settings { must_connect: true, may, ..one(faults) };
    let [first, longest] = [1, 1000].map(Duration::from_millis);
    settings.config.backoff = Backoff { first, longest, retries: RETRIES };
    settings
}

/// What a test explores at a scale.
enum Extent {
    Of(Settings),
    /// Nothing, because the test with this name explores these states and more.
    CoveredBy(&'static str),
}

/// Explores the settings for the scale of this run, and panics if a rule is broken.
fn explore(name: &str, quick: Settings, full: Extent, soak: Extent) {
    let extent = match scale() {
        Scale::Quick => Extent::Of(quick),
        Scale::Full => full,
        Scale::Soak => soak,
    };
    let settings = match extent {
        Extent::Of(settings) => settings,
        Extent::CoveredBy(test) => return println!("{name}: covered by {test}"),
    };
    let (looks_up, must_connect) = (settings.looks_up, settings.must_connect);
    let Report { counterexample, quiescent, .. } = search(name, settings);
    if let Some(trace) = counterexample {
        panic!("{name}:\n{trace}");
    }
    let [with, without] = quiescent.map(|count| count > 0);
    assert!((with || looks_up) && (without || must_connect), "{name}: {quiescent:?}");
}

#[test]
fn both_sides_of_a_connection_reach_the_same_verdict() {
    let quick = one(Faults { losses: 1, delays: 1, ..NONE });
    let soak = Extent::CoveredBy("a_restarted_host_leaves_no_half_open_connection");
    explore("one connection", quick, Extent::Of(one(ALL)), soak);
}

#[test]
fn a_restarted_host_leaves_no_half_open_connection() {
    let quick = one(Faults { crashes: 1, ..NONE });
    let full = Extent::CoveredBy("both_sides_of_a_connection_reach_the_same_verdict");
    explore("one connection and a crash", quick, full, Extent::Of(one(Faults { crashes: 2, ..ALL })));
}

#[test]
fn timers_expire_before_messages_arrive() {
    let quick = one(Faults { early: 1, ..NONE });
    let full = one(Faults { losses: 2, duplicates: 1, early: 2, ..NONE });
    explore("early timers", quick, Extent::Of(full), Extent::Of(one(Faults { early: 1, ..ALL })));
}

#[test]
fn timers_expire_at_any_time() {
    let settings = |losses, retries| {
        let mut settings = one(Faults { losses, early: u8::MAX, ..NONE });
        settings.config.backoff.retries = retries;
        settings
    };
    let mut quick = settings(0, 1);
    quick.may = is_orderly;
    explore("timers at any time", quick, Extent::Of(settings(1, 1)), Extent::Of(settings(0, 2)));
}

#[test]
fn no_reused_queue_pair_meets_an_old_connection() {
    let full = two(Faults { losses: 1, delays: 1, crashes: 1, ..NONE });
    explore("two connections", two(Faults { delays: 1, ..NONE }), Extent::Of(full), Extent::Of(two(ALL)));
}

#[test]
fn a_reused_queue_pair_meets_no_late_packet() {
    let full = two(Faults { crashes: 0, ..ALL });
    let soak = Extent::CoveredBy("no_reused_queue_pair_meets_an_old_connection");
    explore("two connections without a crash", two(Faults { losses: 1, ..NONE }), Extent::Of(full), soak);
}

#[test]
fn connections_in_both_directions_do_not_mix() {
    let full = crossing(Faults { losses: 1, ..NONE });
    let soak = crossing(Faults { losses: 1, crashes: 1, ..NONE });
    let quick = Settings { is_eager: true, ..crossing(NONE) };
    explore("two directions", quick, Extent::Of(full), Extent::Of(soak));
}

#[test]
fn two_losses_do_not_prevent_a_connection() {
    let all = || Extent::Of(willing(Faults { losses: 2, duplicates: 1, ..NONE }));
    explore("willing programs", willing(Faults { losses: 1, ..NONE }), all(), all());
}

#[test]
fn lookups_end_once() {
    let settings = |faults| Settings { looks_up: true, ..one(faults) };
    let quick = settings(Faults { losses: 1, duplicates: 1, ..NONE });
    let all = || Extent::Of(settings(Faults { early: 2, ..ALL }));
    explore("lookups", quick, all(), all());
}

/// Plants a fault in sound settings. The explorer finds it, and its counterexample contains `expected`.
fn find(plant: Plant, settings: Settings, expected: &str) {
    let name = format!("planted fault {plant:?}");
    if scale() != Scale::Quick {
        let sound = search(&format!("without the {name}"), settings.clone());
        assert_eq!(sound.counterexample, None, "without the {name}");
    }
    let report = search(&name, Settings { plant, ..settings });
    let trace = report.counterexample.unwrap_or_else(|| panic!("{name} is not found"));
    println!("{trace}\n");
    assert!(trace.contains(expected), "{name}:\n{trace}");
    assert!(trace.lines().count() > 5, "{name}:\n{trace}");
}

#[test]
fn the_explorer_finds_that_timewait_ends_at_once() {
    find(Plant::NoTimewait, two(Faults { delays: 1, ..NONE }), "reused queue pair");
}

#[test]
fn the_explorer_finds_that_a_duplicate_rep_is_not_answered() {
    find(Plant::NoRtuAgain, willing(Faults { losses: 1, ..NONE }), "has no connection");
}

#[test]
fn the_explorer_finds_that_a_dreq_is_not_retransmitted() {
    find(Plant::DreqOnce, one(Faults { losses: 1, ..NONE }), "half-open");
}

#[test]
fn the_explorer_finds_that_a_dreq_before_the_rep_is_forgotten() {
    let may = |stage, op| is_orderly(stage, op) && op != Op::Send || (stage, op) == (Stage::Accepted, Op::Release);
    find(Plant::DreqForgotten, Settings { may, ..one(Faults { losses: 2, delays: 1, ..NONE }) }, "half-open");
}

#[test]
fn the_explorer_finds_that_a_restarted_host_reuses_its_identity() {
    let settings = one(Faults { crashes: 1, delays: 1, ..NONE });
    find(Plant::SameIdentity, settings, "an old connection uses the queue pair number of another connection");
}
