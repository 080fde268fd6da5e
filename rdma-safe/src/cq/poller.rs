//! The poller: polling a completion queue in a loop.

use std::cell::UnsafeCell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::ptr::NonNull;

use rdma_sys::*;

use super::{ClassicBatch, CompletionQueue, Mode, PollError, WcFields, WorkCompletion};
use crate::Error;
use crate::branch::rare;
use crate::interface::Known;

/// Polls a completion queue by one interface, at a lower cost per poll than [`Poll`](crate::Poll).
///
/// Take it for loops that poll millions of times per second; otherwise use [`CompletionQueue::poll`].
///
/// Completions are passed to a closure, so that a poll, during which the provider holds a lock, cannot be forgotten
/// while it is open. The polling thread is recorded once, when the poller is made. If this thread drops a queue pair
/// that completes to this queue, it is destroyed when the poller is dropped. A reset and
/// [`QueuePair::destroy`](crate::QueuePair::destroy) fail with [`Error::PollInProgress`](crate::Error::PollInProgress).
///
/// ```no_run
/// # use std::ops::ControlFlow;
/// # fn example(cq: &mut rdma_safe::CompletionQueue) -> Result<(), Box<dyn std::error::Error>> {
/// use rdma_safe::interface::Extended;
///
/// let poller = cq.poller_with_interface::<Extended>();
/// let mut poller = poller.ok_or("the provider has no extended completion queues")?;
/// // Wait for one completion:
/// let id = loop {
///     if let Some(id) = poller.poll_one(|completion| completion.wr_id())? {
///         break id;
///     }
/// };
/// // Take all completions that are there:
/// poller.poll_all(|completion| {
///     println!("{} after {id}: {}", completion.wr_id(), completion.status());
///     ControlFlow::Continue(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub struct Poller<'cq, I: Known> {
    /// Copy of the field of `cq`, so that it need not be read again for each poll.
    raw: NonNull<ibv_cq>,
    /// Copy of the field of [`ClassicBatch`], for the same reason.
    rows: NonNull<ibv_wc>,
    fields: WcFields,
    one_per_poll: bool,
    has_channel: bool,
    cq: &'cq mut CompletionQueue,
    interface: PhantomData<I>,
    /// `!Send`, because the queue has recorded the thread.
    not_send: PhantomData<*mut ()>,
}

impl CompletionQueue {
    /// Polls by the interface `I`: [`Extended`](crate::interface::Extended) for `ibv_start_poll`, or
    /// [`Classic`](crate::interface::Classic) for `ibv_poll_cq(3)`.
    ///
    /// `None` if the queue uses the other interface: see [`CompletionQueue::is_extended`]. A program that need not save
    /// instructions polls with [`CompletionQueue::poll`], which works with both.
    #[doc(alias = "ibv_start_poll")]
    #[doc(alias = "ibv_poll_cq")]
    #[inline]
    pub fn poller_with_interface<I: Known>(&mut self) -> Option<Poller<'_, I>> {
        if I::EXTENDED != Some(self.is_extended()) {
            return None;
        }
        // SAFETY: `I` is the interface of the queue.
        Some(unsafe { Poller::new(self) })
    }
}

/// Argument of start_poll, for which no flag is defined.
pub(super) struct PollFlags(UnsafeCell<ibv_poll_cq_attr>);

// SAFETY: nobody writes it. Providers only read `comp_mask`, an input. It is in a cell because the C parameter is not
// `const`.
unsafe impl Sync for PollFlags {}

static NO_FLAGS: PollFlags = PollFlags(UnsafeCell::new(ibv_poll_cq_attr { comp_mask: 0 }));

/// An open poll, between start_poll and end_poll. Dropping it ends the poll, also when a closure panics.
pub(super) struct Started(NonNull<ibv_cq_ex>);

impl Started {
    /// Calls `ibv_start_poll` and returns its result. If that is 0, the caller must create a `Started`.
    ///
    /// # Safety
    /// The queue must be an extended one without an open poll.
    #[inline(always)]
    unsafe fn start(cq: NonNull<ibv_cq_ex>) -> i32 {
        // SAFETY: the caller's contract.
        unsafe { ibv_start_poll(cq.as_ptr(), NO_FLAGS.0.get()) }
    }

