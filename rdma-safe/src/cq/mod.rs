//! Completion queues: polling, the fields of completions, and channels for their events.
//!
//! Start with [`Context::completion_queue`](crate::Context::completion_queue), which makes a [`CompletionQueue`], and
//! [`CompletionQueue::poll`]. An endpoint or endpoint set has its own completion queue.

mod accessors;
mod builder;
mod channel;
mod classic;
mod completion;
mod modify;
mod owned;
mod poll;
mod poller;
mod raw;
mod standard;
mod wc;

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rdma_sys::*;

use crate::branch::rare;
use crate::errno::check;
use crate::error::Verb;
use crate::object::{self, Object};
use crate::{Context, Errno, Error, ProtectionDomain, Result};

use classic::ClassicBatch;

pub use builder::CompletionQueueBuilder;
pub use channel::CompletionChannel;
pub use completion::{CompletionError, WorkCompletion};
pub(crate) use owned::OpenPoll;
pub use poll::{Poll, PollError};
pub use poller::Poller;
pub use standard::StandardFields;
pub use wc::{WcFields, WcFlags, WcOpcode, WcStatus};

pub use crate::id::CqId;

/// A completion queue: `struct ibv_cq_ex`, or `struct ibv_cq` if the provider has no extended queues.
///
/// It is destroyed when it and all queue pairs that complete to it were dropped.
pub struct CompletionQueue {
    /// The start of a `struct ibv_cq_ex`, unless the mode is [`Mode::Classic`].
    raw: NonNull<ibv_cq>,
    mode: Mode,
    fields: WcFields,
    /// [`Quirks::ONE_COMPLETION_PER_POLL`](crate::device::Quirks::ONE_COMPLETION_PER_POLL).
    one_per_poll: bool,
    batch: ClassicBatch,
    shared: Arc<Shared>,
}

/// How the queue is polled, and whether a poll is open.
///
/// Stored here and not in the cursor, so that a forgotten cursor can still be ended. It is one field, so that a cursor
/// needs one comparison.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Polled by `ibv_start_poll`; no poll is open.
    Extended,
    /// Polled by `ibv_poll_cq`.
    Classic,
    /// Polled by `ibv_start_poll`; a cursor is between start_poll and end_poll.
    Open,
    /// Polled by `ibv_start_poll`; a [`Poller`] exists, and `polling` holds its thread.
    Polled,
}

/// The part of a completion queue that queue pairs share.
pub(crate) struct Shared {
    object: Object<Parents>,
    id: CqId,
    capacity: AtomicU32,
    /// The thread that is between start_poll and end_poll and holds the provider's lock; 0 if none. With the bit
    /// [`DEFERRED`] if `deferred` is not empty.
    polling: AtomicUsize,
    /// Objects to drop when that lock is released.
    deferred: Mutex<Vec<Box<dyn Send>>>,
}

struct Parents {
    context: Context,
    channel: Option<CompletionChannel>,
    /// Only kept alive.
    _domain: Option<ProtectionDomain>,
}

/// A bit of `polling`. Thread numbers are even.
const DEFERRED: usize = 1;

