//! XRC targets: the receiving end of XRC connections.

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32};

use rdma_sys::*;

use super::{
    ConnectOptions, Core, Home, InitOptions, Local, Parents, QueuePairAddress, QueuePairAttributes, QueuePairCapacity,
    QueuePairState, QueuePairType,
};
use crate::errno::check_ptr;
use crate::error::Verb;
use crate::id::QpId;
use crate::object::Object;
use crate::xrc::XrcDomain;
use crate::{Context, Error, Result};

const NO_CAPACITY: QueuePairCapacity =
    QueuePairCapacity { max_send_wr: 0, max_recv_wr: 0, max_send_sge: 0, max_recv_sge: 0, max_inline_data: 0 };

/// The target of an XRC connection: a queue pair of type XRC_RECV. Made by [`XrcDomain::create_target`].
///
/// It has no queues. Its peer, a queue pair of type [`XRC_SEND`](QueuePairType::XRC_SEND), names a shared receive queue
/// of the domain in each message, see [`SendBatch::to_srq`](crate::SendBatch::to_srq). The message takes a receive from
/// that queue and completes there. So one connection reaches all shared receive queues of the domain, in any process.
///
/// It is destroyed with its last handle, across all processes that have opened it.
pub struct XrcTarget {
    core: Core,
    /// Set by [`XrcTarget::init`].
    local: Option<Local>,
}

impl XrcDomain {
    /// Creates an XRC target in this domain, in state RESET: `ibv_create_qp_ex(3)` with type XRC_RECV.
    ///
    /// # Errors
    /// [`Error::CreateQueuePair`]; [`Error::Unsupported`].
    #[doc(alias = "ibv_create_qp_ex")]
    pub fn create_target(&self) -> Result<XrcTarget> {
        let (id, context) = (QpId::next(), self.context());
        let mut attr = ibv_qp_init_attr_ex::zeroed();
        attr.qp_context = id.to_context();
        attr.qp_type = ibv_qp_type(QueuePairType::XRC_RECV.0);
        attr.xrcd = self.as_raw();
        attr.comp_mask = IBV_QP_INIT_ATTR_XRCD.0;
        // SAFETY: the context and the domain are valid, and `attr` is valid during the call.
        let raw = check_ptr(|| unsafe { ibv_create_qp_ex(context.as_raw(), &mut attr) }).map_err(|errno| {
            if errno.is_unsupported() {
                return context.unsupported("targets of extended reliable connections (XRC)");
            }
            let limits = format!("{} queue pairs", context.attributes().max_qp());
            Error::CreateQueuePair { qp_type: QueuePairType::XRC_RECV, requested: NO_CAPACITY, limits, errno }
        })?;
        // SAFETY: it was just created, and nobody else uses it.
        Ok(unsafe { XrcTarget::new(self, raw, id, QueuePairState::RESET) })
    }

    /// Opens an existing target of this domain by its number: `ibv_open_qp(3)`.
    ///
    /// Another process may have created it. It exists as long as one of its handles.
    ///
    /// # Errors
    /// [`Error::Verb`] with `EINVAL` or `ENOENT` if the domain has no such target, or if its state cannot be queried;
    /// [`Error::Unsupported`].
    #[doc(alias = "ibv_open_qp")]
    pub fn open_target(&self, number: u32) -> Result<XrcTarget> {
        let (id, context) = (QpId::next(), self.context());
        let mut attr = ibv_qp_open_attr {
            comp_mask: (IBV_QP_OPEN_ATTR_NUM
                | IBV_QP_OPEN_ATTR_XRCD
                | IBV_QP_OPEN_ATTR_CONTEXT
                | IBV_QP_OPEN_ATTR_TYPE)
                .0,
            qp_num: number,
            xrcd: self.as_raw(),
            qp_context: id.to_context(),
            qp_type: ibv_qp_type(QueuePairType::XRC_RECV.0),
        };
        // SAFETY: the context and the domain are valid, and `attr` is valid during the call.
        let raw = check_ptr(|| unsafe { ibv_open_qp(context.as_raw(), &mut attr) })
            .map_err(|errno| context.feature_error(Verb::OpenQp, "opening existing queue pairs", errno))?;
        // SAFETY: it was just opened, and nobody else uses this handle.
        let target = unsafe { XrcTarget::new(self, raw, id, QueuePairState::UNKNOWN) };
        let _ = target.query()?;
        Ok(target)
    }
}

