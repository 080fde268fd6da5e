//! Looking up addresses by names and services.

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::ptr::{NonNull, null, null_mut};

use rdma_sys::*;

use super::error::failed;
use super::{Address, CmError, EventChannel, Id, PortSpace};
use crate::errno::{NameError, check_name, check_neg};
use crate::error::Verb;
use crate::{Errno, QueuePairType, Result};

/// The release of rdma-core that added lookups for an id.
const SINCE: u32 = 60;

/// A family of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum AddressFamily {
    /// `AF_INET`.
    V4,
    /// `AF_INET6`.
    V6,
    /// `AF_IB`: the host is a GID, written as an IPv6 address.
    Ib,
}

impl AddressFamily {
    fn of(address: &Address) -> Self {
        match address {
            Address::Ip(SocketAddr::V4(_)) => AddressFamily::V4,
            Address::Ip(SocketAddr::V6(_)) => AddressFamily::V6,
            Address::Ib(_) => AddressFamily::Ib,
        }
    }

    fn as_raw(self) -> c_int {
        match self {
            AddressFamily::V4 => libc::AF_INET,
            AddressFamily::V6 => libc::AF_INET6,
            AddressFamily::Ib => AF_IB,
        }
    }
}

/// A lookup of addresses: names, and `struct rdma_addrinfo` as hints.
///
/// ```no_run
/// # fn main() -> rdma_safe::Result<()> {
/// use rdma_safe::cm::{AddressQuery, Connector};
///
/// let found = AddressQuery::new().node("storage.example").service("7471").lookup()?;
/// for peer in found.iter().filter_map(|info| info.peer) {
///     println!("{peer}");
///     let route = Connector::new().resolve(peer)?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[must_use]
pub struct AddressQuery {
    node: Option<String>,
    service: Option<String>,
    source: Option<Address>,
    destination: Option<Address>,
    passive: bool,
    numeric_host: bool,
    no_route: bool,
    family: Option<AddressFamily>,
    space: Option<PortSpace>,
    qp_type: Option<QueuePairType>,
}

impl AddressQuery {
    /// An empty query.
    pub fn new() -> Self {
        AddressQuery::default()
    }

    /// Name or address of the host.
    pub fn node(mut self, node: impl Into<String>) -> Self {
        self.node = Some(node.into());
        self
    }

    /// Name of the service (services(5)), or its port.
    pub fn service(mut self, service: impl Into<String>) -> Self {
        self.service = Some(service.into());
        self
    }

    /// Address of the peer, if there is no name. The lookup then finds the route.
    pub fn destination(mut self, address: impl Into<Address>) -> Self {
        self.destination = Some(address.into());
        self
    }

    /// The local address. It must have the same address family as the peer.
    pub fn source(mut self, address: impl Into<Address>) -> Self {
        self.source = Some(address.into());
        self
    }

    /// Looks up an address to listen at (`RAI_PASSIVE`); without a name, all addresses of this host.
    pub fn passive(mut self) -> Self {
        self.passive = true;
        self
    }

    /// Treats the name as an address, without asking a name service (`RAI_NUMERICHOST`).
    pub fn numeric_host(mut self) -> Self {
        self.numeric_host = true;
        self
    }

    /// Returns a route only if it is cached, without waiting for it (`RAI_NOROUTE`).
    pub fn no_route(mut self) -> Self {
        self.no_route = true;
        self
    }

    /// Looks up addresses of this family only (`RAI_FAMILY`).
    ///
    /// With [`AddressFamily::Ib`] the name is a GID in the notation of [`Ipv6Addr`].
    pub fn family(mut self, family: AddressFamily) -> Self {
        self.family = Some(family);
        self
    }

    /// Port space of the id; [`PortSpace::TCP`] is preferred by default.
    pub fn space(mut self, space: PortSpace) -> Self {
        self.space = Some(space);
        self
    }

    /// Type of the queue pair; reliable connections are preferred by default.
    pub fn qp_type(mut self, qp_type: QueuePairType) -> Self {
        self.qp_type = Some(qp_type);
        self
    }

