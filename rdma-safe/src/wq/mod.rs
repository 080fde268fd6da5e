//! Work queues and receive-side scaling (RSS).
//!
//! Start with [`ProtectionDomain::work_queue`]. [`Context::indirection_table`] puts [`WorkQueue`]s in an
//! [`IndirectionTable`], and an [`RssQueuePair`] distributes packets over them.

mod builder;
pub(crate) mod rss;
mod table;

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::check;
use crate::error::Verb;
use crate::named::named;
use crate::object::{self, Object};
use crate::post::{RecvBatch, RecvChain};
use crate::{CompletionQueue, Context, Errno, Error, PostError, ProtectionDomain, Result, Sge, cq};

pub use builder::WorkQueueBuilder;
pub use rss::{RssQueuePair, RssQueuePairBuilder};
pub use table::IndirectionTable;

pub use crate::id::WqId;

named! {
    /// State of a work queue: `enum ibv_wq_state`.
    pub struct WorkQueueState(u32) as "work queue state" {
        /// Initial state. Receives cannot be posted.
        RESET = IBV_WQS_RESET.0 => "RESET",
        /// Ready.
        RDY = IBV_WQS_RDY.0 => "RDY",
        /// Error: the queue failed or was moved here. Posted receives are flushed.
        ERR = IBV_WQS_ERR.0 => "ERR",
        /// Unknown to the provider.
        UNKNOWN = IBV_WQS_UNKNOWN.0 => "UNKNOWN",
    }
}

bitflags::bitflags! {
    /// Options of work queues: `enum ibv_wq_flags`. [`RawPacketCapabilities`](crate::device::RawPacketCapabilities) lists
    /// the options that the device supports.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct WorkQueueFlags: u32 {
        /// Strip the VLAN tag from packets.
        const CVLAN_STRIPPING = IBV_WQ_FLAGS_CVLAN_STRIPPING.0;
        /// Deliver packets with their frame check sequence.
        const SCATTER_FCS = IBV_WQ_FLAGS_SCATTER_FCS.0;
        /// Delay packets that find no receive for a while, instead of dropping them.
        const DELAY_DROP = IBV_WQ_FLAGS_DELAY_DROP.0;
        /// Pad packets to whole cache lines.
        const PCI_WRITE_END_PADDING = IBV_WQ_FLAGS_PCI_WRITE_END_PADDING.0;

        const _ = !0;
    }
}

/// A receive work queue: `struct ibv_wq`. Made by [`ProtectionDomain::work_queue`].
///
/// It receives nothing on its own: an [`RssQueuePair`] distributes packets over the work queues of
/// its [`IndirectionTable`]. The queue starts in RESET, and accepts receives in RDY: [`WorkQueue::ready`].
///
/// The handle is exclusive, as with a [`SharedReceiveQueue`](crate::SharedReceiveQueue). The queue is destroyed when
/// the handle and all tables that contain the queue are dropped: see [`WorkQueue::destroy`].
pub struct WorkQueue {
    chain: RecvChain<WorkQueue>,
    max_wr: u32,
    max_sge: u32,
    /// State that was last set.
    state: WorkQueueState,
    shared: Arc<Shared>,
}

/// The part of a work queue that its tables share.
pub(crate) struct Shared {
    /// Taken on destruction.
    object: Object<Parents>,
    id: WqId,
}

struct Parents {
    pd: ProtectionDomain,
    cq: Arc<cq::Shared>,
}

