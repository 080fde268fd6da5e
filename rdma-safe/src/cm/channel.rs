//! Event channels of ids.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdma_sys::*;

use super::error::failed;
use super::{CmError, Event, EventKind, Id, Parameters};
use crate::errno::{check_neg, check_ptr};
use crate::error::Verb;
use crate::fork::{self, Creator};
use crate::id::CmId;
use crate::{Errno, Error, Result, readiness};

/// A channel of events: `struct rdma_event_channel`. Clones share it.
///
/// Its descriptor becomes readable when there is an event. It works with `poll(2)`, `epoll(7)` and the reactors of
/// async runtimes, and is non-blocking. When it is readable, call [`EventChannel::try_event`] until it returns `None`.
/// Do not read the descriptor directly, or change its flags.
///
/// Events are copied and acknowledged as they are read, so destroying an id never waits for an event.
///
/// Reading an event modifies its id inside librdmacm, so a lock serializes all calls on the ids of one channel. Threads
/// that must not wait for each other use separate channels, see [`Id::migrate`].
#[derive(Clone)]
pub struct EventChannel {
    inner: Arc<Inner>,
}

struct Inner {
    raw: NonNull<rdma_event_channel>,
    cm: &'static RdmaCm,
    /// Ids that refuse calls. Its lock serializes all calls on the channel and on the ids that report to it.
    ended: Mutex<EndedIds>,
    creator: Creator,
}

/// Ids of a channel that can only be destroyed.
#[derive(Default)]
pub(super) struct EndedIds {
    /// Their [`EventKind::DeviceRemoval`] was read.
    removed: Vec<CmId>,
    /// librdmacm has freed a group of theirs, but the kernel may still have events with its address.
    failed_leave: Vec<CmId>,
}

impl EndedIds {
    /// Checks that an id accepts calls.
    ///
    /// # Errors
    /// `ENXIO` after the removal of the device. The kernel returns it, too, but only once it has destroyed its side of the id,
    /// shortly after the event. Until then some calls succeed without effect, and others fail with `EINVAL`.
    /// [`CmError::FailedLeave`] after [`EndedIds::add_failed_leave`].
    pub(super) fn check(&self, id: CmId, verb: Verb) -> Result<()> {
        if self.removed.contains(&id) {
            return Err(failed(verb, Errno(libc::ENXIO)));
        }
        if self.failed_leave.contains(&id) {
            return Err(CmError::FailedLeave { id }.into());
        }
        Ok(())
    }

    /// Prevents events from being read until the id is destroyed.
    pub(super) fn add_failed_leave(&mut self, id: CmId) {
        self.failed_leave.push(id);
    }

    /// Forgets an id that was destroyed, and its events with it.
    pub(super) fn forget(&mut self, id: CmId) {
        self.removed.retain(|other| *other != id);
        self.failed_leave.retain(|other| *other != id);
    }
}

// SAFETY: the functions of librdmacm may be called from any thread. Calls on a channel and its ids are serialized by
// `ended`.
unsafe impl Send for Inner {}
// SAFETY: calls through a shared reference hold the same lock. The descriptor does not change.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.creator.is_parent() {
            return;
        }
        // SAFETY: every id that reports to the channel holds an `Arc` of the channel, so no such id is left. An id that could
        // not be destroyed has leaked its `Arc`.
        unsafe { (self.cm.rdma_destroy_event_channel)(self.raw.as_ptr()) }
    }
}

impl EventChannel {
    /// Opens a channel: `rdma_create_event_channel(3)`.
    ///
    /// # Errors
    /// [`Error::Load`](crate::Error::Load) without librdmacm; [`CmError::Call`], with `EPERM`, `ENODEV`
    /// or `ENOENT` when the kernel has no connection manager (the module `rdma_ucm`) or no device.
    #[doc(alias = "rdma_create_event_channel")]
    pub fn new() -> Result<Self> {
        /// The first call enumerates the devices and probes the kernel. Concurrent calls do not wait for that, so they
        /// are serialized.
        static OPENING: Mutex<()> = Mutex::new(());
        let cm = rdmacm()?;
        fork::watch().map_err(|errno| failed(Verb::PthreadAtfork, errno))?;
        let guard = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the function has no arguments.
        let raw = check_ptr(|| unsafe { (cm.rdma_create_event_channel)() })
            .map_err(|errno| failed(Verb::RdmaCreateEventChannel, errno))?;
        drop(guard);
        let channel =
            EventChannel { inner: Arc::new(Inner { raw, cm, ended: Mutex::default(), creator: Creator::current() }) };
        readiness::set_blocking(&channel, false).map_err(|errno| failed(Verb::Fcntl, errno))?;
        Ok(channel)
    }

