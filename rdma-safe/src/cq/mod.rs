//! Completion queues.

mod builder;
mod poll;
mod wc;

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rdma_sys::*;

use crate::errno::check;
use crate::{CompletionChannel, Context, Errno, Error, Result};

pub use builder::CompletionQueueBuilder;
pub use poll::{CompletionError, Poll, PollError, WorkCompletion};
pub use wc::{WcFields, WcFlags, WcOpcode, WcStatus};

/// A completion queue: `struct ibv_cq_ex`, or `struct ibv_cq` where the provider has no extended queues.
///
/// It is destroyed when it and the queue pairs that complete to it are gone.
pub struct CompletionQueue {
    shared: Arc<Shared>,
    fields: WcFields,
    source: Source,
}

/// What queue pairs hold of the queue that they complete to.
pub(crate) struct Shared {
    raw: NonNull<ibv_cq>,
    parents: Option<(Context, Option<CompletionChannel>)>,
    id: CqId,
    capacity: u32,
    /// The thread that is between start_poll and end_poll, and so holds the provider's lock; 0 for none.
    polling: AtomicUsize,
    /// What is to be dropped when that lock is released, and whether there is anything.
    deferred: Mutex<Vec<Box<dyn Send>>>,
    has_deferred: AtomicBool,
}

enum Source {
    Extended {
        raw: NonNull<ibv_cq_ex>,
        /// Between start_poll and end_poll. Here and not in the cursor, so that forgetting a cursor is not fatal.
        open: bool,
        /// [`Quirks::ONE_COMPLETION_PER_POLL`](crate::Quirks::ONE_COMPLETION_PER_POLL).
        one_per_poll: bool,
    },
    Classic(Box<Classic>),
}

/// Completions that `ibv_poll_cq` has taken out and nobody has seen yet.
struct Classic {
    raw: NonNull<ibv_cq>,
    rows: [ibv_wc; 16],
    next: u32,
    len: u32,
}

// SAFETY: the C object may be used from any thread; the cursor's state is reached by `&mut` only.
unsafe impl Send for CompletionQueue {}
// SAFETY: through a shared reference there are only immutable fields to be read.
unsafe impl Sync for CompletionQueue {}
// SAFETY: libibverbs objects may be used from any thread (see `Context`); the fields are immutable.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// Tells completion queues apart in the events of a channel; never used twice in a process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CqId(u64);

impl CqId {
    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        CqId(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// As `cq_context`, which is handed back with an event and never dereferenced.
    fn to_context(self) -> *mut std::ffi::c_void {
        std::ptr::without_provenance_mut(self.0 as usize)
    }

    pub(crate) fn from_context(context: *mut std::ffi::c_void) -> Self {
        CqId(context.addr() as u64)
    }
}

impl CompletionQueue {
    /// The device that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.shared.context()
    }

