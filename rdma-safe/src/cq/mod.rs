//! Completion queues.

mod accessors;
mod builder;
mod modify;
mod owned;
mod poll;
mod poller;
mod raw;
mod standard;
mod wc;

use std::fmt;
use std::ops::ControlFlow;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rdma_sys::*;

use crate::errno::check;
use crate::id::CqId;
use crate::object::{self, Object};
use crate::{CompletionChannel, Context, Errno, Error, ProtectionDomain, Result};

pub use builder::CompletionQueueBuilder;
pub(crate) use owned::Standing;
pub use poll::{CompletionError, Poll, PollError, WorkCompletion};
pub use poller::Poller;
pub use standard::StandardFields;
pub use wc::{WcFields, WcFlags, WcOpcode, WcStatus};

/// A completion queue: `struct ibv_cq_ex`, or `struct ibv_cq` where the provider has no extended queues.
///
/// It is destroyed when it and the queue pairs that complete to it are gone.
pub struct CompletionQueue {
    /// Of a queue that is not [`Mode::Classic`], the beginning of a `struct ibv_cq_ex`.
    raw: NonNull<ibv_cq>,
    mode: Mode,
    fields: WcFields,
    /// [`Quirks::ONE_COMPLETION_PER_POLL`](crate::Quirks::ONE_COMPLETION_PER_POLL).
    one_per_poll: bool,
    taken: Taken,
    shared: Arc<Shared>,
}

/// How a queue is polled, and where polling is. Here and not in the cursor, so that forgetting a cursor is not fatal; in one
/// field, so that a cursor has one thing to look at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// By `ibv_start_poll`.
    Extended,
    /// By `ibv_poll_cq`.
    Classic,
    /// As `Extended`, and between start_poll and end_poll.
    Open,
    /// As `Extended`, and a [`Poller`] was made: the thread is noted.
    Polled,
}

/// Completions that `ibv_poll_cq` has taken out and nobody has seen yet.
///
/// The counters are not where the rows are: what a provider is given a pointer to, a compiler has to read again.
struct Taken {
    /// [`Taken::ROOM`] of them; none for an extended queue.
    rows: NonNull<ibv_wc>,
    room: u32,
    /// Whether there are rows that nobody has seen: from this one
    left: bool,
    next: u32,
    /// to before this one, at most `room`.
    end: u32,
    /// The last batch was as long as there was room: there may be more in the queue.
    full: bool,
}

/// What queue pairs hold of the queue that they complete to.
pub(crate) struct Shared {
    object: Object<Parents>,
    id: CqId,
    capacity: AtomicU32,
    /// The thread that is between start_poll and end_poll, and so holds the provider's lock; 0 for none. With [`DEFERRED`]
    /// if there is something in `deferred`.
    polling: AtomicUsize,
    /// What is to be dropped when that lock is released.
    deferred: Mutex<Vec<Box<dyn Send>>>,
}

struct Parents {
    context: Context,
    channel: Option<CompletionChannel>,
    /// Kept, and not asked for anything.
    _domain: Option<ProtectionDomain>,
}

/// Beside the number of a thread, which is even.
const DEFERRED: usize = 1;

