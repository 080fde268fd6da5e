//! Creating queue pairs.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32};

use rdma_sys::*;

use super::operations::{available, basic, fallback_sets, present};
use super::options::Options;
use super::{Core, Home, Parents, QueuePair, QueuePairCapacity, QueuePairState, QueuePairType};
use crate::device::Quirks;
use crate::errno::check_ptr;
use crate::id::QpId;
use crate::object::Object;
use crate::post::{EXTENDED_ONLY, RecvState, SendMemory, SendOps, SendState};
use crate::{CompletionQueue, Errno, Error, ProtectionDomain, Result, SharedReceiveQueue, srq};

/// Describes a queue pair: `ibv_create_qp_ex(3)`, or `ibv_create_qp(3)` if the provider lacks it.
///
/// Made by [`ProtectionDomain::queue_pair`].
#[derive(Clone, Debug)]
#[must_use = "a builder creates nothing until `build`"]
pub struct QueuePairBuilder<'a> {
    pub(super) pd: &'a ProtectionDomain,
    pub(super) send_cq: &'a CompletionQueue,
    pub(super) recv_cq: &'a CompletionQueue,
    pub(super) qp_type: QueuePairType,
    pub(super) srq: Option<Arc<srq::Shared>>,
    pub(super) capacity: QueuePairCapacity,
    pub(super) ops: Option<SendOps>,
    pub(super) max_batch: u32,
    /// Largest batch of receives; `max_batch` if `None`.
    pub(super) max_recv_batch: Option<u32>,
    pub(super) classic: bool,
    pub(super) options: Options,
}

