//! Taking several completions with one poll.

use rdma_sys::ibv_wc;

use super::builder::FIELDS;
use super::poll::{CurrentCompletion, EndpointCompletion, SlowPoll, record};
use super::ring::{Kind, Ring};
use super::{Completion, Endpoint, Live, Operation, Succeeded, WorkId};
use crate::cq::OpenPoll;
use crate::interface::Interface;
use crate::{Buffer, PollError, WcFlags, WcStatus, WorkCompletion};

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
        // `f` is passed to no function that is not inlined. So the compiler can keep what it captures in registers.
        let Some(mut found) = self.poll_plain(max, &mut taken, &mut f)? else { return Ok(taken) };
        loop {
            match self.slow_poll_result(found, |completion| completion)? {
                Some(completion) => f(completion),
                None => return Ok(taken),
            }
            taken += 1;
            if taken == max {
                return Ok(taken);
            }
            found = self.poll_aside();
        }
    }

    /// The fast path of [`Endpoint::poll_each`]. If it finds a completion that it does not handle, it records it, and returns what to
    /// hand out next.
    #[inline(always)]
    fn poll_plain(
        &mut self,
        max: usize,
        taken: &mut usize,
        f: &mut impl FnMut(Completion),
    ) -> Result<Option<SlowPoll>, PollError> {
        if max == 0 {
            return Ok(None);
        }
        if !self.poster.gates.poll || self.cq.takes_one_at_a_time() {
            return Ok(Some(self.poll_aside()));
        }
        let found_any = if I::EXTENDED.unwrap_or_else(|| self.cq.is_extended()) {
            // SAFETY: as in `poll_with`. What `f` may do is in the documentation of `cq::owned`.
            let Some(open) = (unsafe { self.cq.start_poll() })? else { return self.found_nothing() };
            let mut open = EndpointCompletion(open);
            let Live { sends, receives, .. } = &mut self.poster.live;
            while take_plain(sends, receives, &open.completion(), max, taken, f) {
                if *taken == max || !open.0.next()? {
                    return Ok(None);
                }
            }
            return if *taken == max { self.record_rest(open.0) } else { Ok(Some(self.poll_recording(open.0))) };
        } else {
            let mut found_any = false;
            // SAFETY: the queue is a classic one.
            while let Some(row) = unsafe { self.cq.next_row() }? {
                let Live { sends, receives, .. } = &mut self.poster.live;
                if !take_plain(sends, receives, &row, max, taken, f) {
                    let row = row.row();
                    return if *taken == max {
                        self.record_rest_row(row)
                    } else {
                        Ok(Some(self.poll_recording_row(row)))
                    };
                }
                if *taken == max {
                    return Ok(None);
                }
                found_any = true;
            }
            found_any
        };
        if found_any { Ok(None) } else { self.found_nothing() }
    }

    /// Records a completion of which all that may be taken was taken. The rest is handed out by later polls.
    #[cold]
    #[inline(never)]
    fn record_rest(&mut self, open: OpenPoll) -> Result<Option<SlowPoll>, PollError> {
        // SAFETY: the queue of an endpoint has these fields.
        let found = unsafe { open.completion(FIELDS) };
        let recorded = record(&mut self.poster.live, &mut self.poster.slow, found);
        drop(open);
        self.end_recording(recorded)
    }

    /// Like [`Endpoint::record_rest`], for a row that was just taken from `self.cq`.
    #[cold]
    #[inline(never)]
    fn record_rest_row(&mut self, row: *const ibv_wc) -> Result<Option<SlowPoll>, PollError> {
        // SAFETY: the row is still valid, because the queue has not been polled since.
        let found = unsafe { WorkCompletion::classic(&*row) };
        let recorded = record(&mut self.poster.live, &mut self.poster.slow, found);
        self.end_recording(recorded)
    }

    fn end_recording(&mut self, recorded: Result<(), PollError>) -> Result<Option<SlowPoll>, PollError> {
        recorded.inspect_err(|_| self.poster.mark_poisoned())?;
        self.poster.gates.poll = false;
        Ok(None)
    }

    /// Polls like [`Endpoint::poll`], and leaves the completion in [`SlowResults`](super::SlowResults).
    #[cold]
    #[inline(never)]
    fn poll_aside(&mut self) -> SlowPoll {
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

/// The fast path of a poll of several: the completion is of the oldest receive or of sends that are the oldest, these have succeeded,
/// and there is no immediate data. Passes them to `f`, at most `max` in all, and counts them in `taken`.
///
/// Returns whether this is all that the completion means. Otherwise it has to be recorded.
#[inline(always)]
fn take_plain(
    sends: &mut Ring<Buffer>,
    receives: &mut Ring<Buffer>,
    found: &WorkCompletion<'_>,
    max: usize,
    taken: &mut usize,
    f: &mut impl FnMut(Completion),
) -> bool {
    if sends.is_in_flight(found.wr_id()) {
        let (count, is_whole) = take_run(sends, found, max - *taken, |sent| f(sent.into()));
        *taken += count;
        return is_whole;
    }
    let Some(received) = take_received(receives, found) else { return false };
    f(received.into());
    *taken += 1;
    true
}

/// The part of [`take_plain`] for sends. The completion names one in flight, and returns those before it, too. At most `max`, which is
/// not 0.
///
/// Returns the number of sends that were taken, and whether these are all.
#[inline(always)]
pub(super) fn take_run(
    sends: &mut Ring<Buffer>,
    found: &WorkCompletion<'_>,
    max: usize,
    mut f: impl FnMut(Succeeded),
) -> (usize, bool) {
    if found.status() != WcStatus::SUCCESS {
        return (0, false);
    }
    let last = found.wr_id();
    let taken = sends.take_run(last, max, |id, Kind { operation, user_data, .. }, buffer| {
        f(Succeeded { id: WorkId(id), operation, user_data, buffer });
    });
    (taken, sends.oldest() > last)
}

/// The part of [`take_plain`] for sends: the completion names the oldest one.
#[inline(always)]
pub(super) fn take_sent(sends: &mut Ring<Buffer>, found: &WorkCompletion<'_>) -> Option<Succeeded> {
    if found.status() != WcStatus::SUCCESS {
        return None;
    }
    let Kind { operation, user_data, .. } = sends.oldest_kind();
    let buffer = sends.take_oldest()?;
    Some(Succeeded { id: WorkId(found.wr_id()), operation, user_data, buffer })
}

/// The part of [`take_plain`] for receives.
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
