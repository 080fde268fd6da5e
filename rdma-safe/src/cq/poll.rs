//! The cursor over completions.

use std::fmt;
use std::marker::PhantomData;

use rdma_sys::*;

use super::{CompletionQueue, Mode, WorkCompletion};
use crate::Errno;
use crate::branch::rare;

/// Why polling failed. The completion queue cannot be used any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PollError {
    /// The provider failed.
    #[error(
        "polling a completion queue failed ({0}): it overran, or the device is gone; create another one, with more entries"
    )]
    Provider(Errno),

    /// A completion names work that is not in flight: the provider repeated or invented it.
    #[error("a completion with identifier {wr_id:#x} names work that is not in flight; the provider is faulty")]
    NotInFlight {
        /// Identifier of the completion.
        wr_id: u64,
    },
}

/// A cursor over the completions of a queue.
///
/// It calls `ibv_start_poll`, `ibv_next_poll` and `ibv_end_poll`, or `ibv_poll_cq(3)`, and lends one completion at a
/// time. The provider holds a lock from the first [`Poll::next`] until the cursor is dropped. So the cursor stays in
/// its thread and borrows the queue mutably. Completions that are not taken stay in the queue.
///
/// Some providers take the same lock to destroy or reset a queue pair that completes to this queue. If this thread
/// drops such a queue pair while a completion is lent, it is destroyed when the cursor moves on or is dropped. A reset
/// and [`QueuePair::destroy`](crate::QueuePair::destroy) must report their result, and fail with
/// [`Error::PollInProgress`](crate::Error::PollInProgress).
///
/// While a completion is lent, this thread should not post to a queue pair that completes to this queue and may be
/// full. mlx5 then waits for the lock forever instead of reporting
/// [`PostError::QueueFull`](crate::PostError::QueueFull). One receive for each receive completion that was taken always
/// fits.
#[must_use = "nothing is taken until `next` is called"]
pub struct Poll<'cq> {
    cq: &'cq mut CompletionQueue,
    stage: Stage,
    /// The error of `Stage::Failed`. Separate, so that the stage is a small number.
    error: PollError,
    not_send: PhantomData<*mut ()>,
}

/// Progress of a cursor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// The cursor has not polled the queue yet. Or it polls again for each completion: see
    /// [`Quirks::ONE_COMPLETION_PER_POLL`](crate::device::Quirks::ONE_COMPLETION_PER_POLL).
    Fresh,
    /// The cursor is positioned on a completion of an extended queue, between start_poll and end_poll.
    Open,
    /// The cursor has polled a classic queue.
    Classic,
    /// There are no more completions.
    Empty,
    Failed,
}

impl CompletionQueue {
    /// Returns a cursor over the completions in the queue: the way to poll unless single instructions count.
    ///
    /// [`CompletionQueue::poller_with_interface`] costs less in a loop, and is for one of the two interfaces.
    ///
    /// ```no_run
    /// # fn example(cq: &mut rdma_safe::CompletionQueue) -> rdma_safe::Result<()> {
    /// let mut poll = cq.poll();
    /// while let Some(completion) = poll.next()? {
    ///     println!("{}: {}", completion.wr_id(), completion.status());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[inline(always)]
    pub fn poll(&mut self) -> Poll<'_> {
        Poll { cq: self, stage: Stage::Fresh, error: PollError::Provider(Errno(0)), not_send: PhantomData }
    }
}

