//! Address handles: destinations of datagrams.

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;

use rdma_sys::*;

use crate::address::{AddressError, AddressVector, Grh};
use crate::errno::{check_neg, check_ptr};
use crate::error::Verb;
use crate::object::{Object, Parents};
use crate::{Context, Errno, Error, LinkLayer, ProtectionDomain, Result, WcFields, WcFlags, WorkCompletion};

/// An address handle, the path of datagrams to a port: `struct ibv_ah`. Destroyed on drop.
///
/// Made by [`ProtectionDomain::address_handle`]. Any number of queue pairs of its domain can use it. Together with a
/// queue pair number and a queue key ([`UdTarget`](crate::UdTarget)) it reaches any queue pair at the remote port. Work
/// in flight does not keep it alive: see [`SendBatch`](crate::SendBatch).
pub struct AddressHandle {
    // Providers only read the C object when work is posted.
    object: Object<MadeFrom>,
}

struct MadeFrom(ProtectionDomain);

impl Parents for MadeFrom {
    type Raw = ibv_ah;

    const VERB: Verb = Verb::DestroyAh;

    fn context(&self) -> &Context {
        self.0.context()
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_ah) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { (self.context().verbs().ibv_destroy_ah)(raw) }
    }
}

impl ProtectionDomain {
    /// Creates a handle for `address`: `ibv_create_ah(3)`.
    ///
    /// # Errors
    /// [`Error::NoSuchPort`]; [`Error::Address`], which names the reason: a wrong service level, a RoCE port without a
    /// global route, a missing local GID, or a peer that cannot be resolved.
    #[doc(alias = "ibv_create_ah")]
    pub fn address_handle(&self, address: &AddressVector) -> Result<AddressHandle> {
        let context = self.context();
        context.query_port(address.port)?;
        if address.sl > 15 {
            return Err(Box::new(AddressError::ServiceLevel { sl: address.sl }).into());
        }
        address.check_route(context).map_err(Box::new)?;
        let mut raw = address.to_raw();
        // SAFETY: the domain is valid, and `raw` is valid during the call.
        match check_ptr(|| unsafe { (context.verbs().ibv_create_ah)(self.as_raw(), &mut raw) }) {
            // SAFETY: the handle was just created, and nobody else has it.
            Ok(raw) => Ok(unsafe { AddressHandle::from_raw(self, raw) }),
            Err(errno) => {
                let route = address.diagnose_route(context, errno);
                // With EINVAL, everything except the route is right.
                let known =
                    route.filter(|(_, is_certain)| *is_certain || errno.0 == libc::EINVAL).map(|(error, _)| error);
                let refused = || AddressError::Refused { address: Box::new(*address), errno };
                Err(Box::new(known.unwrap_or_else(refused)).into())
            }
        }
    }

    /// Creates a handle to reply to the sender of a datagram that arrived at `port`: `ibv_create_ah_from_wc(3)`.
    ///
    /// A reply also needs the sender's queue pair number, [`WorkCompletion::src_qp`].
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

/// The route of a received datagram, as its completion reports it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) slid: u32,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
    pub(crate) flags: WcFlags,
}

impl Arrival {
    /// `None` if the completion queue was created without these fields.
    pub(crate) fn of(completion: &WorkCompletion<'_>) -> Option<Self> {
        Some(Arrival {
            slid: completion.slid()?,
            sl: completion.sl()?,
            dlid_path_bits: completion.dlid_path_bits()?,
            flags: completion.flags(),
        })
    }
}

impl Context {
    /// The path back to the sender of a datagram that arrived at `port`: `ibv_init_ah_from_wc(3)`.
    ///
    /// `grh` is required if the completion has the flag [`WcFlags::GRH`], which on RoCE it always has.
    ///
    /// # Errors
    /// [`Error::Work`] if the receive failed; [`Error::NoGrh`]; [`Error::MissingFields`] if the completion queue was
    /// created without the fields that InfiniBand needs; [`Error::NoSuchPort`]; [`Error::Verb`], for example if the
    /// port no longer has the GID that the datagram was sent to.
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

    /// Like [`Context::sender_address`], from stored fields of the completion.
    pub(crate) fn address_of_arrival(&self, port: u8, arrival: &Arrival, grh: Option<&Grh>) -> Result<AddressVector> {
        let Arrival { slid, sl, dlid_path_bits, flags } = *arrival;
        if flags.contains(WcFlags::GRH) && grh.is_none() {
            return Err(Error::NoGrh);
        }
        // On Ethernet, drivers report the packet type in `sl`. `ibv_init_ah_from_wc` would use it as a service level.
        let sl = if self.query_port(port)?.link_layer() == LinkLayer::ETHERNET { 0 } else { sl };
        let mut wc = ibv_wc {
            // LIDs have 16 bits, like the field of `ibv_wc`.
            slid: slid as u16,
            sl,
            dlid_path_bits,
            wc_flags: flags.bits(),
            ..ibv_wc::zeroed()
        };
        let mut grh = grh.map_or(ibv_grh::zeroed(), |grh| grh.to_raw());
        let mut attr = ibv_ah_attr::zeroed();
        let verbs = self.verbs();
        // SAFETY: the context is valid, and the three structures are valid during the call.
        let init = || unsafe { (verbs.ibv_init_ah_from_wc)(self.as_raw(), port, &mut wc, &mut grh, &mut attr) };
        match check_neg(init) {
            Ok(0) => Ok(AddressVector::from_raw(&attr)),
            Ok(errno) => Err(self.verb_error(Verb::InitAhFromWc, Errno(errno))),
            Err(errno) => Err(self.verb_error(Verb::InitAhFromWc, errno)),
        }
    }
}

impl AddressHandle {
    /// Adopts a handle that other code has created, for example with vendor attributes. It is destroyed on drop.
    ///
    /// # Safety
    /// `raw` must be an address handle of `pd` that nobody else destroys.
    #[must_use]
    pub unsafe fn from_raw(pd: &ProtectionDomain, raw: NonNull<ibv_ah>) -> AddressHandle {
        // SAFETY: the caller's contract. Those who post work with it guarantee that it outlives the work.
        AddressHandle { object: unsafe { Object::new(raw, MadeFrom(pd.clone())) } }
    }

    /// Gives up ownership: the caller must destroy the returned handle. It no longer keeps its domain alive.
    #[must_use]
    pub fn into_raw(self) -> NonNull<ibv_ah> {
        self.object.disown()
    }

    /// The protection domain that the handle belongs to.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.object.0
    }

    /// The C object, valid while this handle exists.
    #[must_use]
    #[inline(always)]
    pub fn as_raw(&self) -> *mut ibv_ah {
        self.object.as_raw()
    }

    #[inline(always)]
    pub(crate) fn raw(&self) -> NonNull<ibv_ah> {
        self.object.raw()
    }

    /// Destroys the handle: `ibv_destroy_ah(3)`. Dropping does the same, but ignores errors.
    ///
    /// # Errors
    /// [`Error::Verb`] if the provider fails; the object and everything it depends on are then leaked.
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
