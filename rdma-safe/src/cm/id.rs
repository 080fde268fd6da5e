//! Ids, the ends of connections to be.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::{NonNull, null_mut};
use std::time::Duration;

use rdma_sys::*;

use super::error::failed;
use super::{Address, ConnectParameters, EventChannel, PrivateData};
use crate::errno::check_neg;
use crate::id::CmId;
use crate::named::named;
use crate::qp::AttributeMask;
use crate::{Ece, Errno, Gid, Guid, QueuePairAttributes, QueuePairState, Result};

named! {
    /// What ids of one kind have ports in common: `enum rdma_port_space`.
    pub struct PortSpace(u32) as "port space" {
        /// Of reliable connections.
        TCP = RDMA_PS_TCP.0 => "TCP",
        /// Of datagrams.
        UDP = RDMA_PS_UDP.0 => "UDP",
        /// Of IP over InfiniBand, for its multicast groups.
        IPOIB = RDMA_PS_IPOIB.0 => "IPoIB",
        /// Of InfiniBand itself: any service id.
        IB = RDMA_PS_IB.0 => "IB",
    }
}

/// An id: `struct rdma_cm_id`. It is destroyed on drop, which ends its connection, or rejects the one that it was to accept.
///
/// Calls only begin something; how it went is told by an [`Event`](super::Event) that has its name, [`Id::id`].
///
/// # To connect
/// [`resolve_address`](Id::resolve_address), [`resolve_route`](Id::resolve_route); make a queue pair on the device that was found
/// and bring it to INIT by [`attributes`](Id::attributes); [`connect`](Id::connect); with the peer's answer bring it to RTR and
/// RTS, and [`establish`](Id::establish).
///
/// # To be connected to
/// [`bind`](Id::bind), [`listen`](Id::listen); with each request comes an id of its own, for which a queue pair is brought to INIT,
/// RTR and RTS before [`accept`](Id::accept).
pub struct Id {
    raw: NonNull<rdma_cm_id>,
    channel: ManuallyDrop<EventChannel>,
    name: CmId,
    /// Groups that it has joined, for which librdmacm keeps something.
    groups: Vec<Address>,
    /// It came with a request that was not answered yet. A second answer would take the first one back, and for a minute the kernel
    /// would not let the id go.
    unanswered: bool,
}

// SAFETY: the functions of librdmacm may be called from any thread, and each call on an id takes the turn of its channel.
unsafe impl Send for Id {}
// SAFETY: as above; what a shared reference reads, it reads in such a turn.
unsafe impl Sync for Id {}

impl Id {
    /// Makes an id that reports to `channel`: `rdma_create_id(3)`.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_create_id")]
    pub fn new(channel: &EventChannel, space: PortSpace) -> Result<Self> {
        let name = CmId::next();
        let mut raw = null_mut();
        {
            let _turn = channel.turn();
            // SAFETY: the channel is valid, and so is the out pointer; the context is a number that is never dereferenced.
            let create = || unsafe {
                let space = rdma_port_space(space.0);
                (channel.cm().rdma_create_id)(channel.as_raw(), &mut raw, name.to_context(), space)
            };
            check_neg(create).map_err(|errno| failed("rdma_create_id", errno))?;
        }
        // It says that it has made one.
        let raw = NonNull::new(raw).ok_or(failed("rdma_create_id", Errno(0)))?;
        Ok(Id { raw, channel: ManuallyDrop::new(channel.clone()), name, groups: Vec::new(), unanswered: false })
    }

    /// # Safety
    /// `raw` must be an id that a request came with, which reports to `channel`, whose turn is taken; and be this one's alone to
    /// destroy.
    pub(super) unsafe fn from_request(channel: &EventChannel, raw: *mut rdma_cm_id) -> Self {
        let name = CmId::next();
        // SAFETY: it is valid, and nobody else has it; it has no events before it was accepted.
        let raw = unsafe {
            (*raw).context = name.to_context();
            NonNull::new_unchecked(raw)
        };
        Id { raw, channel: ManuallyDrop::new(channel.clone()), name, groups: Vec::new(), unanswered: true }
    }

    /// Its name in events, which no other id of the process will have.
    #[must_use]
    pub fn id(&self) -> CmId {
        self.name
    }

    /// The channel that it reports to.
    #[must_use]
    pub fn channel(&self) -> &EventChannel {
        &self.channel
    }