impl WorkQueue {
    /// Adopts a work queue that other code has created.
    ///
    /// It is destroyed when the handle and all tables that contain the queue are dropped.
    ///
    /// # Safety
    /// `raw` must be an existing receive work queue, created in `pd` and completing to `cq`, with room for `max_wr`
    /// work requests of `max_sge` elements and its `post_recv` set. No table may contain it. Other code must not use or
    /// destroy it, or read its events, from now on.
    pub unsafe fn from_raw(
        pd: &ProtectionDomain,
        cq: &CompletionQueue,
        raw: NonNull<ibv_wq>,
        max_wr: u32,
        max_sge: u32,
    ) -> Self {
        let id = WqId::next();
        // SAFETY: the caller's contract, by which other code does not read the field now.
        let state = unsafe {
            (*raw.as_ptr()).wq_context = id.to_context();
            (*raw.as_ptr()).state
        };
        // SAFETY: the caller's contract. Each table that contains the queue holds an `Arc` of the queue.
        let object = unsafe { Object::new(raw, Parents { pd: pd.clone(), cq: cq.shared().clone() }) };
        let shared = Shared { object, id };
        // SAFETY: the caller's contract.
        unsafe { WorkQueue::new(shared, (max_wr, max_sge), 64, WorkQueueState(state.0)) }
    }

    /// # Safety
    /// The queue of `shared` must be valid and have this capacity.
    unsafe fn new(shared: Shared, (max_wr, max_sge): (u32, u32), max_batch: u32, state: WorkQueueState) -> Self {
        // SAFETY: `shared`, which is kept alongside, owns the queue.
        let chain = unsafe { RecvChain::new(shared.object.raw(), max_sge, max_batch.min(max_wr)) };
        WorkQueue { chain, max_wr, max_sge, state, shared: Arc::new(shared) }
    }

    /// The name of the work queue in asynchronous events, unique within the process.
    #[must_use]
    pub fn id(&self) -> WqId {
        self.shared.id
    }

    /// Number of the work queue.
    #[must_use]
    pub fn number(&self) -> u32 {
        // SAFETY: the queue is valid, and the field is set at creation.
        unsafe { (*self.as_raw()).wq_num }
    }

    /// Maximum number of work requests; at least the requested number.
    #[must_use]
    pub fn max_wr(&self) -> u32 {
        self.max_wr
    }

    /// Maximum number of scatter/gather elements per receive; at least the requested number.
    #[must_use]
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// State that was last set.
    ///
    /// A device may move the queue to the error state, which raises [`WQ_FATAL`](crate::async_event::AsyncEventType::WQ_FATAL).
    #[must_use]
    pub fn state(&self) -> WorkQueueState {
        self.state
    }

    /// Moves the queue to RDY, so that it accepts receives and packets: [`WorkQueue::modify`].
    ///
    /// # Errors
    /// Like [`WorkQueue::modify`].
    pub fn ready(&mut self) -> Result<()> {
        self.modify(WorkQueueState::RDY)
    }

    /// Moves the queue to a state: `ibv_modify_wq(3)`.
    ///
    /// Allowed are RESET to RDY, RDY to ERR, and any state to RESET.
    ///
    /// # Errors
    /// [`Error::PollInProgress`] when this thread has an open poll of its completion queue, whose lock the call needs;
    /// [`Error::ModifyWorkQueue`].
    #[doc(alias = "ibv_modify_wq")]
    pub fn modify(&mut self, state: WorkQueueState) -> Result<()> {
        if self.shared.object.cq.is_polled_by_this_thread() {
            return Err(Error::PollInProgress { verb: Verb::ModifyWq });
        }
        let attr =
            ibv_wq_attr { attr_mask: IBV_WQ_ATTR_STATE.0, wq_state: ibv_wq_state(state.0), ..ibv_wq_attr::zeroed() };
        let from = self.state;
        self.set(attr).map_err(|errno| Error::ModifyWorkQueue { from, to: state, errno })?;
        self.state = state;
        Ok(())
    }

