//! Polling for an endpoint, or a set of them, whose own the queue is: no queue pair that completes to it is dropped while it is
//! polled, so that nothing is noted for that.

use super::poller::Started;
use super::{CompletionQueue, PollError, WcFields, WorkCompletion};

/// On a completion of an extended queue, between start_poll and end_poll.
pub(crate) struct Standing(Started);

impl Standing {
    /// `fields` must be some of those that the queue was created with.
    #[inline(always)]
    pub(crate) fn completion(&self, fields: WcFields) -> WorkCompletion<'_> {
        WorkCompletion::extended(self.0.raw(), fields)
    }
}

impl CompletionQueue {
    /// Stands on the next completion, if there is any.
    ///
    /// # Safety
    /// The queue must be an extended one that nobody has begun to poll, and no queue pair that completes to it be dropped or reset
    /// by this thread as long as it stands.
    #[inline(always)]
    pub(crate) unsafe fn stand(&mut self) -> Result<Option<Standing>, PollError> {
        // SAFETY: the caller's contract; what this begins it ends.
        Ok(unsafe { Started::begin(self.raw.cast()) }?.map(Standing))
    }

    /// The next completion, if there is any.
    ///
    /// # Safety
    /// The queue must be a classic one.
    #[inline(always)]
    pub(crate) unsafe fn next_row(&mut self) -> Result<Option<WorkCompletion<'_>>, PollError> {
        if !self.taken.has_next() {
            // SAFETY: the queue is valid, and a classic one; nothing is left.
            return match unsafe { self.taken.take_first(self.raw) } {
                Ok(row) => Ok(row.map(WorkCompletion::classic)),
                Err(result) => Err(PollError::of_provider(result)),
            };
        }
        // SAFETY: there is one.
        Ok(Some(WorkCompletion::classic(unsafe { self.taken.take() })))
    }
}
