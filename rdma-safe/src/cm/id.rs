//! Ids of librdmacm, the ends of connections.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::{NonNull, null_mut};
use std::time::Duration;

use rdma_sys::*;

use super::error::failed;
use super::{Address, ConnectParameters, EventChannel, PrivateData};
use crate::address::Guid;
use crate::errno::check_neg;
use crate::error::Verb;
use crate::id::CmId;
use crate::named::named;
use crate::qp::{AttributeMask, Ece, QueuePairAttributes};
use crate::{Errno, Gid, QueuePairState, Result};

named! {
    /// The port space that an id belongs to: `enum rdma_port_space`.
    pub struct PortSpace(u32) as "port space" {
        /// Reliable connections.
        TCP = RDMA_PS_TCP.0 => "TCP",
        /// Datagrams.
        UDP = RDMA_PS_UDP.0 => "UDP",
        /// IP over InfiniBand, for its multicast groups.
        IPOIB = RDMA_PS_IPOIB.0 => "IPoIB",
        /// Native InfiniBand: any service ID.
        IB = RDMA_PS_IB.0 => "IB",
    }
}

/// An id: `struct rdma_cm_id`. Dropping it ends its connection, or rejects the request that it came with.
///
/// Calls only start an operation. An [`Event`](super::Event) with the id's name, [`Id::id`], reports the result.
///
/// # Connecting
/// 1. [`resolve_address`](Id::resolve_address), then [`resolve_route`](Id::resolve_route).
/// 2. Create a queue pair on the device that was found, and bring it to INIT with [`attributes`](Id::attributes).
/// 3. [`connect`](Id::connect).
/// 4. After the peer's reply, bring the queue pair to RTR and RTS, and call [`establish`](Id::establish).
///
/// # Accepting
/// 1. [`bind`](Id::bind), then [`listen`](Id::listen). Each request comes with a new id.
/// 2. Bring a queue pair to INIT, RTR and RTS with the new id's [`attributes`](Id::attributes).
/// 3. [`accept`](Id::accept).
pub struct Id {
    raw: NonNull<rdma_cm_id>,
    channel: ManuallyDrop<EventChannel>,
    name: CmId,
    /// Groups that it has joined, for which librdmacm keeps state.
    groups: Vec<Address>,
    /// Whether it came with a request that is not answered yet.
    ///
    /// A second answer would withdraw the first one, and the kernel would keep the id for a minute.
    unanswered: bool,
}

// SAFETY: the functions of librdmacm may be called from any thread, and each call on an id holds the lock of its
// channel.
unsafe impl Send for Id {}
// SAFETY: as above. Reads through a shared reference hold the lock, too.
unsafe impl Sync for Id {}

impl Id {
    /// Creates an id that reports to `channel`: `rdma_create_id(3)`.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_create_id")]
    pub fn new(channel: &EventChannel, space: PortSpace) -> Result<Self> {
        channel.require_own()?;
        let name = CmId::next();
        let mut raw = null_mut();
        {
            let _guard = channel.lock();
            // SAFETY: the channel is valid, and so is the out pointer. The context is a number that is never
            // dereferenced.
            let create = || unsafe {
                let space = rdma_port_space(space.0);
                (channel.cm().rdma_create_id)(channel.as_raw(), &mut raw, name.to_context(), space)
            };
            check_neg(create).map_err(|errno| failed(Verb::RdmaCreateId, errno))?;
        }
        // The call has succeeded, so this is not NULL.
        let raw = NonNull::new(raw).ok_or(failed(Verb::RdmaCreateId, Errno(0)))?;
        Ok(Id { raw, channel: ManuallyDrop::new(channel.clone()), name, groups: Vec::new(), unanswered: false })
    }

    /// # Safety
    /// `raw` must be the id of a request and report to `channel`, whose lock must be held. The returned `Id` must be
    /// its only owner.
    pub(super) unsafe fn from_request(channel: &EventChannel, raw: *mut rdma_cm_id) -> Self {
        let name = CmId::next();
        // SAFETY: `raw` is valid and has no other owner. It has no events before it is accepted.
        let raw = unsafe {
            (*raw).context = name.to_context();
            NonNull::new_unchecked(raw)
        };
        Id { raw, channel: ManuallyDrop::new(channel.clone()), name, groups: Vec::new(), unanswered: true }
    }

