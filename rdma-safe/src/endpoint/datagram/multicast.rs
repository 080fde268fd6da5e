//! Multicast groups of datagram endpoints.

use super::{DatagramEndpoint, Peer};
use crate::endpoint::EndpointMut;
use crate::{Error, Gid, QueuePairAddress, Result};

/// Destination queue pair number of multicast datagrams.
const EVERY_MEMBER: u32 = 0xff_ffff;

impl DatagramEndpoint {
    /// Joins a multicast group, so that the endpoint receives its datagrams: [`QueuePair::attach_mcast`].
    ///
    /// [`QueuePair::attach_mcast`] lists what else is necessary for datagrams of the group to reach this host. The
    /// membership lasts until [`DatagramEndpoint::detach_mcast`] or until the endpoint is dropped. Datagrams of the
    /// group use the same receives as all others. For a datagram of the group, [`Grh::dgid`](crate::address::Grh::dgid) of
    /// [`DatagramSender::grh`](crate::endpoint::DatagramSender::grh) is the group. The device drops datagrams
    /// whose queue key differs from the endpoint's, so members and senders must agree on a queue key.
    ///
    /// [`QueuePair::attach_mcast`]: crate::QueuePair::attach_mcast
    ///
    /// On InfiniBand `lid` is the LID of the group. RoCE ignores it; pass 0.
    ///
    /// ```no_run
    /// # use rdma_safe::{Buffer, DatagramEndpoint, Gid};
    /// # fn example(endpoint: &mut DatagramEndpoint, inbox: Buffer) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::net::{Ipv4Addr, UdpSocket};
    ///
    /// let group = Ipv4Addr::new(239, 1, 2, 3);
    /// // On RoCE the host joins with a socket, on the interface of the port. The socket has to stay open.
    /// let socket = UdpSocket::bind("0.0.0.0:0")?;
    /// let interface = endpoint.address().gid.ipv4().ok_or("the GID has no IPv4 address")?;
    /// socket.join_multicast_v4(&group, &interface)?;
    /// endpoint.attach_mcast(Gid::from(group), 0)?;
    /// endpoint.receive(inbox)?;
    ///
    /// // Senders need not be members.
    /// let all = endpoint.multicast_peer(Gid::from(group), 0)?;
    /// endpoint.send_inline(b"to all", &all)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Verb`], and the other errors of [`QueuePair::attach_mcast`] except that for the type of the queue pair.
    #[doc(alias = "ibv_attach_mcast")]
    pub fn attach_mcast(&mut self, group: Gid, lid: u16) -> Result<()> {
        self.endpoint.poster.live.qp.attach_mcast(group, lid)
    }

    /// Leaves a multicast group: [`QueuePair::detach_mcast`](crate::QueuePair::detach_mcast).
    ///
    /// Datagrams that have arrived are still delivered.
    ///
    /// # Errors
    /// Those of [`QueuePair::detach_mcast`](crate::QueuePair::detach_mcast), except that for the type of the queue
    /// pair.
    #[doc(alias = "ibv_detach_mcast")]
    pub fn detach_mcast(&mut self, group: Gid, lid: u16) -> Result<()> {
        self.endpoint.poster.live.qp.detach_mcast(group, lid)
    }

    /// A peer that stands for all members of a multicast group that have this endpoint's queue key.
    ///
    /// `lid` is as in [`DatagramEndpoint::attach_mcast`].
    ///
    /// # Errors
    /// [`Error::NotMulticast`]; the errors of [`DatagramEndpoint::peer`].
    pub fn multicast_peer(&self, group: Gid, lid: u16) -> Result<Peer> {
        if !group.is_multicast() {
            return Err(Error::NotMulticast { gid: group });
        }
        self.peer(&QueuePairAddress { qp_num: EVERY_MEMBER, gid: group, lid, ..self.address() })
    }
}

impl EndpointMut<'_> {
    /// Joins a multicast group: [`DatagramEndpoint::attach_mcast`].
    ///
    /// # Errors
    /// Like [`DatagramEndpoint::attach_mcast`]; [`Error::WrongType`] for a connection.
    #[doc(alias = "ibv_attach_mcast")]
    pub fn attach_mcast(&mut self, group: Gid, lid: u16) -> Result<()> {
        self.poster.live.qp.attach_mcast(group, lid)
    }

    /// Leaves a multicast group: [`DatagramEndpoint::detach_mcast`].
    ///
    /// # Errors
    /// Like [`DatagramEndpoint::detach_mcast`]; [`Error::WrongType`] for a connection.
    #[doc(alias = "ibv_detach_mcast")]
    pub fn detach_mcast(&mut self, group: Gid, lid: u16) -> Result<()> {
        self.poster.live.qp.detach_mcast(group, lid)
    }
}
