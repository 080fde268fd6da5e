//! Receive-side scaling: queue pairs that spread what they receive over work queues.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::{check, check_ptr};
use crate::id::QpId;
use crate::object::{Object, Parents};
use crate::{
    Context, Error, IndirectionTable, ProtectionDomain, QueuePairAttributes, QueuePairType, Result, RxHashFields,
    RxHashFunctions,
};

/// Describes a queue pair that spreads packets over work queues: `ibv_create_qp_ex(3)` with an indirection table. Made by
/// [`ProtectionDomain::rss_queue_pair`].
#[derive(Clone, Debug)]
#[must_use = "a builder creates nothing until `build`"]
pub struct RssQueuePairBuilder<'a> {
    pd: &'a ProtectionDomain,
    table: &'a IndirectionTable,
    qp_type: QueuePairType,
    function: RxHashFunctions,
    key: &'a [u8],
    fields: RxHashFields,
}

/// A queue pair without queues of its own: the hash of each packet that comes to it chooses a work queue of its table.
///
/// What comes to it, [`Flow`](crate::Flow)s say. It is destroyed when the handle and the flows to it are gone.
pub struct RssQueuePair {
    shared: Arc<Shared>,
}

/// What flows hold of the queue pair that they lead to.
pub(crate) struct Shared {
    /// Taken by the destruction.
    object: Object<(ProtectionDomain, IndirectionTable)>,
    id: QpId,
    qp_type: QueuePairType,
}

impl ProtectionDomain {
    /// Starts describing a queue pair that spreads packets over the work queues of `table`: the hash of `fields` of the packet,
    /// with `key`, chooses the entry. Devices want a key of 40 bytes for the Toeplitz hash. Without fields, all go to the first
    /// entry.
    pub fn rss_queue_pair<'a>(
        &'a self,
        table: &'a IndirectionTable,
        key: &'a [u8],
        fields: RxHashFields,
    ) -> RssQueuePairBuilder<'a> {
        let (qp_type, function) = (QueuePairType::RAW_PACKET, RxHashFunctions::TOEPLITZ);
        RssQueuePairBuilder { pd: self, table, qp_type, function, key, fields }
    }
}

impl RssQueuePairBuilder<'_> {
    /// Type: [`QueuePairType::RAW_PACKET`] unless set.
    pub fn qp_type(mut self, qp_type: QueuePairType) -> Self {
        self.qp_type = qp_type;
        self
    }

    /// Hash function: [`RxHashFunctions::TOEPLITZ`] unless set.
    pub fn function(mut self, function: RxHashFunctions) -> Self {
        self.function = function;
        self
    }

    /// Creates the queue pair.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where there is no [`ReceiveSideScaling`](crate::ReceiveSideScaling); [`Error::ForeignContext`] when
    /// the table belongs to another context; [`Error::WrongType`]; [`Error::RxHash`] for a hash that the device has not, or a key
    /// longer than 255 bytes, and when the provider refuses.
    #[doc(alias = "ibv_create_qp_ex")]
    pub fn build(self) -> Result<RssQueuePair> {
        let context = self.pd.context();
        let unsupported = || context.unsupported("receive-side scaling");
        let caps = context.attributes().receive_side_scaling().ok_or_else(unsupported)?;
        context.require_same(self.table.context(), "indirection table")?;
        if !caps.qp_types.contains(self.qp_type) {
            let instead = "see ReceiveSideScaling::qp_types";
            return Err(Error::WrongType { what: "receive-side scaling", qp_type: self.qp_type, instead });
        }
        let error = |errno| Error::RxHash {
            function: self.function,
            fields: self.fields,
            key: self.key.len(),
            caps: Box::new(caps),
            errno,
        };
        let has = caps.hash_functions.contains(self.function) && caps.hash_fields.contains(self.fields);
        let Ok(rx_hash_key_len) = u8::try_from(self.key.len()) else {
            return Err(error(crate::Errno(libc::EINVAL)));
        };
        if !has {
            return Err(error(crate::Errno(libc::EOPNOTSUPP)));
        }
        let (id, mut key) = (QpId::next(), self.key.to_vec());
        let mut attr = ibv_qp_init_attr_ex::zeroed();
        attr.qp_context = id.to_context();
        attr.qp_type = ibv_qp_type(self.qp_type.0);
        attr.pd = self.pd.as_raw();
        attr.rwq_ind_tbl = self.table.as_raw();
        attr.rx_hash_conf = ibv_rx_hash_conf {
            rx_hash_function: self.function.bits(),
            rx_hash_key_len,
            rx_hash_key: key.as_mut_ptr(),
            rx_hash_fields_mask: self.fields.bits(),
        };
        attr.comp_mask = (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH).0;
        // SAFETY: the context, the domain and the table are valid; `attr` and the key, whose length it has, are for the duration of
        // the call. A queue pair with a table has no queues of its own, so none are named.
        let raw =
            check_ptr(|| unsafe { ibv_create_qp_ex(context.as_raw(), &mut attr) }).map_err(|errno| {
                match errno.is_unsupported() {
                    true => unsupported(),
                    false => error(errno),
                }
            })?;
        // SAFETY: just created from these, and given to nobody else; a flow to it holds an `Arc` of it.
        let object = unsafe { Object::new(raw, (self.pd.clone(), self.table.clone())) };
        Ok(RssQueuePair { shared: Arc::new(Shared { object, id, qp_type: self.qp_type }) })
    }
}