// SAFETY: the C object may be used from any thread. The state of the cursor is accessed through `&mut` only.
unsafe impl Send for CompletionQueue {}
// SAFETY: a shared reference only reads fields that change through `&mut`, and `shared`, which is `Sync`.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// The context that the queue belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.shared.context()
    }

    /// Completions that the queue can hold, at least the requested number.
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

    /// The channel through which it reports events.
    #[must_use]
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.shared.channel()
    }

    /// Identifier in the events of a channel.
    #[must_use]
    #[inline]
    pub fn id(&self) -> CqId {
        self.shared.id
    }

    /// Requests one event for the next completion: `ibv_req_notify_cq(3)`.
    ///
    /// With `solicited_only`, only a solicited or failed completion raises the event. Completions that are already in
    /// the queue need not raise one. So poll until the queue is empty after arming it, and only then wait on the
    /// channel. Arming does not remove earlier events from the channel. [`Endpoint::wait`](crate::Endpoint::wait) does
    /// all of this, and [`Endpoint::arm`](crate::Endpoint::arm) says whether to wait.
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
        // A forgotten cursor holds a lock that some providers take in `ibv_req_notify_cq`.
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
        self.context().verb_error(Verb::ReqNotifyCq, errno)
    }

    /// The C object, valid while this queue exists.
    #[must_use]
    #[inline]
    pub fn as_raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Destroys the queue: `ibv_destroy_cq(3)`. Dropping does the same once nothing completes to it, but ignores
    /// errors.
    ///
    /// # Errors
    /// [`Error::InUse`] if queue pairs, shared receive queues or work queues complete to it: it is destroyed with the
    /// last of them. [`Error::Verb`] if the provider fails; the object and everything it depends on are then leaked.
    #[doc(alias = "ibv_destroy_cq")]
    pub fn destroy(self) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        // Ends the poll of a forgotten cursor.
        drop(self);
        match Arc::into_inner(shared) {
            Some(shared) => shared.object.destroy().map(drop),
            None => Err(Error::InUse { object: "completion queue", users: "queues that complete to it" }),
        }
    }

    /// Ends the poll of a forgotten cursor or poller.
    #[inline(always)]
    fn end_poll(&mut self) {
        if self.mode == Mode::Open {
            // SAFETY: the mode is `Open`.
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
        // SAFETY: the queue is valid. The mode says that it is an extended queue, and that start_poll succeeded without
        // an end_poll since.
        unsafe { ibv_end_poll(self.raw.as_ptr().cast()) }
        self.shared.poll_ended();
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        if !self.context().is_inherited() {
            self.end_poll();
        }
        // The thread of a forgotten cursor may have deferred a drop while another thread, which the queue was moved to,
        // ended the cursor.
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
    /// Whether this thread holds the lock that `ibv_destroy_qp` and a reset take on some providers.
    #[inline(always)]
    pub(crate) fn is_polled_by_this_thread(&self) -> bool {
        self.polling.load(Ordering::Relaxed) & !DEFERRED == this_thread()
    }

    /// Drops `object` when this thread stops polling the queue.
    pub(crate) fn defer(&self, object: Box<dyn Send>) {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner).push(object);
        self.polling.fetch_or(DEFERRED, Ordering::Relaxed);
    }

    /// Records that this thread has called start_poll.
    #[inline(always)]
    fn poll_started(&self) {
        self.polling.store(this_thread(), Ordering::Relaxed);
    }

    /// Records that this thread has called end_poll, and drops deferred objects.
    #[inline(always)]
    fn poll_ended(&self) {
        if self.polling.load(Ordering::Relaxed) & DEFERRED != 0 {
            return self.drop_deferred();
        }
        self.polling.store(0, Ordering::Relaxed);
    }

    // `extern "C"`, because a Rust call could unwind: each caller would then keep its cursor in memory instead of
    // registers. If a `Backing` that is dropped here panics, the process is aborted, which its contract allows.
    #[allow(improper_ctypes_definitions)]
    #[cold]
    #[inline(never)]
    extern "C" fn drop_deferred(&self) {
        // First, so that the objects are not deferred again.
        self.polling.store(0, Ordering::Relaxed);
        let objects = std::mem::take(&mut *self.deferred.lock().unwrap_or_else(PoisonError::into_inner));
        drop(objects);
    }
}

/// An even, nonzero number that no other running thread of the process has.
#[inline(always)]
fn this_thread() -> usize {
    thread_local!(static HERE: u64 = const { 0 });
    HERE.with(|here| std::ptr::from_ref(here).addr())
}

impl object::Parents for Parents {
    type Raw = ibv_cq;

    const VERB: Verb = Verb::DestroyCq;

    fn context(&self) -> &Context {
        &self.context
    }

    // Only the handle polls the queue, and it is gone when the queue is destroyed.
    unsafe fn destroy(&mut self, raw: *mut ibv_cq) -> std::ffi::c_int {
        // SAFETY: the caller's contract. `CompletionChannel` acknowledges each event right after it was read. So this
        // blocks at most until a thread that is reading an event has acknowledged it.
        unsafe { (self.context.verbs().ibv_destroy_cq)(raw) }
    }
}
