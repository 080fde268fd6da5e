//! Completion channels: events of completion queues on a file descriptor.

use std::ffi::c_int;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rdma_sys::*;

use crate::errno::{check_neg, check_ptr};
use crate::error::Verb;
use crate::id::CqId;
use crate::object::{Object, Parents};
use crate::{Context, Errno, Error, Result, readiness};

/// A completion channel: `struct ibv_comp_channel`. Clones share it.
///
/// Its descriptor becomes readable when an armed completion queue gets a completion. It works with `poll(2)`,
/// `epoll(7)` and the reactors of async runtimes. The descriptor is non-blocking. When it is readable, take events with
/// [`CompletionChannel::try_event`] until there is none, as edge-triggered reactors require.
///
/// With tokio, wrap a clone of the channel in an `AsyncFd` once. Then, in a loop: arm the queue, poll it until it is
/// empty, await `readable()`, take events with [`CompletionChannel::try_event`] until there is none, and only then call
/// `clear_ready()`. [`AsyncEvents`](crate::AsyncEvents) and [`cm::EventChannel`](crate::cm::EventChannel) work in the
/// same way. [`Armed`](crate::endpoint::Armed) has the loop for an [`Endpoint`](crate::Endpoint) or an
/// [`EndpointSet`](crate::EndpointSet).
///
/// Do not read from the descriptor directly or change its flags. An event that is read directly is never acknowledged,
/// and destroying its queue then blocks forever. This type acknowledges each event as it is read, so none can block
/// the destruction of a queue.
///
/// Any number of queues may report through one channel. An event names its queue by
/// [`CompletionQueue::id`](crate::CompletionQueue::id). It is raised once per arming, and not for completions that were
/// there before. So arm the queue, then poll it until it is empty, and only then wait. Pending events of a queue are
/// removed when it is destroyed.
///
/// ```no_run
/// # fn main() -> rdma_safe::Result<()> {
/// use std::collections::HashMap;
/// use std::time::Duration;
/// use rdma_safe::{CompletionQueue, Device};
///
/// let context = Device::first()?.open()?;
/// let channel = context.create_channel()?;
/// let mut queues = HashMap::new();
/// for _ in 0..8 {
///     let mut queue = context.completion_queue(256).channel(&channel).build()?;
///     queue.arm(false)?;
///     queues.insert(queue.id(), queue);
/// }
/// // … create queue pairs with them, connect, post …
/// fn take_all(queue: &mut CompletionQueue) -> rdma_safe::Result<()> {
///     let mut poll = queue.poll();
///     while let Some(completion) = poll.next()? {
///         println!("{}: {}", completion.wr_id(), completion.status());
///     }
///     Ok(())
/// }
/// while let Some(id) = channel.wait(Duration::from_secs(10))? {
///     let Some(queue) = queues.get_mut(&id) else { continue };
///     queue.arm(false)?;
///     take_all(queue)?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct CompletionChannel {
    // Reading an event is a single read(2).
    inner: Arc<Object<MadeFrom>>,
}

struct MadeFrom {
    context: Context,
    /// Whether the descriptor blocks.
    blocking: AtomicBool,
}

impl Parents for MadeFrom {
    type Raw = ibv_comp_channel;

    const VERB: Verb = Verb::DestroyCompChannel;

    fn context(&self) -> &Context {
        &self.context
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_comp_channel) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { (self.context.verbs().ibv_destroy_comp_channel)(raw) }
    }
}

impl CompletionChannel {
    pub(crate) fn new(context: &Context) -> Result<Self> {
        // SAFETY: the context is valid.
        let raw = check_ptr(|| unsafe { (context.verbs().ibv_create_comp_channel)(context.as_raw()) })
            .map_err(|errno| Error::CreateChannel { errno })?;
        // SAFETY: the channel was just created, and nobody else has it.
        let channel = unsafe { CompletionChannel::from_raw(context, raw) }?;
        // There is no event yet. Trying once tells soft0 that this program handles `EAGAIN`, so that it wakes the
        // program sooner: docs/soft.md, "Progress".
        channel.try_event()?;
        Ok(channel)
    }