impl RssQueuePair {
    /// Adopts a queue pair that other code has created. It is destroyed when it and the flows to it are gone.
    ///
    /// # Safety
    /// `raw` must be a queue pair that exists, made in `pd` with `table`, and with no multicast group, flow or completion counter.
    /// Nobody else may change or destroy it, or read its events, from here on.
    #[must_use]
    pub unsafe fn from_raw(pd: &ProtectionDomain, table: &IndirectionTable, raw: NonNull<ibv_qp>) -> Self {
        let id = QpId::next();
        // SAFETY: the caller's contract, by which nobody reads the field meanwhile.
        let qp_type = unsafe {
            (*raw.as_ptr()).qp_context = id.to_context();
            (*raw.as_ptr()).qp_type
        };
        // SAFETY: as above; a flow to it holds an `Arc` of it.
        let object = unsafe { Object::new(raw, (pd.clone(), table.clone())) };
        RssQueuePair { shared: Arc::new(Shared { object, id, qp_type: QueuePairType(qp_type.0) }) }
    }

    /// Its name in asynchronous events, which no other queue pair of the process will have.
    #[must_use]
    pub fn id(&self) -> QpId {
        self.shared.id
    }

    /// Number of the queue pair; 0 where the device gives those with a table none.
    #[must_use]
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is valid, and the field is set at creation.
        unsafe { (*self.as_raw()).qp_num }
    }

    /// Type.
    #[must_use]
    pub fn qp_type(&self) -> QueuePairType {
        self.shared.qp_type
    }

    /// Sets attributes: `ibv_modify_qp(3)`. On some devices such a queue pair is ready when it was made and cannot be changed, on
    /// others it goes through INIT, RTR and RTS.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::Verb`].
    #[doc(alias = "ibv_modify_qp")]
    pub fn modify(&mut self, attributes: &QueuePairAttributes) -> Result<()> {
        let (mut raw, mask) = (attributes.raw, attributes.mask);
        let context = self.context();
        // SAFETY: the queue pair is valid and borrowed mutably, and the attributes, for the duration of the call, are those of the
        // mask.
        check(unsafe { (context.verbs().ibv_modify_qp)(self.as_raw(), &mut raw, mask.bits() as std::ffi::c_int) })
            .map_err(|errno| {
                context.feature_error("ibv_modify_qp", "changing queue pairs with an indirection table", errno)
            })
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

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The C object, valid while this queue pair or a flow to it is.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_qp {
        self.shared.as_raw()
    }

    /// Destroys it: `ibv_destroy_qp(3)`. Dropping does the same and tells nobody.
    ///
    /// # Errors
    /// [`Error::Verb`] with the provider's answer; the object, and all it depends on, then stays until the process ends.
    /// [`Error::InUse`] while there are [`Flow`](crate::Flow)s to it: it is destroyed when the last of them is gone.
    #[doc(alias = "ibv_destroy_qp")]
    pub fn destroy(self) -> Result<()> {
        match Arc::into_inner(self.shared) {
            Some(shared) => shared.object.destroy().map(drop),
            None => Err(Error::InUse { object: "queue pair", by: "flows" }),
        }
    }
}

impl fmt::Debug for RssQueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RssQueuePair")
            .field("device", &self.context().device_name())
            .field("type", &self.qp_type())
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn pd(&self) -> &ProtectionDomain {
        &self.object.0
    }

    pub(crate) fn as_raw(&self) -> *mut ibv_qp {
        self.object.as_raw()
    }

    pub(crate) fn qp_type(&self) -> QueuePairType {
        self.qp_type
    }
}

impl Parents for (ProtectionDomain, IndirectionTable) {
    type Raw = ibv_qp;

    const VERB: &'static str = "ibv_destroy_qp";

    fn context(&self) -> &Context {
        self.0.context()
    }

    /// It has no completion queue.
    unsafe fn destroy(&self, raw: *mut ibv_qp) -> std::ffi::c_int {
        // SAFETY: the caller's contract.
        unsafe { (self.context().verbs().ibv_destroy_qp)(raw) }
    }
}