    /// Calls `ibv_start_poll`; `None` if the queue is empty.
    ///
    /// # Safety
    /// The queue must be an extended one without an open poll.
    #[inline(always)]
    pub(super) unsafe fn begin(cq: NonNull<ibv_cq_ex>) -> Result<Option<Self>, PollError> {
        // SAFETY: the caller's contract.
        let result = unsafe { Started::start(cq) };
        // First, because a caller that takes single completions usually finds the queue empty.
        if result == libc::ENOENT {
            return Ok(None);
        }
        if result != 0 {
            rare();
            return Err(PollError::from_provider(result));
        }
        Ok(Some(Started(cq)))
    }

    /// Like [`Started::begin`], for a caller that does more if the queue is empty.
    ///
    /// # Safety
    /// That of [`Started::begin`].
    #[inline(always)]
    pub(super) unsafe fn begin_owned(cq: NonNull<ibv_cq_ex>) -> Result<Option<Self>, PollError> {
        // SAFETY: the caller's contract.
        let result = unsafe { Started::start(cq) };
        if result == 0 {
            return Ok(Some(Started(cq)));
        }
        if result == libc::ENOENT {
            return Ok(None);
        }
        rare();
        Err(PollError::from_provider(result))
    }

    #[inline(always)]
    pub(super) fn raw(&self) -> NonNull<ibv_cq_ex> {
        self.0
    }
}

impl Drop for Started {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: start_poll has succeeded, and this is dropped once.
        unsafe { ibv_end_poll(self.0.as_ptr()) }
    }
}

impl<'cq, I: Known> Poller<'cq, I> {
    /// # Safety
    /// `I` must be the interface of the queue.
    // Not inlined: it runs once before a loop, and would take registers from the loop.
    #[inline(never)]
    unsafe fn new(cq: &'cq mut CompletionQueue) -> Self {
        // Ends the poll of a forgotten cursor or poller.
        cq.end_poll();
        let extended = cq.mode != Mode::Classic;
        debug_assert!(I::EXTENDED == Some(extended));
        if extended {
            cq.mode = Mode::Polled;
            cq.shared.poll_started();
        }
        Poller {
            raw: cq.raw,
            rows: cq.batch.rows,
            fields: cq.fields,
            one_per_poll: cq.one_per_poll,
            has_channel: cq.channel().is_some(),
            cq,
            interface: PhantomData,
            not_send: PhantomData,
        }
    }