    /// Adopts a channel that other code has created, and makes its descriptor non-blocking.
    ///
    /// It is destroyed with the last queue that reports through it.
    ///
    /// # Errors
    /// [`Error::CreateChannel`] if the descriptor cannot be made non-blocking; the channel is then destroyed.
    ///
    /// # Safety
    /// `raw` must be a channel of `context` that nobody else destroys or reads. Each queue that reports through it must
    /// belong to this crate, or have a number as its `cq_context`, which is then the id in its events. Queues of other
    /// code must be destroyed before the last handle is dropped.
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_comp_channel>) -> Result<CompletionChannel> {
        let made_from = MadeFrom { context: context.clone(), blocking: AtomicBool::new(true) };
        // SAFETY: the caller's contract. Each queue of this channel holds an `Arc` of the channel.
        let channel = CompletionChannel { inner: Arc::new(unsafe { Object::new(raw, made_from) }) };
        channel.make_blocking(false).map_err(|errno| Error::CreateChannel { errno })?;
        Ok(channel)
    }

    fn make_blocking(&self, blocking: bool) -> Result<(), Errno> {
        readiness::set_blocking(self, blocking)?;
        self.inner.blocking.store(blocking, Ordering::Relaxed);
        Ok(())
    }

    /// Sets whether [`CompletionChannel::try_event`] blocks until there is an event; false unless set.
    ///
    /// Blocking saves a system call compared to [`CompletionChannel::wait`], but has no deadline. Besides an event,
    /// only a signal ends it, if its handler was installed without `SA_RESTART`. It is meant for programs that stop
    /// their threads with signals. Do not use it on a channel that a reactor watches or several threads read: if
    /// another thread takes the event that has woken [`CompletionChannel::wait`], that waits for the next event beyond
    /// its deadline.
    ///
    /// # Errors
    /// [`Error::Channel`].
    pub fn set_blocking(&self, blocking: bool) -> Result<()> {
        self.make_blocking(blocking).map_err(|errno| Error::Channel { verb: Verb::Fcntl, errno })
    }

    /// Takes one event, if there is one, and acknowledges it: `ibv_get_cq_event(3)`, `ibv_ack_cq_events(3)`.
    ///
    /// The queue is then no longer armed. On a [blocking](Self::set_blocking) channel this waits for an event, and
    /// returns `None` if a signal comes first.
    ///
    /// # Errors
    /// [`Error::Channel`], for example if the device is gone.
    #[doc(alias = "ibv_get_cq_event")]
    #[doc(alias = "ibv_ack_cq_events")]
    #[inline]
    pub fn try_event(&self) -> Result<Option<CqId>> {
        let verbs = self.inner.context.verbs();
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        loop {
            // SAFETY: the channel and both out pointers are valid.
            match check_neg(|| unsafe { (verbs.ibv_get_cq_event)(self.as_raw(), &mut cq, &mut context) }) {
                Ok(_) => {
                    // SAFETY: the queue exists, since `ibv_destroy_cq` waits until the event is acknowledged. Because
                    // of this wait, the event is acknowledged at once.
                    unsafe { (verbs.ibv_ack_cq_events)(cq, 1) };
                    return Ok(Some(CqId::from_context(context)));
                }
                Err(errno) if self.has_no_event(errno)? => return Ok(None),
                Err(_) => {}
            }
        }
    }

    /// Takes an event like [`CompletionChannel::try_event`], but never blocks.
    pub(crate) fn take_event(&self) -> Result<Option<CqId>> {
        if self.inner.blocking.load(Ordering::Relaxed) { self.wait(Duration::ZERO) } else { self.try_event() }
    }

    /// Handles a failed read: returns true if there is no event, and false if the read should be repeated.
    #[cold]
    fn has_no_event(&self, errno: Errno) -> Result<bool> {
        match errno {
            // On a blocking channel, a signal ends the wait.
            Errno(libc::EINTR) => Ok(self.inner.blocking.load(Ordering::Relaxed)),
            Errno(libc::EAGAIN) => Ok(true),
            errno => Err(Error::Channel { verb: Verb::GetCqEvent, errno }),
        }
    }

    /// Waits for an event for at most `timeout`; `None` when that has passed.
    ///
    /// # Errors
    /// [`Error::Channel`].
    pub fn wait(&self, timeout: Duration) -> Result<Option<CqId>> {
        readiness::wait(self, timeout, || self.try_event(), |errno| Error::Channel { verb: Verb::PollFd, errno })
    }

    /// The context that the channel belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The C object, valid while this channel exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_comp_channel {
        self.inner.as_raw()
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the channel exists.
        unsafe { BorrowedFd::borrow_raw((*self.as_raw()).fd) }
    }
}

/// For reactors that need a raw descriptor, such as tokio's `AsyncFd`: give it a clone.
///
/// All clones return the same descriptor, which stays open until the last one is dropped. This is the contract of the
/// `unsafe` `AsyncFd::register` of tokio 1.54; `new` of older releases is safe.
impl AsRawFd for CompletionChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionChannel").field("fd", &self.as_fd().as_raw_fd()).finish_non_exhaustive()
    }
}
