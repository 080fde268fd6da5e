//! The multicast groups of sockets.

use rdma_safe::{EndpointKey, Error, Gid, Result};

use super::queue::Queue;
use crate::Sharing;

impl<S: Sharing> Queue<S> {
    /// Delivers the datagrams of a group. Each call needs one of [`Queue::leave_group`].
    pub(crate) fn join_group(&self, key: EndpointKey, gid: Gid, lid: u16) -> Result<()> {
        S::with(&self.state, |state| {
            let (set, member) = state.with_set(key);
            let (Some(member), Some(mut endpoint)) = (member, set.endpoint(key)) else {
                return Err(Error::NoSuchEndpoint);
            };
            // Attaching twice has no effect.
            endpoint.attach_mcast(gid, lid)?;
            member.groups.push((gid, lid));
            Ok(())
        })
    }

    pub(crate) fn leave_group(&self, key: EndpointKey, gid: Gid, lid: u16) {
        S::with(&self.state, |state| {
            let (set, member) = state.with_set(key);
            let (Some(member), Some(mut endpoint)) = (member, set.endpoint(key)) else { return };
            if let Some(place) = member.groups.iter().position(|group| *group == (gid, lid)) {
                member.groups.swap_remove(place);
            }
            if !member.groups.contains(&(gid, lid)) {
                // If this fails, the device is gone.
                let _ = endpoint.detach_mcast(gid, lid);
            }
        });
    }
}
