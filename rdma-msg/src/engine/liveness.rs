//! Whether the program of the peer still runs.
//!
//! The device answers the keepalive of the connection even if the program is stopped or hangs. So the programs exchange heartbeats.
//! The passive side sends the first one when it starts, and answers each at once. Before that, its program may not have accepted
//! the connection yet, and is not judged.

use std::time::Duration;

use super::Engine;
use super::timer::Timer;
use crate::error::Error;
use crate::flow::Counts;

/// Checks within the shorter keepalive of the two ends. The active side sends a heartbeat with each.
const CHECKS: u32 = 5;

/// The shortest keepalive in use, so that a peer cannot keep this end busy.
const MIN_KEEPALIVE: Duration = Duration::from_millis(100);

/// Checks now and then whether the peer has sent something, and sends heartbeats.
pub(super) struct Liveness {
    timer: Timer,
    /// Time between two checks. `None` if neither end has a keepalive.
    interval: Option<Duration>,
    /// The keepalive of this end, and the number of silent checks after which it has expired.
    patience: Option<(Duration, u32)>,
    /// Checks since the peer has sent something.
    silent: u32,
    /// Packets that had arrived at the last check.
    arrived_before: u64,
    /// Whether to send a heartbeat when it is the turn of this end.
    is_due: bool,
}

impl Liveness {
    /// `keepalives` are those of this end and of the peer.
    pub(super) fn new(timer: Timer, keepalives: [Option<Duration>; 2]) -> Self {
        let keepalives = keepalives.map(|time| time.map(|time| time.max(MIN_KEEPALIVE)));
        let interval = keepalives.into_iter().flatten().min().map(|time| time / CHECKS);
        let patience = keepalives[0].zip(interval).map(|(within, interval)| {
            (within, u32::try_from(within.as_nanos().div_ceil(interval.as_nanos())).unwrap_or(u32::MAX))
        });
        Liveness { timer, interval, patience, silent: 0, arrived_before: 0, is_due: false }
    }
}

impl Engine {
    /// Arms the timer of the next check.
    pub(super) fn arm_liveness_timer(&mut self) {
        if let Some(interval) = self.liveness.interval {
            self.liveness.timer.arm(interval);
        }
    }

    /// Ends the connection if the peer has been silent for too long.
    pub(super) fn check_peer(&mut self) {
        if !self.liveness.timer.take_fired() {
            return;
        }
        let (arrived, liveness) = (self.counts.arrived, &mut self.liveness);
        let is_silent = arrived != 0 && arrived == liveness.arrived_before;
        liveness.silent = if is_silent { liveness.silent + 1 } else { 0 };
        liveness.arrived_before = arrived;
        liveness.is_due = true;
        if let Some((within, _)) = liveness.patience.filter(|(_, checks)| liveness.silent >= *checks) {
            self.end(Error::Unresponsive(within));
        }
    }

    /// The counts for a heartbeat, if one is due.
    pub(super) fn due_heartbeat(&mut self) -> Option<Counts> {
        let Liveness { interval, is_due, .. } = self.liveness;
        let is_due = if self.flow.is_active() { is_due } else { interval.is_some() };
        let counts = if is_due { self.flow.heartbeat() } else { None }?;
        self.liveness.is_due = false;
        Some(counts)
    }
}
