//! Taking work that is done.

use std::time::Duration;

use super::builder::FIELDS;
use super::completion::Extra;
use super::gates::Gates;
use super::ring::{Done, Ring};
use super::wait::{self, Polled};
use super::{Armed, Completion, Endpoint, Live, Operation, Poster, RECEIVE, Rare, WorkId};
use rdma_sys::ibv_wc;

use crate::cq::Standing;
use crate::interface::Interface;
use crate::srq::Slab;
use crate::{Buffer, CompletionQueue, Grh, PollError, Result, WcFlags, WcOpcode, WcStatus, WorkCompletion};

/// What there is to say of work that has completed, beside what it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Outcome {
    pub(super) status: WcStatus,
    pub(super) vendor_error: u32,
    pub(super) byte_len: u32,
    pub(super) extra: Extra,
    pub(super) timestamp: Option<u64>,
    /// What turned out to be another operation than was thought when it was posted.
    pub(super) operation: Option<Operation>,
}

impl<I: Interface> Endpoint<I> {
    /// Takes one piece of work that is done, if there is any. It never waits.
    ///
    /// Work of each direction comes in the order in which it was posted; no order is kept between the two.
    ///
    /// # Errors
    /// [`PollError`] when the provider failed: the endpoint is of no more use, and the buffers come back from
    /// [`Endpoint::close`].
    #[inline(always)]
    pub fn poll(&mut self) -> Result<Option<Completion>, PollError> {
        self.take(|completion| completion)
    }

    /// As [`Endpoint::poll`], with what `look` makes of the work.
    ///
    /// It costs less where `look` uses only some of the fields: the completion need not be put together in memory.
    ///
    /// # Errors
    /// As [`Endpoint::poll`].
    #[inline(always)]
    pub fn take<R>(&mut self, look: impl FnOnce(Completion) -> R) -> Result<Option<R>, PollError> {
        if !self.poster.gates.poll {
            let found = self.poll_slowly();
            return self.polled_rarely(found, look);
        }
        if I::EXTENDED.unwrap_or_else(|| self.cq.is_extended()) {
            // SAFETY: the queue is an extended one, which is polled here and in `look` only, where each poll is ended. Only the
            // queue pair of this endpoint completes to it, and nothing happens to that here.
            let Some(standing) = (unsafe { self.cq.stand() })? else { return Ok(None) };
            return match take_usual(&mut self.poster.live.sends, &mut self.poster.live.receives, standing, look) {
                Ok(seen) => Ok(Some(seen)),
                Err((standing, look)) => {
                    let found = self.poll_noting(standing);
                    self.polled_rarely(found, look)
                }
            };
        }
        // SAFETY: a classic queue.
        let Some(row) = (unsafe { self.cq.next_row() })? else { return Ok(None) };
        match take_usual(&mut self.poster.live.sends, &mut self.poster.live.receives, row, look) {
            Ok(seen) => Ok(Some(seen)),
            Err((row, look)) => {
                let row = row.row();
                let found = self.poll_noting_row(row);
                self.polled_rarely(found, look)
            }
        }
    }

    /// The result of a rare call.
    #[inline(always)]
    fn polled_rarely<R>(&mut self, found: Found, look: impl FnOnce(Completion) -> R) -> Result<Option<R>, PollError> {
        match found {
            Found::Nothing => Ok(None),
            Found::Failure => Err(self.poster.rare.failure),
            Found::Completion => match self.poster.rare.completion.take() {
                Some(completion) => Ok(Some(look(completion))),
                None => Ok(None),
            },
        }
    }

    /// As [`Endpoint::poll`], whatever keeps the gate shut.
    #[cold]
    #[inline(never)]
    fn poll_slowly(&mut self) -> Found {
        loop {
            let completion = self.poster.pop();
            // As long as anything is left to hand out, beside this, that comes first.
            self.poster.open_gates();
            self.poster.rare.completion = completion;
            if self.poster.rare.completion.is_some() {
                return Found::Completion;
            }
            if self.poster.has_completed() {
                // Pending sends were flushed just now.
                continue;
            }
            match self.look() {
                Ok(true) => {}
                Ok(false) => return Found::Nothing,
                Err(error) => {
                    self.poster.rare.failure = error;
                    return Found::Failure;
                }
            }
        }
    }

