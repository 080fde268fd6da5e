//! Whether the program of the peer still runs.
//!
//! The keepalive of the connection tells whether the device of the peer answers. A program that is stopped or hangs has a device
//! that answers, so programs exchange probes.

use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use rdma_async::Deadline;

use super::Engine;
use crate::error::Error;
use crate::flow::Counts;
use crate::wire::Keepalive;

/// Looks in the shorter of the times within which the ends want to hear from each other.
const LOOKS: u32 = 5;

/// Looks now and then whether the peer has sent something, and sends probes.
pub(super) struct Alive {
    deadline: Deadline,
    waker: Waker,
    /// Time between two looks. `None` if the peer does not answer probes, or if neither end wants to know.
    interval: Option<Duration>,
    /// The next look.
    next: Option<Instant>,
    /// The time within which this end wants to hear from the peer, and the number of silent looks after which it has passed.
    patience: Option<(Duration, u32)>,
    /// Looks since the peer has sent something.
    silent: u32,
    /// Packets heard and sent before the last look.
    before: [u64; 2],
    /// Whether to send the probe when it is at this end.
    is_due: bool,
    /// Whether this end sends the probe back at once.
    answers: bool,
}

impl Alive {
    pub(super) fn new(deadline: Deadline, waker: Waker, keepalives: [Keepalive; 2], has_connected: bool) -> Self {
        let [own, peer] = keepalives.map(|keepalive| match keepalive {
            Keepalive::Within(time) => Some(time),
            Keepalive::Any | Keepalive::Unknown => None,
        });
        let shorter = own.into_iter().chain(peer).min().filter(|_| keepalives[1] != Keepalive::Unknown);
        let interval = shorter.map(|time| (time / LOOKS).max(Duration::from_micros(100)));
        let patience = own.zip(interval).map(|(within, interval)| {
            // The peer may have sent something up to one interval before the first silent look.
            let looks = (within.as_nanos() / interval.as_nanos()).saturating_sub(1).max(1);
            (within, u32::try_from(looks).unwrap_or(u32::MAX))
        });
        Alive {
            deadline,
            waker,
            interval,
            next: None,
            patience,
            silent: 0,
            before: [0; 2],
            is_due: false,
            answers: !has_connected,
        }
    }
}

impl Engine {
    /// Looks later, unless that is decided.
    pub(super) fn watch(&mut self) {
        let Alive { deadline, waker, interval: Some(interval), next: next @ None, .. } = &mut self.alive else {
            return;
        };
        let until = Instant::now() + *interval;
        if deadline.poll(until, &mut Context::from_waker(waker)).is_pending() {
            *next = Some(until);
        }
    }

    /// Looks whether the peer has sent something, if it is time.
    pub(super) fn look_for_life(&mut self) {
        if self.ended.is_some() || self.alive.next.is_none_or(|next| Instant::now() < next) {
            return;
        }
        let now = [self.counts.heard, self.counts.posted];
        let alive = &mut self.alive;
        alive.next = None;
        let [is_silent, has_been_silent] = [0, 1].map(|index| now[index] == alive.before[index]);
        alive.silent = if is_silent { alive.silent + 1 } else { 0 };
        alive.before = now;
        alive.is_due |= is_silent || has_been_silent;
        if let Some((within, _)) = alive.patience.filter(|(_, looks)| alive.silent >= *looks) {
            self.end(Error::Unresponsive(within));
        }
    }

    /// The counts for a probe, if one is due.
    pub(super) fn due_probe(&mut self) -> Option<Counts> {
        let Alive { answers, is_due, .. } = self.alive;
        let counts = if answers || is_due { self.flow.probe() } else { None }?;
        self.alive.is_due = false;
        Some(counts)
    }

    /// The time has come to look at something.
    pub(crate) fn look(&mut self) {
        self.look_for_life();
        self.look_for_idleness();
    }
}