    /// Gives it the address that it is reached by: `rdma_bind_addr(3)`. With an unspecified IP address it is every one of this
    /// host, on any device; with port 0 it gets a free one.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EADDRINUSE` when another id has the address and port, `EADDRNOTAVAIL` when
    /// another has the port and it or this one is to be at every address, and `EADDRNOTAVAIL` or `ENODEV` when no device has the
    /// address.
    #[doc(alias = "rdma_bind_addr")]
    pub fn bind(&mut self, address: impl Into<Address>) -> Result<()> {
        let mut raw = address.into().to_raw();
        // SAFETY: the id is valid, and so is the address for the duration of the call.
        self.call("rdma_bind_addr", |cm, id| unsafe { (cm.rdma_bind_addr)(id, (&raw mut raw).cast()) })
    }

    /// Begins to find the device that leads to `destination`, from `source` where that is given: `rdma_resolve_addr(3)`. Then comes
    /// [`AddressResolved`](super::EventKind::AddressResolved), or, at the latest after `timeout` of 1 ms to 24 days,
    /// [`AddressError`](super::EventKind::AddressError).
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
        // Both stay for the call, which copies them.
        let (mut source, mut destination) = (source.map(Address::to_raw), destination.into().to_raw());
        let from = source.as_mut().map_or(null_mut(), |raw| (&raw mut *raw).cast());
        let timeout = millis(timeout);
        // SAFETY: the id is valid, and so are the addresses for the duration of the call; without a source it is NULL.
        self.call("rdma_resolve_addr", |cm, id| unsafe {
            (cm.rdma_resolve_addr)(id, from, (&raw mut destination).cast(), timeout)
        })
    }

    /// Begins to find a way to the address that was resolved: `rdma_resolve_route(3)`. Then comes
    /// [`RouteResolved`](super::EventKind::RouteResolved), or, at the latest after `timeout`,
    /// [`RouteError`](super::EventKind::RouteError).
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` before the address was resolved.
    #[doc(alias = "rdma_resolve_route")]
    pub fn resolve_route(&mut self, timeout: Duration) -> Result<()> {
        let timeout = millis(timeout);
        // SAFETY: the id is valid.
        self.call_on_device("rdma_resolve_route", |cm, id| unsafe { (cm.rdma_resolve_route)(id, timeout) })
    }

    /// Asks the peer for a connection, or, of datagrams, for its queue pair: `rdma_connect(3)`. The queue pair that the parameters
    /// name is in INIT, and its first receives are best posted before. A peer that does not answer is given up by the kernel
    /// ([`Unreachable`](super::EventKind::Unreachable)), which takes it more than a minute: who has less time drops the id.
    ///
    /// # Errors
    /// [`CmError::PrivateData`](super::CmError::PrivateData) for more than 56 bytes, or 180 of datagrams;
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` before a route was resolved, and for more
    /// [resources](ConnectParameters::responder_resources) than the device has.
    #[doc(alias = "rdma_connect")]
    pub fn connect(&mut self, parameters: &ConnectParameters) -> Result<()> {
        parameters.check(if self.is_datagrams() { 180 } else { 56 })?;
        let mut raw = parameters.as_raw();
        // SAFETY: the id is valid, and so are the parameters for the duration of the call.
        self.call_on_device("rdma_connect", |cm, id| unsafe { (cm.rdma_connect)(id, &mut raw) })
    }

    /// Lets others connect to the address that it is bound to, `backlog` of them before the first is read: `rdma_listen(3)`. Each
    /// comes as [`ConnectRequest`](super::EventKind::ConnectRequest).
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_listen")]
    pub fn listen(&mut self, backlog: u32) -> Result<()> {
        let backlog = c_int::try_from(backlog).unwrap_or(c_int::MAX);
        // SAFETY: the id is valid.
        self.call("rdma_listen", |cm, id| unsafe { (cm.rdma_listen)(id, backlog) })
    }

    /// Accepts the connection that it came with: `rdma_accept(3)`. The queue pair that the parameters name is in RTS. Then comes
    /// [`Established`](super::EventKind::Established); of datagrams nothing.
    ///
    /// # Errors
    /// [`CmError::PrivateData`](super::CmError::PrivateData) for more than 196 bytes, or 136 of datagrams;
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` for an id that came with no request or has answered it, or whose peer
    /// has gone meanwhile.
    #[doc(alias = "rdma_accept")]
    pub fn accept(&mut self, parameters: &ConnectParameters) -> Result<()> {
        parameters.check(if self.is_datagrams() { 136 } else { 196 })?;
        let mut raw = parameters.as_raw();
        // SAFETY: the id is valid, and so are the parameters for the duration of the call.
        self.answer("rdma_accept", |cm, id| unsafe { (cm.rdma_accept)(id, &mut raw) })
    }

    /// Refuses the connection that it came with: `rdma_reject(3)`. The peer gets [`Rejected`](super::EventKind::Rejected) with
    /// [`CONSUMER_DEFINED`](super::RejectReason::CONSUMER_DEFINED) and the bytes, at most 148, or 136 of datagrams.
    ///
    /// # Errors
    /// [`CmError::PrivateData`](super::CmError::PrivateData); [`CmError::Call`](super::CmError::Call), with `EINVAL` as with
    /// [`Id::accept`].
    #[doc(alias = "rdma_reject")]
    pub fn reject(&mut self, private_data: &[u8]) -> Result<()> {
        let data = PrivateData::new(private_data, if self.is_datagrams() { 136 } else { 148 })?;
        let (bytes, len) = data.as_raw();
        // SAFETY: the id is valid, and so are the bytes for the duration of the call.
        self.answer("rdma_reject", |cm, id| unsafe { (cm.rdma_reject)(id, bytes, len) })
    }

    /// As [`Id::reject`], because of the options of [`Id::set_local_ece`]: `rdma_reject_ece(3)`.
    ///
    /// # Errors
    /// As [`Id::reject`].
    #[doc(alias = "rdma_reject_ece")]
    pub fn reject_ece(&mut self, private_data: &[u8]) -> Result<()> {
        let data = PrivateData::new(private_data, 148)?;
        let (bytes, len) = data.as_raw();
        // SAFETY: the id is valid, and so are the bytes for the duration of the call.
        self.answer("rdma_reject_ece", |cm, id| unsafe { (cm.rdma_reject_ece)(id, bytes, len) })
    }

    /// Tells the peer, which has accepted, that the queue pair is in RTS: `rdma_establish(3)`. The peer gets
    /// [`Established`](super::EventKind::Established); this end has its connection with this call.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_establish")]
    pub fn establish(&mut self) -> Result<()> {
        // SAFETY: the id is valid, and has no queue pair of librdmacm's.
        self.call("rdma_establish", |cm, id| unsafe { (cm.rdma_establish)(id) })
    }

    /// Ends the connection: `rdma_disconnect(3)`. The peer gets [`Disconnected`](super::EventKind::Disconnected), and this end when
    /// the peer answers by the same call, or drops its id, or does not answer for some seconds. The queue pair stays as it is:
    /// bring it to the error state, so that what is in flight is flushed.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` when there is none.
    #[doc(alias = "rdma_disconnect")]
    pub fn disconnect(&mut self) -> Result<()> {
        // SAFETY: the id is valid.
        self.call_on_device("rdma_disconnect", |cm, id| unsafe { (cm.rdma_disconnect)(id) })
    }

    /// Tells the connection manager of an event of the queue pair: [`COMM_EST`](crate::AsyncEventType::COMM_EST), a message before
    /// the connection was established: `rdma_notify(3)`.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_notify")]
    pub fn notify(&mut self, event: crate::AsyncEventType) -> Result<()> {
        let event = ibv_event_type(event.0);
        // SAFETY: the id is valid.
        self.call("rdma_notify", |cm, id| unsafe { (cm.rdma_notify)(id, event) })
    }

    /// Lets it report to `channel` from here on, its events that were not read yet among it: `rdma_migrate_id(3)`.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call): then it reports where it did.
    #[doc(alias = "rdma_migrate_id")]
    pub fn migrate(&mut self, channel: &EventChannel) -> Result<()> {
        if self.channel.is_same(channel) {
            return Ok(());
        }
        // In the same order everywhere, or two that change places would wait for each other.
        let mut both = [&*self.channel, channel];
        both.sort_unstable_by_key(|channel| channel.order());
        let turns = both.map(EventChannel::turn);
        // SAFETY: the id and the channel are valid, and no event of the id is being read.
        check_neg(|| unsafe { (channel.cm().rdma_migrate_id)(self.raw.as_ptr(), channel.as_raw()) })
            .map_err(|errno| failed("rdma_migrate_id", errno))?;
        drop(turns);
        *self.channel = channel.clone();
        Ok(())
    }

    /// What brings a queue pair to `state`, one of INIT, RTR and RTS, for [`QueuePair::modify`](crate::QueuePair::modify):
    /// `rdma_init_qp_attr(3)`. Of INIT the rights of the peer are for the caller to add ([`QueuePairAttributes::set_access`]), and
    /// of RTR how long a peer waits for a receive, which is 655 ms unless set ([`QueuePairAttributes::set_min_rnr_timer`]).
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` for a state that cannot be reached yet.
    #[doc(alias = "rdma_init_qp_attr")]
    pub fn attributes(&self, state: QueuePairState) -> Result<QueuePairAttributes> {
        let mut attributes = QueuePairAttributes::new();
        attributes.raw.qp_state = ibv_qp_state(state.0);
        let mut mask = 0;
        // SAFETY: the id and both out pointers are valid.
        self.call("rdma_init_qp_attr", |cm, id| unsafe { (cm.rdma_init_qp_attr)(id, &mut attributes.raw, &mut mask) })?;
        attributes.mask = AttributeMask::from_bits_retain(mask as u32);
        Ok(attributes)
    }

    /// The address of this end, with its port; `None` before it has one.
    #[doc(alias = "rdma_get_local_addr")]
    #[doc(alias = "rdma_get_src_port")]
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        let _turn = self.channel.turn();
        // SAFETY: the id is valid, and is not changed in this turn; its addresses have room for any family.
        unsafe { Address::from_raw(rdma_get_local_addr(self.raw.as_ptr())) }
    }

    /// The address of the peer; `None` where there is none. A link-local address of IPv6 comes without its interface, if the peer
    /// is who has connected.
    #[doc(alias = "rdma_get_peer_addr")]
    #[doc(alias = "rdma_get_dst_port")]
    #[must_use]
    pub fn peer_address(&self) -> Option<Address> {
        let _turn = self.channel.turn();
        // SAFETY: the id is valid, and is not changed in this turn; its addresses have room for any family.
        unsafe { Address::from_raw(rdma_get_peer_addr(self.raw.as_ptr())) }
    }

    /// The GIDs of both ends, this one first; zero where they are not known yet.
    #[must_use]
    pub fn gids(&self) -> (Gid, Gid) {
        let _turn = self.channel.turn();
        // SAFETY: the id is valid, and is not changed in this turn; every member of the unions is made of integers.
        let address = unsafe { (*self.raw.as_ptr()).route.addr.addr.ibaddr };
        (Gid::from_raw(address.sgid), Gid::from_raw(address.dgid))
    }

    /// The partition key, in host byte order.
    #[must_use]
    pub fn pkey(&self) -> u16 {
        let _turn = self.channel.turn();
        // SAFETY: the id is valid, and is not changed in this turn; every member of the unions is made of integers.
        u16::from_be(unsafe { (*self.raw.as_ptr()).route.addr.addr.ibaddr.pkey })
    }

    /// The port of the device, counted from 1; `None` before one was found.
    #[must_use]
    pub fn port(&self) -> Option<u8> {
        let _turn = self.channel.turn();
        // SAFETY: the id is valid, and is not changed in this turn.
        Some(unsafe { (*self.raw.as_ptr()).port_num }).filter(|port| *port != 0)
    }

    /// The name of the device, for [`Device::by_name`](crate::Device::by_name); `None` before one was found.
    #[must_use]
    pub fn device_name(&self) -> Option<String> {
        self.of_device(|verbs, device| {
            // SAFETY: the device is valid, and its name is a string within it.
            let name = unsafe { CStr::from_ptr((verbs.ibv_get_device_name)(device)) };
            name.to_string_lossy().into_owned()
        })
    }

    /// The node GUID of the device, for [`Device::by_guid`](crate::Device::by_guid); `None` before one was found.
    #[must_use]
    pub fn device_guid(&self) -> Option<Guid> {
        // SAFETY: the device is valid.
        self.of_device(|verbs, device| Guid::from_be(unsafe { (verbs.ibv_get_device_guid)(device) }))
    }

    fn of_device<T>(&self, of: impl FnOnce(&Verbs, *mut ibv_device) -> T) -> Option<T> {
        let verbs = verbs().ok()?;
        let _turn = self.channel.turn();
        // SAFETY: the id is valid, and is not changed in this turn.
        let context = NonNull::new(unsafe { (*self.raw.as_ptr()).verbs })?;
        // SAFETY: librdmacm keeps the context of an id that has one open, and the field does not change. No reference to the whole
        // context is made: it has a mutex, which other threads may lock.
        Some(of(verbs, unsafe { (*context.as_ptr()).device }))
    }

    /// Offers the peer options of enhanced connection establishment: `rdma_set_local_ece(3)`. Before [`Id::connect`] or
    /// [`Id::accept`].
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_set_local_ece")]
    pub fn set_local_ece(&mut self, ece: Ece) -> Result<()> {
        let mut raw = ibv_ece { vendor_id: ece.vendor_id, options: ece.options, comp_mask: 0 };
        // SAFETY: the id is valid, and so is the structure for the duration of the call.
        self.call("rdma_set_local_ece", |cm, id| unsafe { (cm.rdma_set_local_ece)(id, &mut raw) })
    }

    /// What the peer has offered, with its request or its answer: `rdma_get_remote_ece(3)`.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_get_remote_ece")]
    pub fn remote_ece(&self) -> Result<Ece> {
        let mut raw = ibv_ece::zeroed();
        // SAFETY: the id and the out pointer are valid.
        self.call("rdma_get_remote_ece", |cm, id| unsafe { (cm.rdma_get_remote_ece)(id, &mut raw) })?;
        Ok(Ece { vendor_id: raw.vendor_id, options: raw.options })
    }

    /// The C object, valid while this id is. What is called on it has to take turns with the calls of this crate on its channel's
    /// ids, and neither destroys it nor moves it to another channel.
    #[must_use]
    pub fn as_raw(&self) -> *mut rdma_cm_id {
        self.raw.as_ptr()
    }

    /// Destroys it: `rdma_destroy_id(3)`. Dropping does the same and tells nobody.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call); the id, and its channel, then stay until the process ends.
    #[doc(alias = "rdma_destroy_id")]
    pub fn destroy(self) -> Result<()> {
        // SAFETY: once, since it is not dropped.
        unsafe { ManuallyDrop::new(self).end() }
    }

    /// # Safety
    /// To be called once; nothing is used after.
    unsafe fn end(&mut self) -> Result<()> {
        for group in std::mem::take(&mut self.groups) {
            let _ = self.leave_multicast(group);
        }
        // SAFETY: the id is valid. All its events that were read were acknowledged in the same turn, so this waits for none.
        self.call("rdma_destroy_id", |cm, id| unsafe { (cm.rdma_destroy_id)(id) })?;
        // SAFETY: dropped here only, and not used after. Where the id stays, its channel does.
        unsafe { ManuallyDrop::drop(&mut self.channel) }
        Ok(())
    }

    /// What it has ports in common with.
    #[must_use]
    pub fn space(&self) -> PortSpace {
        // SAFETY: the id is valid, and the field is set at creation.
        PortSpace(unsafe { (*self.raw.as_ptr()).ps }.0)
    }

    pub(super) fn is_datagrams(&self) -> bool {
        matches!(self.space(), PortSpace::UDP | PortSpace::IPOIB)
    }

    pub(super) fn joined(&mut self, group: Address) {
        self.groups.push(group);
    }

    pub(super) fn left(&mut self, group: Address) {
        if let Some(index) = self.groups.iter().position(|own| *own == group) {
            self.groups.swap_remove(index);
        }
    }

    /// As [`Id::call`], of a function that looks at the device of the id, which librdmacm does without asking whether there is one.
    pub(super) fn call_on_device(
        &self,
        call: &'static str,
        function: impl FnOnce(&RdmaCm, *mut rdma_cm_id) -> c_int,
    ) -> Result<()> {
        self.in_turn(call, |cm, id| {
            // SAFETY: the id is valid, and is not changed in this turn; with its context it has a device.
            match unsafe { (*id).verbs }.is_null() {
                true => Err(Errno(libc::EINVAL)),
                false => check_neg(|| function(cm, id)),
            }
        })
    }

    /// Answers the request that it came with, once.
    fn answer(&mut self, call: &'static str, function: impl FnOnce(&RdmaCm, *mut rdma_cm_id) -> c_int) -> Result<()> {
        if !self.unanswered {
            return Err(failed(call, Errno(libc::EINVAL)));
        }
        self.call_on_device(call, function)?;
        self.unanswered = false;
        Ok(())
    }

    /// Calls a function of librdmacm that returns -1 and sets `errno`, in the turn of the channel.
    pub(super) fn call(
        &self,
        call: &'static str,
        function: impl FnOnce(&RdmaCm, *mut rdma_cm_id) -> c_int,
    ) -> Result<()> {
        self.in_turn(call, |cm, id| check_neg(|| function(cm, id)))
    }

    fn in_turn(
        &self,
        call: &'static str,
        function: impl FnOnce(&RdmaCm, *mut rdma_cm_id) -> Result<c_int, Errno>,
    ) -> Result<()> {
        let _turn = self.channel.turn();
        function(self.channel.cm(), self.raw.as_ptr()).map(drop).map_err(|errno| failed(call, errno))
    }
}

/// At least one: 0 is for ever with some kernels.
fn millis(timeout: Duration) -> c_int {
    c_int::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX).max(1)
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: nothing uses it after its drop.
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