    /// As [`Endpoint::poll`], for the completion that was found is not the usual one: it is noted, and work is handed out that
    /// comes before it, or itself, or, if it was silent, what comes after.
    #[cold]
    #[inline(never)]
    fn poll_noting(&mut self, standing: Standing) -> Found {
        let noted = note(&mut self.poster.live, &mut self.poster.rare, standing.completion(FIELDS));
        drop(standing);
        self.poll_noted(noted)
    }

    /// Likewise, for a row of `self.cq` that was just taken.
    #[cold]
    #[inline(never)]
    fn poll_noting_row(&mut self, row: *const ibv_wc) -> Found {
        // SAFETY: it is where it was, as the queue was not asked since.
        let found = unsafe { WorkCompletion::classic(&*row) };
        let noted = note(&mut self.poster.live, &mut self.poster.rare, found);
        self.poll_noted(noted)
    }

    fn poll_noted(&mut self, noted: Result<(), PollError>) -> Found {
        let Err(error) = noted else { return self.poll_slowly() };
        self.poster.doubt();
        self.poster.rare.failure = error;
        Found::Failure
    }

    /// Takes one completion out of the queue, if there is any, and notes it in its ring.
    #[inline(never)]
    fn look(&mut self) -> Result<bool, PollError> {
        let Endpoint { cq, poster: Poster { live, rare, .. } } = self;
        let fields = cq.fields();
        let noted = if cq.is_extended() {
            // SAFETY: as in `take`.
            let Some(standing) = (unsafe { cq.stand() })? else { return Ok(false) };
            note(live, rare, standing.completion(fields))
        } else {
            // SAFETY: a classic queue.
            let Some(found) = (unsafe { cq.next_row() })? else { return Ok(false) };
            note(live, rare, found)
        };
        noted.inspect_err(|_| self.poster.doubt())?;
        Ok(true)
    }

    /// Waits for a piece of work to be done, at most for `timeout`.
    ///
    /// It spins, or, when the endpoint was built with [`EndpointBuilder::events`](crate::EndpointBuilder::events), sleeps until
    /// there is an event.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout); [`Error::Poll`](crate::Error::Poll); [`Error::Channel`](crate::Error::Channel).
    #[inline]
    pub fn wait(&mut self, timeout: Duration) -> Result<Completion> {
        // Before a look at the clock, which costs as much as a poll.
        match self.poll() {
            Ok(Some(completion)) => Ok(completion),
            Ok(None) => wait::wait(self, timeout),
            Err(error) => Err(error.into()),
        }
    }

    /// Asks for an event at the next completion, unless completions are there already.
    ///
    /// Takes all pending events from the channel first, so no other code has to read them. [`Armed`] says whether to wait for the
    /// channel or to poll again, and shows the loop.
    ///
    /// # Errors
    /// [`Error::NoChannel`](crate::Error::NoChannel) without [`EndpointBuilder::events`](crate::EndpointBuilder::events);
    /// [`Error::Verb`](crate::Error::Verb); [`Error::Poll`](crate::Error::Poll).
    #[inline]
    pub fn arm(&mut self) -> Result<Armed> {
        if let Some(channel) = self.cq.channel() {
            while channel.take_event()?.is_some() {}
        }
        // Ends a forgotten batch, which may hold a lock that arming takes.
        self.poster.open_gates();
        self.cq.arm(false)?;
        // What completed before arming causes no event.
        if !self.poster.has_completed() {
            self.look()?;
        }
        self.poster.open_gates();
        Ok(Armed::with(self.poster.has_completed()))
    }
}

impl<I: Interface> Polled for Endpoint<I> {
    type Done = Completion;

    fn poll_once(&mut self) -> Result<Option<Completion>, PollError> {
        self.poll()
    }

    fn queue(&mut self) -> &mut CompletionQueue {
        &mut self.cq
    }
}

impl<I: Interface> Poster<I> {
    #[inline]
    pub(super) fn has_completed(&self) -> bool {
        self.live.sends.has_completed() || self.live.receives.has_completed() || self.rare.completion.is_some()
    }

