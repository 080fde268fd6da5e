//! Targets of XRC connections.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU32};

use rdma_sys::*;

use super::{
    ConnectOptions, Groups, Home, InitOptions, Local, Parents, QueuePairAddress, QueuePairAttributes,
    QueuePairCapacity, QueuePairState, QueuePairType, Shared,
};
use crate::errno::check_ptr;
use crate::id::QpId;
use crate::object::Object;
use crate::{Context, Error, Result, XrcDomain};

const NO_CAPACITY: QueuePairCapacity =
    QueuePairCapacity { max_send_wr: 0, max_recv_wr: 0, max_send_sge: 0, max_recv_sge: 0, max_inline_data: 0 };

/// The target of an XRC connection: a queue pair of type XRC_RECV. Made by [`XrcDomain::create_target`].
///
/// It has no queues. What its peer, a queue pair of type [`XRC_SEND`](QueuePairType::XRC_SEND), sends goes to the shared receive
/// queue of the domain that the message names, see [`SendBatch::to_srq`](crate::SendBatch::to_srq), and completes there. So one
/// connection reaches every queue of the domain, in whichever process it is.
///
/// It is destroyed when the last handle to it is, of all processes that have opened it.
pub struct XrcTarget {
    shared: Shared,
    /// Since [`XrcTarget::init`].
    local: Option<Local>,
}

impl XrcDomain {
    /// Creates the target of a connection in this domain, in the state RESET: `ibv_create_qp_ex(3)` of type XRC_RECV.
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
        // SAFETY: the context and the domain are valid, and `attr` is for the duration of the call.
        let raw = check_ptr(|| unsafe { ibv_create_qp_ex(context.as_raw(), &mut attr) }).map_err(|errno| {
            if errno.is_unsupported() {
                return context.unsupported("targets of extended reliable connections (XRC)");
            }
            let allowed = format!("{} queue pairs", context.attributes().max_qp());
            Error::CreateQueuePair { qp_type: QueuePairType::XRC_RECV, asked: NO_CAPACITY, allowed, errno }
        })?;
        // SAFETY: it was just created, and nobody else has it.
        Ok(unsafe { XrcTarget::new(self, raw, id, QueuePairState::RESET) })
    }

    /// Opens a target of this domain that was created elsewhere, say by another process, by its number: `ibv_open_qp(3)`. It lives
    /// as long as one of its handles.
    ///
    /// # Errors
    /// [`Error::Verb`] with `EINVAL` or `ENOENT` when the domain has no such target, and where its state cannot be queried;
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
        // SAFETY: the context and the domain are valid, and `attr` is for the duration of the call.
        let raw = check_ptr(|| unsafe { ibv_open_qp(context.as_raw(), &mut attr) })
            .map_err(|errno| context.feature_error("ibv_open_qp", "opening queue pairs of others", errno))?;
        // SAFETY: it was just opened, and nobody else has this handle.
        let target = unsafe { XrcTarget::new(self, raw, id, QueuePairState::UNKNOWN) };
        let _ = target.query()?;
        Ok(target)
    }
}

