//! Asynchronous events of a device, its ports and its objects.
//!
//! Start with [`Context::async_events`](crate::Context::async_events), which returns [`AsyncEvents`].

mod kind;

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

use rdma_sys::*;

use crate::errno::check_neg;
use crate::error::Verb;
use crate::id::{CqId, QpId, SrqId, WqId};
use crate::{Context, Errno, Error, Result, readiness};

pub use kind::AsyncEventType;

/// An asynchronous event: `struct ibv_async_event`, without its pointer.
///
/// It identifies its source but does not keep it alive: the object may no longer exist when the event is handled.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct AsyncEvent {
    /// Type of the event.
    pub event_type: AsyncEventType,
    /// Source of the event.
    pub source: AsyncSource,
}

/// Source of an asynchronous event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum AsyncSource {
    /// The device as a whole.
    WholeDevice,
    /// A port, counted from 1.
    Port(u32),
    /// A queue pair.
    Qp {
        /// The [`QueuePair::id`](crate::QueuePair::id).
        id: QpId,
        /// Queue pair number, which another queue pair may have by now.
        number: u32,
    },
    /// A completion queue, by [`CompletionQueue::id`](crate::CompletionQueue::id).
    Cq(CqId),
    /// A shared receive queue, by [`SharedReceiveQueue::id`](crate::SharedReceiveQueue::id).
    Srq(SrqId),
    /// A work queue.
    Wq {
        /// The [`WorkQueue::id`](crate::wq::WorkQueue::id).
        id: WqId,
        /// Work queue number.
        number: u32,
    },
    /// An event of an unknown type. The meaning of the number is unknown, too; often it is a port.
    Unknown(i32),
}

impl AsyncEvent {
    /// Copies the identity of the source.
    ///
    /// # Safety
    /// `raw` must have been read by `ibv_get_async_event`, and must not be acknowledged yet.
    unsafe fn from_raw(raw: &ibv_async_event) -> Self {
        let event_type = AsyncEventType(raw.event_type.0);
        // SAFETY: libibverbs sets the union member of the event type: a pointer for queue pairs, completion queues,
        // shared receive queues and work queues, otherwise the number. The object exists, because its destruction waits
        // for the acknowledgement, which the caller guarantees is still to come. The fields were set at creation.
        // libibverbs itself relies on objects having no events while they are created, since the acknowledgement locks
        // them.
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
/// A context has one queue of events that all readers share: each event goes to the thread that reads it first. Events
/// of ports and of the device go to every context of the device; events of an object go to the context that it was
/// created from.
///
/// The descriptor becomes readable when there is an event. It works with `poll(2)`, `epoll(7)` and the reactors of
/// async runtimes. It is non-blocking. When it is readable, take events with [`AsyncEvents::try_event`] until there is
/// none, as edge-triggered reactors require.
///
/// Do not read from the descriptor directly or change its flags. An event that is read directly is never acknowledged,
/// and destroying its object then blocks forever. This type acknowledges each event as it is read, so none can block
/// the destruction of an object. Unread events accumulate in the kernel without limit. Pending events of an object are
/// removed when it is destroyed.
///
/// ```no_run
/// # fn refill(_: rdma_safe::srq::SrqId) {}
/// # fn main() -> rdma_safe::Result<()> {
/// use std::time::Duration;
/// use rdma_safe::Device;
/// use rdma_safe::async_event::{AsyncEventType, AsyncSource};
///
/// let context = Device::first()?.open()?;
/// let events = context.async_events()?;
/// loop {
///     let Some(event) = events.wait(Duration::from_secs(1))? else { continue };
///     println!("{event}"); // such as "PORT_ERR: port 1"
///     match (event.event_type, event.source) {
///         (AsyncEventType::DEVICE_FATAL, _) => break,
///         (AsyncEventType::SRQ_LIMIT_REACHED, AsyncSource::Srq(id)) => refill(id), // the SharedReceiveQueue::id
///         (_, AsyncSource::Qp { id, .. }) => println!("queue pair with QueuePair::id {id}"),
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
    /// Returns the asynchronous events of the context, and makes their descriptor non-blocking.
    ///
    /// # Errors
    /// [`Error::AsyncEvents`]; [`Error::Unsupported`] if the provider reports no events.
    #[doc(alias = "ibv_get_async_event")]
    pub fn async_events(&self) -> Result<AsyncEvents> {
        let events = AsyncEvents { context: self.clone() };
        if events.raw_fd() < 0 {
            return Err(self.unsupported("asynchronous events"));
        }
        readiness::set_blocking(&events, false).map_err(|errno| events.error(Verb::Fcntl, errno))?;
        Ok(events)
    }
}

impl AsyncEvents {
    /// Takes one event, if there is one, and acknowledges it: `ibv_get_async_event(3)`, `ibv_ack_async_event(3)`.
    ///
    /// # Errors
    /// [`Error::AsyncEvents`], for example with `EIO` if the device is gone.
    #[doc(alias = "ibv_get_async_event")]
    #[doc(alias = "ibv_ack_async_event")]
    pub fn try_event(&self) -> Result<Option<AsyncEvent>> {
        let verbs = self.context.verbs();
        loop {
            let mut raw = ibv_async_event::zeroed();
            // SAFETY: the context and the out pointer are valid.
            match check_neg(|| unsafe { (verbs.ibv_get_async_event)(self.context.as_raw(), &mut raw) }) {
                Ok(_) => {
                    // SAFETY: the event was just read and is acknowledged below.
                    let event = unsafe { AsyncEvent::from_raw(&raw) };
                    // SAFETY: the event was read, and is acknowledged once. The object cannot be destroyed before, so
                    // the acknowledgement must not be delayed.
                    unsafe { (verbs.ibv_ack_async_event)(&mut raw) };
                    return Ok(Some(event));
                }
                Err(Errno(libc::EAGAIN)) => return Ok(None),
                // A non-blocking read is rarely interrupted, so it is just repeated.
                Err(Errno(libc::EINTR)) => {}
                Err(errno) => return Err(self.error(Verb::GetAsyncEvent, errno)),
            }
        }
    }

    /// Waits for an event for at most `timeout`; `None` when that has passed.
    ///
    /// # Errors
    /// Those of [`AsyncEvents::try_event`].
    pub fn wait(&self, timeout: Duration) -> Result<Option<AsyncEvent>> {
        readiness::wait(self, timeout, || self.try_event(), |errno| self.error(Verb::PollFd, errno))
    }

    /// The context that the events belong to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    fn raw_fd(&self) -> i32 {
        // SAFETY: the context is valid, and the field does not change after opening.
        unsafe { (*self.context.as_raw()).async_fd }
    }

    fn error(&self, verb: Verb, errno: Errno) -> Error {
        Error::AsyncEvents { verb, device: self.context.device_name().into(), errno }
    }
}

impl AsFd for AsyncEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `Context::async_events` has checked the descriptor, which is open as long as the context.
        unsafe { BorrowedFd::borrow_raw(self.raw_fd()) }
    }
}

/// For reactors that need a raw descriptor, such as tokio's `AsyncFd`: give it a clone.
///
/// All clones return the same descriptor, which stays open until the last one is dropped. This is the contract of the
/// `unsafe` `AsyncFd::register` of tokio 1.54; `new` of older releases is safe.
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
