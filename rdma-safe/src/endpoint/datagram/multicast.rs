//! Datagrams to and from multicast groups.

use super::{DatagramEndpoint, Peer};
use crate::{Error, Gid, QueuePairAddress, Result};

/// What datagrams to a group have in place of the number of a queue pair.
const EVERY_MEMBER: u32 = 0xff_ffff;

impl DatagramEndpoint {
    /// Lets it receive what is sent to a multicast group, from now on and until it [leaves](DatagramEndpoint::detach_mcast) or
    /// ends: [`QueuePair::attach_mcast`](crate::QueuePair::attach_mcast), which says what else it takes for datagrams of the group
    /// to come to this host. They go into its receives beside those that are sent to it alone; the header says which is which:
    /// in what came to the group, [`Grh::dgid`](crate::Grh::dgid) of [`Sender::grh`](crate::Sender::grh) is the group. Datagrams
    /// that have another queue key than the endpoint are dropped here, too: members and senders agree on one.
    ///
    /// On InfiniBand `lid` is the group's LID; on RoCE it means nothing, and 0 will do.
    ///
    /// ```no_run
    /// # use rdma_safe::{Buffer, DatagramEndpoint, Gid};
    /// # fn example(endpoint: &mut DatagramEndpoint, inbox: Buffer) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::net::{Ipv4Addr, UdpSocket};
    ///
    /// let group = Ipv4Addr::new(239, 1, 2, 3);
    /// // On RoCE the host joins by a socket, which stays open. The interface is that of the port, which has its address.
    /// let socket = UdpSocket::bind("0.0.0.0:0")?;
    /// let interface = endpoint.address().gid.ipv4().ok_or("a GID of IPv4 is what this takes")?;
    /// socket.join_multicast_v4(&group, &interface)?;
    /// endpoint.attach_mcast(Gid::from(group), 0)?;
    /// endpoint.receive(inbox)?;
    ///
    /// // To send one need not be a member.
    /// let all = endpoint.multicast_peer(Gid::from(group), 0)?;
    /// endpoint.send_inline(b"to all", &all)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As there, but for the type.
    #[doc(alias = "ibv_attach_mcast")]
    pub fn attach_mcast(&mut self, group: Gid, lid: u16) -> Result<()> {
        self.endpoint.poster.live.qp.attach_mcast(group, lid)
    }

    /// Takes it out of a multicast group: [`QueuePair::detach_mcast`](crate::QueuePair::detach_mcast). What has arrived stays.
    ///
    /// # Errors
    /// As there, but for the type.
    #[doc(alias = "ibv_detach_mcast")]
    pub fn detach_mcast(&mut self, group: Gid, lid: u16) -> Result<()> {
        self.endpoint.poster.live.qp.detach_mcast(group, lid)
    }

    /// All members of a multicast group that have the same queue key, to send to them. `lid` is as for
    /// [`DatagramEndpoint::attach_mcast`].
    ///
    /// # Errors
    /// [`Error::NotMulticast`]; those of [`DatagramEndpoint::peer`].
    pub fn multicast_peer(&self, group: Gid, lid: u16) -> Result<Peer> {
        if !group.is_multicast() {
            return Err(Error::NotMulticast { gid: group });
        }
        self.peer(&QueuePairAddress { qp_num: EVERY_MEMBER, gid: group, lid, ..self.address() })
    }
}