impl Poll<'_> {
    /// Returns the next completion, or `None` if there is none left.
    ///
    /// After `None` or an error the cursor returns the same again, without polling the queue. To poll again, drop it
    /// and call [`CompletionQueue::poll`].
    ///
    /// # Errors
    /// [`PollError`] if the provider failed; a failure is never reported as an empty queue.
    // Always inlined, even if the compiler finds it too long, so that the state stays in registers.
    #[inline(always)]
    #[allow(clippy::should_implement_trait)] // A lending cursor cannot be an `Iterator`: collecting it would alias one cursor.
    pub fn next(&mut self) -> Result<Option<WorkCompletion<'_>>, PollError> {
        let cq = self.cq.raw.cast::<ibv_cq_ex>();
        // Comparisons instead of a `match`, which would become a jump table.
        if self.stage == Stage::Open {
            // SAFETY: the queue is valid, and this thread is between start_poll and end_poll. A provider with
            // start_poll has next_poll.
            let result = unsafe { ibv_next_poll(cq.as_ptr()) };
            if result == 0 {
                // SAFETY: the fields are the queue's. The poll is open, and moves on only by this cursor, which the
                // completion borrows.
                return Ok(Some(unsafe { WorkCompletion::extended(cq, self.cq.fields) }));
            }
            // No completion is lent any more, so the lock need not be held until the cursor is dropped.
            // SAFETY: the mode is `Open`.
            unsafe { self.cq.end_open_poll() };
            self.stage = Stage::Empty;
            return if result == libc::ENOENT { Ok(None) } else { Err(self.fail(result)) };
        }
        if self.stage == Stage::Fresh {
            if self.cq.mode != Mode::Extended {
                if self.cq.mode == Mode::Classic {
                    return self.next_classic();
                }
                rare();
                // The previous completion of this cursor, or a forgotten cursor, has left a poll open.
                self.cq.end_poll();
            }
            let mut attr = ibv_poll_cq_attr { comp_mask: 0 };
            // SAFETY: the queue is valid. No poll is open: the mode says so, and `&mut CompletionQueue` is required to
            // open one. `attr` has no flags.
            let result = unsafe { ibv_start_poll(cq.as_ptr(), &mut attr) };
            if result == 0 {
                self.cq.mode = Mode::Open;
                self.cq.shared.poll_started();
                if !self.cq.one_per_poll {
                    self.stage = Stage::Open;
                }
                // SAFETY: as above.
                return Ok(Some(unsafe { WorkCompletion::extended(cq, self.cq.fields) }));
            }
            self.stage = Stage::Empty;
            return if result == libc::ENOENT { Ok(None) } else { Err(self.fail(result)) };
        }
        if self.stage == Stage::Classic {
            return self.next_classic();
        }
        if self.stage == Stage::Failed { Err(self.error) } else { Ok(None) }
    }

    #[inline(always)]
    fn next_classic(&mut self) -> Result<Option<WorkCompletion<'_>>, PollError> {
        let raw = self.cq.raw;
        let batch = &mut self.cq.batch;
        if !batch.has_next() {
            // A short batch means that the queue is empty, so it need not be polled again.
            if matches!(self.stage, Stage::Classic) && !batch.full {
                self.stage = Stage::Empty;
                return Ok(None);
            }
            self.stage = Stage::Classic;
            // SAFETY: the queue is valid and a classic one, and `has_next` has returned false.
            let result = unsafe { batch.refill(raw) };
            if result <= 0 {
                if result < 0 {
                    // ibv_poll_cq(3) does not promise an errno; providers return codes of their own.
                    return Err(self.fail(result));
                }
                self.stage = Stage::Empty;
                return Ok(None);
            }
        }
        // SAFETY: there is one, because `has_next` returned true or `refill` returned more than 0.
        let row = unsafe { self.cq.batch.take() };
        Ok(Some(WorkCompletion::classic(row)))
    }
}

impl Poll<'_> {
    /// `result` is the return value of `ibv_start_poll`, `ibv_next_poll` or `ibv_poll_cq`.
    #[inline(always)]
    fn fail(&mut self, result: i32) -> PollError {
        rare();
        self.stage = Stage::Failed;
        self.error = PollError::from_provider(result);
        self.error
    }
}

impl PollError {
    /// `result` is the return value of `ibv_start_poll`, `ibv_next_poll` or `ibv_poll_cq`.
    #[inline(always)]
    pub(super) fn from_provider(result: i32) -> Self {
        rare();
        // A negative code is specific to the provider, such as CQ_POLL_ERR of mlx5.
        PollError::Provider(Errno(if result > 0 { result } else { libc::EIO }))
    }
}

impl Drop for Poll<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // If this cursor has not polled, an earlier one may have left a poll open. In the other stages no poll is open.
        if matches!(self.stage, Stage::Fresh | Stage::Open) {
            self.cq.end_poll();
        }
    }
}

impl fmt::Debug for Poll<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poll").field("stage", &self.stage).finish_non_exhaustive()
    }
}
