//! Whom datagrams go to, and whom they come from.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::{AddressHandle, Gid, Grh, ProtectionDomain, UdTarget, WcFlags, WorkCompletion};

/// Where a [`DatagramEndpoint`](crate::DatagramEndpoint) sends to: the way to a port, and a queue pair there. Made by
/// [`DatagramEndpoint::peer`](crate::DatagramEndpoint::peer), [`peer_of`](crate::DatagramEndpoint::peer_of),
/// [`peer_at`](crate::DatagramEndpoint::peer_at) and [`multicast_peer`](crate::DatagramEndpoint::multicast_peer).
///
/// Clones share the address handle, which work in flight keeps, too.
#[derive(Clone)]
pub struct Peer {
    handle: Arc<AddressHandle>,
    qp_num: u32,
    qkey: u32,
}

impl Peer {
    pub(super) fn new(handle: AddressHandle, qp_num: u32, qkey: u32) -> Self {
        Peer { handle: Arc::new(handle), qp_num, qkey }
    }

    /// Number of its queue pair.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        self.qp_num
    }

    /// The same queue pair, which has this queue key; the endpoint's own unless set.
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

/// Who has sent a datagram. Two are equal if they are the same queue pair of the same port.
#[derive(Clone, Copy)]
pub struct Sender {
    qp_num: u32,
    pub(super) route: Arrival,
    grh: Option<Grh>,
}

/// What a completion says of the way that a datagram has come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) slid: u32,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
    pub(crate) flags: WcFlags,
}

impl Arrival {
    /// `None` if the completion queue was created without the fields.
    pub(crate) fn of(completion: &WorkCompletion<'_>) -> Option<Self> {
        Some(Arrival {
            slid: completion.slid()?,
            sl: completion.sl()?,
            dlid_path_bits: completion.dlid_path_bits()?,
            flags: completion.flags(),
        })
    }
}

impl Sender {
    pub(super) fn new(qp_num: u32, route: Arrival, grh: Grh) -> Self {
        Sender { qp_num, route, grh: route.flags.contains(WcFlags::GRH).then_some(grh) }
    }

    /// Number of its queue pair.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        self.qp_num
    }

    /// The header that came before the payload; always there on RoCE, on InfiniBand for what comes from another subnet.
    #[must_use]
    pub fn grh(&self) -> Option<&Grh> {
        self.grh.as_ref()
    }

    /// GID of its port, where the header says so.
    #[must_use]
    pub fn gid(&self) -> Option<Gid> {
        self.grh.as_ref().map(Grh::sgid)
    }

    /// LID of its port; of no meaning on RoCE.
    #[must_use]
    pub fn lid(&self) -> u16 {
        self.route.slid as u16
    }

    fn identity(&self) -> (u32, Option<Gid>, u16) {
        (self.qp_num, self.gid(), self.lid())
    }
}

impl PartialEq for Sender {
    fn eq(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for Sender {}

impl Hash for Sender {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
    }
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender")
            .field("qp_num", &format_args!("{:#08x}", self.qp_num))
            .field("gid", &self.gid())
            .field("lid", &self.lid())
            .finish_non_exhaustive()
    }
}
