//! Multicast groups.

use std::fmt;

use rdma_safe::EndpointKey;
use rdma_safe::cm::{Address, GroupMembership};

use super::Peer;
use crate::driver::queue::Queue;
use crate::{Result, Sharing, Threads};

/// Membership of a socket in a multicast group. Made by [`Datagrams::join`](crate::Datagrams::join).
///
/// Dropping it leaves the group, unless the socket has joined the group again.
///
/// A group is also a destination of [`Datagrams::send_to`](crate::Datagrams::send_to), for all sockets of the driver on this
/// device.
pub struct Group<S: Sharing = Threads> {
    peer: Peer,
    address: Address,
    queue: S::Rc<Queue<S>>,
    key: EndpointKey,
    membership: S::Cell<GroupMembership>,
}

impl<S: Sharing> Group<S> {
    pub(super) fn attach(queue: &S::Rc<Queue<S>>, key: EndpointKey, membership: GroupMembership) -> Result<Self> {
        let (gid, lid) = (membership.gid(), membership.lid());
        queue.join_group(key, gid, lid)?;
        Ok(Group {
            peer: membership.peer.clone().into(),
            address: membership.group(),
            queue: queue.clone(),
            key,
            membership: S::cell(membership),
        })
    }

    /// The address of the group.
    #[must_use]
    pub fn address(&self) -> Address {
        self.address
    }

    /// Whether the membership still exists. It is lost if the subnet manager drops it or the device is removed.
    ///
    /// # Errors
    /// [`Error::Rdma`](crate::Error::Rdma).
    pub fn is_member(&self) -> Result<bool> {
        Ok(S::with(&self.membership, GroupMembership::is_member)?)
    }
}

impl<S: Sharing> AsRef<Peer> for Group<S> {
    fn as_ref(&self) -> &Peer {
        &self.peer
    }
}

impl<S: Sharing> Drop for Group<S> {
    fn drop(&mut self) {
        if self.queue.events.is_inherited() {
            return;
        }
        let (gid, lid) = S::with(&self.membership, |membership| (membership.gid(), membership.lid()));
        self.queue.leave_group(self.key, gid, lid);
    }
}

impl<S: Sharing> fmt::Debug for Group<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("address", &self.address).finish_non_exhaustive()
    }
}
