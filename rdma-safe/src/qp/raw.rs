//! Adopting queue pairs that other code has created, and giving up ownership of queue pairs.

use std::ptr::NonNull;

use rdma_sys::*;

use super::builder::Created;
use super::{QueuePair, QueuePairBuilder, QueuePairCapacity, QueuePairType};
use crate::device::Quirks;
use crate::error::Verb;
use crate::id::QpId;
use crate::{Error, Result, SendOps};

impl QueuePairBuilder<'_> {
    /// Adopts a queue pair that other code has created, for example with vendor calls (`mlx5dv_create_qp`,
    /// `efadv_create_qp_ex`). It is destroyed on drop.
    ///
    /// The builder must describe the queue pair. The queue pair posts by `ibv_wr_*`. Its enabled operations are the builder's
    /// [operations](QueuePairBuilder::operations) whose functions exist. Unless the builder has operations, the operations of
    /// the type are used. With [`QueuePairBuilder::classic`], or if no function exists, the queue pair posts by
    /// `ibv_post_send(3)`. Capacities and state are read with `ibv_query_qp(3)`. The `qp_context` is overwritten with the value
    /// of [`QueuePair::id`].
    ///
    /// ```no_run
    /// # use std::ptr::NonNull;
    /// # use rdma_safe::*;
    /// # struct Cq;
    /// # unsafe fn mlx5dv_create_cq(_: *mut sys::ibv_context, _: *mut Cq) -> *mut sys::ibv_cq_ex { unimplemented!() }
    /// # unsafe fn mlx5dv_create_qp(_: *mut sys::ibv_context, _: *mut Cq) -> *mut sys::ibv_qp { unimplemented!() }
    /// # fn example(context: &Context, pd: &ProtectionDomain, attributes: *mut Cq)
    /// #     -> std::result::Result<(), Box<dyn std::error::Error>> {
    /// // SAFETY: the attributes have IBV_WC_STANDARD_FLAGS, and nobody else uses the queue.
    /// let cq = unsafe {
    ///     let raw = NonNull::new(mlx5dv_create_cq(context.as_raw(), attributes)).ok_or("mlx5dv_create_cq")?;
    ///     context.completion_queue(64).fields(WcFields::STANDARD).from_raw(raw.cast())?
    /// };
    /// // SAFETY: the attributes name `pd` and `cq`, IBV_QPT_RC and these operations, and nobody else uses the queue pair.
    /// let mut qp = unsafe {
    ///     let raw = NonNull::new(mlx5dv_create_qp(context.as_raw(), attributes)).ok_or("mlx5dv_create_qp")?;
    ///     pd.queue_pair(&cq, &cq).operations(SendOps::SEND | SendOps::RDMA_WRITE).from_raw(raw)?
    /// };
    /// let address = qp.init(&InitOptions::default())?; // and connect it, as any other
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Change its state with [`QueuePair::modify`], or in RESET with [`QueuePair::init`] and [`QueuePair::connect`].
    ///
    /// # Errors
    /// [`Error::WrongType`] for types that cannot be built; [`Error::WrongParent`] if its type, domain, completion
    /// queues or shared receive queue differ from the builder's; [`Error::UnsupportedOperations`] for operations
    /// that its type or the queue pair does not support; [`Error::Verb`] if it cannot be queried. On an error the
    /// caller keeps the queue pair, unchanged.
    ///
    /// # Safety
    /// `raw` must be a queue pair that nobody else destroys, modifies or posts to, without an open batch. Unless the
    /// builder is classic, it must have been created with all operations of the builder (`send_ops_flags`): if its
    /// structure is shorter than that of this crate, the fields of other operations do not exist. Memory of work in
    /// flight on it must stay valid until the work has completed or the queue pair is destroyed. Objects of other code
    /// that refer to it, such as flows, must be destroyed before it. Nobody may read an event of it, for example with
    /// [`AsyncEvents`](crate::AsyncEvents), before this returns.
    pub unsafe fn from_raw(self, raw: NonNull<ibv_qp>) -> Result<QueuePair> {
        let all = self.all_operations()?;
        let asked = self.ops;
        if let Some(ops) = asked.filter(|ops| !all.contains(*ops)) {
            return Err(Error::UnsupportedOperations { ops: ops - all });
        }
        // SAFETY: the caller guarantees that the queue pair is valid.
        unsafe { self.check_parents(raw.as_ptr())? }
        let pd = self.pd;
        let verbs = pd.context().verbs();
        let (mut attr, mut init) = (ibv_qp_attr::zeroed(), ibv_qp_init_attr::zeroed());
        let mask = (IBV_QP_STATE | IBV_QP_CAP | IBV_QP_PORT).0 as std::ffi::c_int;
        // SAFETY: the queue pair is valid, and both out pointers are valid.
        crate::errno::check(unsafe { (verbs.ibv_query_qp)(raw.as_ptr(), &mut attr, mask, &mut init) })
            .map_err(|errno| pd.context().verb_error(Verb::QueryQp, errno))?;
        let mut capacity = QueuePairCapacity::from_raw(&init.cap);
        // The default has only operations that every release supports, because the structures of older releases lack later fields.
        let ops = asked.unwrap_or(all & (SendOps::RC | SendOps::UC | SendOps::UD));
        let interface = match self.is_extended() {
            // SAFETY: the queue pair is valid. This returns NULL if it was created without operations.
            true => NonNull::new(unsafe { (verbs.ibv_qp_to_qp_ex)(raw.as_ptr()) }),
            false => None,
        };
        // SAFETY: the interface is part of the queue pair. The caller guarantees that it was created with these
        // operations.
        let present = interface.map(|qp_ex| unsafe { super::operations::present(qp_ex.as_ptr(), self.qp_type, ops) });
        let (interface, enabled) = match present {
            Some(present) if !present.is_empty() => (interface, present),
            _ => (None, ops - crate::post::EXTENDED_ONLY),
        };
        if let Some(lacks) = asked.map(|asked| asked - enabled).filter(|lacks| !lacks.is_empty()) {
            return Err(Error::UnsupportedOperations { ops: lacks });
        }
        if interface.is_some() && pd.context().quirks().contains(Quirks::SGE_LISTS_MISCOUNTED) {
            capacity.max_send_sge = 1;
        }
        let id = QpId::next();
        // SAFETY: the queue pair is valid, and the caller guarantees that nobody reads the field meanwhile.
        unsafe { (*raw.as_ptr()).qp_context = id.to_context() };
        let mut qp = self.finish(Created { raw, capacity, id }, enabled, interface);
        qp.core().set_port(attr.port_num);
        qp.core().set_state(super::QueuePairState(attr.qp_state.0));
        qp.update_queue_states();
        if attr.port_num != 0 {
            qp.update_max_datagram(attr.port_num);
        }
        Ok(qp)
    }
}

