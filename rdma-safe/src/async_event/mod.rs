//! Asynchronous events: what happens to a device, its ports and its objects without being asked for.

mod kind;

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

use rdma_sys::*;

use crate::errno::check_neg;
use crate::id::{CqId, QpId, SrqId, WqId};
use crate::{Context, Errno, Error, Result, readiness};

pub use kind::AsyncEventType;

/// An asynchronous event: `struct ibv_async_event`, without its pointer.
///
/// It names what it is about and keeps nothing alive: the object may be gone by the time that the event is looked at.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct AsyncEvent {
    /// What happened.
    pub event_type: AsyncEventType,
    /// To what.
    pub source: AsyncSource,
}

/// What an asynchronous event is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum AsyncSource {
    /// Not one of its parts.
    WholeDevice,
    /// A port, counted from 1.
    Port(u32),
    /// A queue pair.
    Qp {
        /// As of [`QueuePair::id`](crate::QueuePair::id).
        id: QpId,
        /// Its number, which another queue pair may have by now.
        number: u32,
    },
    /// A completion queue, by [`CompletionQueue::id`](crate::CompletionQueue::id).
    Cq(CqId),
    /// A shared receive queue, by [`SharedReceiveQueue::id`](crate::SharedReceiveQueue::id).
    Srq(SrqId),
    /// A work queue.
    Wq {
        /// As of [`WorkQueue::id`](crate::WorkQueue::id).
        id: WqId,
        /// Its number.
        number: u32,
    },
    /// The kind of event is not known here, and so neither is what this number means; often it is a port.
    Unknown(i32),
}

impl AsyncEvent {
    /// Copies out what identifies the object.
    ///
    /// # Safety
    /// `raw` must have been read by `ibv_get_async_event`, and not be acknowledged yet.
    unsafe fn from_raw(raw: &ibv_async_event) -> Self {
        let event_type = AsyncEventType(raw.event_type.0);
        // SAFETY: libibverbs sets the member of the union that belongs to the kind: a pointer for those of queue pairs,
        // completion queues, shared receive queues and work queues, else the number. The object exists: its destruction
        // waits for the acknowledgement, which, says the caller, is still to come. What is read was set at creation; libibverbs
        // itself relies on there being no event of what is still being created, as the acknowledgement locks it.
        let source = unsafe {
            match event_type {
                AsyncEventType::CQ_ERR => AsyncSource::Cq(CqId::from_context((*raw.element.cq).cq_context)),
                AsyncEventType::QP_FATAL
                | AsyncEventType::QP_REQ_ERR
                | AsyncEventType::QP_ACCESS_ERR
                | AsyncEventType::COMM_EST
                | AsyncEventType::SQ_DRAINED
                | AsyncEventType::PATH_MIG
                | AsyncEventType::PATH_MIG_ERR
                | AsyncEventType::QP_LAST_WQE_REACHED => {
                    let qp = raw.element.qp;
                    AsyncSource::Qp { id: QpId::from_context((*qp).qp_context), number: (*qp).qp_num }
                }
                AsyncEventType::SRQ_ERR | AsyncEventType::SRQ_LIMIT_REACHED => {
                    AsyncSource::Srq(SrqId::from_context((*raw.element.srq).srq_context))
                }
                AsyncEventType::WQ_FATAL => {
                    let wq = raw.element.wq;
                    AsyncSource::Wq { id: WqId::from_context((*wq).wq_context), number: (*wq).wq_num }
                }
                AsyncEventType::PORT_ACTIVE
                | AsyncEventType::PORT_ERR
                | AsyncEventType::LID_CHANGE
                | AsyncEventType::PKEY_CHANGE
                | AsyncEventType::SM_CHANGE
                | AsyncEventType::CLIENT_REREGISTER
                | AsyncEventType::GID_CHANGE => AsyncSource::Port(raw.element.port_num.unsigned_abs()),
                AsyncEventType::DEVICE_FATAL | AsyncEventType::DEVICE_SPEED_CHANGE => AsyncSource::WholeDevice,
                _ => AsyncSource::Unknown(raw.element.port_num),
            }
        };
        AsyncEvent { event_type, source }
    }
}

impl fmt::Display for AsyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.event_type)?;
        match self.source {
            AsyncSource::WholeDevice => f.write_str("device"),
            AsyncSource::Port(port) => write!(f, "port {port}"),
            AsyncSource::Qp { number, .. } => write!(f, "queue pair {number:#08x}"),
            AsyncSource::Cq(id) => write!(f, "completion queue {}", id),
            AsyncSource::Srq(id) => write!(f, "shared receive queue {}", id),
            AsyncSource::Wq { number, .. } => write!(f, "work queue {number:#08x}"),
            AsyncSource::Unknown(number) => write!(f, "element {number}"),
        }
    }
}

