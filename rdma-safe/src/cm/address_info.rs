//! Addresses of names and services.

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};
use std::ptr::{NonNull, null, null_mut};

use rdma_sys::*;

use super::error::failed;
use super::{Address, CmError, EventChannel, Id, PortSpace};
use crate::errno::{NameError, check_name, check_neg};
use crate::{Errno, QueuePairType, Result};

/// The release of rdma-core that has what begins a look-up for an id.
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

/// What addresses are looked up by: names, and `struct rdma_addrinfo` as hints.
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
    /// Of nothing yet.
    pub fn new() -> Self {
        AddressQuery::default()
    }

    /// Name of the host, or its address.
    pub fn node(mut self, node: impl Into<String>) -> Self {
        self.node = Some(node.into());
        self
    }

    /// Name of the service (services(5)), or its port.
    pub fn service(mut self, service: impl Into<String>) -> Self {
        self.service = Some(service.into());
        self
    }

    /// The peer's address, where there is no name: what is looked up is the way there.
    pub fn destination(mut self, address: impl Into<Address>) -> Self {
        self.destination = Some(address.into());
        self
    }

    /// The address of this end, whose family the peer's has, too.
    pub fn source(mut self, address: impl Into<Address>) -> Self {
        self.source = Some(address.into());
        self
    }

    /// Looks for an address to listen at (`RAI_PASSIVE`), which without a name is every one of this host.
    pub fn passive(mut self) -> Self {
        self.passive = true;
        self
    }

    /// The name is an address, and no name service is asked (`RAI_NUMERICHOST`).
    pub fn numeric_host(mut self) -> Self {
        self.numeric_host = true;
        self
    }

    /// A way there is given if it is known, and not waited for (`RAI_NOROUTE`).
    pub fn no_route(mut self) -> Self {
        self.no_route = true;
        self
    }

    /// Addresses of this family only (`RAI_FAMILY`). With [`AddressFamily::Ib`] the name is a GID, as [`Ipv6Addr`] writes it.
    pub fn family(mut self, family: AddressFamily) -> Self {
        self.family = Some(family);
        self
    }

    /// What the id will have ports in common with; [`PortSpace::TCP`] comes first unless set.
    pub fn space(mut self, space: PortSpace) -> Self {
        self.space = Some(space);
        self
    }

    /// Type of the queue pair: reliable connections come first unless set.
    pub fn qp_type(mut self, qp_type: QueuePairType) -> Self {
        self.qp_type = Some(qp_type);
        self
    }

    /// Looks it up: `rdma_getaddrinfo(3)`. The name service is asked for as long as it takes, and on InfiniBand ibacm(8), where it
    /// runs, for the way there. What librdmacm returns is copied and freed (`rdma_freeaddrinfo`).
    ///
    /// Of the addresses that a name has, librdmacm returns the first one; ibacm's answer comes before it as an address of
    /// InfiniBand.
    ///
    /// # Errors
    /// [`CmError::NoAddress`] when a name is not known, with what getaddrinfo(3) says; [`CmError::Call`], with `EINVAL` for a
    /// source of another family than is asked for; those of [`EventChannel::new`].
    #[doc(alias = "rdma_getaddrinfo")]
    #[doc(alias = "rdma_freeaddrinfo")]
    pub fn lookup(&self) -> Result<Vec<AddressInfo>> {
        const CALL: &str = "rdma_getaddrinfo";
        // The first of a process has librdmacm find its devices, which a look-up would not wait for in another thread.
        let channel = EventChannel::new()?;
        let cm = channel.cm();
        let mut list = null_mut();
        self.with_raw(CALL, |node, service, hints| {
            // SAFETY: the names are strings or NULL, and they and the hints, with what they point to, are valid for the call; so is
            // the out pointer.
            check_name(|| unsafe { (cm.rdma_getaddrinfo)(node, service, hints, &mut list) })
        })?
        .map_err(|error| not_found(CALL, error))?;
        // SAFETY: it has returned a list, which is this function's to free.
        Ok(unsafe { List::new(cm, list) }.copy())
    }

    /// Calls `function` with the names and the hints as C has them.
    fn with_raw<T>(
        &self,
        call: &'static str,
        function: impl FnOnce(*const c_char, *const c_char, *const rdma_addrinfo) -> T,
    ) -> Result<T> {
        let invalid = || failed(call, Errno(libc::EINVAL));
        let [node, service] = [&self.node, &self.service].map(|name| name.as_deref().map(CString::new).transpose());
        let no_name = |_| CmError::NoAddress { reason: "a name has a zero byte within".to_owned() };
        let (node, service) = (node.map_err(no_name)?, service.map_err(no_name)?);
        let has_name = node.is_some() || service.is_some();
        let destination = self.destination.filter(|_| !has_name);
        if !has_name && destination.is_none() && !(self.passive && self.source.is_some()) {
            let reason = "neither a name nor an address was given to look for".to_owned();
            return Err(CmError::NoAddress { reason }.into());
        }
        // librdmacm reads the source and the destination as of one family.
        let mut families =
            [self.family, self.source.map(|own| AddressFamily::of(&own)), destination.map(|to| AddressFamily::of(&to))]
                .into_iter()
                .flatten();
        let family = families.next();
        if families.any(|other| Some(other) != family) {
            return Err(invalid());
        }
        let of_ib = family == Some(AddressFamily::Ib);
        // It reads what getaddrinfo(3) returns as an IPv6 address then, without a look at its family.
        let is_gid = self.node.as_deref().is_some_and(|node| node.parse::<Ipv6Addr>().is_ok());
        if of_ib && has_name && !is_gid {
            let reason = "the name of a host of InfiniBand is its GID, written as an IPv6 address".to_owned();
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

/// What was found: `struct rdma_addrinfo`.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct AddressInfo {
    /// Whether it is to listen at.
    pub passive: bool,
    /// What an id for it has ports in common with: for [`Id::new`].
    pub space: PortSpace,
    /// Type of its queue pair.
    pub qp_type: QueuePairType,
    /// The address of this end, if it is given: to [bind](Id::bind) to, or to [resolve](Id::resolve_address) from.
    pub local: Option<Address>,
    /// The address of the peer.
    pub peer: Option<Address>,
    /// The proper name of this end.
    pub local_name: Option<String>,
    /// The proper name of the peer.
    pub peer_name: Option<String>,
    /// The way to the peer, if ibacm has said it: for [`Id::set_paths`] in place of [`Id::resolve_route`].
    pub paths: Option<Paths>,
    /// Bytes that come before those of the program when a peer is asked for a connection by an address of InfiniBand: they have the
    /// addresses of IP.
    pub connect_data: Vec<u8>,
}

/// The way to a peer: `struct ibv_path_data`, one or more of them, as ibacm has said.
#[derive(Clone, PartialEq, Eq)]
pub struct Paths(Vec<u8>);

impl Paths {
    /// How many there are, for one direction or both.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // There is one, or none of these.
    pub fn len(&self) -> usize {
        self.0.len() / PATH_DATA
    }

    /// As C has them.
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

/// A list of librdmacm's, freed on drop.
struct List {
    cm: &'static RdmaCm,
    first: Option<NonNull<rdma_addrinfo>>,
}

impl List {
    /// # Safety
    /// `first` must be NULL, or a list that librdmacm has returned, and that nobody else frees.
    unsafe fn new(cm: &'static RdmaCm, first: *mut rdma_addrinfo) -> Self {
        List { cm, first: NonNull::new(first) }
    }

    fn copy(&self) -> Vec<AddressInfo> {
        let mut found = Vec::new();
        let mut next = self.first;
        while let Some(raw) = next {
            // SAFETY: an entry of the list, which is valid until it is freed on drop, as is what it points to.
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
            // SAFETY: the list is ours, and nothing points into it: what is returned was copied.
            unsafe { (self.cm.rdma_freeaddrinfo)(first.as_ptr()) }
        }
    }
}

impl AddressInfo {
    /// # Safety
    /// `raw` must be an entry of a list that librdmacm has returned and that was not freed.
    unsafe fn from_raw(raw: &rdma_addrinfo) -> Self {
        let address = |raw: *mut libc::sockaddr, len: libc::socklen_t| match raw.is_null() || len == 0 {
            true => None,
            // SAFETY: the caller's contract: an address has the length of its family.
            false => unsafe { Address::from_raw(raw) },
        };
        let name = |raw: *mut c_char| {
            // SAFETY: the caller's contract: a name is a string, or NULL.
            let name = NonNull::new(raw).map(|raw| unsafe { CStr::from_ptr(raw.as_ptr()) });
            name.map(CStr::to_string_lossy).map(Cow::into_owned)
        };
        let bytes = |raw: *mut std::ffi::c_void, len: usize| match raw.is_null() {
            true => Vec::new(),
            // SAFETY: the caller's contract: there are as many bytes as it says.
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
    /// Looks addresses up for this id: `rdma_resolve_addrinfo(3)`, of rdma-core 60. Then comes
    /// [`AddressInfoResolved`](super::EventKind::AddressInfoResolved), and [`Id::address_info`] has what was found. The name
    /// service is asked before this returns, and ids of the same channel wait that long; it is one look-up at a time.
    ///
    /// # Errors
    /// [`CmError::OlderLibrary`]; [`CmError::Call`], with `EBUSY` while another look-up is not done, or its outcome was not taken;
    /// those of [`AddressQuery::lookup`].
    #[doc(alias = "rdma_resolve_addrinfo")]
    pub fn resolve_address_info(&mut self, query: &AddressQuery) -> Result<()> {
        const CALL: &str = "rdma_resolve_addrinfo";
        let resolve = self.newer(CALL, self.channel().cm().rdma_resolve_addrinfo)?;
        query
            .with_raw(CALL, |node, service, hints| {
                let _turn = self.channel().turn();
                // SAFETY: the id is valid; the names are strings or NULL, and they and the hints, with what they point to, are
                // valid for the call.
                check_neg(|| unsafe { resolve(self.as_raw(), node, service, hints) })
            })?
            .map(drop)
            .map_err(|errno| not_found(CALL, NameError::of_errno(errno)))
    }

    /// Asks the subnet administrator of InfiniBand who has a service, by its name or number: `rdma_resolve_addrinfo(3)` with
    /// `RAI_SA`, of rdma-core 60. The id has a device. Then comes
    /// [`AddressInfoResolved`](super::EventKind::AddressInfoResolved) or
    /// [`AddressInfoError`](super::EventKind::AddressInfoError).
    ///
    /// # Errors
    /// As [`Id::resolve_address_info`]; [`CmError::Call`], as the kernel says.
    pub fn resolve_service(&mut self, service: &str) -> Result<()> {
        const CALL: &str = "rdma_resolve_addrinfo";
        let resolve = self.newer(CALL, self.channel().cm().rdma_resolve_addrinfo)?;
        let service = CString::new(service)
            .map_err(|_| CmError::NoAddress { reason: "a name has a zero byte within".to_owned() })?;
        let hints = rdma_addrinfo { ai_flags: RAI_SA as c_int, ..rdma_addrinfo::zeroed() };
        // SAFETY: the id is valid; so are the name and the hints for the duration of the call, and no host is named.
        self.call_on_device(CALL, |_, id| unsafe { resolve(id, null(), service.as_ptr(), &hints) })
    }

    /// What was looked up for this id, once: `rdma_query_addrinfo(3)`, of rdma-core 60.
    ///
    /// # Errors
    /// [`CmError::OlderLibrary`]; [`CmError::Call`], with `ENOENT` before
    /// [`AddressInfoResolved`](super::EventKind::AddressInfoResolved) has come, and after it was taken.
    #[doc(alias = "rdma_query_addrinfo")]
    pub fn address_info(&mut self) -> Result<Vec<AddressInfo>> {
        const CALL: &str = "rdma_query_addrinfo";
        let query = self.newer(CALL, self.channel().cm().rdma_query_addrinfo)?;
        let mut list = null_mut();
        // SAFETY: the id and the out pointer are valid.
        self.call(CALL, |_, id| unsafe { query(id, &mut list) })?;
        // SAFETY: it has given its list away.
        Ok(unsafe { List::new(self.channel().cm(), list) }.copy())
    }

    /// Writes an event of the program's own into the channel, which comes as [`User`](super::EventKind::User), to wake who waits
    /// there: `rdma_write_cm_event(3)`, of rdma-core 60.
    ///
    /// # Errors
    /// [`CmError::OlderLibrary`]; [`CmError::Call`], as when the kernel is older.
    #[doc(alias = "rdma_write_cm_event")]
    pub fn write_event(&self, status: i32, argument: u64) -> Result<()> {
        const CALL: &str = "rdma_write_cm_event";
        let write = self.newer(CALL, self.channel().cm().rdma_write_cm_event)?;
        // SAFETY: the id is valid.
        self.call(CALL, |_, id| unsafe { write(id, RDMA_CM_EVENT_USER, status, argument) })
    }

    fn newer<F>(&self, call: &'static str, function: Option<F>) -> Result<F> {
        function.ok_or(CmError::OlderLibrary { call, since: SINCE }.into())
    }
}

fn not_found(call: &'static str, error: NameError) -> crate::Error {
    match error {
        NameError::Errno(errno) => failed(call, errno),
        NameError::Code(code) => {
            // SAFETY: it returns a string that lasts, for any number.
            let text = unsafe { CStr::from_ptr(libc::gai_strerror(code)) };
            CmError::NoAddress { reason: text.to_string_lossy().into_owned() }.into()
        }
    }
}