// SAFETY: the C object may be used from any thread; the cursor's state is reached by `&mut` only.
unsafe impl Send for CompletionQueue {}
// SAFETY: through a shared reference there are only immutable fields to be read.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// The device that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.shared.context()
    }

    /// Number of completions it has room for; at least what was asked for.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.shared.capacity.load(Ordering::Relaxed)
    }

    /// Fields that its completions have.
    #[must_use]
    pub fn fields(&self) -> WcFields {
        self.fields
    }

    /// Whether it is polled by `ibv_start_poll`; otherwise by `ibv_poll_cq`.
    #[must_use]
    #[inline(always)]
    pub fn is_extended(&self) -> bool {
        self.mode != Mode::Classic
    }

    /// The channel that it reports events over.
    #[must_use]
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.shared.channel()
    }

    /// Its name in the events of a channel.
    #[must_use]
    #[inline]
    pub fn id(&self) -> CqId {
        self.shared.id
    }

    /// Asks for one event at the next completion, or the next solicited or failed one: `ibv_req_notify_cq(3)`.
    ///
    /// Completions that are already there need not raise an event. So poll after arming until the queue is empty, and only then
    /// wait on the channel. Arming leaves earlier events in the channel. [`Endpoint::wait`](crate::Endpoint::wait) does
    /// all of that, and [`Endpoint::arm`](crate::Endpoint::arm) says whether to wait.
    ///
    /// ```no_run
    /// # fn example(context: &rdma_safe::Context) -> rdma_safe::Result<()> {
    /// use std::time::Duration;
    ///
    /// let channel = context.create_channel()?;
    /// let mut cq = context.completion_queue(256).channel(&channel).build()?;
    /// loop {
    ///     cq.arm(false)?;
    ///     let mut poll = cq.poll();
    ///     while let Some(completion) = poll.next()? {
    ///         println!("{}: {}", completion.wr_id(), completion.status());
    ///     }
    ///     drop(poll);
    ///     channel.wait(Duration::from_secs(10))?;
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NoChannel`] without a channel; [`Error::Verb`].
    #[doc(alias = "ibv_req_notify_cq")]
    #[inline]
    pub fn arm(&mut self, solicited_only: bool) -> Result<()> {
        if self.shared.channel().is_none() {
            return Err(Error::NoChannel);
        }
        // A cursor that was forgotten holds a lock that some providers take here.
        self.end_poll();
        self.request(solicited_only)
    }

    /// Calls `ibv_req_notify_cq`.
    #[inline(always)]
    fn request(&self, solicited_only: bool) -> Result<()> {
        // SAFETY: the queue is valid.
        check(unsafe { ibv_req_notify_cq(self.as_raw(), i32::from(solicited_only)) })
            .map_err(|errno| self.arm_error(errno))
    }

    #[cold]
    fn arm_error(&self, errno: Errno) -> Error {
        self.context().verb_error("ibv_req_notify_cq", errno)
    }

    /// The C object, valid while this queue is.
    #[must_use]
    #[inline]
    pub fn as_raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Destroys it: `ibv_destroy_cq(3)`. Dropping does the same, when nothing completes to it any more, and tells nobody.
    ///
    /// # Errors
    /// [`Error::InUse`] while there are queue pairs, shared receive queues or work queues that complete to it: it is destroyed when
    /// the last of them is gone. [`Error::Verb`] with the provider's answer; it, and all it depends on, then stays until the
    /// process ends.
    #[doc(alias = "ibv_destroy_cq")]
    pub fn destroy(self) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        // Ends what a forgotten cursor has begun.
        drop(self);
        match Arc::into_inner(shared) {
            Some(shared) => shared.object.destroy().map(drop),
            None => Err(Error::InUse { object: "completion queue", by: "queues that complete to it" }),
        }
    }

    /// Ends what a cursor or a poller has begun.
    #[inline(always)]
    fn end_poll(&mut self) {
        if self.mode == Mode::Open {
            // SAFETY: it is.
            unsafe { self.end_open_poll() }
        } else if self.mode == Mode::Polled {
            rare();
            self.mode = Mode::Extended;
            self.shared.poll_ended();
        }
    }

    /// # Safety
    /// The mode must be [`Mode::Open`].
    #[inline(always)]
    unsafe fn end_open_poll(&mut self) {
        self.mode = Mode::Extended;
        // SAFETY: the queue is valid and, as the mode said, an extended one, and start_poll succeeded without an end_poll
        // since.
        unsafe { ibv_end_poll(self.raw.as_ptr().cast()) }
        self.shared.poll_ended();
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.end_poll();
        // Put off by the thread of a forgotten cursor just as another one, which the queue was moved to, ended it.
        self.shared.drop_deferred();
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("device", &self.context().device_name())
            .field("id", &self.id())
            .field("capacity", &self.capacity())
            .field("extended", &self.is_extended())
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn context(&self) -> &Context {
        &self.object.context
    }

    #[inline]
    fn channel(&self) -> Option<&CompletionChannel> {
        self.object.channel.as_ref()
    }
}

impl Shared {
    /// Whether this very thread holds the lock that `ibv_destroy_qp` and a reset take on some providers.
    pub(crate) fn is_polled_here(&self) -> bool {
        self.polling.load(Ordering::Relaxed) & !DEFERRED == this_thread()
    }

    /// Drops `object` when this thread, which is polling the queue, has ended that.
    pub(crate) fn defer(&self, object: Box<dyn Send>) {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner).push(object);
        self.polling.fetch_or(DEFERRED, Ordering::Relaxed);
    }

    /// This thread has called start_poll.
    #[inline(always)]
    fn poll_started(&self) {
        self.polling.store(this_thread(), Ordering::Relaxed);
    }

    /// This thread has called end_poll.
    #[inline(always)]
    fn poll_ended(&self) {
        if self.polling.load(Ordering::Relaxed) & DEFERRED != 0 {
            return self.drop_deferred();
        }
        self.polling.store(0, Ordering::Relaxed);
    }

    // Not a Rust call, which could unwind: for that every caller would keep its cursor in memory and not in registers.
    // What is dropped here does not panic.
    #[allow(improper_ctypes_definitions)]
    #[cold]
    #[inline(never)]
    extern "C" fn drop_deferred(&self) {
        // First, so that nothing is put off again.
        self.polling.store(0, Ordering::Relaxed);
        let objects = std::mem::take(&mut *self.deferred.lock().unwrap_or_else(PoisonError::into_inner));
        drop(objects);
    }
}

/// Says that what calls it is rare, so that the code of the common case lies together.
#[cold]
#[inline]
pub(crate) fn rare() {}

/// An even number other than 0 that no other thread of the process has at the same time.
#[inline(always)]
fn this_thread() -> usize {
    thread_local!(static HERE: u64 = const { 0 });
    HERE.with(|here| std::ptr::from_ref(here).addr())
}

impl object::Parents for Parents {
    type Raw = ibv_cq;

    const VERB: &'static str = "ibv_destroy_cq";

    fn context(&self) -> &Context {
        &self.context
    }

    // It is polled by its handle, of which none is left when it is destroyed.
    unsafe fn destroy(&self, raw: *mut ibv_cq) -> std::ffi::c_int {
        // SAFETY: the caller's contract. Every event that was read from the channel was acknowledged at once (`CompletionChannel`),
        // so this does not block for long: at most until a thread that is just reading an event has acknowledged it.
        unsafe { (self.context.verbs().ibv_destroy_cq)(raw) }
    }
}

impl Taken {
    const ROOM: u32 = 16;

    fn none() -> Self {
        Taken::with(0)
    }

    fn room() -> Self {
        Taken::with(Self::ROOM)
    }

    fn with(room: u32) -> Self {
        let rows = vec![ibv_wc::zeroed(); room as usize].into_boxed_slice();
        Taken { rows: NonNull::from(Box::leak(rows)).cast(), room, left: false, next: 0, end: 0, full: false }
    }

    /// Takes the next batch out of a classic queue: how many there are, or a negative number.
    ///
    /// # Safety
    /// The queue must be valid, this made by [`Taken::room`], and none of the last batch be left.
    #[inline(always)]
    unsafe fn refill(&mut self, cq: NonNull<ibv_cq>) -> i32 {
        // SAFETY: the queue is valid and there is room for as many completions as are asked for.
        let taken = unsafe { ibv_poll_cq(cq.as_ptr(), Self::ROOM as i32, self.rows.as_ptr()) };
        if taken > 0 {
            // No more than there is room for, whatever a provider says.
            (self.left, self.next, self.end) = (true, 0, (taken as u32).min(Self::ROOM));
            self.full = taken as u32 >= Self::ROOM;
        }
        taken
    }

    /// Whether nobody has seen the next completion.
    #[inline(always)]
    fn has_next(&self) -> bool {
        self.left
    }

    /// The next completion.
    ///
    /// # Safety
    /// There must be one.
    #[inline(always)]
    unsafe fn take(&mut self) -> &ibv_wc {
        let row = self.next as usize;
        self.next += 1;
        self.left = self.next != self.end;
        // SAFETY: it was less than `end`, which is at most `room`.
        unsafe { self.rows.add(row).as_ref() }
    }

    /// As [`Taken::refill`] and [`Taken::take`]: the first of the next batch, or the negative number.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn take_first(&mut self, cq: NonNull<ibv_cq>) -> Result<Option<&ibv_wc>, i32> {
        // SAFETY: as there.
        let taken = unsafe { ibv_poll_cq(cq.as_ptr(), Self::ROOM as i32, self.rows.as_ptr()) };
        if taken != 1 {
            if taken <= 0 {
                return if taken == 0 { Ok(None) } else { Err(taken) };
            }
            (self.left, self.next, self.end) = (true, 1, (taken as u32).min(Self::ROOM));
        }
        // SAFETY: it has just been filled.
        Ok(Some(unsafe { self.rows.as_ref() }))
    }

    /// Shows the rows from `next` to before `end` to `each`, until it breaks or panics: what it has not seen is left.
    ///
    /// # Safety
    /// They must be filled, `rows` be those of this, `end` at most `room`, and nothing count as left.
    #[inline(always)]
    unsafe fn show(
        &mut self,
        rows: NonNull<ibv_wc>,
        next: u32,
        end: u32,
        each: &mut impl FnMut(&ibv_wc) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        /// Counts in a register. Where all were seen there is nothing to store.
        struct At<'a> {
            taken: &'a mut Taken,
            next: u32,
            end: u32,
        }
        impl Drop for At<'_> {
            #[inline(always)]
            fn drop(&mut self) {
                let At { next, end, .. } = *self;
                (self.taken.left, self.taken.next, self.taken.end) = (next != end, next, end);
            }
        }
        let mut at = At { taken: self, next, end };
        while at.next < at.end {
            let row = at.next as usize;
            at.next += 1;
            // SAFETY: the caller's contract; the provider writes them only when it is asked again.
            each(unsafe { rows.add(row).as_ref() })?;
        }
        std::mem::forget(at);
        ControlFlow::Continue(())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // SAFETY: the box of so many rows that was leaked when this was made.
        drop(unsafe { Box::from_raw(NonNull::slice_from_raw_parts(self.rows, self.room as usize).as_ptr()) });
    }
}