impl XrcTarget {
    /// # Safety
    /// `raw` must be a queue pair of type XRC_RECV in `domain`, with `id` as its context, that nobody else destroys.
    unsafe fn new(domain: &XrcDomain, raw: NonNull<ibv_qp>, id: QpId, state: QueuePairState) -> Self {
        // SAFETY: the queue pair is valid, and the field is set at creation.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        let parents = Parents::new(Home::Xrc(domain.clone()), [None, None], None);
        let core = Core {
            // SAFETY: the caller's contract; nothing is created from it.
            object: unsafe { Object::new(raw, parents) },
            number,
            id,
            qp_type: QueuePairType::XRC_RECV,
            capacity: NO_CAPACITY,
            state: AtomicU32::new(state.0),
            port: AtomicU8::new(0),
        };
        XrcTarget { core, local: None }
    }

    /// Adopts an XRC target that other code has created, and queries its state. It is destroyed on drop.
    ///
    /// # Errors
    /// Those of [`XrcTarget::query`]. The caller then keeps the queue pair, unchanged.
    ///
    /// # Safety
    /// `raw` must be a queue pair of type XRC_RECV in `domain`. Nobody else may destroy it or use it afterwards. Its
    /// `qp_context` is overwritten with the value of [`XrcTarget::id`]; nobody may read an event of it before, for
    /// example with [`AsyncEvents`](crate::AsyncEvents).
    pub unsafe fn from_raw(domain: &XrcDomain, raw: NonNull<ibv_qp>) -> Result<Self> {
        let id = QpId::next();
        // SAFETY: the caller's contract.
        let target = unsafe { XrcTarget::new(domain, raw, id, QueuePairState::UNKNOWN) };
        if let Err(error) = target.query() {
            let _ = target.core.object.disown();
            return Err(error);
        }
        // SAFETY: the queue pair is valid, and the caller guarantees that nobody reads the field meanwhile.
        unsafe { (*raw.as_ptr()).qp_context = id.to_context() };
        Ok(target)
    }

    /// Number of the queue pair, 24 bits. A peer needs it to connect, and another process to open the target.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.core.number
    }

    /// Identifier in asynchronous events of this process. No other queue pair of the process ever has the same.
    #[must_use]
    pub fn id(&self) -> QpId {
        self.core.id
    }

    /// State as last set or queried here.
    #[must_use]
    pub fn state(&self) -> QueuePairState {
        self.core.state()
    }

    /// Brings the target from RESET to INIT, and returns the address that the peer needs to connect.
    ///
    /// # Errors
    /// Those of [`QueuePair::init`](crate::QueuePair::init).
    pub fn init(&mut self, options: &InitOptions) -> Result<QueuePairAddress> {
        let mut local = Local::resolve(self.context(), options)?;
        local.address.qp_num = self.number();
        self.modify(&options.to_init())?;
        self.local = Some(local);
        Ok(local.address)
    }

    /// Connects to the [`XRC_SEND`](QueuePairType::XRC_SEND) queue pair at `remote`, which must connect to this target.
    ///
    /// Ignores the `options` about retries and about reads as requester.
    ///
    /// # Errors
    /// Those of [`QueuePair::connect`](crate::QueuePair::connect).
    pub fn connect(&mut self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
        let Some(local) = self.local else { return Err(Error::NotInitialised) };
        let [rtr, rts] = local.to_peer(self.context(), QueuePairType::XRC_RECV, remote, options);
        self.modify(&rtr)?;
        self.modify(&rts)
    }

    /// Sets attributes: `ibv_modify_qp(3)`.
    ///
    /// # Errors
    /// Those of [`QueuePair::modify`](crate::QueuePair::modify).
    #[doc(alias = "ibv_modify_qp")]
    pub fn modify(&mut self, attributes: &QueuePairAttributes) -> Result<()> {
        self.core.modify(attributes)
    }

    /// Reads attributes from the device: `ibv_query_qp(3)`.
    ///
    /// # Errors
    /// [`Error::Verb`].
    #[doc(alias = "ibv_query_qp")]
    pub fn query(&self) -> Result<QueuePairAttributes> {
        self.core.query(|| ())
    }

    /// The context that the target belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.core.context()
    }

    /// The C object, valid while this target exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_qp {
        self.core.as_raw()
    }

    /// Destroys the target, or only closes this handle if there are others: `ibv_destroy_qp(3)`. Dropping does the
    /// same, but ignores errors.
    ///
    /// # Errors
    /// [`Error::Verb`] if the provider fails; the object and everything it depends on are then leaked.
    #[doc(alias = "ibv_destroy_qp")]
    pub fn destroy(self) -> Result<()> {
        self.core.object.destroy().map(drop)
    }
}

impl fmt::Debug for XrcTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("XrcTarget")
            .field("number", &format_args!("{:#08x}", self.number()))
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
