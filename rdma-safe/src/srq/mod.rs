//! Shared receive queues, and lists of tags that match messages to receives.
//!
//! Start with [`ProtectionDomain::shared_receive_queue`](crate::ProtectionDomain::shared_receive_queue), which makes a
//! [`SharedReceiveQueue`] of queue pairs. Endpoints share a [`ReceivePool`](crate::ReceivePool).

mod builder;
mod extended;
mod raw;
mod slab;
mod tag_matching;

use std::fmt;
use std::sync::Arc;

use rdma_sys::*;

use crate::device::{DeviceCapabilities, Quirks};
use crate::errno::check;
use crate::error::Verb;
use crate::object::Object;
use crate::post::{RecvBatch, RecvChain};
use crate::{Context, Errno, Error, PostError, ProtectionDomain, Result, Sge};

pub use builder::SharedReceiveQueueBuilder;
use extended::MadeFrom;
pub(crate) use slab::{Slab, Vacancies};
pub use tag_matching::{Tag, TagHandle, TagHeader, TagInfo, TagList, TagListSize, TagMessage, TagOperation};

pub use crate::id::SrqId;

/// A shared receive queue: receives that several queue pairs share, `struct ibv_srq`.
///
/// Made by [`ProtectionDomain::shared_receive_queue`]. Build queue pairs with
/// [`QueuePairBuilder::shared_receive_queue`](crate::QueuePairBuilder::shared_receive_queue). A message consumes the
/// receive that was posted first. The receive completes to the completion queue of the queue pair that the message
/// arrived at, so the completions of one queue are not in the order of its receives.
///
/// The handle is exclusive: posting writes work requests to memory of the queue, and a lock on each call would cost
/// more than everything else. Queue pairs share the queue, but not the handle. Threads that post to one queue keep the
/// handle in a `Mutex`, and lock it for a batch.
///
/// The queue is destroyed when the handle *and* all queue pairs that use it are dropped. The memory of its receives
/// must stay until then, see [`SharedReceiveQueue::destroy`]. [`AsyncEvents`](crate::AsyncEvents) reports when the
/// limit is reached or the queue fails, with the name [`SharedReceiveQueue::id`].
///
/// A queue pair that fails may have consumed receives that never complete. Like unused receives, they end when the
/// queue is destroyed. If the device supports it, [`QP_LAST_WQE_REACHED`](crate::async_event::AsyncEventType::QP_LAST_WQE_REACHED)
/// reports that a failed queue pair consumes no more receives.
///
/// For endpoints, use [`ReceivePool`](crate::ReceivePool), which needs no `unsafe`.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use rdma_safe::{Access, Device, Sge};
///
/// const SLOT: usize = 2048;
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// // This memory stays allocated, and is accessed only by address while receives are posted.
/// let memory: *mut [u8] = Box::leak(vec![0_u8; 64 * SLOT].into_boxed_slice());
/// // SAFETY: the memory is leaked, and accessed only by address.
/// let region = unsafe { pd.register_raw(memory.cast(), 64 * SLOT, Access::LOCAL_WRITE)? };
///
/// let mut receives = pd.shared_receive_queue(64).build()?;
/// let mut batch = receives.recv_batch();
/// for slot in 0..64 {
///     let sge = Sge { address: region.address() + slot * SLOT as u64, len: SLOT as u32, lkey: region.lkey() };
///     // SAFETY: each slot is used by one receive, and the memory stays allocated.
///     unsafe { batch.receive(slot, &[sge])? };
/// }
/// batch.post()?;
/// receives.set_limit(16)?; // raises an event when fewer are left: see AsyncEvents
///
/// let mut cq = pd.context().completion_queue(128).build()?;
/// let peers: Result<Vec<_>, _> =
///     (0..4).map(|_| pd.queue_pair(&cq, &cq).shared_receive_queue(&receives).build()).collect();
/// let peers = peers?;
/// // … connect them; then poll for messages of all peers:
/// let mut poll = cq.poll();
/// while let Some(completion) = poll.next()? {
///     completion.ok()?;
///     let from = peers.iter().position(|peer| Some(peer.number()) == completion.qp_num());
///     println!("{:?} bytes in slot {} from peer {from:?}", completion.byte_len(), completion.wr_id());
/// }
/// # Ok(())
/// # }
/// ```
pub struct SharedReceiveQueue {
    chain: RecvChain<SharedReceiveQueue>,
    capacity: SharedReceiveQueueAttributes,
    shared: Arc<Shared>,
}