    /// Performs the lookup: `rdma_getaddrinfo(3)`.
    ///
    /// This blocks on the name service, and on InfiniBand also on ibacm(8), if it runs, for the route. The list from
    /// librdmacm is copied and freed (`rdma_freeaddrinfo`).
    ///
    /// If a name has several addresses, librdmacm returns the first. The result of ibacm precedes it, as a native
    /// InfiniBand address.
    ///
    /// # Errors
    /// [`CmError::NoAddress`] when a name is unknown, with the message of getaddrinfo(3); [`CmError::Call`], with
    /// `EINVAL` for a source of another family than the requested one; the errors of [`EventChannel::new`].
    #[doc(alias = "rdma_getaddrinfo")]
    #[doc(alias = "rdma_freeaddrinfo")]
    pub fn lookup(&self) -> Result<Vec<AddressInfo>> {
        const VERB: Verb = Verb::RdmaGetaddrinfo;
        // The first call of a process enumerates the devices. Concurrent lookups do not wait for that, but opening a
        // channel does.
        let channel = EventChannel::new()?;
        let cm = channel.cm();
        let mut list = null_mut();
        self.with_raw(VERB, |node, service, hints| {
            // SAFETY: the names are C strings or NULL. They, the hints with everything these point to, and the out
            // pointer are valid during the call.
            check_name(|| unsafe { (cm.rdma_getaddrinfo)(node, service, hints, &mut list) })
        })?
        .map_err(|error| lookup_error(VERB, error))?;
        // SAFETY: the call has returned a list that this function has to free.
        Ok(unsafe { List::new(cm, list) }.copy())
    }

    /// Calls `function` with the names and the hints as C types.
    fn with_raw<T>(
        &self,
        verb: Verb,
        function: impl FnOnce(*const c_char, *const c_char, *const rdma_addrinfo) -> T,
    ) -> Result<T> {
        let invalid = || failed(verb, Errno(libc::EINVAL));
        let [node, service] = [&self.node, &self.service].map(|name| name.as_deref().map(CString::new).transpose());
        let no_name = |_| CmError::NoAddress { reason: "the name contains a zero byte".to_owned() };
        let (node, service) = (node.map_err(no_name)?, service.map_err(no_name)?);
        let has_name = node.is_some() || service.is_some();
        let destination = self.destination.filter(|_| !has_name);
        if !has_name && destination.is_none() && !(self.passive && self.source.is_some()) {
            let reason = "the query has neither a name nor an address".to_owned();
            return Err(CmError::NoAddress { reason }.into());
        }
        // librdmacm assumes that source and destination have the same family.
        let mut families =
            [self.family, self.source.map(|own| AddressFamily::of(&own)), destination.map(|to| AddressFamily::of(&to))]
                .into_iter()
                .flatten();
        let family = families.next();
        if families.any(|other| Some(other) != family) {
            return Err(invalid());
        }
        let of_ib = family == Some(AddressFamily::Ib);
        // librdmacm then interprets the result of getaddrinfo(3) as an IPv6 address without checking its family.
        let is_gid = self.node.as_deref().is_some_and(|node| node.parse::<Ipv6Addr>().is_ok());
        if of_ib && has_name && !is_gid {
            let reason = "the name of an InfiniBand host must be its GID, in the notation of IPv6".to_owned();
            return Err(CmError::NoAddress { reason }.into());
        }
        let (mut source, mut destination) = (self.source.map(Address::to_raw), destination.map(Address::to_raw));
        let mut hints = rdma_addrinfo::zeroed();
        for (set, flag) in [
            (self.passive, RAI_PASSIVE),
            (self.numeric_host || of_ib, RAI_NUMERICHOST),
            (self.no_route, RAI_NOROUTE),
            (family.is_some(), RAI_FAMILY),
        ] {
            hints.ai_flags |= if set { flag } else { 0 };
        }
        hints.ai_family = family.map_or(0, AddressFamily::as_raw);
        hints.ai_port_space = self.space.map_or(0, |space| space.0 as c_int);
        hints.ai_qp_type = self.qp_type.map_or(0, |qp_type| qp_type.0 as c_int);
        if let (Some(raw), Some(address)) = (&mut source, self.source) {
            (hints.ai_src_addr, hints.ai_src_len) = ((&raw mut *raw).cast(), address.raw_len());
        }
        if let (Some(raw), Some(address)) = (&mut destination, self.destination) {
            (hints.ai_dst_addr, hints.ai_dst_len) = ((&raw mut *raw).cast(), address.raw_len());
        }
        let as_ptr = |name: &Option<CString>| name.as_deref().map_or(null(), CStr::as_ptr);
        Ok(function(as_ptr(&node), as_ptr(&service), &hints))
    }
}

