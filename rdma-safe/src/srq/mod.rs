//! Shared receive queues.

mod builder;
mod completing;
mod raw;
mod slab;
mod tag_matching;

use std::fmt;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::check;
use crate::id::SrqId;
use crate::object::Object;
use crate::post::{RecvBatch, RecvChain};
use crate::{Context, DeviceCapabilities, Errno, Error, PostError, ProtectionDomain, Result, Sge};

pub use builder::SharedReceiveQueueBuilder;
use completing::MadeFrom;
pub(crate) use slab::{Slab, Vacancies};
pub use tag_matching::{Tag, TagHandle, TagHeader, TagInfo, TagList, TagListSize, TagMessage, TagOperation};

/// A shared receive queue: receives that several queue pairs take from, `struct ibv_srq`. Made by
/// [`ProtectionDomain::shared_receive_queue`].
///
/// Queue pairs are built with [`QueuePairBuilder::shared_receive_queue`](crate::QueuePairBuilder::shared_receive_queue). A
/// message takes the receive that was posted first; its completion comes to the completion queue of the queue pair that it
/// arrived at, so completions of a queue are not in the order of its receives.
///
/// This handle is exclusive: posting writes work requests to memory of the queue, for which a lock on each call would cost more
/// than all the rest. Queue pairs have no use for the handle, only for the queue. Threads that post to one queue share
/// the handle in a `Mutex`, and hold it for a batch.
///
/// The queue is destroyed when the handle *and* the queue pairs that take from it are gone: memory of its receives must stay until
/// then, see [`SharedReceiveQueue::destroy`]. When the limit is reached or the queue
/// fails, [`AsyncEvents`](crate::AsyncEvents) tells, and names it by [`SharedReceiveQueue::id`].
///
/// A queue pair that fails may have taken receives that then never complete. Like those that no queue pair has taken, they end when
/// the queue is destroyed. That a failed queue pair takes no more of them is told by
/// [`QP_LAST_WQE_REACHED`](crate::AsyncEventType::QP_LAST_WQE_REACHED), where the device reports it.
///
/// [`ReceivePool`](crate::ReceivePool) is the same for endpoints, and without `unsafe`.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use rdma_safe::{Access, Device, Sge};
///
/// const SLOT: usize = 2048;
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// // Memory that stays, and that nobody looks at but through the address, while receives are posted.
/// let memory: *mut [u8] = Box::leak(vec![0_u8; 64 * SLOT].into_boxed_slice());
/// // SAFETY: it is leaked, and only accessed by address.
/// let region = unsafe { pd.register_raw(memory.cast(), 64 * SLOT, Access::LOCAL_WRITE)? };
///
/// let mut receives = pd.shared_receive_queue(64).build()?;
/// let mut batch = receives.recv_batch();
/// for slot in 0..64 {
///     let sge = Sge { address: region.address() + slot * SLOT as u64, len: SLOT as u32, lkey: region.lkey() };
///     // SAFETY: each slot is in one receive, and the memory stays.
///     unsafe { batch.receive(slot, &[sge])? };
/// }
/// batch.post()?;
/// receives.set_limit(16)?; // an event with fewer left: see AsyncEvents
///
/// let mut cq = pd.context().completion_queue(128).build()?;
/// let peers: Result<Vec<_>, _> =
///     (0..4).map(|_| pd.queue_pair(&cq, &cq).shared_receive_queue(&receives).build()).collect();
/// let peers = peers?;
/// // … connect them; then, of whichever peer:
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

/// What queue pairs hold of the queue that they take from.
pub(crate) struct Shared {
    object: Object<MadeFrom>,
    id: SrqId,
}

/// What a shared receive queue holds: `struct ibv_srq_attr`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct SharedReceiveQueueAttributes {
    /// Work requests that it holds.
    pub max_wr: u32,
    /// Scatter/gather elements of each.
    pub max_sge: u32,
    /// With fewer work requests left than this, an event comes; 0 for never.
    pub limit: u32,
}

impl SharedReceiveQueueAttributes {
    fn from_raw(raw: &ibv_srq_attr) -> Self {
        SharedReceiveQueueAttributes { max_wr: raw.max_wr, max_sge: raw.max_sge, limit: raw.srq_limit }
    }
}

impl SharedReceiveQueue {
    /// Its name in asynchronous events, which no other shared receive queue of the process will have.
    #[must_use]
    pub fn id(&self) -> SrqId {
        self.shared.id
    }

    /// Work requests that it holds; at least what was asked for.
    #[must_use]
    pub fn max_wr(&self) -> u32 {
        self.capacity.max_wr
    }

    /// Scatter/gather elements of a receive; at least what was asked for.
    #[must_use]
    pub fn max_sge(&self) -> u32 {
        self.capacity.max_sge
    }

