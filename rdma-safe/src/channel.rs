//! Completion channels: events of completion queues, over a file descriptor.

use std::ffi::c_int;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rdma_sys::*;

use crate::errno::{check_neg, check_ptr};
use crate::id::CqId;
use crate::object::{Object, Parents};
use crate::{Context, Errno, Error, Result, readiness};

/// A completion channel: `struct ibv_comp_channel`. Clones share it.
///
/// Its descriptor becomes readable when an armed completion queue gets a completion; it works with `poll(2)`, `epoll(7)`
/// and the reactors of async runtimes. The descriptor is non-blocking: once it is readable, take events with
/// [`CompletionChannel::try_event`] until there is none, which edge-triggered reactors need.
///
/// With tokio, wrap a clone of the channel in an `AsyncFd` once. Then, in a loop: arm the queue, poll it until it is empty, await
/// `readable()`, take events with [`CompletionChannel::try_event`] until there is none, and only then call `clear_ready()`.
/// [`AsyncEvents`](crate::AsyncEvents) and [`cm::EventChannel`](crate::cm::EventChannel) work in the same way. The loop for an
/// [`Endpoint`](crate::Endpoint) or an [`EndpointSet`](crate::EndpointSet) is at [`Armed`](crate::Armed).
///
/// Leave reading it, and its flags, to this type: an event that is read from the descriptor itself is never acknowledged, and
/// the destruction of its queue then waits for ever.
///
/// Events are acknowledged as they are read, so none can be left over to block the destruction of a queue.
///
/// Any number of queues may report over one channel; an event names its queue by
/// [`CompletionQueue::id`](crate::CompletionQueue::id). It comes once for each arming, and not for completions that were there
/// before: so arm, then poll until there is nothing, and only then wait. The events of a queue that is gone go with it.
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
/// // … make queue pairs of them, connect, post …
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
    // Reading an event is one read(2) of a whole event.
    inner: Arc<Object<MadeFrom>>,
}

struct MadeFrom {
    context: Context,
    /// The descriptor blocks.
    blocking: AtomicBool,
}

impl Parents for MadeFrom {
    type Raw = ibv_comp_channel;

    const VERB: &'static str = "ibv_destroy_comp_channel";

    fn context(&self) -> &Context {
        &self.context
    }

    unsafe fn destroy(&self, raw: *mut ibv_comp_channel) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { (self.context.verbs().ibv_destroy_comp_channel)(raw) }
    }
}

impl CompletionChannel {
    pub(crate) fn new(context: &Context) -> Result<Self> {
        // SAFETY: the context is valid.
        let raw = check_ptr(|| unsafe { (context.verbs().ibv_create_comp_channel)(context.as_raw()) })
            .map_err(|errno| Error::CreateChannel { errno })?;
        // SAFETY: just created, and given to nobody else.
        let channel = unsafe { CompletionChannel::from_raw(context, raw) }?;
        // There is none. soft0 learns that this program expects `EAGAIN`, and wakes it sooner: docs/soft.md, "Progress".
        channel.try_event()?;
        Ok(channel)
    }