    /// Sets the options in `which` to their value in `flags`: `ibv_modify_wq(3)`.
    ///
    /// Devices support this for [`WorkQueueFlags::CVLAN_STRIPPING`].
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::Verb`].
    #[doc(alias = "ibv_modify_wq")]
    pub fn set_flags(&mut self, which: WorkQueueFlags, flags: WorkQueueFlags) -> Result<()> {
        let attr = ibv_wq_attr {
            attr_mask: IBV_WQ_ATTR_FLAGS.0,
            flags: (flags & which).bits(),
            flags_mask: which.bits(),
            ..ibv_wq_attr::zeroed()
        };
        let context = self.context().clone();
        self.set(attr).map_err(|errno| context.feature_error(Verb::ModifyWq, "changing options of work queues", errno))
    }

    fn set(&mut self, mut attr: ibv_wq_attr) -> Result<(), Errno> {
        // SAFETY: the queue is valid and borrowed mutably, and `attr` is valid during the call.
        check(unsafe { ibv_modify_wq(self.as_raw(), &mut attr) })
    }

    /// Posts one receive: `ibv_post_wq_recv`. Costs less than a batch of one.
    ///
    /// # Errors
    /// [`PostError::WorkQueueNotReady`] in RESET; [`PostError::QueueFull`]; [`PostError::Refused`] and
    /// [`PostError::MaybePosted`] on other errors of the provider.
    ///
    /// # Safety
    /// See [`RecvBatch`].
    #[doc(alias = "ibv_post_wq_recv")]
    #[inline(always)]
    pub unsafe fn receive(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        self.check_state()?;
        // SAFETY: the chain was allocated when it was made. The rest is the caller's contract.
        unsafe { self.chain.post_one(wr_id, sge) }
    }

    /// Begins a batch of receives. [`RecvBatch::post`] posts it.
    ///
    /// # Errors
    /// [`PostError::WorkQueueNotReady`] in RESET.
    #[inline(always)]
    pub fn recv_batch(&mut self) -> Result<RecvBatch<'_, WorkQueue>, PostError> {
        self.check_state()?;
        // SAFETY: the chain was allocated when it was made.
        Ok(unsafe { self.chain.batch() })
    }

    /// Rejects receives in RESET, because providers discard them when the queue becomes ready.
    #[inline(always)]
    fn check_state(&self) -> Result<(), PostError> {
        match self.state {
            WorkQueueState::RDY | WorkQueueState::ERR => Ok(()),
            state => Err(PostError::WorkQueueNotReady { state }),
        }
    }

    /// The domain of the queue.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.shared.object.pd
    }

    /// The device of the queue.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.pd().context()
    }

    /// The C object, valid while this queue or a table that contains it exists.
    #[must_use]
    #[inline]
    pub fn as_raw(&self) -> *mut ibv_wq {
        self.shared.object.as_raw()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Destroys the queue: `ibv_destroy_wq(3)`.
    ///
    /// Dropping the handle and all tables that contain the queue does the same, but ignores errors. After success the
    /// memory of its receives can be reused.
    ///
    /// # Errors
    /// [`Error::InUse`] while tables contain it; it is destroyed when the last of them is dropped.
    /// [`Error::PollInProgress`] when this thread has an open poll of its completion queue; it is destroyed when that poll
    /// moves on or ends. [`Error::Verb`] with the provider's error; the queue and everything it depends on are then
    /// kept until the process ends.
    #[doc(alias = "ibv_destroy_wq")]
    pub fn destroy(self) -> Result<()> {
        let WorkQueue { chain, shared, .. } = self;
        drop(chain);
        match Arc::into_inner(shared) {
            Some(shared) => shared.object.destroy().map(drop),
            None => Err(Error::InUse { object: "work queue", users: "indirection tables" }),
        }
    }
}

impl fmt::Debug for WorkQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkQueue")
            .field("device", &self.context().device_name())
            .field("number", &format_args!("{:#08x}", self.number()))
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl object::Parents for Parents {
    type Raw = ibv_wq;

    const VERB: Verb = Verb::DestroyWq;

    fn context(&self) -> &Context {
        self.pd.context()
    }

    fn polled_by_this_thread(&self) -> Option<&Arc<cq::Shared>> {
        Some(&self.cq).filter(|cq| cq.is_polled_by_this_thread())
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_wq) -> std::ffi::c_int {
        // SAFETY: the caller's contract. Every asynchronous event is acknowledged as it is read (`AsyncEvents`), so
        // this does not block for long.
        unsafe { ibv_destroy_wq(raw) }
    }
}
