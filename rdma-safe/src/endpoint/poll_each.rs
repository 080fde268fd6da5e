//! Taking several completions with one poll.

use super::poll::{CurrentCompletion, EndpointCompletion, SlowPoll};
use super::ring::{Kind, Ring};
use super::{Completion, Endpoint, Live, Operation, Succeeded, WorkId};
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
        if self.poster.gates.poll && self.takes_several() && max != 0 {
            // SAFETY: as in `poll_with`. What `f` may do is in the documentation of `cq::owned`.
            let Some(open) = (unsafe { self.cq.start_poll() })? else {
                self.found_nothing::<()>()?;
                return Ok(0);
            };
            let mut open = EndpointCompletion(open);
            let Live { sends, receives, .. } = &mut self.poster.live;
            while let Some(completion) = take_plain(sends, receives, &open.completion()) {
                f(completion);
                taken += 1;
                if taken == max || !open.0.next()? {
                    return Ok(taken);
                }
            }
            let found = self.poll_recording(open.0);
            return self.poll_rest(max, taken, Some(found), &mut f);
        }
        self.poll_rest(max, taken, None, &mut f)
    }

    /// The rest of [`Endpoint::poll_each`], one completion at a time. `found` is the first of them.
    // `f` is not a type parameter, so that the compiler inlines it where it is called for most completions.
    #[cold]
    #[inline(never)]
    fn poll_rest(
        &mut self,
        max: usize,
        mut taken: usize,
        found: Option<SlowPoll>,
        f: &mut dyn FnMut(Completion),
    ) -> Result<usize, PollError> {
        if let Some(found) = found {
            match self.slow_poll_result(found, |completion| completion)? {
                Some(completion) => f(completion),
                None => return Ok(taken),
            }
            taken += 1;
        }
        while taken < max {
            match self.poll()? {
                Some(completion) => f(completion),
                None => break,
            }
            taken += 1;
        }
        Ok(taken)
    }

    /// Whether [`Endpoint::poll_each`] can take several completions with one poll.
    #[inline(always)]
    fn takes_several(&self) -> bool {
        I::EXTENDED != Some(false) && self.cq.takes_several()
    }
}

/// The fast path of a poll of several: the oldest work of its ring has succeeded, and has no immediate data.
///
/// `None` for any other completion, with nothing changed. There is one result for sends and receives, so that the caller can use it
/// in one place.
#[inline(always)]
fn take_plain(sends: &mut Ring<Buffer>, receives: &mut Ring<Buffer>, found: &WorkCompletion<'_>) -> Option<Completion> {
    if found.wr_id() == sends.oldest() {
        return take_sent(sends, found).map(Into::into);
    }
    take_received(receives, found).map(Into::into)
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