/// A result of a lookup: `struct rdma_addrinfo`.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct AddressInfo {
    /// Whether it is an address to listen at.
    pub passive: bool,
    /// Port space of an id for it, for [`Id::new`].
    pub space: PortSpace,
    /// Type of the queue pair.
    pub qp_type: QueuePairType,
    /// The local address, if known: to [bind](Id::bind) to, or to [resolve](Id::resolve_address) from.
    pub local: Option<Address>,
    /// The address of the peer.
    pub peer: Option<Address>,
    /// Canonical name of this end.
    pub local_name: Option<String>,
    /// Canonical name of the peer.
    pub peer_name: Option<String>,
    /// The route to the peer, if ibacm returned one: for [`Id::set_paths`] instead of [`Id::resolve_route`].
    pub paths: Option<Paths>,
    /// Header of the private data of a connection request to a native InfiniBand address. It contains the IP addresses.
    pub connect_data: Vec<u8>,
}

/// The route to a peer from ibacm: one or more `struct ibv_path_data`.
#[derive(Clone, PartialEq, Eq)]
pub struct Paths(Vec<u8>);

impl Paths {
    /// Number of paths, for one direction or both.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // It is never empty.
    pub fn len(&self) -> usize {
        self.0.len() / PATH_DATA
    }

    /// The paths as a C array.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// `struct ibv_path_data`: flags, padding, and the record.
const PATH_DATA: usize = 8 + size_of::<ibv_path_record>();

impl fmt::Debug for Paths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Paths").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// A list that librdmacm returned, freed on drop.
struct List {
    cm: &'static RdmaCm,
    first: Option<NonNull<rdma_addrinfo>>,
}

impl List {
    /// # Safety
    /// `first` must be NULL, or a list that librdmacm returned and that has no other owner.
    unsafe fn new(cm: &'static RdmaCm, first: *mut rdma_addrinfo) -> Self {
        List { cm, first: NonNull::new(first) }
    }

    fn copy(&self) -> Vec<AddressInfo> {
        let mut found = Vec::new();
        let mut next = self.first;
        while let Some(raw) = next {
            // SAFETY: an entry of the list. It and everything it points to are valid until the list is freed on drop.
            let raw = unsafe { raw.as_ref() };
            // SAFETY: as above.
            found.push(unsafe { AddressInfo::from_raw(raw) });
            next = NonNull::new(raw.ai_next);
        }
        found
    }
}

impl Drop for List {
    fn drop(&mut self) {
        if let Some(first) = self.first {
            // SAFETY: this is the owner of the list, and nothing points into it, because results are copies.
            unsafe { (self.cm.rdma_freeaddrinfo)(first.as_ptr()) }
        }
    }
}

impl AddressInfo {
    /// # Safety
    /// `raw` must be an entry of a list that librdmacm returned and that was not freed.
    unsafe fn from_raw(raw: &rdma_addrinfo) -> Self {
        let address = |raw: *mut libc::sockaddr, len: libc::socklen_t| match raw.is_null() || len == 0 {
            true => None,
            // SAFETY: the caller's contract. An address has the length of its family.
            false => unsafe { Address::from_raw(raw) },
        };
        let name = |raw: *mut c_char| {
            // SAFETY: the caller's contract. A name is a C string or NULL.
            let name = NonNull::new(raw).map(|raw| unsafe { CStr::from_ptr(raw.as_ptr()) });
            name.map(CStr::to_string_lossy).map(Cow::into_owned)
        };
        let bytes = |raw: *mut std::ffi::c_void, len: usize| match raw.is_null() {
            true => Vec::new(),
            // SAFETY: the caller's contract. The length is valid.
            false => unsafe { std::slice::from_raw_parts(raw.cast::<u8>(), len) }.to_vec(),
        };
        let paths = bytes(raw.ai_route, raw.ai_route_len);
        AddressInfo {
            passive: raw.ai_flags & RAI_PASSIVE != 0,
            space: PortSpace(raw.ai_port_space as u32),
            qp_type: QueuePairType(raw.ai_qp_type as u32),
            local: address(raw.ai_src_addr, raw.ai_src_len),
            peer: address(raw.ai_dst_addr, raw.ai_dst_len),
            local_name: name(raw.ai_src_canonname),
            peer_name: name(raw.ai_dst_canonname),
            paths: (paths.len() >= PATH_DATA).then_some(Paths(paths)),
            connect_data: bytes(raw.ai_connect, raw.ai_connect_len),
        }
    }
}

impl Id {
    /// Looks up addresses for this id: `rdma_resolve_addrinfo(3)` of rdma-core 60.
    ///
    /// [`AddressInfoResolved`](super::EventKind::AddressInfoResolved) follows, and [`Id::address_info`] returns the
    /// result. This call blocks on the name service, and so do calls on other ids of the same channel. Only one lookup
    /// can be pending.
    ///
    /// # Errors
    /// [`CmError::OlderLibrary`]; [`CmError::Call`], with `EBUSY` while another lookup is pending or its result was not
    /// taken; the errors of [`AddressQuery::lookup`].
    #[doc(alias = "rdma_resolve_addrinfo")]
    pub fn resolve_address_info(&mut self, query: &AddressQuery) -> Result<()> {
        const VERB: Verb = Verb::RdmaResolveAddrinfo;
        let resolve = self.require_newer(VERB, self.channel().cm().rdma_resolve_addrinfo)?;
        query
            .with_raw(VERB, |node, service, hints| {
                let _guard = self.channel().lock();
                // SAFETY: the id is valid. The names are C strings or NULL. They and the hints, with everything these
                // point to, are valid during the call.
                check_neg(|| unsafe { resolve(self.as_raw(), node, service, hints) })
            })?
            .map(drop)
            .map_err(|errno| lookup_error(VERB, NameError::from_errno(errno)))
    }

