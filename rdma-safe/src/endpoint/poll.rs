//! Polling an endpoint.

use std::time::{Duration, Instant};

use super::builder::FIELDS;
use super::completion::Extra;
use super::gates::Gates;
use super::keepalive::{Keepalive, PROBE};
use super::poll_each::take_sent;
use super::ring::{Done, Ring};
use super::wait::{self, Waitable};
use super::{Armed, Completion, Endpoint, Live, Operation, Poster, RECEIVE, SlowResults, WorkId};
use rdma_sys::ibv_wc;

use crate::address::Grh;
use crate::cq::OpenPoll;
use crate::interface::Interface;
use crate::srq::Slab;
use crate::{Buffer, CompletionQueue, Error, PollError, Result, WcFlags, WcOpcode, WcStatus, WorkCompletion};

/// How work ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Outcome {
    pub(super) status: WcStatus,
    pub(super) vendor_error: u32,
    pub(super) byte_len: u32,
    pub(super) extra: Extra,
    pub(super) timestamp: Option<u64>,
    /// The actual operation, if it differs from the one assumed at posting.
    pub(super) operation: Option<Operation>,
}

impl<I: Interface> Endpoint<I> {
    /// Takes one piece of completed work, if there is any. Never waits.
    ///
    /// Sends complete in the order in which they were posted, and so do receives. There is no order between the two.
    ///
    /// # Errors
    /// [`PollError`] when the provider failed. The endpoint is then unusable, and [`Endpoint::close`] returns the
    /// buffers.
    #[inline(always)]
    pub fn poll(&mut self) -> Result<Option<Completion>, PollError> {
        self.poll_with(|completion| completion)
    }

    /// Like [`Endpoint::poll`], but passes the completed work to `f` and returns its result.
    ///
    /// It exists for loops that use only some of the fields: the completion is then not assembled in memory.
    ///
    /// # Errors
    /// Like [`Endpoint::poll`].
    #[inline(always)]
    pub fn poll_with<R>(&mut self, f: impl FnOnce(Completion) -> R) -> Result<Option<R>, PollError> {
        if !self.poster.gates.poll {
            let found = self.poll_slowly();
            return self.slow_poll_result(found, f);
        }
        if I::EXTENDED.unwrap_or_else(|| self.cq.is_extended()) {
            // SAFETY: the queue is extended. It is polled only here and in `poll_queue`, and each of these polls is ended.
            // Only the queue pair of this endpoint completes to it. That queue pair is not modified or destroyed here, nor by
            // code of the user, which cannot reach it while this endpoint is borrowed (see `cq/owned.rs`). `take_fast` ends
            // the poll before it calls `f`.
            let Some(open) = (unsafe { self.cq.start_poll() })? else { return self.found_nothing() };
            let current = EndpointCompletion(open);
            return match take_fast(&mut self.poster.live.sends, &mut self.poster.live.receives, current, f) {
                Ok(seen) => Ok(Some(seen)),
                Err((EndpointCompletion(open), f)) => {
                    let found = self.poll_recording(open);
                    self.slow_poll_result(found, f)
                }
            };
        }
        // SAFETY: the queue is a classic one.
        let Some(row) = (unsafe { self.cq.next_row() })? else { return self.found_nothing() };
        match take_fast(&mut self.poster.live.sends, &mut self.poster.live.receives, row, f) {
            Ok(seen) => Ok(Some(seen)),
            Err((row, f)) => {
                let row = row.row();
                let found = self.poll_recording_row(row);
                self.slow_poll_result(found, f)
            }
        }
    }

    /// Ends a poll that found nothing. Some of them check the peer, whose loss the next poll reports.
    #[inline(always)]
    pub(super) fn found_nothing<R>(&mut self) -> Result<Option<R>, PollError> {
        if self.poster.countdown.count() {
            self.poster.check_peer_by_clock();
        }
        Ok(None)
    }

    /// Returns the result of a slow-path poll.
    #[inline(always)]
    pub(super) fn slow_poll_result<R>(
        &mut self,
        found: SlowPoll,
        f: impl FnOnce(Completion) -> R,
    ) -> Result<Option<R>, PollError> {
        match found {
            SlowPoll::Nothing => Ok(None),
            SlowPoll::Failure => Err(self.poster.slow.failure),
            SlowPoll::Completion => match self.poster.slow.completion.take() {
                Some(completion) => Ok(Some(f(completion))),
                None => Ok(None),
            },
        }
    }