    /// Hands out work that is done.
    pub(super) fn pop(&mut self) -> Option<Completion> {
        if let Some(shared) = self.rare.completion.take() {
            return Some(shared);
        }
        let done = match self.live.sends.pop() {
            Some(done) => done,
            None => self.live.receives.pop()?,
        };
        let Done { sequence, buffer, operation, mut outcome } = done;
        if outcome.is_success() && matches!(operation, Operation::Read | Operation::Atomic) {
            // Also where it had no completion of its own to say so.
            outcome.byte_len = buffer.as_ref().map_or(0, |buffer| buffer.len() as u32);
        }
        Some(Completion::new(sequence, operation, buffer, outcome))
    }

    /// The provider is not to be trusted with more work.
    pub(super) fn doubt(&mut self) {
        self.poisoned = true;
        self.gates = Gates::SHUT;
    }
}

/// What shows a completion until it is dropped.
pub(super) trait Shown {
    /// It must have [`FIELDS`].
    fn completion(&self) -> WorkCompletion<'_>;
}

impl Shown for Standing {
    #[inline(always)]
    fn completion(&self) -> WorkCompletion<'_> {
        Standing::completion(self, FIELDS)
    }
}

impl Shown for WorkCompletion<'_> {
    #[inline(always)]
    fn completion(&self) -> WorkCompletion<'_> {
        self.reborrow()
    }
}

/// What a rare call has found. What there is to say of it is in [`Rare`](super::Rare).
#[derive(Clone, Copy)]
enum Found {
    Nothing,
    Completion,
    Failure,
}

/// What is done most often, at once: the oldest work of its queue has succeeded, and its buffer goes to `look`. Any other is given
/// back, and nothing has changed.
// Each kind calls by itself: the compiler then knows what comes of it.
#[inline(always)]
pub(super) fn take_usual<S: Shown, F: FnOnce(Completion) -> R, R>(
    sends: &mut Ring<Buffer>,
    receives: &mut Ring<Buffer>,
    shown: S,
    look: F,
) -> Result<R, (S, F)> {
    let found = shown.completion();
    if found.status() != WcStatus::SUCCESS {
        return Err((shown, look));
    }
    let id = found.wr_id();
    if id == sends.oldest() {
        let Some((buffer, operation)) = sends.take_oldest() else { return Err((shown, look)) };
        drop(shown);
        // Those that transfer into the buffer fill it.
        let byte_len = match operation {
            Operation::Read | Operation::Atomic => buffer.len() as u32,
            _ => 0,
        };
        return Ok(look(Completion::new(id, operation, Some(buffer), Outcome { byte_len, ..Outcome::DONE })));
    }
    if id != receives.oldest() {
        return Err((shown, look));
    }
    let flags = found.flags();
    // A write that takes a receive has immediate data, so that others need not be asked what they are.
    if !flags.intersects(WcFlags::WITH_IMM | WcFlags::WITH_INV) {
        let Some((mut buffer, _)) = receives.take_oldest() else { return Err((shown, look)) };
        buffer.set_len_within(found.byte_len().unwrap_or(0));
        drop(shown);
        let outcome = Outcome { byte_len: buffer.len() as u32, ..Outcome::DONE };
        return Ok(look(Completion::new(id, Operation::Receive, Some(buffer), outcome)));
    }
    if flags.contains(WcFlags::WITH_INV) {
        return Err((shown, look));
    }
    if found.opcode() == WcOpcode::RECV {
        let Some((mut buffer, _)) = receives.take_oldest() else { return Err((shown, look)) };
        buffer.set_len_within(found.byte_len().unwrap_or(0));
        let extra = Extra { flags: WcFlags::WITH_IMM, number: found.imm_or_key() };
        drop(shown);
        let outcome = Outcome { byte_len: buffer.len() as u32, extra, ..Outcome::DONE };
        return Ok(look(Completion::new(id, Operation::Receive, Some(buffer), outcome)));
    }
    if found.opcode() != WcOpcode::RECV_RDMA_WITH_IMM {
        return Err((shown, look));
    }
    let Some((mut buffer, _)) = receives.take_oldest() else { return Err((shown, look)) };
    buffer.set_len_within(0);
    let extra = Extra { flags: WcFlags::WITH_IMM, number: found.imm_or_key() };
    let outcome = Outcome { byte_len: found.byte_len().unwrap_or(0), extra, ..Outcome::DONE };
    drop(shown);
    Ok(look(Completion::new(id, Operation::ReceiveWrite, Some(buffer), outcome)))
}

