//! Polling for an endpoint, or a set of endpoints, that owns its completion queue.
//!
//! [`EndpointSet::poll_into`](crate::EndpointSet::poll_into) and its like call code of the user during a poll, on purpose.
//!
//! The owner drops no queue pair that completes to the queue during a poll. So the polling thread need not be recorded.
//!
//! # Code of the user during a poll
//!
//! Dropping a buffer runs [`Backing::take_back`](crate::mr::Backing::take_back), and dropping the last one of a region the
//! destructor of its backing, which is code of the user. Between start_poll and end_poll an owner only moves buffers. If it did
//! drop one, or if code of the user ran for another reason, that would be sound:
//!
//! - The code cannot poll, arm or destroy this queue. Only the handle [`CompletionQueue`] can, which is not `Clone`. The owner
//!   has it in a private field and lends it to nobody, and the poll borrows the owner mutably. An owner in an `Arc` is behind a
//!   lock, which the caller of the poll holds. The `Shared` of the queue is in an `Arc`, too, but has no method that polls.
//! - The code cannot destroy or reset a queue pair that completes to this queue. Only the owner makes such queue pairs, and it
//!   keeps them. A set lends its endpoints as `EndpointMut`, and keeps their queue pairs.
//! - The code cannot destroy a shared receive queue of these queue pairs: they keep it by an `Arc`.
//! - It may poll, post to and destroy other objects, deregister regions, and post to a shared receive queue. Providers serialise
//!   these with locks of their own, and take the lock of this queue for none of them.
//! - If it panics, the open poll ends when the stack unwinds.

use rdma_sys::ibv_next_poll;

use super::poller::Started;
use super::{CompletionQueue, PollError, WcFields, WorkCompletion};
use crate::branch::rare;

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

    /// Moves on to the next completion. Returns whether there is one; if not, this value has to be dropped.
    #[inline(always)]
    pub(crate) fn next(&mut self) -> Result<bool, PollError> {
        // SAFETY: this is between start_poll and end_poll. A provider with start_poll has next_poll.
        let result = unsafe { ibv_next_poll(self.0.raw().as_ptr()) };
        if result == 0 {
            return Ok(true);
        }
        if result == libc::ENOENT {
            return Ok(false);
        }
        rare();
        Err(PollError::from_provider(result))
    }
}

impl CompletionQueue {
    /// Whether one poll can take several completions: the queue is extended, and its provider has no fault in `ibv_next_poll`.
    #[inline(always)]
    pub(crate) fn takes_several(&self) -> bool {
        self.is_extended() && !self.one_per_poll
    }

    /// Whether the provider has a fault in `ibv_next_poll`, so that one poll takes one completion.
    #[inline(always)]
    pub(crate) fn is_one_per_poll(&self) -> bool {
        self.one_per_poll
    }

    /// Starts a poll of the next completion, if there is one.
    ///
    /// # Safety
    /// The queue must be an extended one without an open poll. This thread must not drop or reset a queue pair that
    /// completes to it before the returned value is dropped. That includes code of the user that runs in destructors, see the
    /// module's documentation.
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
