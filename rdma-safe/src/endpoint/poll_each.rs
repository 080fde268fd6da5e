//! Taking several completions with one poll.

use super::poll::{CurrentCompletion, EndpointCompletion, SlowPoll};
use super::ring::{Kind, Ring};
use super::{Completion, Endpoint, Operation, Poster, Succeeded, WorkId};
use crate::interface::Interface;
use crate::{Buffer, PollError, WcFlags, WcStatus, WorkCompletion};

/// What the fast path did with a completion.
pub(super) enum Taken {
    /// It took all work that the completion returns.
    All,
    /// It took some of it. The slow path hands out the rest.
    Part,
    /// Nothing. The completion has to be recorded.
    None,
}

impl<I: Interface> Endpoint<I> {
    /// Takes completed work, at most `max` pieces, and passes each to `f`. Never waits. Returns their number.
    ///
    /// For one piece it costs as much as [`Endpoint::poll`], and less for each further one: the provider is asked once for all.
    /// The provider may hold a lock while `f` runs, so `f` should only store what it is given.
    ///
    /// # Errors
    /// Like [`Endpoint::poll`]. The pieces before the error have been passed to `f`.
    #[inline(always)]
    pub fn poll_each(&mut self, max: usize, mut f: impl FnMut(Completion)) -> Result<usize, PollError> {
        let mut taken = 0;
        if max == 0 {
            return Ok(0);
        }
        // Only inlined functions get `f`, so the compiler can keep what it captures in registers.
        let mut slow = if !self.poster.gates.poll || self.cq.is_one_per_poll() {
            Some(self.poll_to_slow_results())
        } else if I::EXTENDED.unwrap_or_else(|| self.cq.is_extended()) {
            self.poll_extended(max, &mut taken, &mut f)?
        } else {
            self.poll_classic(max, &mut taken, &mut f)?
        };
        while let Some(found) = slow {
            let Some(completion) = self.slow_poll_result(found, |completion| completion)? else { break };
            f(completion);
            taken += 1;
            slow = if taken == max { None } else { Some(self.poll_to_slow_results()) };
        }
        Ok(taken)
    }

    /// The fast path for an extended queue. If more is to be taken on the slow path, returns the first result of that.
    #[inline(always)]
    fn poll_extended(
        &mut self,
        max: usize,
        taken: &mut usize,
        f: &mut impl FnMut(Completion),
    ) -> Result<Option<SlowPoll>, PollError> {
        // SAFETY: as in `poll_with`. What `f` may do is in the documentation of `cq::owned`.
        let Some(open) = (unsafe { self.cq.start_poll() })? else { return self.found_nothing() };
        let mut open = EndpointCompletion(open);
        loop {
            match self.poster.take_plain(&open.completion(), max, taken, f) {
                Taken::All => {}
                Taken::Part => break,
                Taken::None => return Ok(Some(self.poll_recording(open.0))),
            }
            if *taken == max || !open.0.next()? {
                return Ok(None);
            }
        }
        drop(open);
        Ok((*taken != max).then(|| self.poll_to_slow_results()))
    }

    /// Like [`Endpoint::poll_extended`], for a classic queue.
    #[inline(always)]
    fn poll_classic(
        &mut self,
        max: usize,
        taken: &mut usize,
        f: &mut impl FnMut(Completion),
    ) -> Result<Option<SlowPoll>, PollError> {
        loop {
            // SAFETY: the queue is a classic one.
            let Some(row) = (unsafe { self.cq.next_row() })? else {
                return if *taken == 0 { self.found_nothing() } else { Ok(None) };
            };
            match self.poster.take_plain(&row, max, taken, f) {
                Taken::All => {}
                Taken::Part => return Ok((*taken != max).then(|| self.poll_to_slow_results())),
                Taken::None => {
                    let row = row.row();
                    return Ok(Some(self.poll_recording_row(row)));
                }
            }
            if *taken == max {
                return Ok(None);
            }
        }
    }

    /// Polls, and leaves a completion or an error in [`SlowResults`](super::SlowResults).
    #[cold]
    #[inline(never)]
    fn poll_to_slow_results(&mut self) -> SlowPoll {
        match self.poll() {
            Ok(None) => SlowPoll::Nothing,
            Ok(completion) => {
                self.poster.slow.completion = completion;
                SlowPoll::Completion
            }
            Err(error) => {
                self.poster.slow.failure = error;
                SlowPoll::Failure
            }
        }
    }
}

impl<I: Interface> Poster<I> {
    /// The fast path for a completion of the oldest receive, or of sends that are the oldest: they have succeeded, and there is no
    /// immediate data. Passes them to `f`, at most `max` in all, and counts them in `taken`.
    #[inline(always)]
    fn take_plain(
        &mut self,
        found: &WorkCompletion<'_>,
        max: usize,
        taken: &mut usize,
        f: &mut impl FnMut(Completion),
    ) -> Taken {
        if self.live.sends.is_in_flight(found.wr_id()) {
            return self.take_run(found, max, taken, |sent| f(sent.into()));
        }
        let Some(received) = take_received(&mut self.live.receives, found) else { return Taken::None };
        f(received.into());
        *taken += 1;
        Taken::All
    }

    /// The fast path for a completion of a send in flight, which returns those before it, too.
    ///
    /// The gate must be open. It is shut while `f` runs, so nothing is lost if `f` panics.
    #[inline(always)]
    pub(super) fn take_run(
        &mut self,
        found: &WorkCompletion<'_>,
        max: usize,
        taken: &mut usize,
        mut f: impl FnMut(Succeeded),
    ) -> Taken {
        if found.status() != WcStatus::SUCCESS {
            return Taken::None;
        }
        let Some(mut run) = self.live.sends.complete_run(found.wr_id()) else { return Taken::None };
        self.gates.poll = false;
        let before = run.len();
        run.take((max - *taken) as u64, |id, Kind { operation, user_data, .. }, buffer| {
            f(Succeeded { id: WorkId(id), operation, user_data, buffer });
        });
        *taken += (before - run.len()) as usize;
        self.gates.poll = run.len() == 0;
        if self.gates.poll { Taken::All } else { Taken::Part }
    }
}

/// Takes the oldest send, if the completion names it.
#[inline(always)]
pub(super) fn take_sent(sends: &mut Ring<Buffer>, found: &WorkCompletion<'_>) -> Option<Succeeded> {
    if found.status() != WcStatus::SUCCESS {
        return None;
    }
    let Kind { operation, user_data, .. } = sends.oldest_kind();
    let buffer = sends.take_oldest()?;
    Some(Succeeded { id: WorkId(found.wr_id()), operation, user_data, buffer })
}

/// Takes the oldest receive, if the completion is of it and has succeeded, without immediate data.
#[inline(always)]
pub(super) fn take_received(receives: &mut Ring<Buffer>, found: &WorkCompletion<'_>) -> Option<Succeeded> {
    let id = found.wr_id();
    if id != receives.oldest()
        || found.status() != WcStatus::SUCCESS
        || found.flags().intersects(WcFlags::WITH_IMM | WcFlags::WITH_INV)
    {
        return None;
    }
    let mut buffer = receives.take_oldest()?;
    buffer.set_len_within(found.byte_len().unwrap_or(0));
    Some(Succeeded { id: WorkId(id), operation: Operation::Receive, user_data: 0, buffer })
}
