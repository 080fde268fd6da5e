//! Taking work that is done.

use std::time::{Duration, Instant};

use super::ring::Ring;
use super::{Completion, Endpoint, Operation, Posted, Sent, WorkId};
use crate::cq::rare;
use crate::{Buffer, Error, Poll, PollError, Result, WcFlags, WcOpcode, WcStatus, WorkCompletion};

#[derive(Clone, Copy)]
pub(super) struct Outcome {
    status: WcStatus,
    vendor_error: u32,
    byte_len: u32,
    timestamp: Option<u64>,
}

/// What there is to say of a receive that has completed.
#[derive(Clone, Copy)]
pub(super) struct Arrival {
    outcome: Outcome,
    operation: Operation,
    imm: Option<u32>,
    invalidated_rkey: Option<u32>,
}

/// What a look at the queue has found.
enum Look {
    Empty,
    /// Completions, which are in the rings now.
    Noted,
    /// The completion of the oldest work. Others may be in the rings.
    Found(Completion),
}

impl Endpoint {
    /// Takes one piece of work that is done, if there is any. It never waits.
    ///
    /// Work of each direction comes in the order in which it was posted; no order is kept between the two.
    ///
    /// # Errors
    /// [`PollError`] when the provider failed: the endpoint is of no more use, and the buffers come back from
    /// [`Endpoint::close`].
    #[inline(always)]
    pub fn poll(&mut self) -> Result<Option<Completion>, PollError> {
        // A second time only when what there was, was silent.
        loop {
            if self.sends.has_completed() || self.receives.has_completed() {
                if let Some(completion) = self.pop() {
                    return Ok(Some(completion));
                }
            }
            match self.look() {
                Ok(Look::Noted) => {}
                Ok(Look::Empty) => return Ok(None),
                Ok(Look::Found(completion)) => return Ok(Some(completion)),
                Err(error) => return Err(error),
            }
        }
    }

    /// Looks at the queue when nothing is left of the last look.
    #[inline(always)]
    fn look(&mut self) -> Result<Look, PollError> {
        let Endpoint { cq, sends, receives, poisoned, .. } = self;
        let mut poll = cq.poll();
        let first = match poll.next() {
            Ok(Some(first)) => first,
            Ok(None) => return Ok(Look::Empty),
            Err(error) => return Err(error),
        };
        // The usual case: it is of the oldest work, and goes to the caller without a stop in the ring.
        let id = WorkId(first.wr_id());
        let completion = match id.is_receive() {
            false if first.status() == WcStatus::SUCCESS => sends
                .take_if(id.sequence(), |sent| !sent.silent)
                .map(|sent| Completion::of_send(id, Outcome::of(&first, sent.has_length()), sent)),
            false => None,
            true => receives.take_if(id.sequence(), |_| true).map(|mut posted| {
                let arrival = posted.finish(&first);
                Completion::of_receive(id, arrival, posted.buffer)
            }),
        };
        let Some(completion) = completion else {
            if !note(sends, receives, first) {
                *poisoned = true;
                return Err(PollError::Unexpected { wr_id: id.0 });
            }
            return note_rest(poll, sends, receives, poisoned).map(|()| Look::Noted);
        };
        match note_rest(poll, sends, receives, poisoned) {
            Ok(()) => Ok(Look::Found(completion)),
            Err(error) => {
                rare();
                // It is handed out later; so it stays in the ring, as nothing was added meanwhile.
                let Completion { status, vendor_error, byte_len, timestamp, .. } = completion;
                let outcome = Outcome { status, vendor_error, byte_len, timestamp };
                let len = completion.buffer.as_ref().map_or(0, |buffer| buffer.len());
                if id.is_receive() {
                    let Completion { operation, imm, invalidated_rkey, .. } = completion;
                    std::mem::forget(completion);
                    // SAFETY: the entry was just taken, and what it was taken as is forgotten.
                    let posted = unsafe { receives.untake() };
                    posted.arrival = Some(Arrival { outcome, operation, imm, invalidated_rkey });
                    posted.buffer.set_len_within(len);
                } else {
                    std::mem::forget(completion);
                    // SAFETY: as above.
                    unsafe { sends.untake() }.outcome = Some(outcome);
                }
                Err(error)
            }
        }
    }