/// The part of a shared receive queue that its queue pairs share.
pub(crate) struct Shared {
    object: Object<MadeFrom>,
    id: SrqId,
}

/// Attributes of a shared receive queue: `struct ibv_srq_attr`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct SharedReceiveQueueAttributes {
    /// Maximum number of work requests.
    pub max_wr: u32,
    /// Scatter/gather elements per work request.
    pub max_sge: u32,
    /// An event is raised when fewer work requests than this are left; 0 for never.
    pub limit: u32,
}

impl SharedReceiveQueueAttributes {
    fn from_raw(raw: &ibv_srq_attr) -> Self {
        SharedReceiveQueueAttributes { max_wr: raw.max_wr, max_sge: raw.max_sge, limit: raw.srq_limit }
    }
}

impl SharedReceiveQueue {
    /// The name of the queue in asynchronous events, unique within the process.
    #[must_use]
    pub fn id(&self) -> SrqId {
        self.shared.id
    }

    /// Maximum number of work requests; at least the requested number.
    #[must_use]
    pub fn max_wr(&self) -> u32 {
        self.capacity.max_wr
    }

    /// Maximum number of scatter/gather elements per receive; at least the requested number.
    #[must_use]
    pub fn max_sge(&self) -> u32 {
        self.capacity.max_sge
    }

