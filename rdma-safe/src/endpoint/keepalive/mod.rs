//! Detects that the peer of an idle connection is gone.
//!
//! The endpoint is checked at intervals of about a fifth of the time limit. Each check looks for completions since the
//! check before:
//!
//! | completions since the last check | in flight | action |
//! |---|---|---|
//! | some | – | the peer is alive |
//! | none | a signaled send | none: the transport retries that send, and fails it if no ACK arrives |
//! | none | no signaled send | post a probe: a write of zero bytes, which the peer's device acknowledges |
//! | none | a probe, for the second check in a row | the peer is gone, if the probe was the only work in flight |
//! | none | no signaled send, and the provider refuses the probe for the second check in a row | the device has failed |
//!
//! A probe behind unsignaled sends does not prove anything when it takes long: an earlier send may be waiting for a
//! receive of a peer that is alive. The transport tells the two apart, since it counts RNR NAKs and ACK timeouts
//! separately. So [`ack_timeout`] limits the transport's retries by the time limit.
//!
//! Each check follows a poll that found nothing, so no completion is overlooked. Time counts only while the program
//! polls or waits: after a pause of any length, the next check counts as one.

mod error;
mod pace;

use std::time::{Duration, Instant};

use super::completion::{Completion, Extra, Operation, WorkId};
use super::poll::Outcome;
use super::ring::Ring;
use super::{Live, Poster};
use crate::device::Quirks;
use crate::interface::Interface;
use crate::qp::{QueuePairAttributes, QueuePairState};
use crate::{Buffer, ConnectOptions, PostError, Remote, Sge, WcStatus, WorkRequest};

pub use error::{ConnectionLost, KeepaliveError};
pub(super) use pace::{Countdown, Pace};

/// Marks the `wr_id` of probes. Receives have the bit above it, and tickets of pools have both.
pub(super) const PROBE: u64 = 1 << 62;

/// Time limit of connections by address, unless it is set.
pub(super) const CM_DEFAULT: Duration = Duration::from_secs(10);

/// Shortest and longest time limit.
pub(super) const LIMITS: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(24 * 60 * 60)];

/// Number of checks without completions after which a probe has failed.
const WAITS: u8 = 2;

/// Number of checks in a row whose probe the provider refuses after which the connection has failed.
const REFUSALS: u8 = 2;

/// The keepalive of an endpoint.
pub(super) struct Keepalive {
    /// Time limit.
    within: Duration,
    /// Time between two checks. Four of them, each with a delay of up to [`slack`], take the time limit.
    interval: Duration,
    /// Whether the endpoint is connected and nothing has failed.
    watching: bool,
    /// Whether the connection manager has paused the keepalive, and nothing has failed since.
    paused: bool,
    /// Number of the peer's queue pair.
    peer: u32,
    /// Time of the next check of an endpoint that is not in a set.
    due: Option<Instant>,
    /// Not used in a set.
    pace: Pace,
    /// Number of completions at the last check.
    seen: u64,
    /// Completions that leave no trace in the rings: probes, and receives of a pool.
    others: u64,
    /// Number of probes.
    probes: u64,
    /// The probe in flight.
    probe: Option<Probe>,
    /// Number of probes in a row that the provider has refused.
    refusals: u8,
    /// Result of the keepalive that is to be handed out.
    report: Option<Outcome>,
    /// The report that was handed out.
    lost: Option<ConnectionLost>,
}

#[derive(Clone, Copy)]
struct Probe {
    wr_id: u64,
    /// Sequence number of the first send that is posted after it.
    next: u64,
    /// Whether no other send was in flight.
    is_alone: bool,
    /// Number of checks since then without completions.
    waits: u8,
}

/// The result of a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Check {
    /// Nothing to do.
    Pass,
    /// Post a probe.
    Probe,
    /// The peer is gone, or the device takes no probes.
    Lost,
}

impl Keepalive {
    pub(super) fn new(within: Duration) -> Self {
        Keepalive {
            within,
            interval: within * 3 / 16,
            watching: false,
            paused: false,
            peer: 0,
            due: None,
            pace: Pace::new(Instant::now(), slack(within)),
            seen: 0,
            others: 0,
            probes: 0,
            probe: None,
            refusals: 0,
            report: None,
            lost: None,
        }
    }