/// The asynchronous events of an opened device. Made by [`Context::async_events`].
///
/// A context has one queue of them, which is shared by everyone who reads: each event goes to one reader, in the thread that
/// is first. Events of ports and of the device come to every context that has the device open; those of an object to the
/// context that it was made from.
///
/// The descriptor becomes readable when there is an event; it works with `poll(2)`, `epoll(7)` and the reactors of async
/// runtimes. It is non-blocking: once it is readable, take events with [`AsyncEvents::try_event`] until there is none, which
/// edge-triggered reactors need. Leave reading it, and its flags, to this type: an event that is read from the descriptor
/// itself is never acknowledged, and the destruction of its object then waits for ever.
///
/// Events are acknowledged as they are read, so none can be left over to block the destruction of an object. What nobody
/// reads waits in the kernel, without limit; the events of an object go when it does.
///
/// ```no_run
/// # fn refill(_: rdma_safe::SrqId) {}
/// # fn main() -> rdma_safe::Result<()> {
/// use std::time::Duration;
/// use rdma_safe::{AsyncEventType, AsyncSource, Device};
///
/// let context = Device::first()?.open()?;
/// let events = context.async_events()?;
/// loop {
///     let Some(event) = events.wait(Duration::from_secs(1))? else { continue };
///     println!("{event}"); // such as "PORT_ERR: port 1"
///     match (event.event_type, event.source) {
///         (AsyncEventType::DEVICE_FATAL, _) => break,
///         (AsyncEventType::SRQ_LIMIT_REACHED, AsyncSource::Srq(id)) => refill(id), // as of SharedReceiveQueue::id
///         (_, AsyncSource::Qp { id, .. }) => println!("of queue pair {id}, as of QueuePair::id"),
///         _ => {}
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct AsyncEvents {
    context: Context,
}

impl Context {
    /// Opens the queue of asynchronous events, and makes its descriptor non-blocking.
    ///
    /// # Errors
    /// [`Error::AsyncEvents`]; [`Error::Unsupported`] when the provider reports none at all.
    #[doc(alias = "ibv_get_async_event")]
    pub fn async_events(&self) -> Result<AsyncEvents> {
        let events = AsyncEvents { context: self.clone() };
        if events.raw_fd() < 0 {
            return Err(self.unsupported("asynchronous events"));
        }
        readiness::set_blocking(&events, false).map_err(|errno| events.error("fcntl(2)", errno))?;
        Ok(events)
    }
}

impl AsyncEvents {
    /// Takes one event if there is one, and acknowledges it: `ibv_get_async_event(3)`, `ibv_ack_async_event(3)`.
    ///
    /// # Errors
    /// [`Error::AsyncEvents`], for instance with `EIO` when the device is gone.
    #[doc(alias = "ibv_get_async_event")]
    #[doc(alias = "ibv_ack_async_event")]
    pub fn try_event(&self) -> Result<Option<AsyncEvent>> {
        let verbs = self.context.verbs();
        loop {
            let mut raw = ibv_async_event::zeroed();
            // SAFETY: the context is valid, and so is the out pointer.
            match check_neg(|| unsafe { (verbs.ibv_get_async_event)(self.context.as_raw(), &mut raw) }) {
                Ok(_) => {
                    // SAFETY: it was just read and is acknowledged below.
                    let event = unsafe { AsyncEvent::from_raw(&raw) };
                    // SAFETY: it was read, and this is the one acknowledgement of it. The object cannot be destroyed before,
                    // which is why the acknowledgement is not put off.
                    unsafe { (verbs.ibv_ack_async_event)(&mut raw) };
                    return Ok(Some(event));
                }
                Err(Errno(libc::EAGAIN)) => return Ok(None),
                // A read that does not block is not interrupted twice for long.
                Err(Errno(libc::EINTR)) => {}
                Err(errno) => return Err(self.error("ibv_get_async_event", errno)),
            }
        }
    }

    /// Waits for an event, at most for `timeout`; `None` when it passed.
    ///
    /// # Errors
    /// As [`AsyncEvents::try_event`].
    pub fn wait(&self, timeout: Duration) -> Result<Option<AsyncEvent>> {
        readiness::wait(self, timeout, || self.try_event(), |errno| self.error("poll(2)", errno))
    }

    /// The device that they are of.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    fn raw_fd(&self) -> i32 {
        // SAFETY: the context is valid, and the field does not change after it was opened.
        unsafe { (*self.context.as_raw()).async_fd }
    }

    fn error(&self, call: &'static str, errno: Errno) -> Error {
        Error::AsyncEvents { call, device: self.context.device_name().into(), errno }
    }
}

impl AsFd for AsyncEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor, which `Context::async_events` has seen to be one, is open while the context is.
        unsafe { BorrowedFd::borrow_raw(self.raw_fd()) }
    }
}

/// For reactors that take a raw descriptor, such as tokio's `AsyncFd`: give it a clone. All clones return the same descriptor,
/// which is open until the last of them is dropped. That is what the `unsafe` `AsyncFd::register` of tokio 1.54 asks for; `new`
/// of older releases is safe.
impl AsRawFd for AsyncEvents {
    fn as_raw_fd(&self) -> RawFd {
        self.raw_fd()
    }
}

impl fmt::Debug for AsyncEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncEvents")
            .field("device", &self.context.device_name())
            .field("fd", &self.as_fd().as_raw_fd())
            .finish_non_exhaustive()
    }
}
