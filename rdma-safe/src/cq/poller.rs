//! Polling in a loop.

use std::cell::UnsafeCell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::ptr::NonNull;

use rdma_sys::*;

use super::{CompletionQueue, Mode, PollError, Taken, WcFields, WorkCompletion, rare};
use crate::Error;
use crate::interface::{Any, Classic, Extended, Interface, Known};

/// A completion queue that one thread polls for a while: what [`Poll`](crate::Poll) does, at less cost for each poll.
///
/// Completions are shown to a closure, so that a poll, during which the provider holds a lock, cannot be forgotten half done;
/// and the thread that polls is noted once, when this is made. So, as long as it lives, a queue pair that completes to this
/// queue and is dropped in this thread is put off: it is destroyed when this goes. A reset and
/// [`QueuePair::destroy`](crate::QueuePair::destroy) report [`Error::PolledHere`](crate::Error::PolledHere).
///
/// ```no_run
/// # use std::ops::ControlFlow;
/// # fn example(cq: &mut rdma_safe::CompletionQueue) -> Result<(), Box<dyn std::error::Error>> {
/// let mut poller = cq.extended_poller().ok_or("the provider has no extended completion queues")?;
/// // One, as soon as it is there:
/// let id = loop {
///     if let Some(id) = poller.take(|completion| completion.wr_id())? {
///         break id;
///     }
/// };
/// // All that are there:
/// poller.drain(|completion| {
///     println!("{} after {id}: {}", completion.wr_id(), completion.status());
///     ControlFlow::Continue(())
/// })?;
/// # Ok(())
/// # }
/// ```
pub struct Poller<'cq, I: Interface = Any> {
    /// That of `cq`: here, it need not be read again for each poll.
    raw: NonNull<ibv_cq>,
    /// Likewise: those of [`Taken`].
    rows: NonNull<ibv_wc>,
    extended: bool,
    fields: WcFields,
    one_per_poll: bool,
    /// The queue has a channel.
    reports: bool,
    cq: &'cq mut CompletionQueue,
    interface: PhantomData<I>,
    /// The thread was noted.
    not_send: PhantomData<*mut ()>,
}

impl CompletionQueue {
    /// Polls by the interface that it was created with, which is asked for on every poll.
    #[inline]
    pub fn poller(&mut self) -> Poller<'_> {
        Poller::new(self)
    }

    /// Polls by `ibv_start_poll`; `None` for a queue that has to be polled by `ibv_poll_cq`.
    #[doc(alias = "ibv_start_poll")]
    #[inline]
    pub fn extended_poller(&mut self) -> Option<Poller<'_, Extended>> {
        self.poller_by()
    }

    /// Polls by `ibv_poll_cq(3)`; `None` for an extended queue.
    #[doc(alias = "ibv_poll_cq")]
    #[inline]
    pub fn classic_poller(&mut self) -> Option<Poller<'_, Classic>> {
        self.poller_by()
    }

    /// Polls by the interface `I`, for code that is generic over it; `None` for a queue of the other one.
    #[inline]
    pub fn poller_by<I: Known>(&mut self) -> Option<Poller<'_, I>> {
        if I::EXTENDED == Some(self.is_extended()) { Some(Poller::new(self)) } else { None }
    }
}

/// What start_poll is asked for: no flag is defined for it.
pub(super) struct PollFlags(UnsafeCell<ibv_poll_cq_attr>);

// SAFETY: nobody writes it. Providers look at `comp_mask`, an input, and no more; it is in a cell because C has no word for that
// in the type of the parameter.
unsafe impl Sync for PollFlags {}

static NO_FLAGS: PollFlags = PollFlags(UnsafeCell::new(ibv_poll_cq_attr { comp_mask: 0 }));

/// Between start_poll and end_poll, also where a closure panics.
pub(super) struct Started(NonNull<ibv_cq_ex>);

impl Started {
    /// What `ibv_start_poll` returns. When that is 0, a `Started` is to be made.
    ///
    /// # Safety
    /// The queue must be an extended one and not be being polled.
    #[inline(always)]
    unsafe fn start(cq: NonNull<ibv_cq_ex>) -> i32 {
        // SAFETY: the caller's contract.
        unsafe { ibv_start_poll(cq.as_ptr(), NO_FLAGS.0.get()) }
    }

