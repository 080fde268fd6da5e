//! Multicast groups of ids.

use std::net::SocketAddr;

use rdma_sys::*;

use super::attributes::{address_vector, may_join};
use super::event::{CmEvent, Datagram, Parameters};
use crate::device::state::MULTICAST_QP;
use crate::device::{Core, gid};
use crate::net;

/// Membership of an id in a multicast group.
pub(crate) struct Membership {
    number: u32,
    /// Membership of the host, at the interface of the device. The system refuses groups of another address family.
    _joined: Option<net::Membership>,
}

impl Core {
    /// Joins a multicast group: `rdma_join_multicast(3)`. Returns the number of the membership. The event follows at once.
    ///
    /// A member that receives joins the group at the interface of the device, so that switches forward its packets (IGMP). Only a
    /// queue pair that is attached to the group gets them.
    ///
    /// # Errors
    /// `EINVAL` for an id that is not for datagrams, not bound, or not at a device, and for an address that is no group. `ENODEV`
    /// if the address of the device has another family.
    pub(crate) fn cm_join(&mut self, number: u32, group: SocketAddr, receives: bool) -> Result<u32, i32> {
        let Core { state, links, .. } = self;
        let cma = &mut state.cma;
        let id = cma.id_mut(number)?;
        if !may_join(id) || !group.ip().is_multicast() {
            return Err(libc::EINVAL);
        }
        let link = id.link.unwrap_or(0);
        if links.get(link).is_none_or(|link| link.socket.address().is_ipv4() != group.is_ipv4()) {
            return Err(libc::ENODEV);
        }
        let membership = id.memberships.iter().map(|joined| joined.number).max().unwrap_or(0) + 1;
        let interface = links.get(link).filter(|_| receives);
        let joined = interface.and_then(|link| net::Membership::join(&link.socket, group.ip()).ok());
        id.memberships.push(Membership { number: membership, _joined: joined });
        let parameters = Parameters::Datagram(Box::new(Datagram {
            private_data: Vec::new(),
            ah_attr: address_vector(gid(group.ip()), link, id.options.tos),
            qp_num: MULTICAST_QP,
            qkey: id.qkey(),
            membership: Some(membership),
        }));
        cma.push(CmEvent { id: number, listener: None, kind: RDMA_CM_EVENT_MULTICAST_JOIN, status: 0, parameters });
        Ok(membership)
    }

    /// Leaves a multicast group, and removes its event: `rdma_leave_multicast(3)`.
    ///
    /// # Errors
    /// `EADDRNOTAVAIL` if the id is not a member.
    pub(crate) fn cm_leave(&mut self, number: u32, membership: u32) -> Result<(), i32> {
        let cma = &mut self.state.cma;
        let id = cma.id_mut(number)?;
        let at = id.memberships.iter().position(|joined| joined.number == membership).ok_or(libc::EADDRNOTAVAIL)?;
        id.memberships.remove(at);
        cma.remove_events(number, |event| match &event.parameters {
            Parameters::Datagram(datagram) => datagram.membership == Some(membership),
            _ => false,
        });
        Ok(())
    }
}