/// Notes a completion in its ring, or, as it is handed out next, that of a shared receive in `rare`; an error when it names work
/// that is not in flight.
#[cold]
#[inline(never)]
pub(super) fn note(live: &mut Live, rare: &mut Rare, found: WorkCompletion<'_>) -> Result<(), PollError> {
    let Live { sends, receives, pool, datagrams, .. } = live;
    let header = if datagrams.is_some() { Grh::LEN as u32 } else { 0 };
    let id = found.wr_id();
    let status = found.status();
    let failed = (status != WcStatus::SUCCESS).then(|| Outcome::failed(&found));
    let known = if let Some(slab) = pool.as_ref().and_then(|pool| pool.slab()).filter(|_| Slab::is_ticket(id)) {
        rare.completion = slab.take(id).map(|mut buffer| {
            let outcome = failed.unwrap_or_else(|| arrived(&mut buffer, &found, header));
            Completion::new(id, outcome.operation.unwrap_or(Operation::Receive), Some(buffer), outcome)
        });
        rare.completion.is_some()
    } else if id & RECEIVE != 0 {
        let known = receives.complete(id, |slot| match (failed, &mut slot.buffer) {
            (Some(failed), _) => failed,
            (None, Some(buffer)) => arrived(buffer, &found, header),
            (None, None) => Outcome::DONE,
        });
        if let Some(datagrams) = datagrams.as_deref_mut().filter(|_| known && failed.is_none()) {
            datagrams.note(id, &found);
        }
        known
    } else {
        if let Some(flushed) = failed.filter(|_| status == WcStatus::WR_FLUSH_ERR) {
            // Not every provider flushes unsignaled work one by one: whether it was done is not known.
            sends.note_before(id, flushed);
        }
        sends.complete(id, |_| {
            failed.unwrap_or_else(|| Outcome { timestamp: found.completion_timestamp(), ..Outcome::DONE })
        })
    };
    if known { Ok(()) } else { Err(PollError::Unexpected { wr_id: id }) }
}

/// What has arrived in a receive that succeeded, behind a header of so many bytes. Sets the length of its buffer.
fn arrived(buffer: &mut Buffer, found: &WorkCompletion<'_>, header: u32) -> Outcome {
    let byte_len = found.byte_len().unwrap_or(0).saturating_sub(header);
    let mut outcome = Outcome { timestamp: found.completion_timestamp(), ..Outcome::DONE };
    let flags = found.flags();
    if flags.intersects(WcFlags::WITH_IMM | WcFlags::WITH_INV) {
        outcome.extra = Extra { flags, number: found.imm_or_key() };
    }
    if found.opcode() == WcOpcode::RECV_RDMA_WITH_IMM {
        (outcome.operation, outcome.byte_len) = (Some(Operation::ReceiveWrite), byte_len);
        buffer.set_len_within(0);
        return outcome;
    }
    // A provider that claims more than it was given does not get the buffer to lie about it.
    buffer.set_len_within(byte_len);
    outcome.byte_len = buffer.len() as u32;
    outcome
}

impl Completion {
    #[inline(always)]
    pub(super) fn new(sequence: u64, operation: Operation, buffer: Option<Buffer>, outcome: Outcome) -> Self {
        let Outcome { status, vendor_error, byte_len, extra, timestamp, .. } = outcome;
        let id = WorkId(sequence);
        Completion { id, operation, status, vendor_error, buffer, byte_len, timestamp, extra }
    }
}

impl Outcome {
    /// Of work that a later completion released: it was done before that.
    pub(super) const DONE: Outcome = Outcome {
        status: WcStatus::SUCCESS,
        vendor_error: 0,
        byte_len: 0,
        extra: Extra::NONE,
        timestamp: None,
        operation: None,
    };

    fn failed(found: &WorkCompletion<'_>) -> Self {
        Outcome { status: found.status(), vendor_error: found.vendor_error(), ..Outcome::DONE }
    }

    pub(super) fn is_success(&self) -> bool {
        self.status == WcStatus::SUCCESS
    }
}