impl XrcTarget {
    /// # Safety
    /// `raw` must be a queue pair of type XRC_RECV in `domain`, with the name `id`, that is this one's to destroy.
    unsafe fn new(domain: &XrcDomain, raw: NonNull<ibv_qp>, id: QpId, state: QueuePairState) -> Self {
        // SAFETY: the queue pair is valid, and the field is set at creation.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        let parents = Parents {
            home: Home::Xrc(domain.clone()),
            cqs: None,
            srq: None,
            groups: Groups::default(),
            kept: Mutex::default(),
        };
        let shared = Shared {
            // SAFETY: the caller's contract; nothing is made from it.
            object: unsafe { Object::new(raw, parents) },
            number,
            id,
            qp_type: QueuePairType::XRC_RECV,
            capacity: NO_CAPACITY,
            state: AtomicU32::new(state.0),
            port: AtomicU8::new(0),
            query: Mutex::new(()),
        };
        XrcTarget { shared, local: None }
    }

    /// Adopts a queue pair that other code has created, and asks its state. It is destroyed on drop.
    ///
    /// # Errors
    /// That of [`XrcTarget::query`]. It then is as before, and the caller's.
    ///
    /// # Safety
    /// `raw` must be a queue pair of type XRC_RECV in `domain`, and nobody else destroy it or use it afterwards: it is destroyed
    /// with what is returned. Its `qp_context` is set anew, to what [`XrcTarget::id`] returns: nobody may read an event of it, such
    /// as [`AsyncEvents`](crate::AsyncEvents) takes, before that.
    pub unsafe fn from_raw(domain: &XrcDomain, raw: NonNull<ibv_qp>) -> Result<Self> {
        let id = QpId::next();
        // SAFETY: the caller's contract.
        let target = unsafe { XrcTarget::new(domain, raw, id, QueuePairState::UNKNOWN) };
        if let Err(error) = target.query() {
            let _ = target.shared.object.disown();
            return Err(error);
        }
        // SAFETY: the queue pair is valid, and nobody reads the field meanwhile, says the caller.
        unsafe { (*raw.as_ptr()).qp_context = id.to_context() };
        Ok(target)
    }

    /// Number of the queue pair, 24 bits: what a peer needs to reach it, and another process to open it.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.shared.number
    }

    /// Its name in asynchronous events of this process, which no other queue pair will have.
    #[must_use]
    pub fn id(&self) -> QpId {
        self.shared.id
    }

    /// State as last set or queried here.
    #[must_use]
    pub fn state(&self) -> QueuePairState {
        self.shared.state()
    }

    /// Brings it from RESET to INIT, and returns what the peer needs to connect.
    ///
    /// # Errors
    /// As [`QueuePair::init`](crate::QueuePair::init).
    pub fn init(&mut self, options: &InitOptions) -> Result<QueuePairAddress> {
        let mut local = Local::resolve(self.context(), options)?;
        local.address.qp_num = self.number();
        self.modify(&options.to_init())?;
        self.local = Some(local);
        Ok(local.address)
    }

    /// Connects to the [`XRC_SEND`](QueuePairType::XRC_SEND) queue pair at `remote`, which has to connect to this. Of `options`,
    /// those about retries and reads of this end's own do not matter.
    ///
    /// # Errors
    /// As [`QueuePair::connect`](crate::QueuePair::connect).
    pub fn connect(&mut self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
        let Some(local) = self.local else { return Err(Error::NotInitialised) };
        let [rtr, rts] = local.to_peer(self.context(), QueuePairType::XRC_RECV, remote, options);
        self.modify(&rtr)?;
        self.modify(&rts)
    }

    /// Sets attributes: `ibv_modify_qp(3)`.
    ///
    /// # Errors
    /// As [`QueuePair::modify`](crate::QueuePair::modify).
    #[doc(alias = "ibv_modify_qp")]
    pub fn modify(&mut self, attributes: &QueuePairAttributes) -> Result<()> {
        self.shared.modify(attributes)
    }

    /// Reads attributes from the device: `ibv_query_qp(3)`.
    ///
    /// # Errors
    /// [`Error::Verb`].
    #[doc(alias = "ibv_query_qp")]
    pub fn query(&self) -> Result<QueuePairAttributes> {
        self.shared.query(|| ())
    }

    /// The device that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.shared.context()
    }

    /// The C object, valid while this is.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_qp {
        self.shared.as_raw()
    }

    /// Destroys it, or closes this handle where there are others: `ibv_destroy_qp(3)`. Dropping does the same and tells nobody.
    ///
    /// # Errors
    /// [`Error::Verb`] with the provider's answer; the object, and all it depends on, then stays until the process ends.
    #[doc(alias = "ibv_destroy_qp")]
    pub fn destroy(self) -> Result<()> {
        self.shared.object.destroy().map(drop)
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
