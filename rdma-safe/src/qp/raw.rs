//! Queue pairs that other code has created, and those that are given up.

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use super::builder::Created;
use super::{QueuePair, QueuePairBuilder, QueuePairCapacity, QueuePairType};
use crate::id::QpId;
use crate::{Error, Quirks, Result, SendOps};

impl QueuePairBuilder<'_> {
    /// Adopts a queue pair that other code has created as this builder says, for instance by calls of the vendor's
    /// (`mlx5dv_create_qp`, `efadv_create_qp_ex`). It is destroyed on drop.
    ///
    /// It is posted to by `ibv_wr_*` with the [operations](QueuePairBuilder::operations) of the builder, those of its type unless
    /// set, of which it has those whose functions are there; or, with [`QueuePairBuilder::classic`] or where none is, by
    /// `ibv_post_send(3)`. Capacities and state are what `ibv_query_qp(3)` says. Its `qp_context` is set anew, to what
    /// [`QueuePair::id`] returns.
    ///
    /// ```no_run
    /// # use std::ptr::NonNull;
    /// # use rdma_safe::*;
    /// # struct Cq;
    /// # unsafe fn mlx5dv_create_cq(_: *mut sys::ibv_context, _: *mut Cq) -> *mut sys::ibv_cq_ex { unimplemented!() }
    /// # unsafe fn mlx5dv_create_qp(_: *mut sys::ibv_context, _: *mut Cq) -> *mut sys::ibv_qp { unimplemented!() }
    /// # fn example(context: &Context, pd: &ProtectionDomain, attributes: *mut Cq)
    /// #     -> std::result::Result<(), Box<dyn std::error::Error>> {
    /// // SAFETY: the attributes have IBV_WC_STANDARD_FLAGS, and nobody else has the queue.
    /// let cq = unsafe {
    ///     let raw = NonNull::new(mlx5dv_create_cq(context.as_raw(), attributes)).ok_or("mlx5dv_create_cq")?;
    ///     context.completion_queue(64).fields(WcFields::STANDARD).from_raw(raw.cast())?
    /// };
    /// // SAFETY: the attributes name `pd` and `cq`, IBV_QPT_RC and these operations, and nobody else has the queue pair.
    /// let mut qp = unsafe {
    ///     let raw = NonNull::new(mlx5dv_create_qp(context.as_raw(), attributes)).ok_or("mlx5dv_create_qp")?;
    ///     pd.queue_pair(&cq, &cq).operations(SendOps::SEND | SendOps::RDMA_WRITE).from_raw(raw)?
    /// };
    /// let address = qp.init(&InitOptions::default())?; // and connect it, as any other
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Bring it on by [`QueuePair::modify`], or, in RESET, by [`QueuePair::init`] and [`QueuePair::connect`].
    ///
    /// # Errors
    /// [`Error::WrongType`] for types that cannot be built; [`Error::WrongParent`] when it is of another type, domain, completion
    /// or shared receive queue than the builder; [`Error::UnsupportedOperations`] for operations that its type has not or that it
    /// lacks; [`Error::Verb`] when it cannot be queried. It then is as before, and the caller's.
    ///
    /// # Safety
    /// `raw` must be a queue pair that is this one's alone to destroy, to modify and to post to, and no batch of it be open. Unless
    /// it is classic, it must have been created with all operations of the builder (`send_ops_flags`): of a structure that is
    /// shorter than this crate's, other fields are not there to be looked at. Memory of work that is in flight on it must stay
    /// until it has completed, or the queue pair is gone. Objects of other code that refer to it, such as flows, must be gone
    /// before it. Nobody may read an event of it, such as [`AsyncEvents`](crate::AsyncEvents) takes, before this returns.
    pub unsafe fn from_raw(self, raw: NonNull<ibv_qp>) -> Result<QueuePair> {
        let all = self.all_operations()?;
        let asked = self.ops;
        if let Some(ops) = asked.filter(|ops| !all.contains(*ops)) {
            return Err(Error::UnsupportedOperations { ops: ops - all });
        }
        // SAFETY: the queue pair is valid, says the caller.
        unsafe { self.check_parents(raw.as_ptr())? }
        let pd = self.pd;
        let verbs = pd.context().verbs();
        let (mut attr, mut init) = (ibv_qp_attr::zeroed(), ibv_qp_init_attr::zeroed());
        let mask = (IBV_QP_STATE | IBV_QP_CAP | IBV_QP_PORT).0 as std::ffi::c_int;
        // SAFETY: as above, and both are valid out pointers.
        crate::errno::check(unsafe { (verbs.ibv_query_qp)(raw.as_ptr(), &mut attr, mask, &mut init) })
            .map_err(|errno| pd.context().verb_error("ibv_query_qp", errno))?;
        let mut capacity = QueuePairCapacity::from_raw(&init.cap);
        // What every provider has unless asked otherwise: no more is said to be there than the structure of any release has.
        let ops = asked.unwrap_or(all & (SendOps::RC | SendOps::UC | SendOps::UD));
        let interface = match self.is_extended() {
            // SAFETY: as above. For one that was created without operations it returns NULL.
            true => NonNull::new(unsafe { (verbs.ibv_qp_to_qp_ex)(raw.as_ptr()) }),
            false => None,
        };
        // SAFETY: the interface is part of the queue pair, which was created with these, says the caller.
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
        // SAFETY: as above, and nobody reads the field meanwhile, says the caller.
        unsafe { (*raw.as_ptr()).qp_context = id.to_context() };
        let mut qp = self.finish(Created { raw, capacity, id }, enabled, interface);
        qp.shared.set_port(attr.port_num);
        qp.shared.set_state(super::QueuePairState(attr.qp_state.0));
        qp.tell_state();
        if attr.port_num != 0 {
            qp.tell_port(attr.port_num);
        }
        Ok(qp)
    }
}

impl QueuePair {
    /// Gives it up: it is the caller's to destroy, and does not keep its domain and queues any more. A batch that was forgotten is
    /// aborted first. It stays in its multicast groups, and has to leave them before it can be destroyed.
    ///
    /// # Errors
    /// [`Error::InUse`] while there are [`Flow`](crate::Flow)s to it or memory windows bound to it: it is destroyed when the last
    /// of them is gone.
    pub fn into_raw(mut self) -> Result<NonNull<ibv_qp>> {
        self.send.abort();
        let QueuePair { send, recv, shared, .. } = self;
        drop((send, recv));
        match Arc::into_inner(shared) {
            Some(shared) => Ok(shared.object.disown()),
            None => Err(Error::InUse { object: "queue pair", by: "flows or memory windows" }),
        }
    }

    /// The extended part of the C object, valid while this queue pair is; `None` where work is posted by `ibv_post_send(3)`.
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
        // SAFETY: the caller's contract; these fields do not change. No reference to the whole queue pair is made: it has a mutex,
        // which other threads may lock.
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