    /// Takes one completion, if there is one, and returns the result of `read`.
    ///
    /// # Errors
    /// [`PollError`] if the provider failed.
    #[inline(always)]
    pub fn poll_one<R>(&mut self, read: impl FnOnce(WorkCompletion<'_>) -> R) -> Result<Option<R>, PollError> {
        let Some(cq) = self.as_extended() else { return self.poll_one_classic(read) };
        // SAFETY: the queue is an extended one by the contract of `new`, and borrowed. No poll is open: `new` ended that
        // of a forgotten cursor, and each method ends its own.
        let Some(_started) = (unsafe { Started::begin(cq) })? else { return Ok(None) };
        // SAFETY: `fields` is a copy of the queue's. The poll stays open and on this completion while `read` borrows it,
        // since `self` is borrowed, too.
        Ok(Some(read(unsafe { WorkCompletion::extended(cq, self.fields) })))
    }

    /// Takes the completions in the queue and calls `each` with them, until it breaks.
    ///
    /// # Errors
    /// [`PollError`] if the provider failed, after the completions before the failure.
    #[inline(always)]
    pub fn poll_all(&mut self, mut each: impl FnMut(WorkCompletion<'_>) -> ControlFlow<()>) -> Result<(), PollError> {
        let Some(cq) = self.as_extended() else { return self.poll_all_classic(each) };
        loop {
            // SAFETY: as for `begin` in `poll_one`.
            let result = unsafe { Started::start(cq) };
            if result != 0 {
                rare();
                return end_of_poll(result);
            }
            let _started = Started(cq);
            loop {
                // SAFETY: as in `poll_one`: the poll moves on only after `each` has returned.
                if each(unsafe { WorkCompletion::extended(cq, self.fields) }).is_break() {
                    return Ok(());
                }
                if self.one_per_poll {
                    rare();
                    break;
                }
                // SAFETY: this is between start_poll and end_poll. A provider with start_poll has next_poll.
                let result = unsafe { ibv_next_poll(cq.as_ptr()) };
                if result != 0 {
                    return end_of_poll(result);
                }
            }
        }
    }

    /// Requests an event, like [`CompletionQueue::arm`].
    ///
    /// # Errors
    /// Those of [`CompletionQueue::arm`].
    #[doc(alias = "ibv_req_notify_cq")]
    #[inline]
    pub fn arm(&mut self, solicited_only: bool) -> crate::Result<()> {
        if !self.has_channel {
            return Err(Error::NoChannel);
        }
        // No lock is held, because each method ends the poll that it starts.
        self.cq.request(solicited_only)
    }

    #[inline(always)]
    fn poll_one_classic<R>(&mut self, read: impl FnOnce(WorkCompletion<'_>) -> R) -> Result<Option<R>, PollError> {
        let batch = &mut self.cq.batch;
        if !batch.has_next() {
            // SAFETY: the queue is valid and a classic one, and all completions of the batch are taken.
            let result = unsafe { batch.refill(self.raw) };
            if result == 0 {
                return Ok(None);
            }
            // Unlikely, because a caller that takes single completions usually finds the queue empty.
            rare();
            if result < 0 {
                return Err(PollError::from_provider(result));
            }
        }
        // SAFETY: there is one, because `has_next` returned true or `refill` returned more than 0.
        Ok(Some(read(WorkCompletion::classic(unsafe { batch.take() }))))
    }

    #[inline(always)]
    fn poll_all_classic(
        &mut self,
        mut each: impl FnMut(WorkCompletion<'_>) -> ControlFlow<()>,
    ) -> Result<(), PollError> {
        let batch = &mut self.cq.batch;
        let mut each = |row: &ibv_wc| each(WorkCompletion::classic(row));
        if batch.has_next() {
            rare();
            // Completions that an earlier poll has left. They do not show whether the queue is empty now.
            batch.left = false;
            // SAFETY: these rows are filled and were not taken.
            if unsafe { batch.visit(self.rows, batch.next, batch.end, &mut each) }.is_break() {
                return Ok(());
            }
        }
        loop {
            // SAFETY: the queue is valid and a classic one, and there is space for the requested number. All
            // completions of the batch are taken.
            let result = unsafe { ibv_poll_cq(self.raw.as_ptr(), ClassicBatch::CAPACITY as i32, self.rows.as_ptr()) };
            let count = result as u32;
            // A short batch means that the queue is empty, so it need not be polled again.
            if count.wrapping_sub(1) < ClassicBatch::CAPACITY - 1 {
                // SAFETY: `count` rows were filled, and none is left.
                let _ = unsafe { batch.visit(self.rows, 0, count, &mut each) };
                return Ok(());
            }
            if result <= 0 {
                return if result == 0 { Ok(()) } else { Err(PollError::from_provider(result)) };
            }
            // SAFETY: the rows were filled. The number is limited to the capacity, even if a provider reports more.
            if unsafe { batch.visit(self.rows, 0, ClassicBatch::CAPACITY, &mut each) }.is_break() {
                return Ok(());
            }
        }
    }

    /// The queue, if it is an extended one. The compiler knows the answer.
    #[inline(always)]
    fn as_extended(&self) -> Option<NonNull<ibv_cq_ex>> {
        if I::EXTENDED == Some(true) { Some(self.raw.cast()) } else { None }
    }
}

/// `result` is a return value of `ibv_start_poll` or `ibv_next_poll` other than 0.
#[inline(always)]
fn end_of_poll(result: i32) -> Result<(), PollError> {
    if result == libc::ENOENT { Ok(()) } else { Err(PollError::from_provider(result)) }
}

impl<I: Known> Drop for Poller<'_, I> {
    #[inline(always)]
    fn drop(&mut self) {
        if I::EXTENDED == Some(true) {
            self.cq.mode = Mode::Extended;
            self.cq.shared.poll_ended();
        }
    }
}

impl<I: Known> fmt::Debug for Poller<'_, I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poller").field("extended", &(I::EXTENDED == Some(true))).finish_non_exhaustive()
    }
}