    /// The name of the id in events, unique within the process.
    #[must_use]
    pub fn id(&self) -> CmId {
        self.name
    }

    /// The channel that the id reports to.
    #[must_use]
    pub fn channel(&self) -> &EventChannel {
        &self.channel
    }

    /// Binds the id to a local address: `rdma_bind_addr(3)`.
    ///
    /// An unspecified IP address stands for all addresses of this host, on any device. Port 0 selects a free port.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EADDRINUSE` when the address and port are in use, `EADDRNOTAVAIL`
    /// when the port is in use and one of the two ids is bound to all addresses, and `EADDRNOTAVAIL` or `ENODEV` when no
    /// device has the address.
    #[doc(alias = "rdma_bind_addr")]
    pub fn bind(&mut self, address: impl Into<Address>) -> Result<()> {
        let mut raw = address.into().to_raw();
        // SAFETY: the id is valid, and so is the address during the call.
        self.call(Verb::RdmaBindAddr, |cm, id| unsafe { (cm.rdma_bind_addr)(id, (&raw mut raw).cast()) })
    }

    /// Starts to resolve the device that leads to `destination`: `rdma_resolve_addr(3)`.
    ///
    /// `source` restricts the local address. [`AddressResolved`](super::EventKind::AddressResolved) follows, or, within
    /// `timeout` (1 ms to 24 days), [`AddressError`](super::EventKind::AddressError).
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `ENODEV` and `ENETUNREACH` when no device leads there.
    #[doc(alias = "rdma_resolve_addr")]
    pub fn resolve_address(
        &mut self,
        source: Option<Address>,
        destination: impl Into<Address>,
        timeout: Duration,
    ) -> Result<()> {
        // Both stay in place during the call, which copies them.
        let (mut source, mut destination) = (source.map(Address::to_raw), destination.into().to_raw());
        let from = source.as_mut().map_or(null_mut(), |raw| (&raw mut *raw).cast());
        let timeout = millis(timeout);
        // SAFETY: the id is valid, and so are the addresses during the call. Without a source the pointer is NULL.
        self.call(Verb::RdmaResolveAddr, |cm, id| unsafe {
            (cm.rdma_resolve_addr)(id, from, (&raw mut destination).cast(), timeout)
        })
    }

    /// Starts to resolve the route to the resolved address: `rdma_resolve_route(3)`.
    ///
    /// [`RouteResolved`](super::EventKind::RouteResolved) follows, or, within `timeout`,
    /// [`RouteError`](super::EventKind::RouteError).
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` before the address is resolved.
    #[doc(alias = "rdma_resolve_route")]
    pub fn resolve_route(&mut self, timeout: Duration) -> Result<()> {
        let timeout = millis(timeout);
        // SAFETY: the id is valid.
        self.call_on_device(Verb::RdmaResolveRoute, |cm, id| unsafe { (cm.rdma_resolve_route)(id, timeout) })
    }

    /// Requests a connection, or for datagrams the queue pair of the peer: `rdma_connect(3)`.
    ///
    /// The queue pair in the parameters must be in INIT. Post its first receives before this call. If the peer does not
    /// reply, the kernel reports [`Unreachable`](super::EventKind::Unreachable), but only after more than a minute. For
    /// a shorter timeout, drop the id.
    ///
    /// # Errors
    /// [`CmError::PrivateData`](super::CmError::PrivateData) for more than 56 bytes, or 180 for datagrams;
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` before the route is resolved, and for more
    /// [resources](ConnectParameters::responder_resources) than the device has.
    #[doc(alias = "rdma_connect")]
    pub fn connect(&mut self, parameters: &ConnectParameters) -> Result<()> {
        parameters.check(if self.is_datagrams() { 180 } else { 56 })?;
        let mut raw = parameters.as_raw();
        // SAFETY: the id is valid, and so are the parameters during the call.
        self.call_on_device(Verb::RdmaConnect, |cm, id| unsafe { (cm.rdma_connect)(id, &mut raw) })
    }