    /// The time limit.
    pub(super) fn within(&self) -> Duration {
        self.within
    }

    pub(super) fn set_peer(&mut self, qp_num: u32) {
        self.peer = qp_num;
    }

    /// Time between two checks.
    pub(super) fn interval(&self) -> Duration {
        self.interval
    }

    /// Starts when the queue pair is connected. The first check passes.
    fn start(&mut self, now: Instant) {
        (self.watching, self.paused) = (true, false);
        self.seen = u64::MAX;
        self.schedule(now);
    }

    /// Sets the time of the next check.
    fn schedule(&mut self, now: Instant) {
        self.due = now.checked_add(self.interval);
    }

    /// Ends the keepalive: the connection has failed.
    pub(super) fn end(&mut self) {
        (self.watching, self.paused) = (false, false);
        self.due = None;
    }

    /// Counts a completion that leaves no trace in the rings.
    #[inline(always)]
    pub(super) fn count(keepalive: &mut Option<Box<Keepalive>>) {
        if let Some(keepalive) = keepalive {
            keepalive.others = keepalive.others.wrapping_add(1);
        }
    }

    /// The report that was handed out.
    pub(super) fn lost(&self) -> Option<ConnectionLost> {
        self.lost
    }

    /// Whether a report is to be handed out.
    #[inline]
    pub(super) fn has_report(&self) -> bool {
        self.report.is_some()
    }

    /// Checks for completions since the last check. `count` is their number.
    fn check(&mut self, count: u64, sends: &mut Ring<Buffer>) -> Check {
        if !self.watching {
            return Check::Pass;
        }
        let heard = std::mem::replace(&mut self.seen, count) != count;
        if heard {
            self.refusals = 0;
        }
        // A later send has completed, so the provider has lost the completion of the probe.
        self.probe = self.probe.filter(|probe| sends.oldest() <= probe.next);
        match &mut self.probe {
            Some(probe) => {
                probe.waits = if heard { 0 } else { probe.waits.saturating_add(1) };
                if probe.is_alone && probe.waits >= WAITS { Check::Lost } else { Check::Pass }
            }
            None if heard || sends.awaits_completion() => Check::Pass,
            None => Check::Probe,
        }
    }

    /// Records the completion of a probe and of the unsignaled work before it.
    ///
    /// Returns `false` if no such probe is in flight, or if earlier work is signaled.
    pub(super) fn complete(&mut self, wr_id: u64, outcome: Outcome, sends: &mut Ring<Buffer>) -> bool {
        let Some(probe) = self.probe.take_if(|probe| probe.wr_id == wr_id) else { return false };
        self.others = self.others.wrapping_add(1);
        if !outcome.is_success() && self.watching {
            self.end();
            self.report = Some(outcome);
        }
        // As for other work: after a flush it is unknown whether earlier work was done.
        let flushed = (outcome.status == WcStatus::WR_FLUSH_ERR).then_some(outcome);
        sends.complete_before(probe.next, flushed)
    }

    /// A number that changes with each completion of the endpoint.
    fn completions(&self, sends: &Ring<Buffer>, receives: &Ring<Buffer>) -> u64 {
        sends.oldest().wrapping_add(receives.oldest()).wrapping_add(self.others)
    }

    /// Hands out the report, as failed work.
    fn take_report(&mut self) -> Option<Completion> {
        let report = self.report.take()?;
        // At most a day, so the number of milliseconds has less than 32 bits.
        let within = self.within.as_millis() as u32;
        let outcome = Outcome { extra: Extra::lost(within), ..report };
        let report = Completion::new(PROBE | u64::from(self.peer), Operation::Keepalive, None, outcome);
        self.lost = report.connection_lost();
        Some(report)
    }
}

/// Longest delay of a check that keeps the time limit.
pub(super) fn slack(within: Duration) -> Duration {
    within / 16
}