    /// Number of completions it has room for; at least what was asked for.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.shared.capacity
    }

    /// Fields that its completions have.
    #[must_use]
    pub fn fields(&self) -> WcFields {
        self.fields
    }

    /// Whether it is polled by `ibv_start_poll`; otherwise by `ibv_poll_cq`.
    #[must_use]
    pub fn is_extended(&self) -> bool {
        matches!(self.source, Source::Extended { .. })
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
    /// Completions that are already there cause no event: after arming, poll until the queue is empty, and only then
    /// wait on the channel. [`Endpoint::wait`](crate::Endpoint::wait) does all of that.
    ///
    /// # Errors
    /// [`Error::NoChannel`] without a channel; [`Error::Verb`].
    #[doc(alias = "ibv_req_notify_cq")]
    #[inline]
    pub fn arm(&mut self, solicited_only: bool) -> Result<()> {
        if self.shared.channel().is_none() {
            return Err(Error::NoChannel);
        }
        // SAFETY: the queue is valid.
        check(unsafe { ibv_req_notify_cq(self.as_raw(), i32::from(solicited_only)) })
            .map_err(|errno| self.arm_error(errno))
    }

    #[cold]
    fn arm_error(&self, errno: Errno) -> Error {
        Error::Verb { verb: "ibv_req_notify_cq", device: self.context().device_name().into(), errno }
    }

    /// The C object, valid while this queue is.
    #[must_use]
    #[inline]
    pub fn as_raw(&self) -> *mut ibv_cq {
        self.shared.raw.as_ptr()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    #[inline]
    fn end_poll(&mut self) {
        if let Source::Extended { raw, open, .. } = &mut self.source {
            if *open {
                *open = false;
                // SAFETY: the queue is valid and start_poll succeeded without an end_poll since.
                unsafe { ibv_end_poll(raw.as_ptr()) }
                self.shared.poll_ended();
            }
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.end_poll();
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
        &self.parents.as_ref().expect("only `drop` takes them").0
    }

    #[inline]
    fn channel(&self) -> Option<&CompletionChannel> {
        self.parents.as_ref().and_then(|(_, channel)| channel.as_ref())
    }
}

impl Shared {
    /// Whether this very thread holds the lock that `ibv_destroy_qp` and a reset take on some providers.
    pub(crate) fn is_polled_here(&self) -> bool {
        self.polling.load(Ordering::Relaxed) == this_thread()
    }

    /// Drops `object` when this thread, which is polling the queue, has ended that.
    pub(crate) fn defer(&self, object: Box<dyn Send>) {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner).push(object);
        self.has_deferred.store(true, Ordering::Relaxed);
    }

    /// This thread has called start_poll.
    #[inline]
    fn poll_started(&self) {
        self.polling.store(this_thread(), Ordering::Relaxed);
    }

    /// This thread has called end_poll.
    #[inline]
    fn poll_ended(&self) {
        self.polling.store(0, Ordering::Relaxed);
        if self.has_deferred.load(Ordering::Relaxed) {
            self.drop_deferred();
        }
    }

    #[cold]
    fn drop_deferred(&self) {
        self.has_deferred.store(false, Ordering::Relaxed);
        let objects = std::mem::take(&mut *self.deferred.lock().unwrap_or_else(PoisonError::into_inner));
        drop(objects);
    }
}

/// A number other than 0 that no other thread of the process has at the same time.
#[inline]
fn this_thread() -> usize {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| std::ptr::from_ref(here).addr())
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Some(parents) = self.parents.take() else { return };
        // SAFETY: no queue pair and no handle is left, as each holds an `Arc` of this. Every event that was read from
        // the channel was acknowledged at once (`CompletionChannel`), so this does not block for long: at most until a
        // thread that is just reading an event has acknowledged it.
        let destroyed = check(unsafe { (parents.0.verbs().ibv_destroy_cq)(self.raw.as_ptr()) });
        if destroyed.is_err() {
            // The queue still exists: what it belongs to must outlive it.
            std::mem::forget(parents);
        }
    }
}

impl Classic {
    fn new(raw: NonNull<ibv_cq>) -> Box<Self> {
        Box::new(Classic { raw, rows: [ibv_wc::zeroed(); 16], next: 0, len: 0 })
    }

    /// Takes the next batch out of the queue; `false` when it is empty.
    #[inline]
    fn refill(&mut self) -> Result<bool, PollError> {
        // SAFETY: the queue is valid and `rows` has room for as many completions as are asked for.
        let taken = unsafe { ibv_poll_cq(self.raw.as_ptr(), self.rows.len() as i32, self.rows.as_mut_ptr()) };
        if taken < 0 {
            // ibv_poll_cq(3) promises no errno; providers return codes of their own.
            return Err(PollError::Provider(Errno(libc::EIO)));
        }
        self.next = 0;
        self.len = (taken as u32).min(self.rows.len() as u32);
        Ok(self.len > 0)
    }
}