    /// The domain that it is in.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.shared.pd()
    }

    /// The device that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.pd().context()
    }

    /// Posts one receive: `ibv_post_srq_recv(3)`.
    ///
    /// # Errors
    /// [`PostError::QueueFull`]; [`PostError::Refused`] and [`PostError::InDoubt`] when the provider failed otherwise.
    ///
    /// # Safety
    /// See [`RecvBatch`].
    #[doc(alias = "ibv_post_srq_recv")]
    #[inline(always)]
    pub unsafe fn receive(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        // SAFETY: the caller's contract is the same.
        unsafe { self.chain.post_one(wr_id, sge) }
    }

    /// Begins a batch of receives. Nothing is posted before [`RecvBatch::post`].
    #[inline(always)]
    pub fn recv_batch(&mut self) -> RecvBatch<'_, SharedReceiveQueue> {
        self.chain.batch()
    }

    /// Asks the device how many work requests the queue has room for, and whether its limit is armed: `ibv_query_srq(3)`. How many
    /// are posted now, no device tells: count them, or set a limit.
    ///
    /// # Errors
    /// [`Error::Verb`].
    #[doc(alias = "ibv_query_srq")]
    pub fn query(&self) -> Result<SharedReceiveQueueAttributes> {
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: 0 };
        // SAFETY: the queue is valid, and `attr` is a valid out pointer.
        check(unsafe { (self.context().verbs().ibv_query_srq)(self.as_raw(), &mut attr) })
            .map_err(|errno| self.context().verb_error("ibv_query_srq", errno))?;
        Ok(SharedReceiveQueueAttributes::from_raw(&attr))
    }

    /// Asks for one event, [`SRQ_LIMIT_REACHED`](crate::AsyncEventType::SRQ_LIMIT_REACHED), when fewer than `limit` work requests
    /// are left: `ibv_modify_srq(3)`. 0 takes that back. The event disarms the limit.
    ///
    /// Post first: some devices report at once a queue that is below its limit already.
    ///
    /// # Errors
    /// [`Error::LimitSharedReceiveQueue`] for more than the queue holds, or when the device refuses; [`Error::Unsupported`].
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

    /// Makes room for at least `max_wr` work requests, or for fewer than before: `ibv_modify_srq(3)`. What is posted stays.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device lacks [`DeviceCapabilities::SRQ_RESIZE`];
    /// [`Error::ResizeSharedReceiveQueue`] when what is posted, or the limit, does not fit, and beyond the device's maximum;
    /// [`Error::Verb`] when it was resized and then does not say to what: [`SharedReceiveQueue::max_wr`] is what was asked for
    /// then.
    #[doc(alias = "ibv_modify_srq")]
    pub fn resize(&mut self, max_wr: u32) -> Result<()> {
        let attributes = self.context().attributes();
        let max_work_requests = attributes.max_srq_wr();
        let unsupported = || self.context().unsupported("resizing shared receive queues");
        if !attributes.capabilities().contains(DeviceCapabilities::SRQ_RESIZE) {
            return Err(unsupported());
        }
        self.modify(ibv_srq_attr { max_wr, max_sge: 0, srq_limit: 0 }, IBV_SRQ_MAX_WR).map_err(|errno| match errno
            .is_unsupported()
        {
            true => unsupported(),
            false => Error::ResizeSharedReceiveQueue { work_requests: max_wr, max_work_requests, errno },
        })?;
        self.capacity.max_wr = max_wr;
        self.capacity.max_wr = self.query()?.max_wr;
        Ok(())
    }

    fn modify(&self, mut attr: ibv_srq_attr, mask: ibv_srq_attr_mask) -> Result<(), Errno> {
        // SAFETY: the queue is valid, and nobody posts to it meanwhile, since the callers have it mutably; `attr` is for the
        // duration of the call.
        check(unsafe { (self.context().verbs().ibv_modify_srq)(self.as_raw(), &mut attr, mask.0 as i32) })
    }

    /// The C object, valid while this queue or a queue pair that takes from it is.
    #[must_use]
    #[inline]
    pub fn as_raw(&self) -> *mut ibv_srq {
        self.shared.as_raw()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Destroys it: `ibv_destroy_srq(3)`. Dropping does the same, when no queue pair takes from it any more, and tells nobody.
    ///
    /// After success the memory of its receives is free again.
    ///
    /// # Errors
    /// [`Error::InUse`] while there are queue pairs that take from it: it is destroyed when the last of them is gone.
    /// [`Error::Verb`] with the provider's answer; the object, and all it depends on, then stays until the process ends.
    #[doc(alias = "ibv_destroy_srq")]
    pub fn destroy(self) -> Result<()> {
        self.destroy_with_slab().map(drop)
    }

    /// As [`SharedReceiveQueue::destroy`], and hands out the slab, whose buffers nobody uses any more.
    pub(crate) fn destroy_with_slab(self) -> Result<Option<Slab>> {
        let SharedReceiveQueue { chain, shared, .. } = self;
        drop(chain);
        match Arc::into_inner(shared) {
            Some(shared) => Ok(shared.object.destroy()?.slab),
            None => Err(Error::InUse { object: "shared receive queue", by: "queue pairs" }),
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

    /// Of the queue of a [`ReceivePool`](crate::ReceivePool).
    #[inline]
    pub(crate) fn slab(&self) -> Option<&Slab> {
        self.object.slab.as_ref()
    }

    /// Most receives that the pool of this queue holds; 0 without a pool.
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