    /// Listens for connections at the bound address: `rdma_listen(3)`.
    ///
    /// Each request arrives as [`ConnectRequest`](super::EventKind::ConnectRequest). `backlog` is the maximum number of
    /// requests that are not read yet.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_listen")]
    pub fn listen(&mut self, backlog: u32) -> Result<()> {
        let backlog = c_int::try_from(backlog).unwrap_or(c_int::MAX);
        // SAFETY: the id is valid.
        self.call(Verb::RdmaListen, |cm, id| unsafe { (cm.rdma_listen)(id, backlog) })
    }

    /// Accepts the request that the id came with: `rdma_accept(3)`.
    ///
    /// The queue pair in the parameters must be in RTS. [`Established`](super::EventKind::Established) follows, except
    /// for datagrams.
    ///
    /// # Errors
    /// [`CmError::PrivateData`](super::CmError::PrivateData) for more than 196 bytes, or 136 for datagrams;
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` for an id that did not come with a request or has
    /// answered it, or whose peer is gone.
    #[doc(alias = "rdma_accept")]
    pub fn accept(&mut self, parameters: &ConnectParameters) -> Result<()> {
        parameters.check(if self.is_datagrams() { 136 } else { 196 })?;
        let mut raw = parameters.as_raw();
        // SAFETY: the id is valid, and so are the parameters during the call.
        self.answer(Verb::RdmaAccept, |cm, id| unsafe { (cm.rdma_accept)(id, &mut raw) })
    }

    /// Rejects the request that the id came with: `rdma_reject(3)`.
    ///
    /// The peer gets [`Rejected`](super::EventKind::Rejected) with
    /// [`CONSUMER_DEFINED`](super::RejectReason::CONSUMER_DEFINED) and the private data, at most 148 bytes, or 136 for
    /// datagrams.
    ///
    /// # Errors
    /// [`CmError::PrivateData`](super::CmError::PrivateData); [`CmError::Call`](super::CmError::Call), with `EINVAL` as
    /// for [`Id::accept`].
    #[doc(alias = "rdma_reject")]
    pub fn reject(&mut self, private_data: &[u8]) -> Result<()> {
        let data = PrivateData::new(private_data, if self.is_datagrams() { 136 } else { 148 })?;
        let (bytes, len) = data.as_raw();
        // SAFETY: the id is valid, and so are the bytes during the call.
        self.answer(Verb::RdmaReject, |cm, id| unsafe { (cm.rdma_reject)(id, bytes, len) })
    }

    /// Like [`Id::reject`], because of unsupported options ([`Id::remote_ece`]): `rdma_reject_ece(3)`.
    ///
    /// # Errors
    /// Like [`Id::reject`].
    #[doc(alias = "rdma_reject_ece")]
    pub fn reject_ece(&mut self, private_data: &[u8]) -> Result<()> {
        let data = PrivateData::new(private_data, 148)?;
        let (bytes, len) = data.as_raw();
        // SAFETY: the id is valid, and so are the bytes during the call.
        self.answer(Verb::RdmaRejectEce, |cm, id| unsafe { (cm.rdma_reject_ece)(id, bytes, len) })
    }

    /// Confirms to the peer, which has accepted, that the queue pair is in RTS: `rdma_establish(3)`.
    ///
    /// The peer gets [`Established`](super::EventKind::Established). This end gets no event: the connection is
    /// established with this call.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_establish")]
    pub fn establish(&mut self) -> Result<()> {
        // SAFETY: the id is valid, and has no queue pair that librdmacm created.
        self.call(Verb::RdmaEstablish, |cm, id| unsafe { (cm.rdma_establish)(id) })
    }

    /// Ends the connection: `rdma_disconnect(3)`.
    ///
    /// The peer gets [`Disconnected`](super::EventKind::Disconnected). This end gets it when the peer confirms by the
    /// same call, drops its id, or does not reply for some seconds. The queue pair is not modified: bring it to the
    /// error state to flush the work in flight.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` when there is no connection.
    #[doc(alias = "rdma_disconnect")]
    pub fn disconnect(&mut self) -> Result<()> {
        // SAFETY: the id is valid.
        self.call_on_device(Verb::RdmaDisconnect, |cm, id| unsafe { (cm.rdma_disconnect)(id) })
    }