    /// Adopts a channel that other code has created, and makes its descriptor non-blocking. It is destroyed when the last queue
    /// that reports over it is gone.
    ///
    /// # Errors
    /// [`Error::CreateChannel`] when the descriptor cannot be made so; the channel is destroyed then.
    ///
    /// # Safety
    /// `raw` must be a channel of `context`, and be this one's alone to destroy and to read. Queues that report over it must all be
    /// this crate's, or have numbers as their `cq_context`, which are the names of their events then; those of other code must be
    /// gone before the last handle.
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_comp_channel>) -> Result<CompletionChannel> {
        let made_from = MadeFrom { context: context.clone(), blocking: AtomicBool::new(true) };
        // SAFETY: the caller's contract; a queue on this channel holds an `Arc` of it.
        let channel = CompletionChannel { inner: Arc::new(unsafe { Object::new(raw, made_from) }) };
        channel.make_blocking(false).map_err(|errno| Error::CreateChannel { errno })?;
        Ok(channel)
    }

    fn make_blocking(&self, blocking: bool) -> Result<(), Errno> {
        readiness::set_blocking(self, blocking)?;
        self.inner.blocking.store(blocking, Ordering::Relaxed);
        Ok(())
    }

    /// Whether [`CompletionChannel::try_event`] waits until there is an event, which saves a system call over
    /// [`CompletionChannel::wait`]; it does not unless set.
    ///
    /// Such a wait has no deadline. Besides an event only a signal ends it, one whose handler was installed without
    /// `SA_RESTART`: it is for programs that see to the end of their threads that way. Do not set it on a channel that a
    /// reactor watches, or that several threads read: [`CompletionChannel::wait`], when another thread takes the event that
    /// it was woken for, then waits for the next one beyond its deadline.
    ///
    /// # Errors
    /// [`Error::Channel`].
    pub fn set_blocking(&self, blocking: bool) -> Result<()> {
        self.make_blocking(blocking).map_err(|errno| Error::Channel { call: "fcntl(2)", errno })
    }

    /// Takes one event if there is one, and acknowledges it: `ibv_get_cq_event(3)`, `ibv_ack_cq_events(3)`.
    ///
    /// The queue is no longer armed then. On a channel that was [set to block](Self::set_blocking) it waits, and `None` means
    /// that a signal came first.
    ///
    /// # Errors
    /// [`Error::Channel`], for instance when the device is gone.
    #[doc(alias = "ibv_get_cq_event")]
    #[doc(alias = "ibv_ack_cq_events")]
    #[inline]
    pub fn try_event(&self) -> Result<Option<CqId>> {
        let verbs = self.inner.context.verbs();
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        loop {
            // SAFETY: the channel is valid, and so are the out pointers.
            match check_neg(|| unsafe { (verbs.ibv_get_cq_event)(self.as_raw(), &mut cq, &mut context) }) {
                Ok(_) => {
                    // SAFETY: the queue cannot be destroyed before the event is acknowledged: `ibv_destroy_cq` waits for it.
                    // That wait is why the acknowledgement is not put off.
                    unsafe { (verbs.ibv_ack_cq_events)(cq, 1) };
                    return Ok(Some(CqId::from_context(context)));
                }
                Err(errno) if self.has_no_event(errno)? => return Ok(None),
                Err(_) => {}
            }
        }
    }

    /// As [`CompletionChannel::try_event`], but never waits.
    pub(crate) fn take_event(&self) -> Result<Option<CqId>> {
        if self.inner.blocking.load(Ordering::Relaxed) { self.wait(Duration::ZERO) } else { self.try_event() }
    }

    /// Why none could be read: because there is none, or, for `false`, for no reason that lasts.
    #[cold]
    fn has_no_event(&self, errno: Errno) -> Result<bool> {
        match errno {
            // Whoever chose to wait without a deadline is ended by a signal.
            Errno(libc::EINTR) => Ok(self.inner.blocking.load(Ordering::Relaxed)),
            Errno(libc::EAGAIN) => Ok(true),
            errno => Err(Error::Channel { call: "ibv_get_cq_event", errno }),
        }
    }

    /// Waits for an event, at most for `timeout`; `None` when it passed.
    ///
    /// # Errors
    /// [`Error::Channel`].
    pub fn wait(&self, timeout: Duration) -> Result<Option<CqId>> {
        readiness::wait(self, timeout, || self.try_event(), |errno| Error::Channel { call: "poll(2)", errno })
    }

    /// The device that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The C object, valid while this channel is.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_comp_channel {
        self.inner.as_raw()
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open while the channel is.
        unsafe { BorrowedFd::borrow_raw((*self.as_raw()).fd) }
    }
}

/// For reactors that take a raw descriptor, such as tokio's `AsyncFd`: give it a clone. All clones return the same descriptor,
/// which is open until the last of them is dropped. That is what the `unsafe` `AsyncFd::register` of tokio 1.54 asks for; `new`
/// of older releases is safe.
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