    /// The domain of the queue.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.shared.pd()
    }

    /// The device of the queue.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.pd().context()
    }

    /// Posts one receive: `ibv_post_srq_recv(3)`. Costs less than a batch of one.
    ///
    /// # Errors
    /// [`PostError::QueueFull`]; [`PostError::Refused`] and [`PostError::MaybePosted`] on other errors of the provider.
    ///
    /// # Safety
    /// See [`RecvBatch`].
    #[doc(alias = "ibv_post_srq_recv")]
    #[inline(always)]
    pub unsafe fn receive(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        // SAFETY: the chain was allocated when it was made. The rest is the caller's contract.
        unsafe { self.chain.post_one(wr_id, sge) }
    }

    /// Begins a batch of receives. [`RecvBatch::post`] posts it.
    #[inline(always)]
    pub fn recv_batch(&mut self) -> RecvBatch<'_, SharedReceiveQueue> {
        // SAFETY: the chain was allocated when it was made.
        unsafe { self.chain.batch() }
    }

    /// Queries the capacity of the queue, and whether its limit is armed: `ibv_query_srq(3)`.
    ///
    /// Devices do not report how many receives are posted: count them, or set a limit.
    ///
    /// # Errors
    /// [`Error::Verb`].
    #[doc(alias = "ibv_query_srq")]
    pub fn query(&self) -> Result<SharedReceiveQueueAttributes> {
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: 0 };
        // SAFETY: the queue is valid, and `attr` is a valid out pointer.
        check(unsafe { (self.context().verbs().ibv_query_srq)(self.as_raw(), &mut attr) })
            .map_err(|errno| self.context().verb_error(Verb::QuerySrq, errno))?;
        Ok(SharedReceiveQueueAttributes::from_raw(&attr))
    }

    /// Arms a limit: one event when fewer than `limit` work requests are left: `ibv_modify_srq(3)`.
    ///
    /// The event is [`SRQ_LIMIT_REACHED`](crate::async_event::AsyncEventType::SRQ_LIMIT_REACHED), which disarms the
    /// limit. 0 disarms it as well.
    ///
    /// Post receives first: some devices raise the event immediately if the queue is already below the limit.
    ///
    /// # Errors
    /// [`Error::LimitSharedReceiveQueue`] for more than the capacity, or when the device refuses;
    /// [`Error::Unsupported`].
    #[doc(alias = "ibv_modify_srq")]
    pub fn set_limit(&mut self, limit: u32) -> Result<()> {
        let work_requests = self.max_wr();
        let error = |errno| Error::LimitSharedReceiveQueue { limit, work_requests, errno };
        if limit > work_requests {
            return Err(error(Errno(libc::EINVAL)));
        }
        self.modify(ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: limit }, IBV_SRQ_LIMIT).map_err(
            |errno| match errno.is_unsupported() {
                true => self.context().unsupported("limits of shared receive queues"),
                false => error(errno),
            },
        )
    }

    /// Changes the capacity to at least `max_wr` work requests: `ibv_modify_srq(3)`. Posted receives are kept.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device lacks [`DeviceCapabilities::SRQ_RESIZE`];
    /// [`Error::ResizeSharedReceiveQueue`] when the posted receives or the limit do not fit, beyond the device's
    /// maximum, and below the current size on devices with [`Quirks::REFUSED_SRQ_SIZES_FREE_QUEUE`]; [`Error::Verb`]
    /// when the queue was resized but its new capacity cannot be queried. [`SharedReceiveQueue::max_wr`] is then the
    /// requested number.
    #[doc(alias = "ibv_modify_srq")]
    pub fn resize(&mut self, max_wr: u32) -> Result<()> {
        let attributes = self.context().attributes();
        let max_work_requests = attributes.max_srq_wr();
        let unsupported = || self.context().unsupported("resizing shared receive queues");
        if !attributes.capabilities().contains(DeviceCapabilities::SRQ_RESIZE) {
            return Err(unsupported());
        }
        let can_shrink = !self.context().quirks().contains(Quirks::REFUSED_SRQ_SIZES_FREE_QUEUE);
        let min_work_requests = (!can_shrink && max_wr < self.max_wr()).then(|| self.max_wr());
        let refused = |errno| Error::ResizeSharedReceiveQueue {
            work_requests: max_wr,
            min_work_requests,
            max_work_requests,
            errno,
        };
        if min_work_requests.is_some() {
            return Err(refused(Errno(libc::EINVAL)));
        }
        let attr = ibv_srq_attr { max_wr, max_sge: 0, srq_limit: 0 };
        self.modify(attr, IBV_SRQ_MAX_WR).map_err(|errno| match errno.is_unsupported() {
            true => unsupported(),
            false => refused(errno),
        })?;
        self.capacity.max_wr = max_wr;
        self.capacity.max_wr = self.query()?.max_wr;
        Ok(())
    }

    fn modify(&self, mut attr: ibv_srq_attr, mask: ibv_srq_attr_mask) -> Result<(), Errno> {
        // SAFETY: the queue is valid. Nothing posts to it at the same time, because the callers borrow it mutably.
        // `attr` is valid during the call.
        check(unsafe { (self.context().verbs().ibv_modify_srq)(self.as_raw(), &mut attr, mask.0 as i32) })
    }

    /// The C object, valid while this queue or a queue pair that uses it exists.
    #[must_use]
    #[inline]
    pub fn as_raw(&self) -> *mut ibv_srq {
        self.shared.as_raw()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Destroys the queue: `ibv_destroy_srq(3)`.
    ///
    /// Dropping the handle and all queue pairs that use it does the same, but ignores errors. After success the memory
    /// of its receives can be reused.
    ///
    /// # Errors
    /// [`Error::InUse`] while queue pairs use it; it is destroyed when the last of them is dropped. [`Error::Verb`]
    /// with the provider's error; the queue and everything it depends on are then kept until the process ends.
    #[doc(alias = "ibv_destroy_srq")]
    pub fn destroy(self) -> Result<()> {
        self.destroy_with_slab().map(drop)
    }

    /// Like [`SharedReceiveQueue::destroy`], and returns the slab, whose buffers are no longer in use.
    pub(crate) fn destroy_with_slab(self) -> Result<Option<Slab>> {
        let SharedReceiveQueue { chain, shared, .. } = self;
        drop(chain);
        match Arc::into_inner(shared) {
            Some(shared) => Ok(shared.object.destroy()?.slab),
            None => Err(Error::InUse { object: "shared receive queue", users: "queue pairs" }),
        }
    }
}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceiveQueue")
            .field("device", &self.context().device_name())
            .field("id", &self.id())
            .field("max_wr", &self.max_wr())
            .field("max_sge", &self.max_sge())
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn id(&self) -> SrqId {
        self.id
    }

    pub(crate) fn as_raw(&self) -> *mut ibv_srq {
        self.object.as_raw()
    }

    /// The slab, if the queue belongs to a [`ReceivePool`](crate::ReceivePool).
    #[inline]
    pub(crate) fn slab(&self) -> Option<&Slab> {
        self.object.slab.as_ref()
    }

    /// Maximum number of receives of the pool; 0 without a pool.
    pub(crate) fn receives(&self) -> u32 {
        self.slab().map_or(0, Slab::depth)
    }

    pub(crate) fn pd(&self) -> &ProtectionDomain {
        &self.object.pd
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("id", &self.id).finish_non_exhaustive()
    }
}