impl Live {
    /// Ends the keepalive: the connection has failed.
    pub(super) fn end_keepalive(&mut self) {
        if let Some(keepalive) = &mut self.keepalive {
            keepalive.end();
        }
    }
}

impl Completion {
    /// What the keepalive has found, if this completion is its report ([`Operation::Keepalive`]).
    ///
    /// The connection has ended. Work in flight completes as flushed.
    #[must_use]
    pub fn connection_lost(&self) -> Option<ConnectionLost> {
        let WorkId(id) = self.id;
        self.extra.lost_after().map(|millis| ConnectionLost {
            qp_num: (id & !PROBE) as u32,
            within: Duration::from_millis(millis.into()),
            status: self.status,
        })
    }
}

impl<I: Interface> Poster<I> {
    /// Starts the keepalive of a queue pair that has become connected.
    pub(super) fn start_keepalive(&mut self) {
        if let Some(keepalive) = &mut self.live.keepalive {
            keepalive.start(Instant::now());
            self.countdown = Countdown::NOW;
        }
    }

    /// Pauses the keepalive of a queue pair in RTS whose peer does not answer yet.
    pub(super) fn pause_keepalive(&mut self) {
        if let Some(keepalive) = self.live.keepalive.as_mut().filter(|keepalive| keepalive.watching) {
            keepalive.end();
            keepalive.paused = true;
        }
    }

    /// Starts a paused keepalive, unless the connection has failed meanwhile.
    pub(super) fn resume_keepalive(&mut self) {
        if self.live.keepalive.as_ref().is_some_and(|keepalive| keepalive.paused) {
            self.start_keepalive();
        }
    }

    /// Time of the next check of an endpoint that is not in a set.
    pub(super) fn keepalive_due(&self) -> Option<Instant> {
        self.live.keepalive.as_ref()?.due
    }

    /// Reads the clock, after a number of polls that found nothing, and checks the peer if it is time.
    // `extern "C"` because it does not unwind. With a Rust call, callers of `poll` would keep their values in memory.
    #[allow(improper_ctypes_definitions)]
    #[cold]
    #[inline(never)]
    pub(super) extern "C" fn check_peer_by_clock(&mut self) {
        let Some(keepalive) = &mut self.live.keepalive else { return };
        let now = Instant::now();
        self.countdown = keepalive.pace.read(now);
        self.check_peer_at(now);
    }

    /// Checks the peer of an endpoint that is not in a set, if it is time. No completion may be left in the queue.
    pub(super) fn check_peer_at(&mut self, now: Instant) {
        let Some(keepalive) =
            self.live.keepalive.as_mut().filter(|keepalive| keepalive.due.is_some_and(|due| due <= now))
        else {
            return;
        };
        keepalive.schedule(now);
        if self.check_peer() == Check::Lost {
            self.lose_peer();
        }
    }

    /// Checks the peer. Posts a probe if there was no completion since the last check.
    pub(super) fn check_peer(&mut self) -> Check {
        let Live { keepalive: Some(keepalive), sends, receives, .. } = &mut self.live else { return Check::Pass };
        let check = keepalive.check(keepalive.completions(sends, receives), sends);
        if check == Check::Probe { self.post_probe() } else { check }
    }

    /// Whether no completion was recorded since the last check.
    pub(super) fn is_still_silent(&self) -> bool {
        let Live { keepalive: Some(keepalive), sends, receives, .. } = &self.live else { return false };
        keepalive.watching && keepalive.seen == keepalive.completions(sends, receives)
    }

    /// Ends a connection whose peer is gone.
    pub(super) fn lose_peer(&mut self) {
        if let Some(keepalive) = &mut self.live.keepalive {
            let status = if keepalive.refusals < REFUSALS { WcStatus::RESP_TIMEOUT_ERR } else { WcStatus::FATAL_ERR };
            keepalive.report = Some(Outcome { status, ..Outcome::DONE });
        }
        self.poison();
    }

