//! Work queues: receive queues apart from queue pairs, over which receive-side scaling spreads packets.

mod builder;
mod table;

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::check;
use crate::id::WqId;
use crate::named::named;
use crate::object::{self, Object};
use crate::post::{RecvBatch, RecvChain};
use crate::{CompletionQueue, Context, Errno, Error, PostError, ProtectionDomain, Result, Sge, cq};

pub use builder::WorkQueueBuilder;
pub use table::IndirectionTable;

named! {
    /// State of a work queue: `enum ibv_wq_state`.
    pub struct WorkQueueState(u32) as "work queue state" {
        /// As created; it takes no receives.
        RESET = IBV_WQS_RESET.0 => "RESET",
        /// It works.
        RDY = IBV_WQS_RDY.0 => "RDY",
        /// It failed, or was told to; what was posted is flushed.
        ERR = IBV_WQS_ERR.0 => "ERR",
        /// The provider does not know.
        UNKNOWN = IBV_WQS_UNKNOWN.0 => "UNKNOWN",
    }
}

bitflags::bitflags! {
    /// Options of work queues: `enum ibv_wq_flags`. [`RawPacketCapabilities`](crate::RawPacketCapabilities) has those of the
    /// device.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct WorkQueueFlags: u32 {
        /// Packets come without their VLAN tag.
        const CVLAN_STRIPPING = IBV_WQ_FLAGS_CVLAN_STRIPPING.0;
        /// Packets come with their frame check sequence.
        const SCATTER_FCS = IBV_WQ_FLAGS_SCATTER_FCS.0;
        /// A packet that finds no receive waits for one a while.
        const DELAY_DROP = IBV_WQ_FLAGS_DELAY_DROP.0;
        /// Packets are padded to whole cache lines.
        const PCI_WRITE_END_PADDING = IBV_WQ_FLAGS_PCI_WRITE_END_PADDING.0;

        const _ = !0;
    }
}

/// A receive work queue: `struct ibv_wq`. Made by [`ProtectionDomain::work_queue`].
///
/// It receives nothing by itself: an [`IndirectionTable`] of work queues belongs to an [`RssQueuePair`](crate::RssQueuePair), which
/// gives each packet to one of them. It starts in RESET, and takes receives once it is in RDY: [`WorkQueue::ready`].
///
/// The handle is exclusive, as that of a [`SharedReceiveQueue`](crate::SharedReceiveQueue). The queue is destroyed when the handle
/// and the tables that it is in are gone: see [`WorkQueue::destroy`].
pub struct WorkQueue {
    chain: RecvChain<WorkQueue>,
    max_wr: u32,
    max_sge: u32,
    /// As last set here.
    state: WorkQueueState,
    shared: Arc<Shared>,
}

/// What tables hold of the queues that are in them.
pub(crate) struct Shared {
    /// Taken by the destruction.
    object: Object<Parents>,
    id: WqId,
}

struct Parents {
    pd: ProtectionDomain,
    cq: Arc<cq::Shared>,
}

impl WorkQueue {
    /// Adopts a work queue that other code has created. It is destroyed when it and the tables that have it are gone.
    ///
    /// # Safety
    /// `raw` must be a receive work queue that exists, made in `pd` and completing to `cq`, with room for `max_wr` work requests of
    /// `max_sge` elements and its `post_recv` set; no table may have it. Nobody else may use or destroy it, or read its events,
    /// from here on.
    pub unsafe fn from_raw(
        pd: &ProtectionDomain,
        cq: &CompletionQueue,
        raw: NonNull<ibv_wq>,
        max_wr: u32,
        max_sge: u32,
    ) -> Self {
        let id = WqId::next();
        // SAFETY: the caller's contract, by which nobody reads the field meanwhile.
        let state = unsafe {
            (*raw.as_ptr()).wq_context = id.to_context();
            (*raw.as_ptr()).state
        };
        // SAFETY: the caller's contract; a table with it holds an `Arc` of it.
        let object = unsafe { Object::new(raw, Parents { pd: pd.clone(), cq: cq.shared().clone() }) };
        let shared = Shared { object, id };
        // SAFETY: the caller's contract.
        unsafe { WorkQueue::new(shared, (max_wr, max_sge), 64, WorkQueueState(state.0)) }
    }

    /// # Safety
    /// The queue of `shared` must be valid, and have so much room.
    unsafe fn new(shared: Shared, (max_wr, max_sge): (u32, u32), max_batch: u32, state: WorkQueueState) -> Self {
        // SAFETY: `shared`, which is kept beside it, owns the queue.
        let chain = unsafe { RecvChain::new(shared.object.raw(), max_sge, max_batch.min(max_wr)) };
        WorkQueue { chain, max_wr, max_sge, state, shared: Arc::new(shared) }
    }

    /// Its name in asynchronous events, which no other work queue of the process will have.
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

    /// Work requests that it holds; at least what was asked for.
    #[must_use]
    pub fn max_wr(&self) -> u32 {
        self.max_wr
    }