    /// Calls `ibv_start_poll`; `None` when there is nothing to take.
    ///
    /// # Safety
    /// The queue must be an extended one and not be being polled.
    #[inline(always)]
    pub(super) unsafe fn begin(cq: NonNull<ibv_cq_ex>) -> Result<Option<Self>, PollError> {
        // SAFETY: the caller's contract.
        let result = unsafe { Started::start(cq) };
        // First: who asks for one at a time asks again and again.
        if result == libc::ENOENT {
            return Ok(None);
        }
        if result != 0 {
            rare();
            return Err(PollError::of_provider(result));
        }
        Ok(Some(Started(cq)))
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

impl<'cq, I: Interface> Poller<'cq, I> {
    /// `I` must be what the queue is, or [`Any`].
    // Once a loop: inlined, it would take registers from what is in the loop.
    #[inline(never)]
    fn new(cq: &'cq mut CompletionQueue) -> Self {
        // Begun by a cursor or a poller that was forgotten.
        cq.end_poll();
        let extended = cq.mode != Mode::Classic;
        debug_assert!(I::EXTENDED.is_none_or(|known| known == extended));
        if extended {
            cq.mode = Mode::Polled;
            cq.shared.poll_started();
        }
        Poller {
            raw: cq.raw,
            rows: cq.taken.rows,
            extended,
            fields: cq.fields,
            one_per_poll: cq.one_per_poll,
            reports: cq.channel().is_some(),
            cq,
            interface: PhantomData,
            not_send: PhantomData,
        }
    }

    /// Takes one completion, if there is any, and returns what `look` makes of it.
    ///
    /// # Errors
    /// [`PollError`] when the provider failed.
    #[inline(always)]
    pub fn take<R>(&mut self, look: impl FnOnce(WorkCompletion<'_>) -> R) -> Result<Option<R>, PollError> {
        let Some(cq) = self.as_extended() else { return self.take_classic(look) };
        // SAFETY: the queue is an extended one, and borrowed. Nobody polls it: what a cursor had begun was ended when this was
        // made, and what a method of this begins it ends.
        let Some(_started) = (unsafe { Started::begin(cq) })? else { return Ok(None) };
        Ok(Some(look(WorkCompletion::extended(cq, self.fields))))
    }

    /// Takes the completions that are there and shows them to `each`, until it breaks.
    ///
    /// # Errors
    /// [`PollError`] when the provider failed, after those that were there before.
    #[inline(always)]
    pub fn drain(&mut self, mut each: impl FnMut(WorkCompletion<'_>) -> ControlFlow<()>) -> Result<(), PollError> {
        let Some(cq) = self.as_extended() else { return self.drain_classic(each) };
        loop {
            // SAFETY: as in `take`.
            let result = unsafe { Started::start(cq) };
            if result != 0 {
                rare();
                return ended(result);
            }
            let _started = Started(cq);
            loop {
                if each(WorkCompletion::extended(cq, self.fields)).is_break() {
                    return Ok(());
                }
                if self.one_per_poll {
                    rare();
                    break;
                }
                // SAFETY: between start_poll and end_poll; a provider that has start_poll has next_poll.
                let result = unsafe { ibv_next_poll(cq.as_ptr()) };
                if result != 0 {
                    return ended(result);
                }
            }
        }
    }

    /// Asks for an event, as [`CompletionQueue::arm`] does.
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "ibv_req_notify_cq")]
    #[inline]
    pub fn arm(&mut self, solicited_only: bool) -> crate::Result<()> {
        if !self.reports {
            return Err(Error::NoChannel);
        }
        // No lock is held: what a method of this begins it ends.
        self.cq.request(solicited_only)
    }

    #[inline(always)]
    fn take_classic<R>(&mut self, look: impl FnOnce(WorkCompletion<'_>) -> R) -> Result<Option<R>, PollError> {
        let taken = &mut self.cq.taken;
        if !taken.has_next() {
            // SAFETY: the queue is valid, and a classic one; nothing is left.
            let result = unsafe { taken.refill(self.raw) };
            if result == 0 {
                return Ok(None);
            }
            // Less often, at any rate: see `take`.
            rare();
            if result < 0 {
                return Err(PollError::of_provider(result));
            }
        }
        // SAFETY: there is one: as found above, or as `refill` has taken more than none.
        Ok(Some(look(WorkCompletion::classic(unsafe { taken.take() }))))
    }

    #[inline(always)]
    fn drain_classic(&mut self, mut each: impl FnMut(WorkCompletion<'_>) -> ControlFlow<()>) -> Result<(), PollError> {
        let taken = &mut self.cq.taken;
        let mut each = |row: &ibv_wc| each(WorkCompletion::classic(row));
        if taken.has_next() {
            rare();
            // By an earlier poll; that says nothing about what is in the queue by now.
            taken.left = false;
            // SAFETY: these were left.
            if unsafe { taken.show(self.rows, taken.next, taken.end, &mut each) }.is_break() {
                return Ok(());
            }
        }
        loop {
            // SAFETY: the queue is valid, and a classic one, and there is room for as many as are asked for; nothing is left.
            let result = unsafe { ibv_poll_cq(self.raw.as_ptr(), Taken::ROOM as i32, self.rows.as_ptr()) };
            let count = result as u32;
            // A short batch means that the queue is empty: no need to ask once more.
            if count.wrapping_sub(1) < Taken::ROOM - 1 {
                // SAFETY: so many were filled, and none is left.
                let _ = unsafe { taken.show(self.rows, 0, count, &mut each) };
                return Ok(());
            }
            if result <= 0 {
                return if result == 0 { Ok(()) } else { Err(PollError::of_provider(result)) };
            }
            // SAFETY: as above; no more than there is room for, whatever a provider says.
            if unsafe { taken.show(self.rows, 0, Taken::ROOM, &mut each) }.is_break() {
                return Ok(());
            }
        }
    }

    /// The queue, if it is an extended one: known where `I` is.
    #[inline(always)]
    fn as_extended(&self) -> Option<NonNull<ibv_cq_ex>> {
        if I::EXTENDED.unwrap_or(self.extended) { Some(self.raw.cast()) } else { None }
    }
}

/// `result` is what `ibv_start_poll` or `ibv_next_poll` returned, other than 0.
#[inline(always)]
fn ended(result: i32) -> Result<(), PollError> {
    if result == libc::ENOENT { Ok(()) } else { Err(PollError::of_provider(result)) }
}

impl<I: Interface> Drop for Poller<'_, I> {
    #[inline(always)]
    fn drop(&mut self) {
        if I::EXTENDED.unwrap_or(self.extended) {
            self.cq.mode = Mode::Extended;
            self.cq.shared.poll_ended();
        }
    }
}

impl<I: Interface> fmt::Debug for Poller<'_, I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poller").field("extended", &self.extended).finish_non_exhaustive()
    }
}
