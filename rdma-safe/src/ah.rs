//! Address handles: where datagrams go.

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;

use rdma_sys::*;

use crate::endpoint::Arrival;
use crate::errno::{check_neg, check_ptr};
use crate::object::{Object, Parents};
use crate::{
    AddressError, AddressVector, Context, Errno, Error, Grh, LinkLayer, ProtectionDomain, Result, WcFields, WcFlags,
    WorkCompletion,
};

/// An address handle, the way to a port for datagrams: `struct ibv_ah`. Destroyed on drop.
///
/// Made by [`ProtectionDomain::address_handle`]. One serves any number of queue pairs of its domain, and, with their numbers and
/// keys ([`UdTarget`](crate::UdTarget)), all queue pairs behind the port that it leads to. Work in flight does not keep it: see
/// [`SendBatch`](crate::SendBatch).
pub struct AddressHandle {
    // Providers only read it when work is posted.
    object: Object<MadeFrom>,
}

struct MadeFrom(ProtectionDomain);

impl Parents for MadeFrom {
    type Raw = ibv_ah;

    const VERB: &'static str = "ibv_destroy_ah";

    fn context(&self) -> &Context {
        self.0.context()
    }

    unsafe fn destroy(&self, raw: *mut ibv_ah) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { (self.context().verbs().ibv_destroy_ah)(raw) }
    }
}

impl ProtectionDomain {
    /// Makes a handle of `address`: `ibv_create_ah(3)`.
    ///
    /// # Errors
    /// [`Error::NoSuchPort`]; [`Error::Address`] says what does not fit: a service level, a port of RoCE without a global route, a
    /// GID that is not there, or a peer that cannot be resolved.
    #[doc(alias = "ibv_create_ah")]
    pub fn address_handle(&self, address: &AddressVector) -> Result<AddressHandle> {
        let context = self.context();
        context.query_port(address.port)?;
        if address.sl > 15 {
            return Err(Box::new(AddressError::ServiceLevel { sl: address.sl }).into());
        }
        address.check_route(context).map_err(Box::new)?;
        let mut raw = address.to_raw();
        // SAFETY: the domain is valid, and `raw` is for the duration of the call.
        match check_ptr(|| unsafe { (context.verbs().ibv_create_ah)(self.as_raw(), &mut raw) }) {
            // SAFETY: just created, and given to nobody else.
            Ok(raw) => Ok(unsafe { AddressHandle::from_raw(self, raw) }),
            Err(errno) => {
                let route = address.diagnose_route(context, errno);
                // With EINVAL, everything else fits.
                let known =
                    route.filter(|(_, is_certain)| *is_certain || errno.0 == libc::EINVAL).map(|(error, _)| error);
                let refused = || AddressError::Refused { address: Box::new(*address), errno };
                Err(Box::new(known.unwrap_or_else(refused)).into())
            }
        }
    }

    /// Makes a handle to answer the sender of a datagram that arrived at `port`: `ibv_create_ah_from_wc(3)`. The other half of the
    /// way back is the number of its queue pair, [`WorkCompletion::src_qp`].
    ///
    /// # Errors
    /// Those of [`Context::sender_address`] and [`ProtectionDomain::address_handle`].
    #[doc(alias = "ibv_create_ah_from_wc")]
    pub fn address_handle_to_sender(
        &self,
        port: u8,
        completion: &WorkCompletion<'_>,
        grh: Option<&Grh>,
    ) -> Result<AddressHandle> {
        self.address_handle(&self.context().sender_address(port, completion, grh)?)
    }
}