impl QueuePair {
    /// Gives up ownership: the caller must destroy the returned queue pair. It no longer keeps its domain and queues
    /// alive.
    ///
    /// A forgotten batch is aborted first. The queue pair stays in its multicast groups, and must leave them before it
    /// can be destroyed.
    ///
    /// # Errors
    /// [`Error::InUse`] if there are [`Flow`](crate::flow::Flow)s to it or memory windows bound to it: it is destroyed with
    /// the last of them.
    pub fn into_raw(mut self) -> Result<NonNull<ibv_qp>> {
        self.send.abort();
        // SAFETY: `self` is only dropped afterwards.
        unsafe { self.send.core_mut().disown() }
    }

    /// The extended part of the C object, valid while this queue pair exists; `None` if it posts by `ibv_post_send(3)`.
    #[must_use]
    pub fn as_raw_ex(&self) -> Option<NonNull<ibv_qp_ex>> {
        self.send.as_raw_ex()
    }
}

impl QueuePairBuilder<'_> {
    /// # Safety
    /// `qp` must be a valid queue pair.
    unsafe fn check_parents(&self, qp: *const ibv_qp) -> Result<()> {
        let wrong = |object| Err(Error::WrongParent { object });
        // SAFETY: the caller's contract; these fields do not change. There is no reference to the whole queue pair,
        // because other threads may lock the mutex in it.
        let (qp_type, context, pd, send_cq, recv_cq, srq) =
            unsafe { ((*qp).qp_type, (*qp).context, (*qp).pd, (*qp).send_cq, (*qp).recv_cq, (*qp).srq) };
        if QueuePairType(qp_type.0) != self.qp_type {
            return wrong("type");
        }
        for (object, fits) in [
            ("context", context == self.pd.context().as_raw()),
            ("protection domain", pd == self.pd.as_raw()),
            ("completion queue of sends", send_cq == self.send_cq.as_raw()),
            (
                "completion queue of receives",
                recv_cq == self.recv_cq.as_raw() || self.qp_type == QueuePairType::XRC_SEND,
            ),
            ("shared receive queue", srq == self.srq_ptr()),
        ] {
            if !fits {
                return wrong(object);
            }
        }
        Ok(())
    }
}