    /// Posts a signaled write of zero bytes. The send queue has an entry for it.
    ///
    /// Returns [`Check::Lost`] if the provider has refused it too often.
    fn post_probe(&mut self) -> Check {
        self.abort_batch();
        let Some(keepalive) = &mut self.live.keepalive else { return Check::Pass };
        let wr_id = PROBE | (keepalive.probes + 1);
        let sends = &self.live.sends;
        let probe = Probe { wr_id, next: sends.posted(), is_alone: !sends.has_posted(), waits: 0 };
        let posted = self.live.qp.send_batch().and_then(|mut batch| {
            let (wr, nothing) = (WorkRequest::new(wr_id).signaled(), &[][..] as &[Sge]);
            // SAFETY: it has no local memory, and no byte of the peer's memory is written.
            unsafe { batch.write(wr, Remote { address: 0, rkey: 0 }, nothing)? };
            batch.post()
        });
        if posted.is_ok() || matches!(posted, Err(PostError::MaybePosted { .. })) {
            keepalive.probes += 1;
            keepalive.probe = Some(probe);
            keepalive.refusals = 0;
            return Check::Probe;
        }
        // It was surely not posted. The next check tries again.
        keepalive.refusals += 1;
        if keepalive.refusals < REFUSALS { Check::Probe } else { Check::Lost }
    }

    /// Hands out the report of the keepalive. The endpoint then takes no more work.
    pub(super) fn take_keepalive_report(&mut self) -> Option<Completion> {
        let report = self.live.keepalive.as_mut()?.take_report()?;
        self.mark_poisoned();
        Some(report)
    }

    /// Lowers the ACK timeout of a queue pair that is about to be connected, so that the retries end within the time limit.
    pub(super) fn limit_ack_timeout(&self, attributes: &QueuePairAttributes) -> QueuePairAttributes {
        let (Some(keepalive), Some(timeout)) = (&self.live.keepalive, attributes.timeout()) else {
            return *attributes;
        };
        // Attributes with a timeout and without a number of retries change a connected queue pair.
        let Some(retries) = attributes.retry_count() else { return *attributes };
        attributes.set_timeout(self.lower(timeout, keepalive.within(), retries))
    }

    /// Like [`Poster::limit_ack_timeout`], for the options of a connection by exchanged addresses.
    pub(super) fn limit_retries(&self, options: &ConnectOptions) -> ConnectOptions {
        match &self.live.keepalive {
            Some(keepalive) => options.map_timeout(|timeout, retries| self.lower(timeout, keepalive.within(), retries)),
            None => *options,
        }
    }

    fn lower(&self, timeout: u8, within: Duration, retries: u8) -> u8 {
        // SoftRoCE keeps the time exactly. On kernel 6.1 its ACK timeout also runs during RNR retries, so it should not be
        // shorter than necessary.
        let quirks = self.live.qp.context().quirks();
        let most = ack_timeout(within, retries, !quirks.contains(Quirks::MISSING_RECEIVES_TIME_OUT));
        // 0 waits forever.
        if timeout == 0 { most } else { timeout.min(most) }
    }

    /// Prepares the keepalive for attributes that were set, and starts or ends it.
    pub(super) fn follow(&mut self, attributes: &QueuePairAttributes) {
        if let (Some(keepalive), Some(peer)) = (&mut self.live.keepalive, attributes.dest_qp_num()) {
            keepalive.set_peer(peer);
        }
        match attributes.state() {
            Some(QueuePairState::RTS) => self.start_keepalive(),
            Some(QueuePairState::ERR | QueuePairState::RESET) => self.live.end_keepalive(),
            _ => {}
        }
    }
}

/// Largest exponent of the ACK timeout with which a send to a lost peer fails within the time limit, 1 to 31.
///
/// A send fails after `retries` + 1 timeouts of 4.096 µs · 2^exponent. By the specification a timeout may take four times as
/// long, unless the device `may_stretch` it less.
fn ack_timeout(within: Duration, retries: u8, may_stretch: bool) -> u8 {
    let timeouts = (u128::from(retries) + 1) * if may_stretch { 4 } else { 1 };
    let fits = |exponent: &u8| (4096_u128 << exponent) * timeouts <= within.as_nanos();
    (1..=31).rev().find(fits).unwrap_or(1)
}

#[cfg(test)]
mod tests;
