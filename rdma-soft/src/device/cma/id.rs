//! Ids and their options.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::finding::Found;
use super::ports::Binding;
use crate::cm::{ConnectionId, ListenerId};

/// State of an id: `enum rdma_cm_state` of Linux.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IdState {
    Idle,
    Bound,
    AddressResolved,
    RouteResolved,
    /// A lookup in the directory of listeners precedes the request.
    Finding,
    /// A REQ or SIDR_REQ was sent or received.
    Connect,
    Listening,
    /// The device was removed.
    Removed,
}

/// An id.
pub(crate) struct Id {
    /// Port space, as in `enum rdma_port_space`.
    pub(crate) space: u16,
    /// Channel that its events go to.
    pub(crate) channel: u32,
    /// Address of its C object. For the id of a request, 0 until the program reads the event.
    pub(crate) object: usize,
    pub(crate) state: IdState,
    pub(crate) source: SocketAddr,
    pub(crate) destination: Option<SocketAddr>,
    /// First packet sequence number that the peer sends.
    pub(crate) psn: u32,
    /// The link of the device, once it is known.
    pub(crate) link: Option<usize>,
    /// The listener's device, if it was found on this host with the route.
    pub(super) found: Option<Found>,
    /// GID of the peer's device, once it is known.
    pub(crate) remote_gid: Option<[u8; 16]>,
    /// The connection or the lookup.
    pub(crate) connection: Option<ConnectionId>,
    pub(crate) listener: Option<ListenerId>,
    /// The listening id of a request that the program has not read.
    pub(super) listener_of: Option<u32>,
    pub(crate) binding: Option<Binding>,
    pub(crate) options: Options,
    /// Whether events of the connection are reported. For a request, false until the program accepts it.
    pub(crate) is_reported: bool,
    pub(crate) memberships: Vec<super::multicast::Membership>,
}

/// Options of an id: `rdma_set_option(3)`, and ECE.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Options {
    pub(crate) tos: u8,
    pub(crate) ack_timeout: Option<u8>,
    pub(crate) reuses_address: bool,
    pub(crate) is_ipv6_only: bool,
    /// Vendor id and options of enhanced connection establishment that this side offers.
    pub(crate) local_ece: (u32, u32),
    /// Vendor id and options that the peer offers.
    pub(crate) remote_ece: (u32, u32),
    /// Q_Key of datagrams, 0 for the default one.
    pub(crate) qkey: u32,
}

impl Id {
    pub(crate) fn new(space: u16, channel: u32, object: usize) -> Id {
        Id {
            space,
            channel,
            object,
            state: IdState::Idle,
            source: SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            destination: None,
            psn: 0,
            link: None,
            found: None,
            remote_gid: None,
            connection: None,
            listener: None,
            listener_of: None,
            binding: None,
            options: Options::default(),
            is_reported: true,
            memberships: Vec::new(),
        }
    }

    /// Whether the id is for datagrams.
    pub(crate) fn is_datagram(&self) -> bool {
        u32::from(self.space) == rdma_sys::RDMA_PS_UDP.0 || u32::from(self.space) == rdma_sys::RDMA_PS_IPOIB.0
    }

    /// Whether the route to the peer is known.
    pub(crate) fn has_route(&self) -> bool {
        matches!(self.state, IdState::RouteResolved | IdState::Finding | IdState::Connect)
    }

    /// Q_Key of datagrams of this id.
    pub(crate) fn qkey(&self) -> u32 {
        if self.options.qkey == 0 { rdma_sys::RDMA_UDP_QKEY } else { self.options.qkey }
    }
}

/// The unspecified address of the same family.
pub(super) fn unspecified(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}
