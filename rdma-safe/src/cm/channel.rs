//! Where events of ids arrive.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdma_sys::*;

use super::error::failed;
use super::{Event, EventKind, Id, Parameters};
use crate::errno::{check_neg, check_ptr};
use crate::id::CmId;
use crate::{Errno, Result, readiness};

/// A channel of events: `struct rdma_event_channel`. Clones share it.
///
/// Its descriptor becomes readable when there is an event; it works with `poll(2)`, `epoll(7)` and the reactors of async runtimes.
/// It is non-blocking: once it is readable, take events with [`EventChannel::try_event`] until there is none. Leave reading it, and
/// its flags, to this type.
///
/// Events are copied and acknowledged as they are read, so none can be left over that the destruction of an id waits for.
///
/// What librdmacm knows of an id changes while an event of it is read, so ids of one channel take turns: threads that are not to
/// wait for each other use channels of their own, see [`Id::migrate`].
#[derive(Clone)]
pub struct EventChannel {
    inner: Arc<Inner>,
}

struct Inner {
    raw: NonNull<rdma_event_channel>,
    cm: &'static RdmaCm,
    /// Held for each call on the channel or an id that reports to it.
    calls: Mutex<()>,
}

// SAFETY: the functions of librdmacm may be called from any thread; calls on a channel and its ids take turns.
unsafe impl Send for Inner {}
// SAFETY: what a shared reference calls, it calls in such a turn; its descriptor does not change.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: every id that reports here holds an `Arc` of it, so none is left; one that could not be destroyed has leaked its
        // `Arc`.
        unsafe { (self.cm.rdma_destroy_event_channel)(self.raw.as_ptr()) }
    }
}

impl EventChannel {
    /// Opens a channel: `rdma_create_event_channel(3)`.
    ///
    /// # Errors
    /// [`Error::Load`](crate::Error::Load) without librdmacm; [`CmError::Call`](super::CmError::Call), with `EPERM`, `ENODEV`
    /// or `ENOENT` when the kernel has no connection management (the module `rdma_ucm`) or no device.
    #[doc(alias = "rdma_create_event_channel")]
    pub fn new() -> Result<Self> {
        /// The first call finds the devices and tries the kernel out, for which those of other threads would not wait.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let cm = rdmacm()?;
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: no arguments.
        let raw = check_ptr(|| unsafe { (cm.rdma_create_event_channel)() })
            .map_err(|errno| failed("rdma_create_event_channel", errno))?;
        drop(turn);
        let channel = EventChannel { inner: Arc::new(Inner { raw, cm, calls: Mutex::new(()) }) };
        readiness::set_blocking(&channel, false).map_err(|errno| failed("fcntl(2)", errno))?;
        Ok(channel)
    }

    /// Takes one event if there is one: `rdma_get_cm_event(3)`, `rdma_ack_cm_event(3)`.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_get_cm_event")]
    #[doc(alias = "rdma_ack_cm_event")]
    pub fn try_event(&self) -> Result<Option<Event>> {
        let cm = self.cm();
        let _turn = self.turn();
        let mut raw = std::ptr::null_mut();
        loop {
            // SAFETY: the channel is valid, and so is the out pointer.
            match check_neg(|| unsafe { (cm.rdma_get_cm_event)(self.as_raw(), &mut raw) }) {
                Ok(_) => {}
                Err(Errno(libc::EAGAIN)) => return Ok(None),
                Err(Errno(libc::EINTR)) => continue,
                Err(errno) => return Err(failed("rdma_get_cm_event", errno)),
            }
            // SAFETY: an event that was just read is valid until it is acknowledged below.
            let event = unsafe { self.copy(&*raw) };
            // SAFETY: it was read just now, and is not looked at any more: what it points to was copied.
            unsafe { (cm.rdma_ack_cm_event)(raw) };
            return Ok(Some(event));
        }
    }

    /// # Safety
    /// `raw` must be an event of this channel that was not acknowledged yet.
    unsafe fn copy(&self, raw: &rdma_cm_event) -> Event {
        if raw.event != RDMA_CM_EVENT_CONNECT_REQUEST {
            // SAFETY: the id is not destroyed before its event is acknowledged; the field was set before it had any.
            let id = CmId::from_context(unsafe { (*raw.id).context });
            // SAFETY: the caller's contract.
            return Event { id, kind: unsafe { EventKind::of(raw) } };
        }
        // SAFETY: who listens is not destroyed before the event is acknowledged; both fields were set before it had any.
        let (id, space) = unsafe { (CmId::from_context((*raw.listen_id).context), (*raw.listen_id).ps) };
        // SAFETY: the new id is this event's to give away, and reports here.
        let new = unsafe { Id::from_request(self, raw.id) };
        // SAFETY: the caller's contract; a request has the port space of who listens.
        Event { id, kind: EventKind::ConnectRequest(new, unsafe { Parameters::of(raw, space) }) }
    }

    /// Waits for an event, at most for `timeout`; `None` when it passed.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    pub fn wait(&self, timeout: Duration) -> Result<Option<Event>> {
        readiness::wait(self, timeout, || self.try_event(), |errno| failed("poll(2)", errno))
    }

    /// Whether the two are the same.
    #[must_use]
    pub fn is_same(&self, other: &EventChannel) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// The C object, valid while this channel or an id that reports to it is.
    #[must_use]
    pub fn as_raw(&self) -> *mut rdma_event_channel {
        self.inner.raw.as_ptr()
    }

    pub(super) fn cm(&self) -> &'static RdmaCm {
        self.inner.cm
    }

    /// For each call on the channel or an id that reports to it.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.inner.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its address, by which two are locked in the same order everywhere.
    pub(super) fn order(&self) -> usize {
        Arc::as_ptr(&self.inner).addr()
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open while the channel is.
        unsafe { BorrowedFd::borrow_raw((*self.as_raw()).fd) }
    }
}

/// For reactors that take a raw descriptor, such as tokio's `AsyncFd`: give it a clone. All clones return the same descriptor,
/// which is open until the last of them is dropped. That is what the `unsafe` `AsyncFd::register` of tokio 1.54 asks for; `new`
/// of older releases is safe.
impl AsRawFd for EventChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl fmt::Debug for EventChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventChannel").field("fd", &self.as_fd().as_raw_fd()).finish()
    }
}
