//! Polling for an endpoint, or a set of endpoints, that owns its completion queue.
//!
//! The owner drops no queue pair that completes to the queue during a poll. So the polling thread need not be recorded.

use super::poller::Started;
use super::{CompletionQueue, PollError, WcFields, WorkCompletion};

/// An open poll of an extended queue: between start_poll and end_poll, positioned on a completion.
pub(crate) struct OpenPoll(Started);

impl OpenPoll {
    /// The completion at the position of the poll.
    ///
    /// # Safety
    /// The queue must have been created with all of `fields`.
    #[inline(always)]
    pub(crate) unsafe fn completion(&self, fields: WcFields) -> WorkCompletion<'_> {
        // SAFETY: the poll is open until this value is dropped, and nothing moves its position. The rest is the caller's
        // contract.
        unsafe { WorkCompletion::extended(self.0.raw(), fields) }
    }
}

impl CompletionQueue {
    /// Starts a poll of the next completion, if there is one.
    ///
    /// # Safety
    /// The queue must be an extended one without an open poll. This thread must not drop or reset a queue pair that
    /// completes to it before the returned value is dropped.
    #[inline(always)]
    pub(crate) unsafe fn start_poll(&mut self) -> Result<Option<OpenPoll>, PollError> {
        // SAFETY: the caller's contract; the returned value ends the poll.
        Ok(unsafe { Started::begin_owned(self.raw.cast()) }?.map(OpenPoll))
    }

    /// Takes the next completion, if there is one.
    ///
    /// # Safety
    /// The queue must be a classic one.
    #[inline(always)]
    pub(crate) unsafe fn next_row(&mut self) -> Result<Option<WorkCompletion<'_>>, PollError> {
        if !self.batch.has_next() {
            // SAFETY: the queue is valid and a classic one, and all completions of the batch are taken.
            return match unsafe { self.batch.take_first(self.raw) } {
                Ok(row) => Ok(row.map(WorkCompletion::classic)),
                Err(result) => Err(PollError::from_provider(result)),
            };
        }
        // SAFETY: there is a next completion.
        Ok(Some(WorkCompletion::classic(unsafe { self.batch.take() })))
    }
}