    /// Scatter/gather elements of a receive; at least what was asked for.
    #[must_use]
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// State as last set here; a device moves a work queue to the error state by itself, which
    /// [`WQ_FATAL`](crate::AsyncEventType::WQ_FATAL) tells.
    #[must_use]
    pub fn state(&self) -> WorkQueueState {
        self.state
    }

    /// Lets it take receives and packets: as [`WorkQueue::modify`] to RDY.
    ///
    /// # Errors
    /// As there.
    pub fn ready(&mut self) -> Result<()> {
        self.modify(WorkQueueState::RDY)
    }

    /// Brings it to a state: `ibv_modify_wq(3)`. From RESET it goes to RDY, from RDY to ERR, and from any to RESET.
    ///
    /// # Errors
    /// [`Error::PolledHere`] when this thread holds a cursor on its completion queue, whose lock the call needs;
    /// [`Error::ModifyWorkQueue`].
    #[doc(alias = "ibv_modify_wq")]
    pub fn modify(&mut self, state: WorkQueueState) -> Result<()> {
        if self.shared.object.cq.is_polled_here() {
            return Err(Error::PolledHere { verb: "ibv_modify_wq" });
        }
        let attr =
            ibv_wq_attr { attr_mask: IBV_WQ_ATTR_STATE.0, wq_state: ibv_wq_state(state.0), ..ibv_wq_attr::zeroed() };
        let from = self.state;
        self.set(attr).map_err(|errno| Error::ModifyWorkQueue { from, to: state, errno })?;
        self.state = state;
        Ok(())
    }

    /// Switches those of its options that are in `which` to what `flags` has: `ibv_modify_wq(3)`. Devices have it for
    /// [`WorkQueueFlags::CVLAN_STRIPPING`].
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
        self.set(attr).map_err(|errno| context.feature_error("ibv_modify_wq", "changing options of work queues", errno))
    }

    fn set(&mut self, mut attr: ibv_wq_attr) -> Result<(), Errno> {
        // SAFETY: the queue is valid, and borrowed mutably; `attr` is for the duration of the call.
        check(unsafe { ibv_modify_wq(self.as_raw(), &mut attr) })
    }

    /// Posts one receive: `ibv_post_wq_recv`.
    ///
    /// # Errors
    /// [`PostError::WorkQueueNotReady`] in RESET; [`PostError::QueueFull`]; [`PostError::Refused`] and [`PostError::InDoubt`] when
    /// the provider failed otherwise.
    ///
    /// # Safety
    /// See [`RecvBatch`].
    #[doc(alias = "ibv_post_wq_recv")]
    #[inline(always)]
    pub unsafe fn receive(&mut self, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        self.check_state()?;
        // SAFETY: the caller's contract is the same.
        unsafe { self.chain.post_one(wr_id, sge) }
    }

    /// Begins a batch of receives. Nothing is posted before [`RecvBatch::post`].
    ///
    /// # Errors
    /// [`PostError::WorkQueueNotReady`] in RESET.
    #[inline(always)]
    pub fn recv_batch(&mut self) -> Result<RecvBatch<'_, WorkQueue>, PostError> {
        self.check_state()?;
        Ok(self.chain.batch())
    }

    /// What is posted in RESET, providers forget when the queue becomes ready.
    #[inline(always)]
    fn check_state(&self) -> Result<(), PostError> {
        match self.state {
            WorkQueueState::RDY | WorkQueueState::ERR => Ok(()),
            state => Err(PostError::WorkQueueNotReady { state }),
        }
    }

    /// The domain that it is in.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.shared.object.pd
    }

    /// The device that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.pd().context()
    }

    /// The C object, valid while this queue or a table that it is in is.
    #[must_use]
    #[inline]
    pub fn as_raw(&self) -> *mut ibv_wq {
        self.shared.object.as_raw()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Destroys it: `ibv_destroy_wq(3)`. Dropping does the same, when no table has it any more, and tells nobody.
    ///
    /// After success the memory of its receives is free again.
    ///
    /// # Errors
    /// [`Error::InUse`] while it is in tables: it is destroyed when the last of them is gone. [`Error::PolledHere`] when this
    /// thread holds a cursor on its completion queue: it is destroyed when the cursor moves on or goes. [`Error::Verb`] with the
    /// provider's answer; the object, and all it depends on, then stays until the process ends.
    #[doc(alias = "ibv_destroy_wq")]
    pub fn destroy(self) -> Result<()> {
        let WorkQueue { chain, shared, .. } = self;
        drop(chain);
        match Arc::into_inner(shared) {
            Some(shared) => shared.object.destroy().map(drop),
            None => Err(Error::InUse { object: "work queue", by: "indirection tables" }),
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

    const VERB: &'static str = "ibv_destroy_wq";

    fn context(&self) -> &Context {
        self.pd.context()
    }

    fn polled_here(&self) -> Option<&Arc<cq::Shared>> {
        Some(&self.cq).filter(|cq| cq.is_polled_here())
    }

    unsafe fn destroy(&self, raw: *mut ibv_wq) -> std::ffi::c_int {
        // SAFETY: the caller's contract. Every asynchronous event was acknowledged as it was read (`AsyncEvents`), so this does not
        // block for long.
        unsafe { ibv_destroy_wq(raw) }
    }
}