    /// The slow path of [`Endpoint::poll`].
    #[cold]
    #[inline(never)]
    fn poll_slowly(&mut self) -> SlowPoll {
        loop {
            let completion = self.poster.pop();
            // Polling stays on the slow path while there is anything else to hand out.
            self.poster.open_gates();
            self.poster.slow.completion = completion;
            if self.poster.slow.completion.is_some() {
                return SlowPoll::Completion;
            }
            if self.poster.has_completed() {
                // Opening the gates flushed pending sends.
                continue;
            }
            match self.poll_queue() {
                Ok(true) => {}
                Ok(false) => {
                    if self.poster.countdown.count() {
                        self.poster.check_peer_by_clock();
                    }
                    if !self.poster.has_completed() {
                        return SlowPoll::Nothing;
                    }
                }
                Err(error) => {
                    self.poster.slow.failure = error;
                    return SlowPoll::Failure;
                }
            }
        }
    }

    /// The slow path of [`Endpoint::poll`] after it found a completion that the fast path does not handle.
    ///
    /// Records that completion, then hands out the oldest completed work, which may be older or, if that completion is
    /// silent, newer.
    #[cold]
    #[inline(never)]
    pub(super) fn poll_recording(&mut self, open: OpenPoll) -> SlowPoll {
        // SAFETY: the queue of an endpoint has these fields.
        let found = unsafe { open.completion(FIELDS) };
        let recorded = record(&mut self.poster.live, &mut self.poster.slow, found);
        drop(open);
        self.poll_recorded(recorded)
    }

    /// Like [`Endpoint::poll_recording`], for a row that was just taken from `self.cq`.
    #[cold]
    #[inline(never)]
    pub(super) fn poll_recording_row(&mut self, row: *const ibv_wc) -> SlowPoll {
        // SAFETY: the row is still valid, because the queue has not been polled since.
        let found = unsafe { WorkCompletion::classic(&*row) };
        let recorded = record(&mut self.poster.live, &mut self.poster.slow, found);
        self.poll_recorded(recorded)
    }

    fn poll_recorded(&mut self, recorded: Result<(), PollError>) -> SlowPoll {
        let Err(error) = recorded else { return self.poll_slowly() };
        self.poster.mark_poisoned();
        self.poster.slow.failure = error;
        SlowPoll::Failure
    }

    /// Takes one completion out of the queue, if there is any, and records it in its ring.
    #[inline(never)]
    fn poll_queue(&mut self) -> Result<bool, PollError> {
        let Endpoint { cq, poster: Poster { live, slow, .. } } = self;
        let fields = cq.fields();
        let recorded = if cq.is_extended() {
            // SAFETY: as in `poll_with`. Recording a completion does not change the queue pair. It moves buffers and drops none,
            // and if it ran code of the user, that could reach neither the queue nor the queue pair: this borrows both.
            let Some(open) = (unsafe { cq.start_poll() })? else { return Ok(false) };
            // SAFETY: these are the fields of the queue.
            record(live, slow, unsafe { open.completion(fields) })
        } else {
            // SAFETY: the queue is a classic one.
            let Some(found) = (unsafe { cq.next_row() })? else { return Ok(false) };
            record(live, slow, found)
        };
        recorded.inspect_err(|_| self.poster.mark_poisoned())?;
        Ok(true)
    }