    /// Passes an event of the queue pair to the connection manager: `rdma_notify(3)`.
    ///
    /// The event is [`COMM_EST`](crate::async_event::AsyncEventType::COMM_EST): a message arrived before the connection was
    /// established.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_notify")]
    pub fn notify(&mut self, event: crate::async_event::AsyncEventType) -> Result<()> {
        let event = ibv_event_type(event.0);
        // SAFETY: the id is valid.
        self.call(Verb::RdmaNotify, |cm, id| unsafe { (cm.rdma_notify)(id, event) })
    }

    /// Moves the id and its unread events to another channel: `rdma_migrate_id(3)`.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call). The id then still reports to the old channel.
    #[doc(alias = "rdma_migrate_id")]
    pub fn migrate(&mut self, channel: &EventChannel) -> Result<()> {
        if self.channel.is_same(channel) {
            return Ok(());
        }
        // Locks in the same order everywhere, because two migrations in opposite directions would deadlock otherwise.
        let mut both = [&*self.channel, channel];
        both.sort_unstable_by_key(|channel| channel.lock_order());
        let guards = both.map(EventChannel::lock);
        guards.iter().try_for_each(|ended| ended.check(self.name, Verb::RdmaMigrateId))?;
        // SAFETY: the id and the channel are valid, and no event of the id is being read.
        check_neg(|| unsafe { (channel.cm().rdma_migrate_id)(self.raw.as_ptr(), channel.as_raw()) })
            .map_err(|errno| failed(Verb::RdmaMigrateId, errno))?;
        drop(guards);
        *self.channel = channel.clone();
        Ok(())
    }

    /// Attributes that bring a queue pair to `state`, one of INIT, RTR and RTS: `rdma_init_qp_attr(3)`.
    ///
    /// Pass them to [`QueuePair::modify`](crate::QueuePair::modify). For INIT, add the access rights of the peer
    /// ([`QueuePairAttributes::set_access`]). For RTR, add the RNR NAK timer
    /// ([`QueuePairAttributes::set_min_rnr_timer`]), which is 655 ms otherwise.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` for a state that cannot be reached yet.
    #[doc(alias = "rdma_init_qp_attr")]
    pub fn attributes(&self, state: QueuePairState) -> Result<QueuePairAttributes> {
        let mut attributes = QueuePairAttributes::new();
        attributes.raw.qp_state = ibv_qp_state(state.0);
        let mut mask = 0;
        // SAFETY: the id and both out pointers are valid.
        self.call(Verb::RdmaInitQpAttr, |cm, id| unsafe {
            (cm.rdma_init_qp_attr)(id, &mut attributes.raw, &mut mask)
        })?;
        attributes.mask = AttributeMask::from_bits_retain(mask as u32);
        Ok(attributes)
    }