    /// Waits for a piece of work to be done, at most for `timeout`.
    ///
    /// It spins, or, when the endpoint was built with [`EndpointBuilder::events`](crate::EndpointBuilder::events), sleeps until there is an event.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::Poll`]; [`Error::Channel`].
    #[inline]
    pub fn wait(&mut self, timeout: Duration) -> Result<Completion> {
        // Before a look at the clock, which costs as much as a poll.
        match self.poll() {
            Ok(Some(completion)) => Ok(completion),
            Ok(None) => self.wait_longer(timeout),
            Err(error) => Err(error.into()),
        }
    }

    #[inline(never)]
    fn wait_longer(&mut self, timeout: Duration) -> Result<Completion> {
        let start = Instant::now();
        let mut armed = false;
        loop {
            if let Some(completion) = self.poll()? {
                return Ok(completion);
            }
            if self.cq.channel().is_some() && !armed {
                // What completed before arming causes no event, so the queue has to be looked at once more.
                self.cq.arm(false)?;
                armed = true;
                continue;
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(Error::Timeout { waited: timeout });
            }
            match self.cq.channel() {
                // Events of other queues do not count, should the channel be shared with any.
                Some(channel) => armed = channel.wait(left)? != Some(self.cq.id()),
                None => std::hint::spin_loop(),
            }
        }
    }

    /// Asks for an event at the next completion, and says whether there is one to wait for: `false` means that completions are
    /// there already, to be taken with [`Endpoint::poll`] before it is armed again.
    ///
    /// # Errors
    /// [`Error::NoChannel`] without [`EndpointBuilder::events`](crate::EndpointBuilder::events); [`Error::Verb`]; [`Error::Poll`].
    #[inline]
    pub fn arm(&mut self) -> Result<bool> {
        if let Some(channel) = self.cq.channel() {
            while channel.take_event()?.is_some() {}
        }
        self.cq.arm(false)?;
        self.reap()?;
        Ok(!self.sends.has_completed() && !self.receives.has_completed())
    }

    /// Takes completions out of the queue and notes them in the rings, a limited number at a time.
    #[inline(always)]
    fn reap(&mut self) -> Result<(), PollError> {
        let Endpoint { cq, sends, receives, poisoned, .. } = self;
        note_rest(cq.poll(), sends, receives, poisoned)
    }

    /// Hands out work that is done.
    #[inline(always)]
    fn pop(&mut self) -> Option<Completion> {
        self.sends.skip_completed(|sent| sent.silent && sent.outcome.is_none_or(|it| it.status == WcStatus::SUCCESS));
        if let Some((sequence, sent)) = self.sends.pop_completed() {
            return Some(Completion::of_send(WorkId::send(sequence), sent.outcome.unwrap_or(Outcome::DONE), sent));
        }
        let (sequence, posted) = self.receives.pop_completed()?;
        let arrival = posted.arrival.unwrap_or(Arrival::UNKNOWN);
        Some(Completion::of_receive(WorkId::receive(sequence), arrival, posted.buffer))
    }
}

/// Notes what is left of a look at the queue, up to a limit.
#[inline(always)]
fn note_rest(
    mut poll: Poll<'_>,
    sends: &mut Ring<Sent>,
    receives: &mut Ring<Posted>,
    poisoned: &mut bool,
) -> Result<(), PollError> {
    const LIMIT: usize = 16;
    for _ in 0..LIMIT {
        let completion = match poll.next() {
            Ok(Some(completion)) => completion,
            Ok(None) => break,
            Err(error) => return Err(error),
        };
        let wr_id = completion.wr_id();
        if !note(sends, receives, completion) {
            *poisoned = true;
            return Err(PollError::Unexpected { wr_id });
        }
    }
    Ok(())
}