impl Context {
    /// The way back to the sender of a datagram that arrived at `port`: `ibv_init_ah_from_wc(3)`. `grh` is needed where the
    /// completion says that there is one ([`WcFlags::GRH`]), which on RoCE is always.
    ///
    /// # Errors
    /// [`Error::Work`] when the receive failed; [`Error::NoGrh`]; [`Error::MissingFields`] when the completion queue was created
    /// without what InfiniBand needs to know; [`Error::NoSuchPort`]; [`Error::Verb`], among others when the datagram was sent to a
    /// GID that the port does not have any more.
    #[doc(alias = "ibv_init_ah_from_wc")]
    pub fn sender_address(
        &self,
        port: u8,
        completion: &WorkCompletion<'_>,
        grh: Option<&Grh>,
    ) -> Result<AddressVector> {
        completion.ok()?;
        let fields = WcFields::SLID | WcFields::SL | WcFields::DLID_PATH_BITS;
        let arrival = Arrival::of(completion).ok_or(Error::MissingFields { fields })?;
        self.address_of_arrival(port, &arrival, grh)
    }

    /// As [`Context::sender_address`].
    pub(crate) fn address_of_arrival(&self, port: u8, arrival: &Arrival, grh: Option<&Grh>) -> Result<AddressVector> {
        let Arrival { slid, sl, dlid_path_bits, flags } = *arrival;
        if flags.contains(WcFlags::GRH) && grh.is_none() {
            return Err(Error::NoGrh);
        }
        // On Ethernet, drivers report the packet type in `sl`. `ibv_init_ah_from_wc` would use it as a service level.
        let sl = if self.query_port(port)?.link_layer() == LinkLayer::ETHERNET { 0 } else { sl };
        let mut wc = ibv_wc {
            // LIDs have 16 bits, as the field of `ibv_wc`.
            slid: slid as u16,
            sl,
            dlid_path_bits,
            wc_flags: flags.bits(),
            ..ibv_wc::zeroed()
        };
        let mut grh = grh.map_or(ibv_grh::zeroed(), |grh| grh.to_raw());
        let mut attr = ibv_ah_attr::zeroed();
        let verbs = self.verbs();
        // SAFETY: the context is valid, and the three structures are for the duration of the call.
        let init = || unsafe { (verbs.ibv_init_ah_from_wc)(self.as_raw(), port, &mut wc, &mut grh, &mut attr) };
        match check_neg(init) {
            Ok(0) => Ok(AddressVector::from_raw(&attr)),
            Ok(errno) => Err(self.verb_error("ibv_init_ah_from_wc", Errno(errno))),
            Err(errno) => Err(self.verb_error("ibv_init_ah_from_wc", errno)),
        }
    }
}

impl AddressHandle {
    /// Adopts a handle that other code has created, for instance with the vendor's attributes. It is destroyed on drop.
    ///
    /// # Safety
    /// `raw` must be an address handle of `pd`, and be this one's alone to destroy.
    #[must_use]
    pub unsafe fn from_raw(pd: &ProtectionDomain, raw: NonNull<ibv_ah>) -> AddressHandle {
        // SAFETY: the caller's contract. That no work in flight names it is what those who posted it vouch for.
        AddressHandle { object: unsafe { Object::new(raw, MadeFrom(pd.clone())) } }
    }

    /// Gives it up: it is the caller's to destroy, and does not keep its domain any more.
    #[must_use]
    pub fn into_raw(self) -> NonNull<ibv_ah> {
        self.object.disown()
    }

    /// The domain that it belongs to.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.object.0
    }

    /// The C object, valid while this handle is.
    #[must_use]
    #[inline(always)]
    pub fn as_raw(&self) -> *mut ibv_ah {
        self.object.as_raw()
    }

    #[inline(always)]
    pub(crate) fn raw(&self) -> NonNull<ibv_ah> {
        self.object.raw()
    }

    /// Destroys it: `ibv_destroy_ah(3)`. Dropping does the same and tells nobody.
    ///
    /// # Errors
    /// [`Error::Verb`] with the provider's answer; the object, and all it depends on, then stays until the process ends.
    #[doc(alias = "ibv_destroy_ah")]
    pub fn destroy(self) -> Result<()> {
        self.object.destroy().map(drop)
    }
}

impl fmt::Debug for AddressHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressHandle").field("device", &self.pd().context().device_name()).finish_non_exhaustive()
    }
}