    /// The local address with its port; `None` before it is set.
    #[doc(alias = "rdma_get_local_addr")]
    #[doc(alias = "rdma_get_src_port")]
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        let _guard = self.channel.lock();
        // SAFETY: the id is valid and not modified under the lock. Its addresses have room for any family.
        unsafe { Address::from_raw(rdma_get_local_addr(self.raw.as_ptr())) }
    }

    /// The address of the peer; `None` if there is none.
    ///
    /// If the peer connected to this end, an IPv6 link-local address lacks its interface.
    #[doc(alias = "rdma_get_peer_addr")]
    #[doc(alias = "rdma_get_dst_port")]
    #[must_use]
    pub fn peer_address(&self) -> Option<Address> {
        let _guard = self.channel.lock();
        // SAFETY: the id is valid and not modified under the lock. Its addresses have room for any family.
        unsafe { Address::from_raw(rdma_get_peer_addr(self.raw.as_ptr())) }
    }

    /// The GIDs of both ends, the local one first; zero if they are not known yet.
    #[must_use]
    pub fn gids(&self) -> (Gid, Gid) {
        let _guard = self.channel.lock();
        // SAFETY: the id is valid and not modified under the lock. All members of the unions are integers.
        let address = unsafe { (*self.raw.as_ptr()).route.addr.addr.ibaddr };
        (Gid::from_raw(address.sgid), Gid::from_raw(address.dgid))
    }

    /// The partition key, in host byte order.
    #[must_use]
    pub fn pkey(&self) -> u16 {
        let _guard = self.channel.lock();
        // SAFETY: the id is valid and not modified under the lock. All members of the unions are integers.
        u16::from_be(unsafe { (*self.raw.as_ptr()).route.addr.addr.ibaddr.pkey })
    }

    /// The port of the device, counted from 1; `None` before a device is found.
    #[must_use]
    pub fn port(&self) -> Option<u8> {
        let _guard = self.channel.lock();
        // SAFETY: the id is valid and not modified under the lock.
        Some(unsafe { (*self.raw.as_ptr()).port_num }).filter(|port| *port != 0)
    }

    /// The name of the device, for [`Device::by_name`](crate::Device::by_name); `None` before a device is found.
    #[must_use]
    pub fn device_name(&self) -> Option<String> {
        self.with_device(|verbs, device| {
            // SAFETY: the device is valid, and its name is a C string within it.
            let name = unsafe { CStr::from_ptr((verbs.ibv_get_device_name)(device)) };
            name.to_string_lossy().into_owned()
        })
    }

    /// The node GUID of the device, for [`Device::by_guid`](crate::Device::by_guid); `None` before a device is found.
    #[must_use]
    pub fn device_guid(&self) -> Option<Guid> {
        // SAFETY: the device is valid.
        self.with_device(|verbs, device| Guid::from_be(unsafe { (verbs.ibv_get_device_guid)(device) }))
    }

    fn with_device<T>(&self, of: impl FnOnce(&Verbs, *mut ibv_device) -> T) -> Option<T> {
        let verbs = verbs().ok()?;
        let _guard = self.channel.lock();
        // SAFETY: the id is valid and not modified under the lock.
        let context = NonNull::new(unsafe { (*self.raw.as_ptr()).verbs })?;
        // SAFETY: librdmacm keeps the context of an id open, and the field does not change. No reference to the whole
        // context is created, because it contains a mutex that other threads may lock.
        Some(of(verbs, unsafe { (*context.as_ptr()).device }))
    }

    /// Offers options of enhanced connection establishment to the peer: `rdma_set_local_ece(3)`.
    ///
    /// Call this before [`Id::connect`] or [`Id::accept`].
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_set_local_ece")]
    pub fn set_local_ece(&mut self, ece: Ece) -> Result<()> {
        let mut raw = ibv_ece { vendor_id: ece.vendor_id, options: ece.options, comp_mask: 0 };
        // SAFETY: the id is valid, and so is the structure during the call.
        self.call(Verb::RdmaSetLocalEce, |cm, id| unsafe { (cm.rdma_set_local_ece)(id, &mut raw) })
    }

    /// The options that the peer offered with its request or reply: `rdma_get_remote_ece(3)`.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_get_remote_ece")]
    pub fn remote_ece(&self) -> Result<Ece> {
        let mut raw = ibv_ece::zeroed();
        // SAFETY: the id and the out pointer are valid.
        self.call(Verb::RdmaGetRemoteEce, |cm, id| unsafe { (cm.rdma_get_remote_ece)(id, &mut raw) })?;
        Ok(Ece { vendor_id: raw.vendor_id, options: raw.options })
    }

    /// The C object, valid while this id exists.
    ///
    /// Calls on it must be serialized with calls of this crate on the ids of its channel. Do not destroy it or move it
    /// to another channel.
    #[must_use]
    pub fn as_raw(&self) -> *mut rdma_cm_id {
        self.raw.as_ptr()
    }

    /// Destroys the id: `rdma_destroy_id(3)`. Dropping does the same, but ignores errors.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call). The id and its channel are then kept until the process ends.
    #[doc(alias = "rdma_destroy_id")]
    pub fn destroy(self) -> Result<()> {
        // SAFETY: called once, since the id is not dropped.
        unsafe { ManuallyDrop::new(self).end() }
    }

    /// # Safety
    /// Must be called once. The id must not be used afterwards.
    unsafe fn end(&mut self) -> Result<()> {
        // Checked before locking, since a thread that exists only in the parent process may hold the lock.
        self.channel.require_own()?;
        let groups = std::mem::take(&mut self.groups);
        let mut ended = self.channel.lock();
        for group in groups {
            // An error may leave unread events of the group. No thread reads them before they go with the id below.
            let _ = self.leave(&mut ended, group);
        }
        // SAFETY: the id is valid. All its events that were read were acknowledged under the same lock, so this call
        // waits for none.
        check_neg(|| unsafe { (self.channel.cm().rdma_destroy_id)(self.raw.as_ptr()) })
            .map_err(|errno| failed(Verb::RdmaDestroyId, errno))?;
        ended.forget(self.name);
        drop(ended);
        // SAFETY: dropped only here, and not used later. If the id still exists, so does the channel.
        unsafe { ManuallyDrop::drop(&mut self.channel) }
        Ok(())
    }

    /// The port space of the id.
    #[must_use]
    pub fn space(&self) -> PortSpace {
        // SAFETY: the id is valid, and the field is set at creation.
        PortSpace(unsafe { (*self.raw.as_ptr()).ps }.0)
    }

    pub(super) fn is_datagrams(&self) -> bool {
        matches!(self.space(), PortSpace::UDP | PortSpace::IPOIB)
    }

    pub(super) fn add_group(&mut self, group: Address) {
        self.groups.push(group);
    }

    pub(super) fn remove_group(&mut self, group: Address) {
        if let Some(index) = self.groups.iter().position(|own| *own == group) {
            self.groups.swap_remove(index);
        }
    }

    /// Like [`Id::call`], for a function that accesses the device of the id. librdmacm does not check that there is
    /// one.
    pub(super) fn call_on_device(
        &self,
        verb: Verb,
        function: impl FnOnce(&RdmaCm, *mut rdma_cm_id) -> c_int,
    ) -> Result<()> {
        self.locked(verb, |cm, id| {
            // SAFETY: the id is valid and not modified under the lock. An id with a context has a device.
            match unsafe { (*id).verbs }.is_null() {
                true => Err(Errno(libc::EINVAL)),
                false => check_neg(|| function(cm, id)),
            }
        })
    }

    /// Answers the request that the id came with, once.
    fn answer(&mut self, verb: Verb, function: impl FnOnce(&RdmaCm, *mut rdma_cm_id) -> c_int) -> Result<()> {
        if !self.unanswered {
            return Err(failed(verb, Errno(libc::EINVAL)));
        }
        self.call_on_device(verb, function)?;
        self.unanswered = false;
        Ok(())
    }

    /// Calls a function of librdmacm that returns -1 and sets `errno`, with the channel locked.
    pub(super) fn call(&self, verb: Verb, function: impl FnOnce(&RdmaCm, *mut rdma_cm_id) -> c_int) -> Result<()> {
        self.locked(verb, |cm, id| check_neg(|| function(cm, id)))
    }

    fn locked(
        &self,
        verb: Verb,
        function: impl FnOnce(&RdmaCm, *mut rdma_cm_id) -> Result<c_int, Errno>,
    ) -> Result<()> {
        self.channel.require_own()?;
        let ended = self.channel.lock();
        ended.check(self.name, verb)?;
        function(self.channel.cm(), self.raw.as_ptr()).map(drop).map_err(|errno| failed(verb, errno))
    }
}

/// The timeout in milliseconds, at least 1, because 0 means no timeout with some kernels.
fn millis(timeout: Duration) -> c_int {
    c_int::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX).max(1)
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: the id is not used after its drop.
        let _ = unsafe { self.end() };
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Id")
            .field("id", &self.name)
            .field("local", &self.local_address())
            .field("peer", &self.peer_address())
            .finish_non_exhaustive()
    }
}
