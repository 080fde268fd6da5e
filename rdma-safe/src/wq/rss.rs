//! Receive-side scaling (RSS): queue pairs that distribute received packets over work queues.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::device::{RxHashFields, RxHashFunctions};
use crate::errno::{check, check_ptr};
use crate::error::Verb;
use crate::id::QpId;
use crate::object::{Object, Parents};
use crate::qp::QueuePairAttributes;
use crate::wq::IndirectionTable;
use crate::{Context, Error, ProtectionDomain, QueuePairType, Result};

/// Describes a queue pair with receive-side scaling: `ibv_create_qp_ex(3)` with an indirection table.
///
/// Made by [`ProtectionDomain::rss_queue_pair`].
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

/// A queue pair with receive-side scaling: a hash of each packet selects a work queue of its indirection table.
///
/// It has no queues. [`Flow`](crate::flow::Flow)s decide which packets it receives. It is destroyed when the handle and all
/// flows to it were dropped.
pub struct RssQueuePair {
    shared: Arc<Shared>,
}

/// The part of the queue pair that flows to it share.
pub(crate) struct Shared {
    /// Moved out when the queue pair is destroyed.
    object: Object<(ProtectionDomain, IndirectionTable)>,
    id: QpId,
    qp_type: QueuePairType,
}

impl ProtectionDomain {
    /// Starts describing a queue pair that distributes packets over the work queues of `table`.
    ///
    /// The hash of the packet's `fields` with `key` selects the entry. For the Toeplitz hash, devices require a key of
    /// 40 bytes. Without fields, all packets go to the first entry.
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
    /// Type of the queue pair; [`QueuePairType::RAW_PACKET`] unless set.
    pub fn qp_type(mut self, qp_type: QueuePairType) -> Self {
        self.qp_type = qp_type;
        self
    }

    /// Hash function; [`RxHashFunctions::TOEPLITZ`] unless set.
    pub fn function(mut self, function: RxHashFunctions) -> Self {
        self.function = function;
        self
    }

    /// Creates the queue pair.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has no [`ReceiveSideScaling`](crate::device::ReceiveSideScaling);
    /// [`Error::ForeignContext`] if the table belongs to another context; [`Error::WrongType`]; [`Error::RxHash`] for a
    /// hash that the device does not support, a key longer than 255 bytes, or another failure of the provider.
    #[doc(alias = "ibv_create_qp_ex")]
    pub fn build(self) -> Result<RssQueuePair> {
        let context = self.pd.context();
        let unsupported = || context.unsupported("receive-side scaling");
        let caps = context.attributes().receive_side_scaling().ok_or_else(unsupported)?;
        context.require_same(self.table.context(), "indirection table")?;
        if !caps.qp_types.contains(self.qp_type) {
            let advice = "see ReceiveSideScaling::qp_types";
            return Err(Error::WrongType { operation: "receive-side scaling", qp_type: self.qp_type, advice });
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
        // SAFETY: the context, the domain and the table are valid; `attr` and the key, whose length it has, are valid
        // during the call. A queue pair with a table has no completion queues, so none are set.
        let raw =
            check_ptr(|| unsafe { ibv_create_qp_ex(context.as_raw(), &mut attr) }).map_err(|errno| {
                match errno.is_unsupported() {
                    true => unsupported(),
                    false => error(errno),
                }
            })?;
        // SAFETY: the queue pair was just created from this domain and table, and nothing else uses it. Each flow to the
        // queue pair holds an `Arc` of the queue pair.
        let object = unsafe { Object::new(raw, (self.pd.clone(), self.table.clone())) };
        Ok(RssQueuePair { shared: Arc::new(Shared { object, id, qp_type: self.qp_type }) })
    }
}

impl RssQueuePair {
    /// Adopts a queue pair that other code has created. It is destroyed when it and all flows to it were dropped.
    ///
    /// # Safety
    /// `raw` must be a valid queue pair in `pd` with `table`, and without multicast groups, flows or completion
    /// counters. Nobody else may modify or destroy it, or read its events, afterwards.
    #[must_use]
    pub unsafe fn from_raw(pd: &ProtectionDomain, table: &IndirectionTable, raw: NonNull<ibv_qp>) -> Self {
        let id = QpId::next();
        // SAFETY: the caller's contract: the queue pair is valid, and nobody reads the field meanwhile.
        let qp_type = unsafe {
            (*raw.as_ptr()).qp_context = id.to_context();
            (*raw.as_ptr()).qp_type
        };
        // SAFETY: the caller's contract. Each flow to the queue pair holds an `Arc` of the queue pair.
        let object = unsafe { Object::new(raw, (pd.clone(), table.clone())) };
        RssQueuePair { shared: Arc::new(Shared { object, id, qp_type: QueuePairType(qp_type.0) }) }
    }

    /// Identifier in asynchronous events. No other queue pair of the process ever has the same.
    #[must_use]
    pub fn id(&self) -> QpId {
        self.shared.id
    }

    /// Number of the queue pair; 0 if the device does not number queue pairs with a table.
    #[must_use]
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is valid, and the field is set at creation.
        unsafe { (*self.as_raw()).qp_num }
    }

    /// Type of the queue pair.
    #[must_use]
    pub fn qp_type(&self) -> QueuePairType {
        self.shared.qp_type
    }

    /// Sets attributes: `ibv_modify_qp(3)`.
    ///
    /// On some devices such a queue pair is ready when created and cannot be modified. On others it goes through INIT,
    /// RTR and RTS.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::Verb`].
    #[doc(alias = "ibv_modify_qp")]
    pub fn modify(&mut self, attributes: &QueuePairAttributes) -> Result<()> {
        let (mut raw, mask) = (attributes.raw, attributes.mask);
        let context = self.context();
        // SAFETY: the queue pair is valid and borrowed mutably. The attributes match the mask and are valid during the
        // call.
        check(unsafe { (context.verbs().ibv_modify_qp)(self.as_raw(), &mut raw, mask.bits() as std::ffi::c_int) })
            .map_err(|errno| {
                context.feature_error(Verb::ModifyQp, "changing queue pairs with an indirection table", errno)
            })
    }

    /// The protection domain that the queue pair belongs to.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.shared.object.0
    }

    /// The context that the queue pair belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.pd().context()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The C object, valid while this queue pair or a flow to it exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_qp {
        self.shared.object.as_raw()
    }

    /// Destroys the queue pair: `ibv_destroy_qp(3)`. Dropping does the same, but ignores errors.
    ///
    /// # Errors
    /// [`Error::Verb`] if the provider fails; the object and everything it depends on are then leaked. [`Error::InUse`]
    /// if there are [`Flow`](crate::flow::Flow)s to it: it is destroyed with the last of them.
    #[doc(alias = "ibv_destroy_qp")]
    pub fn destroy(self) -> Result<()> {
        match Arc::into_inner(self.shared) {
            Some(shared) => shared.object.destroy().map(drop),
            None => Err(Error::InUse { object: "queue pair", users: "flows" }),
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

impl Parents for (ProtectionDomain, IndirectionTable) {
    type Raw = ibv_qp;

    const VERB: Verb = Verb::DestroyQp;

    fn context(&self) -> &Context {
        self.0.context()
    }

    /// The queue pair has no completion queue, so no lock of one is needed.
    unsafe fn destroy(&mut self, raw: *mut ibv_qp) -> std::ffi::c_int {
        // SAFETY: the caller's contract.
        unsafe { (self.context().verbs().ibv_destroy_qp)(raw) }
    }
}