    /// Takes one event if there is one: `rdma_get_cm_event(3)`, `rdma_ack_cm_event(3)`.
    ///
    /// # Errors
    /// [`CmError::Call`]; [`CmError::FailedLeave`] until the id that it names is dropped.
    #[doc(alias = "rdma_get_cm_event")]
    #[doc(alias = "rdma_ack_cm_event")]
    pub fn try_event(&self) -> Result<Option<Event>> {
        self.require_own()?;
        let cm = self.cm();
        let mut ended = self.lock();
        if let Some(&id) = ended.failed_leave.first() {
            return Err(CmError::FailedLeave { id }.into());
        }
        let mut raw = std::ptr::null_mut();
        loop {
            // SAFETY: the channel is valid, and so is the out pointer. An unread event refers to its id, and maybe to a multicast
            // group of it. A destroyed id has no events, and neither has a group that was left. No id has failed to leave one.
            match check_neg(|| unsafe { (cm.rdma_get_cm_event)(self.as_raw(), &mut raw) }) {
                Ok(_) => {}
                Err(Errno(libc::EAGAIN)) => return Ok(None),
                Err(Errno(libc::EINTR)) => continue,
                Err(errno) => return Err(failed(Verb::RdmaGetCmEvent, errno)),
            }
            // SAFETY: an event that was just read is valid until it is acknowledged below.
            let event = unsafe { self.copy(&*raw) };
            if matches!(event.kind, EventKind::DeviceRemoval) {
                ended.removed.push(event.id);
            }
            // SAFETY: the event was just read, and everything it points to was copied, so it is not accessed again.
            unsafe { (cm.rdma_ack_cm_event)(raw) };
            return Ok(Some(event));
        }
    }

    /// # Safety
    /// `raw` must be an event of this channel that was not acknowledged yet.
    unsafe fn copy(&self, raw: &rdma_cm_event) -> Event {
        if raw.event != RDMA_CM_EVENT_CONNECT_REQUEST {
            // SAFETY: the id is not destroyed before its event is acknowledged. The field was set before the id had any
            // event.
            let id = CmId::from_context(unsafe { (*raw.id).context });
            // SAFETY: the caller's contract.
            return Event { id, kind: unsafe { EventKind::of(raw) } };
        }
        // SAFETY: the listening id is not destroyed before the event is acknowledged. Both fields were set before it
        // had any event.
        let (id, space) = unsafe { (CmId::from_context((*raw.listen_id).context), (*raw.listen_id).ps) };
        // SAFETY: the new id belongs to this event alone, and reports to this channel.
        let new = unsafe { Id::from_request(self, raw.id) };
        // SAFETY: the caller's contract. A request has the port space of the listening id.
        Event { id, kind: EventKind::ConnectRequest(new, unsafe { Parameters::of(raw, space) }) }
    }

    /// Waits for an event, for `timeout` at most. Returns `None` after the timeout.
    ///
    /// # Errors
    /// Like [`EventChannel::try_event`].
    pub fn wait(&self, timeout: Duration) -> Result<Option<Event>> {
        readiness::wait(self, timeout, || self.try_event(), |errno| failed(Verb::PollFd, errno))
    }

    /// Whether both are the same channel.
    #[must_use]
    pub fn is_same(&self, other: &EventChannel) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// The C object, valid while this channel or an id that reports to it exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut rdma_event_channel {
        self.inner.raw.as_ptr()
    }

    /// Returns an error if the channel was opened by the parent of this process.
    pub(super) fn require_own(&self) -> Result<()> {
        match self.inner.creator.is_parent() {
            true => Err(Error::Inherited { object: "rdma_cm".into() }),
            false => Ok(()),
        }
    }

    pub(super) fn cm(&self) -> &'static RdmaCm {
        self.inner.cm
    }

    /// Locks the channel for a call on it or on an id that reports to it.
    pub(super) fn lock(&self) -> MutexGuard<'_, EndedIds> {
        self.inner.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sort key for locking two channels in the same order everywhere.
    pub(super) fn lock_order(&self) -> usize {
        Arc::as_ptr(&self.inner).addr()
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open while the channel is.
        unsafe { BorrowedFd::borrow_raw((*self.as_raw()).fd) }
    }
}

/// For reactors that take a raw descriptor, such as tokio's `AsyncFd`: pass a clone.
///
/// All clones return the same descriptor, which stays open until the last of them is dropped. This satisfies the
/// contract of the `unsafe` function `AsyncFd::register` of tokio 1.54; `new` of older releases is safe.
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