    /// Asks the subnet administrator of InfiniBand for a service by its name or number.
    ///
    /// Calls `rdma_resolve_addrinfo(3)` of rdma-core 60 with `RAI_SA`. The id must have a device.
    /// [`AddressInfoResolved`](super::EventKind::AddressInfoResolved) or
    /// [`AddressInfoError`](super::EventKind::AddressInfoError) follows.
    ///
    /// # Errors
    /// Like [`Id::resolve_address_info`]; [`CmError::Call`] with the error of the kernel.
    pub fn resolve_service(&mut self, service: &str) -> Result<()> {
        const VERB: Verb = Verb::RdmaResolveAddrinfo;
        let resolve = self.require_newer(VERB, self.channel().cm().rdma_resolve_addrinfo)?;
        let service = CString::new(service)
            .map_err(|_| CmError::NoAddress { reason: "the name contains a zero byte".to_owned() })?;
        let hints = rdma_addrinfo { ai_flags: RAI_SA as c_int, ..rdma_addrinfo::zeroed() };
        // SAFETY: the id is valid, and so are the name and the hints during the call. No host is named.
        self.call_on_device(VERB, |_, id| unsafe { resolve(id, null(), service.as_ptr(), &hints) })
    }

    /// Takes the result of the lookup for this id: `rdma_query_addrinfo(3)` of rdma-core 60.
    ///
    /// # Errors
    /// [`CmError::OlderLibrary`]; [`CmError::Call`], with `ENOENT` before
    /// [`AddressInfoResolved`](super::EventKind::AddressInfoResolved), and after the result was taken.
    #[doc(alias = "rdma_query_addrinfo")]
    pub fn address_info(&mut self) -> Result<Vec<AddressInfo>> {
        const VERB: Verb = Verb::RdmaQueryAddrinfo;
        let query = self.require_newer(VERB, self.channel().cm().rdma_query_addrinfo)?;
        let mut list = null_mut();
        // SAFETY: the id and the out pointer are valid.
        self.call(VERB, |_, id| unsafe { query(id, &mut list) })?;
        // SAFETY: the call has returned a list that this function has to free.
        Ok(unsafe { List::new(self.channel().cm(), list) }.copy())
    }

    /// Writes an event into the channel, to wake its readers: `rdma_write_cm_event(3)` of rdma-core 60.
    ///
    /// It arrives as [`User`](super::EventKind::User).
    ///
    /// # Errors
    /// [`CmError::OlderLibrary`]; [`CmError::Call`], for example with an older kernel.
    #[doc(alias = "rdma_write_cm_event")]
    pub fn write_event(&self, status: i32, argument: u64) -> Result<()> {
        const VERB: Verb = Verb::RdmaWriteCmEvent;
        let write = self.require_newer(VERB, self.channel().cm().rdma_write_cm_event)?;
        // SAFETY: the id is valid.
        self.call(VERB, |_, id| unsafe { write(id, RDMA_CM_EVENT_USER, status, argument) })
    }

    fn require_newer<F>(&self, verb: Verb, function: Option<F>) -> Result<F> {
        function.ok_or(CmError::OlderLibrary { verb, since: SINCE }.into())
    }
}

fn lookup_error(verb: Verb, error: NameError) -> crate::Error {
    match error {
        NameError::Errno(errno) => failed(verb, errno),
        NameError::Code(code) => {
            // SAFETY: it returns a static string for any number.
            let text = unsafe { CStr::from_ptr(libc::gai_strerror(code)) };
            CmError::NoAddress { reason: text.to_string_lossy().into_owned() }.into()
        }
    }
}