/// Notes a completion in its ring; `false` when it names work that is not in flight.
// Not a Rust call, which could unwind: for that the callers would keep a completion that they are about to hand out in
// memory. There is nothing here that panics.
#[allow(improper_ctypes_definitions)]
#[inline(never)]
extern "C" fn note(sends: &mut Ring<Sent>, receives: &mut Ring<Posted>, completion: WorkCompletion<'_>) -> bool {
    let id = WorkId(completion.wr_id());
    if id.is_receive() {
        let Some(posted) = receives.complete_oldest(id.sequence()) else { return false };
        posted.arrival = Some(posted.finish(&completion));
        return true;
    }
    if completion.status() == WcStatus::WR_FLUSH_ERR {
        // Not every provider flushes unsignaled work one by one: whether it was done is not known.
        let flushed = Outcome::of(&completion, false);
        sends.each_before(id.sequence(), |sent| sent.outcome = Some(flushed));
    }
    let Some(sent) = sends.complete_if(id.sequence(), |sent, oldest| sent.after < oldest) else { return false };
    sent.outcome = Some(Outcome::of(&completion, sent.has_length()));
    true
}

impl Completion {
    #[inline(always)]
    fn of_send(id: WorkId, outcome: Outcome, sent: Sent) -> Self {
        Completion {
            id,
            operation: sent.operation,
            status: outcome.status,
            vendor_error: outcome.vendor_error,
            buffer: sent.buffer,
            byte_len: outcome.byte_len,
            timestamp: outcome.timestamp,
            imm: None,
            invalidated_rkey: None,
        }
    }

    #[inline(always)]
    fn of_receive(id: WorkId, arrival: Arrival, buffer: Buffer) -> Self {
        Completion {
            id,
            operation: arrival.operation,
            status: arrival.outcome.status,
            vendor_error: arrival.outcome.vendor_error,
            buffer: Some(buffer),
            byte_len: arrival.outcome.byte_len,
            timestamp: arrival.outcome.timestamp,
            imm: arrival.imm,
            invalidated_rkey: arrival.invalidated_rkey,
        }
    }
}

impl Outcome {
    /// Of work that a later completion released: it was done before that.
    const DONE: Outcome = Outcome { status: WcStatus::SUCCESS, vendor_error: 0, byte_len: 0, timestamp: None };

    /// Bytes are counted where `has_length`.
    #[inline(always)]
    fn of(completion: &WorkCompletion<'_>, has_length: bool) -> Self {
        let status = completion.status();
        if status != WcStatus::SUCCESS {
            return Outcome { status, vendor_error: completion.vendor_error(), ..Outcome::DONE };
        }
        let byte_len = if has_length { completion.byte_len().unwrap_or(0) } else { 0 };
        Outcome { byte_len, timestamp: completion.completion_timestamp(), ..Outcome::DONE }
    }
}

impl Arrival {
    /// Of a receive that completed without a word: there is none, as each has a completion of its own.
    const UNKNOWN: Arrival =
        Arrival { outcome: Outcome::DONE, operation: Operation::Receive, imm: None, invalidated_rkey: None };
}

impl Sent {
    /// Whether the length that its completion has means anything.
    #[inline(always)]
    fn has_length(&self) -> bool {
        matches!(self.operation, Operation::Read | Operation::Atomic)
    }
}

impl Posted {
    /// Sets the length of the buffer.
    #[inline(always)]
    fn finish(&mut self, completion: &WorkCompletion<'_>) -> Arrival {
        let mut arrival = Arrival { outcome: Outcome::of(completion, true), ..Arrival::UNKNOWN };
        if arrival.outcome.status == WcStatus::SUCCESS {
            let flags = completion.flags();
            if flags.contains(WcFlags::WITH_IMM) {
                arrival.imm = completion.imm_value();
            }
            if flags.contains(WcFlags::WITH_INV) {
                arrival.invalidated_rkey = completion.invalidated_rkey_value();
            }
            let mut len = arrival.outcome.byte_len as usize;
            if completion.opcode() == WcOpcode::RECV_RDMA_WITH_IMM {
                arrival.operation = Operation::ReceiveWrite;
                len = 0;
            }
            // A provider that claims more than it was given does not get the buffer to lie about it.
            self.buffer.set_len_within(len);
        }
        arrival
    }
}