    /// Waits until a piece of work has completed, for `timeout` at most.
    ///
    /// Spins, or sleeps until there is an event if the endpoint was built with
    /// [`EndpointBuilder::events`](crate::EndpointBuilder::events).
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::Poll`]; [`Error::Channel`]; [`Error::ConnectionLost`] when the keepalive has reported
    /// the loss of the connection before and no work is in flight.
    #[inline]
    pub fn wait(&mut self, timeout: Duration) -> Result<Completion> {
        // Poll before reading the clock, which costs as much as a poll.
        match self.poll() {
            Ok(Some(completion)) => Ok(completion),
            Ok(None) => wait::wait(self, timeout),
            Err(error) => Err(error.into()),
        }
    }

    /// Requests an event for the next completion, unless completions are available already.
    ///
    /// First takes all pending events from the channel, so no other code has to read them. [`Armed`] says whether to
    /// wait for the channel or to poll again, and shows the loop.
    ///
    /// # Errors
    /// [`Error::NoChannel`] without [`EndpointBuilder::events`](crate::EndpointBuilder::events);
    /// [`Error::Verb`]; [`Error::Poll`].
    #[inline]
    pub fn arm(&mut self) -> Result<Armed> {
        if let Some(channel) = self.cq.channel() {
            while channel.take_event()?.is_some() {}
        }
        // Ends a forgotten batch, which may hold a lock that arming needs.
        self.poster.open_gates();
        let armed = self.arm_recording();
        // Completions may have been recorded, also if arming has failed.
        self.poster.open_gates();
        armed.map(|()| Armed::with(self.poster.has_completed()))
    }

    /// Arms the queue, and records completions in the rings.
    fn arm_recording(&mut self) -> Result<()> {
        if self.poster.keepalive_due().is_some() {
            // An endpoint that sleeps on its channel polls seldom, so the clock is read each time. A probe is posted before
            // arming, so its completion raises an event.
            while !self.poster.has_completed() && self.poll_queue()? {}
            self.poster.check_peer_at(Instant::now());
        }
        self.cq.arm(false)?;
        // Completions from before arming raise no event. The user gets none for a probe.
        while !self.poster.has_completed() && self.poll_queue()? {}
        Ok(())
    }
}

impl<I: Interface> Waitable for Endpoint<I> {
    type Done = Completion;

    fn poll_once(&mut self) -> Result<Option<Completion>, PollError> {
        self.poll()
    }

    fn queue(&mut self) -> &mut CompletionQueue {
        &mut self.cq
    }

    fn check_peers(&mut self, now: Instant) -> Option<Instant> {
        self.poster.check_peer_at(now);
        if self.poster.has_completed() { Some(now) } else { self.poster.keepalive_due() }
    }

    fn ended(&self) -> Option<Error> {
        let lost = self.poster.live.keepalive.as_ref()?.lost()?;
        (self.sends_in_flight() + self.receives_in_flight() == 0).then(|| lost.into())
    }
}

impl<I: Interface> Poster<I> {
    #[inline]
    pub(super) fn has_completed(&self) -> bool {
        let Live { sends, receives, keepalive, .. } = &self.live;
        sends.has_completed()
            || receives.has_completed()
            || self.slow.completion.is_some()
            || keepalive.as_ref().is_some_and(|keepalive| keepalive.has_report())
    }

    /// Hands out completed work.
    pub(super) fn pop(&mut self) -> Option<Completion> {
        if let Some(report) = self.take_keepalive_report() {
            return Some(report);
        }
        if let Some(shared) = self.slow.completion.take() {
            return Some(shared);
        }
        let done = match self.live.sends.pop() {
            Some(done) => done,
            None => self.live.receives.pop()?,
        };
        let Done { sequence, buffer, mut list, operation, user_data, mut outcome } = done;
        match (&mut list, operation) {
            _ if !outcome.is_success() => {}
            (None, Operation::Read | Operation::Atomic) => {
                // Covers unsignaled work, for which the provider reported no length.
                outcome.byte_len = buffer.as_ref().map_or(0, |buffer| buffer.len() as u32);
            }
            (Some(list), Operation::Read) => outcome.byte_len = list.byte_len() as u32,
            (Some(list), Operation::Receive) => outcome.byte_len = list.set_received(outcome.byte_len),
            (Some(list), Operation::ReceiveWrite) => _ = list.set_received(0),
            _ => {}
        }
        Some(Completion { list, user_data, ..Completion::new(sequence, operation, buffer, outcome) })
    }

    /// Stops posting: the provider no longer behaves as expected.
    pub(super) fn mark_poisoned(&mut self) {
        self.poisoned = true;
        self.gates = Gates::SHUT;
        self.live.end_keepalive();
    }
}

/// A completion that can be read until the value is dropped.
pub(super) trait CurrentCompletion {
    /// The completion must have [`FIELDS`].
    fn completion(&self) -> WorkCompletion<'_>;
}

/// The current completion of an endpoint's extended queue.
pub(super) struct EndpointCompletion(pub(super) OpenPoll);

impl CurrentCompletion for EndpointCompletion {
    #[inline(always)]
    fn completion(&self) -> WorkCompletion<'_> {
        // SAFETY: the queue of an endpoint has these fields.
        unsafe { self.0.completion(FIELDS) }
    }
}

impl CurrentCompletion for WorkCompletion<'_> {
    #[inline(always)]
    fn completion(&self) -> WorkCompletion<'_> {
        self.reborrow()
    }
}

/// Result of a slow-path poll. The details are in [`SlowResults`](super::SlowResults).
#[derive(Clone, Copy)]
pub(super) enum SlowPoll {
    Nothing,
    Completion,
    Failure,
}

/// The fast path: the completion belongs to the oldest work of its ring, and that work succeeded.
///
/// Passes the work to `f`. Any other completion is returned, with nothing changed.
// Each branch calls `f` separately, so that the compiler can specialize it.
#[inline(always)]
pub(super) fn take_fast<S: CurrentCompletion, F: FnOnce(Completion) -> R, R>(
    sends: &mut Ring<Buffer>,
    receives: &mut Ring<Buffer>,
    current: S,
    f: F,
) -> Result<R, (S, F)> {
    let found = current.completion();
    if found.status() != WcStatus::SUCCESS {
        return Err((current, f));
    }
    let id = found.wr_id();
    if id == sends.oldest() {
        let Some(sent) = take_sent(sends, &found) else { return Err((current, f)) };
        drop(current);
        return Ok(f(sent.into()));
    }
    if id != receives.oldest() {
        return Err((current, f));
    }
    let flags = found.flags();
    // A write that consumes a receive carries immediate data, so receives without it need no check of their opcode.
    if !flags.intersects(WcFlags::WITH_IMM | WcFlags::WITH_INV) {
        let Some(mut buffer) = receives.take_oldest() else { return Err((current, f)) };
        buffer.set_len_within(found.byte_len().unwrap_or(0));
        drop(current);
        let outcome = Outcome { byte_len: buffer.len() as u32, ..Outcome::DONE };
        return Ok(f(Completion::new(id, Operation::Receive, Some(buffer), outcome)));
    }
    if flags.contains(WcFlags::WITH_INV) {
        return Err((current, f));
    }
    if found.opcode() == WcOpcode::RECV {
        let Some(mut buffer) = receives.take_oldest() else { return Err((current, f)) };
        buffer.set_len_within(found.byte_len().unwrap_or(0));
        let extra = Extra { flags: WcFlags::WITH_IMM, number: found.imm_or_key() };
        drop(current);
        let outcome = Outcome { byte_len: buffer.len() as u32, extra, ..Outcome::DONE };
        return Ok(f(Completion::new(id, Operation::Receive, Some(buffer), outcome)));
    }
    if found.opcode() != WcOpcode::RECV_RDMA_WITH_IMM {
        return Err((current, f));
    }
    let Some(mut buffer) = receives.take_oldest() else { return Err((current, f)) };
    buffer.set_len_within(0);
    let extra = Extra { flags: WcFlags::WITH_IMM, number: found.imm_or_key() };
    let outcome = Outcome { byte_len: found.byte_len().unwrap_or(0), extra, ..Outcome::DONE };
    drop(current);
    Ok(f(Completion::new(id, Operation::ReceiveWrite, Some(buffer), outcome)))
}

/// Records a completion in its ring, or in `slow` if it is a receive of a pool.
///
/// A receive of a pool is handed out next, so `slow` must have none. Returns an error if the completion names work that is not in
/// flight.
///
/// A poll may be open. No buffer is dropped here, which would run [`Backing::take_back`](crate::mr::Backing::take_back) inside of
/// it.
#[cold]
#[inline(never)]
pub(super) fn record(live: &mut Live, slow: &mut SlowResults, found: WorkCompletion<'_>) -> Result<(), PollError> {
    let Live { sends, receives, pool, datagrams, keepalive, windows, peer_left, .. } = live;
    let header = if datagrams.is_some() { Grh::LEN as u32 } else { 0 };
    let id = found.wr_id();
    let status = found.status();
    let failed = (status != WcStatus::SUCCESS).then(|| Outcome::failed(&found, *peer_left));
    let known = if let Some(slab) = pool.as_ref().and_then(|pool| pool.slab()).filter(|_| Slab::is_ticket(id)) {
        debug_assert!(slow.completion.is_none(), "it would be dropped");
        slow.completion = slab.take(id).map(|mut buffer| {
            let outcome = failed.unwrap_or_else(|| arrived(Some(&mut buffer), &found, header));
            Completion::new(id, outcome.operation.unwrap_or(Operation::Receive), Some(buffer), outcome)
        });
        Keepalive::count(keepalive);
        slow.completion.is_some()
    } else if id & RECEIVE != 0 {
        let known = receives.complete(id, |slot| match (failed, &mut slot.buffer) {
            (Some(failed), _) => failed,
            (None, buffer) => arrived(buffer.as_mut(), &found, header),
        });
        if let Some(datagrams) = datagrams.as_deref_mut().filter(|_| known && failed.is_none()) {
            datagrams.record_sender(id, &found);
        }
        known
    } else if id & PROBE != 0 {
        let outcome = failed.unwrap_or(Outcome::DONE);
        let known = keepalive.as_mut().is_some_and(|keepalive| keepalive.complete(id, outcome, sends));
        return if known { Ok(()) } else { Err(PollError::NotInFlight { wr_id: id }) };
    } else {
        match failed {
            // Some providers do not flush unsignaled work individually, so it is unknown whether that work was done.
            Some(flushed) if status == WcStatus::WR_FLUSH_ERR => sends.complete_all(id, flushed),
            Some(failed) => sends.complete(id, |_| failed),
            None => {
                let outcome = Outcome { timestamp: found.completion_timestamp(), ..Outcome::DONE };
                sends.complete(id, |_| outcome)
            }
        }
    };
    if let (Some(windows), true) = (windows, known) {
        if id & RECEIVE == 0 {
            windows.completed(id, failed.is_none());
        } else if failed.is_none() && found.flags().contains(WcFlags::WITH_INV) {
            windows.invalidated_by_peer(found.imm_or_key());
        }
    }
    if let (Some(keepalive), true) = (keepalive, failed.is_some()) {
        // The user learns from this completion that the connection is lost.
        keepalive.end();
    }
    if known { Ok(()) } else { Err(PollError::NotInFlight { wr_id: id }) }
}

/// Outcome of a successful receive whose payload follows `header` bytes. Sets the length of the buffer, unless there is a list.
fn arrived(buffer: Option<&mut Buffer>, found: &WorkCompletion<'_>, header: u32) -> Outcome {
    let byte_len = found.byte_len().unwrap_or(0).saturating_sub(header);
    let mut outcome = Outcome { timestamp: found.completion_timestamp(), ..Outcome::DONE };
    let flags = found.flags();
    if flags.intersects(WcFlags::WITH_IMM | WcFlags::WITH_INV) {
        outcome.extra = Extra { flags, number: found.imm_or_key() };
    }
    if found.opcode() == WcOpcode::RECV_RDMA_WITH_IMM {
        (outcome.operation, outcome.byte_len) = (Some(Operation::ReceiveWrite), byte_len);
        if let Some(buffer) = buffer {
            buffer.set_len_within(0);
        }
        return outcome;
    }
    outcome.byte_len = byte_len;
    if let Some(buffer) = buffer {
        // `set_len_within` keeps the length within the capacity even if the provider reports more.
        buffer.set_len_within(byte_len);
        outcome.byte_len = buffer.len() as u32;
    }
    outcome
}

impl Completion {
    #[inline(always)]
    pub(super) fn new(sequence: u64, operation: Operation, buffer: Option<Buffer>, outcome: Outcome) -> Self {
        let Outcome { status, vendor_error, byte_len, extra, timestamp, .. } = outcome;
        let id = WorkId(sequence);
        Completion { id, operation, status, vendor_error, buffer, list: None, byte_len, user_data: 0, timestamp, extra }
    }
}

impl Outcome {
    /// Outcome of unsignaled work: a later completion implies that it succeeded.
    pub(super) const DONE: Outcome = Outcome {
        status: WcStatus::SUCCESS,
        vendor_error: 0,
        byte_len: 0,
        extra: Extra::NONE,
        timestamp: None,
        operation: None,
    };

    fn failed(found: &WorkCompletion<'_>, peer_left: bool) -> Self {
        let (status, vendor_error) = (found.status(), found.vendor_error());
        match status {
            WcStatus::WR_FLUSH_ERR => Outcome { vendor_error, ..Outcome::flushed(peer_left) },
            _ => Outcome { status, vendor_error, ..Outcome::DONE },
        }
    }

    /// Outcome of work that was not done because its endpoint has failed, or its peer has ended the connection.
    pub(super) fn flushed(peer_left: bool) -> Self {
        let extra = if peer_left { Extra::PEER_LEFT } else { Extra::NONE };
        Outcome { status: WcStatus::WR_FLUSH_ERR, extra, ..Outcome::DONE }
    }

    pub(super) fn is_success(&self) -> bool {
        self.status == WcStatus::SUCCESS
    }
}