impl<'a> QueuePairBuilder<'a> {
    #[inline]
    pub(crate) fn new(pd: &'a ProtectionDomain, send_cq: &'a CompletionQueue, recv_cq: &'a CompletionQueue) -> Self {
        let capacity = QueuePairCapacity {
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        QueuePairBuilder {
            pd,
            send_cq,
            recv_cq,
            qp_type: QueuePairType::RC,
            srq: None,
            capacity,
            ops: None,
            max_batch: 64,
            max_recv_batch: None,
            classic: false,
            options: Options::default(),
        }
    }

    /// Type of the queue pair; [`QueuePairType::RC`] unless set.
    ///
    /// Other types are [`QueuePairType::UC`], [`QueuePairType::UD`] and [`QueuePairType::XRC_SEND`], which only sends
    /// and does not use the completion queue for receives. Privileged users (CAP_NET_RAW) can create
    /// [`QueuePairType::RAW_PACKET`].
    #[inline]
    pub fn qp_type(mut self, qp_type: QueuePairType) -> Self {
        self.qp_type = qp_type;
        self
    }

    /// Work requests that the send queue can hold; 128 unless set.
    #[inline]
    pub fn send_depth(mut self, work_requests: u32) -> Self {
        self.capacity.max_send_wr = work_requests;
        self
    }

    /// Work requests that the receive queue can hold; 128 unless set.
    #[inline]
    pub fn recv_depth(mut self, work_requests: u32) -> Self {
        self.capacity.max_recv_wr = work_requests;
        self
    }

    /// Takes receives from `srq` instead of a separate receive queue.
    ///
    /// `recv_depth` and `recv_sges` are then ignored, and posting receives to the queue pair fails with
    /// [`PostError::SharedReceives`](crate::PostError::SharedReceives). Receives complete on the completion queue of
    /// the queue pair that takes them. [`WcFields::QP_NUM`](crate::WcFields::QP_NUM) tells queue pairs on one
    /// completion queue apart.
    #[inline]
    pub fn shared_receive_queue(self, srq: &SharedReceiveQueue) -> Self {
        self.receives_of(srq.shared().clone())
    }

    pub(crate) fn receives_of(mut self, srq: Arc<srq::Shared>) -> Self {
        self.srq = Some(srq);
        self
    }

    /// Largest number of scatter/gather elements in a send, at least 1; 1 unless set.
    #[inline]
    pub fn send_sges(mut self, elements: u32) -> Self {
        self.capacity.max_send_sge = elements.max(1);
        self
    }

    /// Largest number of scatter/gather elements in a receive, at least 1; 1 unless set.
    #[inline]
    pub fn recv_sges(mut self, elements: u32) -> Self {
        self.capacity.max_recv_sge = elements.max(1);
        self
    }

    /// Largest inline data of a send in bytes, which is copied when the send is posted; 0 unless set.
    #[inline]
    pub fn inline_data(mut self, bytes: u32) -> Self {
        self.capacity.max_inline_data = bytes;
        self
    }

    /// Send operations to enable; unless set, all operations of the type that the device supports.
    ///
    /// The base sets are [`SendOps::RC`], [`SendOps::UC`] and [`SendOps::UD`]. Not every device supports the others.
    #[inline]
    pub fn operations(mut self, ops: SendOps) -> Self {
        self.ops = Some(ops);
        self
    }

    /// Largest batch that is collected in memory, in work requests; 64 unless set. This applies to receives, and to
    /// sends that are posted by `ibv_post_send`.
    #[inline]
    pub fn max_batch(mut self, work_requests: u32) -> Self {
        self.max_batch = work_requests.max(1);
        self
    }

    /// Largest batch of receives; with 0, no memory is allocated for batches of them.
    pub(crate) fn max_recv_batch(mut self, work_requests: u32) -> Self {
        self.max_recv_batch = Some(work_requests);
        self
    }

    /// Posts by `ibv_post_send` even if `ibv_wr_*` is available.
    #[inline]
    pub fn classic(mut self, classic: bool) -> Self {
        self.classic = classic;
        self
    }

    /// Creates a queue pair in state RESET.
    ///
    /// # Errors
    /// [`Error::ForeignContext`] if a completion queue or the shared receive queue belongs to another context than the
    /// domain; [`Error::WrongType`] for other types; [`Error::Unsupported`] for types that the device lacks;
    /// [`Error::CreateQueuePair`], which names the capacities and the device's limits; [`Error::UnsupportedOperations`]
    /// for operations that the type or the device does not support.
    #[doc(alias = "ibv_create_qp_ex")]
    #[doc(alias = "ibv_create_qp")]
    pub fn build(mut self) -> Result<QueuePair> {
        if self.srq.is_some() || self.qp_type == QueuePairType::XRC_SEND {
            (self.capacity.max_recv_wr, self.capacity.max_recv_sge) = (0, 0);
        }
        let ops = self.check()?;
        if self.is_extended() {
            let created = match self.create(Some(ops)) {
                Ok(created) => Some((created, ops)),
                Err(errno) if errno.is_unsupported() => self.create_with_fewer(ops)?,
                Err(errno) => return Err(self.error(errno)),
            };
            if let Some((created, ops)) = created {
                return self.finish_extended(created, ops);
            }
        }
        self.build_classic(ops)
    }

    /// Checks the description, and returns the operations to create the queue pair with.
    #[inline(always)]
    fn check(&self) -> Result<SendOps> {
        let context = self.pd.context();
        context.require_own()?;
        for cq in [self.send_cq, self.recv_cq] {
            context.require_same(cq.context(), "completion queue")?;
        }
        if self.srq.is_some() || self.qp_type == QueuePairType::XRC_SEND {
            self.check_receives()?;
        }
        let is_basic = |ops| basic(self.qp_type).is_some_and(|basic| basic.contains(ops));
        let ops = match self.ops {
            // Every device has them, so its capabilities do not matter.
            Some(ops) if is_basic(ops) && self.options.max_tso_header == 0 => ops,
            _ => self.check_operations()?,
        };
        self.options.check(context)?;
        Ok(ops)
    }

    /// Checks the shared receive queue, and the device's support of XRC.
    fn check_receives(&self) -> Result<()> {
        let context = self.pd.context();
        if self.qp_type == QueuePairType::XRC_SEND {
            context.require_xrc()?;
        }
        let Some(srq) = &self.srq else { return Ok(()) };
        context.require_same(srq.pd().context(), "shared receive queue")?;
        if self.qp_type == QueuePairType::XRC_SEND || srq.xrc_number().is_some() {
            let advice = "an XRC message names its shared receive queue by number, see SendBatch::to_srq";
            return Err(Error::WrongType { operation: "this shared receive queue", qp_type: self.qp_type, advice });
        }
        Ok(())
    }

    /// Checks the type and the operations, of which the defaults depend on the device.
    fn check_operations(&self) -> Result<SendOps> {
        let all = self.all_operations()?;
        let has_tso = self.options.max_tso_header > 0;
        let ops = self.ops.unwrap_or(if has_tso { all } else { all - SendOps::TSO });
        let needed = if has_tso { ops | SendOps::TSO } else { ops };
        match all.contains(needed) {
            true => Ok(ops),
            false => Err(Error::UnsupportedOperations { ops: needed - all }),
        }
    }

    /// Whether to post by `ibv_wr_*` if the provider supports it.
    pub(super) fn is_extended(&self) -> bool {
        let quirks = self.pd.context().quirks();
        let lists_miscounted = quirks.contains(Quirks::SGE_LISTS_MISCOUNTED) && self.capacity.max_send_sge > 1;
        !self.classic && !lists_miscounted && !quirks.contains(Quirks::EXTENDED_SENDS_BROKEN)
    }

    pub(super) fn all_operations(&self) -> Result<SendOps> {
        let advice = "QueuePairBuilder builds the types RC, UC, UD, RAW_PACKET and XRC_SEND; \
                       XrcDomain::create_target creates the responder of XRC";
        let error = || Error::WrongType { operation: "QueuePairBuilder", qp_type: self.qp_type, advice };
        available(self.pd.context(), self.qp_type).ok_or_else(error)
    }

    /// Creates the queue pair for `ibv_wr_*` with `ops`, or for `ibv_post_send` with `None`.
    #[inline(always)]
    fn create(&self, ops: Option<SendOps>) -> Result<Created, Errno> {
        let (id, pd) = (QpId::next(), self.pd);
        let mut attr = ibv_qp_init_attr_ex::zeroed();
        attr.qp_context = id.to_context();
        attr.send_cq = self.send_cq.as_raw();
        if self.qp_type != QueuePairType::XRC_SEND {
            attr.recv_cq = self.recv_cq.as_raw();
        }
        attr.srq = self.srq_ptr();
        attr.cap = self.capacity.to_raw();
        attr.qp_type = ibv_qp_type(self.qp_type.0);
        attr.pd = pd.as_raw();
        attr.comp_mask = IBV_QP_INIT_ATTR_PD.0;
        self.options.set(&mut attr);
        if let Some(ops) = ops {
            attr.send_ops_flags = ops.bits();
            attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0;
        }
        // SAFETY: the context, the domain and all queues are valid, and `attr` is valid during the call.
        let raw = check_ptr(|| unsafe { ibv_create_qp_ex(pd.context().as_raw(), &mut attr) })?;
        Ok(Created { raw, capacity: QueuePairCapacity::from_raw(&attr.cap), id })
    }

    /// Creates the queue pair for `ibv_wr_*` after the device has refused all default operations, `ops`, together. `None` if
    /// it refuses fewer, too, or if certain operations are requested.
    #[cold]
    fn create_with_fewer(&self, ops: SendOps) -> Result<Option<(Created, SendOps)>> {
        let sets = if self.ops.is_none() { fallback_sets(ops, self.qp_type) } else { Vec::new() };
        for ops in sets.into_iter().filter(|set| *set != ops) {
            match self.create(Some(ops)) {
                Ok(created) => return Ok(Some((created, ops))),
                Err(errno) if errno.is_unsupported() => {}
                Err(errno) => return Err(self.error(errno)),
            }
        }
        Ok(None)
    }

    /// Creates a queue pair that posts by `ibv_post_send`.
    fn build_classic(&self, ops: SendOps) -> Result<QueuePair> {
        let ops = if self.ops.is_none() { ops - EXTENDED_ONLY } else { ops };
        if ops.intersects(EXTENDED_ONLY) {
            return Err(Error::UnsupportedOperations { ops: ops & EXTENDED_ONLY });
        }
        let created = self.create(None).map_err(|errno| self.error(errno))?;
        Ok(self.finish(created, ops, None))
    }

    /// Finishes a queue pair that posts by `ibv_wr_*` and was created with `ops`. Some providers accept operations that they
    /// then do not implement.
    #[inline(always)]
    fn finish_extended(&self, mut created: Created, ops: SendOps) -> Result<QueuePair> {
        // SAFETY: the queue pair is valid. Created with operations, it has the extended interface; otherwise this
        // returns NULL.
        let qp_ex = NonNull::new(unsafe { (self.pd.context().verbs().ibv_qp_to_qp_ex)(created.raw.as_ptr()) });
        let Some(qp_ex) = qp_ex else { return self.refuse(created, ops) };
        // SAFETY: the interface is part of the queue pair, which was created with `ops`.
        let present = unsafe { present(qp_ex.as_ptr(), self.qp_type, ops) };
        if self.pd.context().quirks().contains(Quirks::SGE_LISTS_MISCOUNTED) {
            // The provider may have granted more than was requested.
            created.capacity.max_send_sge = 1;
        }
        if present != ops && (self.ops.is_some() || present.is_empty()) {
            return self.refuse(created, ops - present);
        }
        Ok(self.finish(created, present, Some(qp_ex)))
    }

    /// Destroys a queue pair that the provider has created without the operations `lacking`.
    #[cold]
    fn refuse(&self, created: Created, lacking: SendOps) -> Result<QueuePair> {
        drop(self.finish(created, SendOps::empty(), None));
        match self.ops {
            Some(ops) if !ops.is_empty() => Err(Error::UnsupportedOperations { ops: lacking }),
            _ => self.clone().classic(true).build(),
        }
    }

    #[inline(always)]
    pub(super) fn finish(&self, created: Created, ops: SendOps, qp_ex: Option<NonNull<ibv_qp_ex>>) -> QueuePair {
        let Created { raw, capacity, id } = created;
        // SAFETY: the queue pair is valid, and the field is set at creation.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        // Allocated first. Nothing panics once `core` exists, so the compiler builds the queue pair where it is returned.
        let memory = SendMemory::new(capacity, qp_ex.is_some(), self.max_batch);
        let (send_cq, recv_cq) = (self.send_cq.shared(), self.recv_cq.shared());
        let cqs = [Some(Arc::clone(send_cq)), (!Arc::ptr_eq(send_cq, recv_cq)).then(|| Arc::clone(recv_cq))];
        let parents = Parents::new(Home::Domain(self.pd.clone()), cqs, self.srq.clone());
        let core = Core {
            // SAFETY: the queue pair was created in or adopted with these parents. Its flows and memory windows hold its
            // keeper.
            object: unsafe { Object::new(raw, parents) },
            number,
            id,
            qp_type: self.qp_type,
            capacity,
            state: AtomicU32::new(QueuePairState::RESET.0),
            port: AtomicU8::new(0),
        };
        // SAFETY: both sides belong to one queue pair, of which they are never moved out.
        let recv = unsafe { RecvState::new(&core, self.max_recv_batch.unwrap_or(self.max_batch)) };
        let send = SendState::new(core, qp_ex, ops, memory, self.options.max_tso_header);
        QueuePair { send, recv, local: None }
    }

    pub(super) fn srq_ptr(&self) -> *mut ibv_srq {
        self.srq.as_ref().map_or(std::ptr::null_mut(), |srq| srq.as_raw())
    }

    #[cold]
    fn error(&self, errno: Errno) -> Error {
        if errno.is_unsupported() {
            if self.qp_type == QueuePairType::RAW_PACKET {
                return self.pd.context().unsupported("raw packet queue pairs");
            }
            if let Some(ops) = self.ops {
                return Error::UnsupportedOperations { ops };
            }
            if !self.options.is_none() {
                return self.pd.context().unsupported("options of queue pairs (ibv_create_qp_ex)");
            }
        }
        let device = self.pd.context().attributes();
        let limits = format!(
            "{} work requests and {} elements each way, {} queue pairs",
            device.max_qp_wr(),
            device.max_sge(),
            device.max_qp()
        );
        Error::CreateQueuePair { qp_type: self.qp_type, requested: self.capacity, limits, errno }
    }
}

/// A queue pair as the provider created it.
pub(super) struct Created {
    pub(super) raw: NonNull<ibv_qp>,
    pub(super) capacity: QueuePairCapacity,
    pub(super) id: QpId,
}
