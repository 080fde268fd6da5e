//! Destinations and senders of datagrams.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::address::{AddressVector, Arrival, Grh};
use crate::{AddressHandle, Gid, ProtectionDomain, Result, UdTarget, WcFlags};

/// A destination of datagrams: the address of a port, and a queue pair there.
///
/// Made by [`DatagramEndpoint::peer`](crate::DatagramEndpoint::peer), [`peer_of`](crate::DatagramEndpoint::peer_of),
/// [`peer_at`](crate::DatagramEndpoint::peer_at) and [`multicast_peer`](crate::DatagramEndpoint::multicast_peer).
/// Clones share the address handle. Work in flight also keeps it alive.
#[derive(Clone)]
pub struct Peer {
    handle: Arc<AddressHandle>,
    qp_num: u32,
    qkey: u32,
    gid: Option<Gid>,
    lid: u16,
}

impl Peer {
    pub(crate) fn new(pd: &ProtectionDomain, address: &AddressVector, qp_num: u32, qkey: u32) -> Result<Self> {
        let handle = Arc::new(pd.address_handle(address)?);
        Ok(Peer { handle, qp_num, qkey, gid: address.route.map(|route| route.dgid), lid: address.dlid })
    }

    /// GID of the peer's port, if the path has a global route; always present on RoCE.
    #[must_use]
    pub fn gid(&self) -> Option<Gid> {
        self.gid
    }

    /// LID of the peer's port; meaningless on RoCE.
    #[must_use]
    pub fn lid(&self) -> u16 {
        self.lid
    }

    /// Number of the peer's queue pair.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        self.qp_num
    }

    /// Sets the queue key of the peer; by default it equals the endpoint's key.
    #[must_use]
    pub fn with_qkey(self, qkey: u32) -> Self {
        Peer { qkey, ..self }
    }

    /// Another queue pair behind the same port.
    #[must_use]
    pub fn with_qp_num(self, qp_num: u32) -> Self {
        Peer { qp_num, ..self }
    }

    #[inline]
    pub(in crate::endpoint) fn handle(&self) -> &Arc<AddressHandle> {
        &self.handle
    }

    #[inline]
    pub(in crate::endpoint) fn is_of(&self, pd: &ProtectionDomain) -> bool {
        self.handle.pd().is_same(pd)
    }

    #[inline]
    pub(in crate::endpoint) fn target(&self) -> UdTarget<'_> {
        UdTarget::new(&self.handle, self.qp_num, self.qkey)
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer")
            .field("qp_num", &format_args!("{:#08x}", self.qp_num))
            .field("qkey", &format_args!("{:#x}", self.qkey))
            .finish_non_exhaustive()
    }
}

/// A port of a device of this host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::endpoint) struct HostPort {
    /// Address of the C object of the device, which all its contexts share. It can be used again after the last of them.
    pub(super) device: usize,
    pub(super) port: u8,
}

/// The sender of a datagram.
///
/// Two senders are equal if they are the same queue pair of the same port, heard at the same port of this host. On InfiniBand,
/// datagrams of a multicast group have a global route header, and others have none. Their peer then counts as two senders.
#[derive(Clone, Copy)]
pub struct DatagramSender {
    qp_num: u32,
    pub(super) heard_at: HostPort,
    pub(super) route: Arrival,
    grh: Option<Grh>,
}

impl DatagramSender {
    pub(super) fn new(qp_num: u32, heard_at: HostPort, route: Arrival, grh: Grh) -> Self {
        DatagramSender { qp_num, heard_at, route, grh: route.flags.contains(WcFlags::GRH).then_some(grh) }
    }

    /// Number of the sender's queue pair.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        self.qp_num
    }

    /// The global route header of the datagram; always present on RoCE, and on InfiniBand for datagrams from another
    /// subnet.
    #[must_use]
    pub fn grh(&self) -> Option<&Grh> {
        self.grh.as_ref()
    }

    /// GID of the sender's port, if the datagram has a global route header.
    #[must_use]
    pub fn gid(&self) -> Option<Gid> {
        self.grh.as_ref().map(Grh::sgid)
    }

    /// LID of the sender's port; meaningless on RoCE.
    #[must_use]
    pub fn lid(&self) -> u16 {
        self.route.slid as u16
    }

    fn identity(&self) -> (u32, HostPort, Option<Gid>, u16) {
        (self.qp_num, self.heard_at, self.gid(), self.lid())
    }
}

impl PartialEq for DatagramSender {
    fn eq(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for DatagramSender {}

impl Hash for DatagramSender {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
    }
}

impl fmt::Debug for DatagramSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatagramSender")
            .field("qp_num", &format_args!("{:#08x}", self.qp_num))
            .field("gid", &self.gid())
            .field("lid", &self.lid())
            .finish_non_exhaustive()
    }
}
