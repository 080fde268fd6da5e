//! Multicast groups, whose addresses a subnet manager or the network gives out.

use std::ptr::null_mut;

use rdma_sys::*;

use super::error::failed;
use super::{Address, Id};
use crate::{Errno, Result};

impl Id {
    /// Begins to join the multicast group of an IP address: `rdma_join_multicast(3)`. The id is of datagrams, and has a device: it
    /// was [bound](Id::bind) to an address of one, or has [resolved](Id::resolve_address) the group's. Then comes
    /// [`MulticastJoined`](super::EventKind::MulticastJoined), which says where the group is: attach the queue pair to its GID
    /// ([`QueuePair::attach_mcast`](crate::QueuePair::attach_mcast)), and send to it by an address handle of it.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` without a device or on an id that is not of datagrams.
    #[doc(alias = "rdma_join_multicast")]
    pub fn join_multicast(&mut self, group: impl Into<Address>) -> Result<()> {
        let group = group.into();
        self.require_datagrams("rdma_join_multicast")?;
        let mut raw = group.to_raw();
        // SAFETY: the id is valid, and so is the address for the duration of the call; there is no context.
        self.call_on_device("rdma_join_multicast", |cm, id| unsafe {
            (cm.rdma_join_multicast)(id, (&raw mut raw).cast(), null_mut())
        })?;
        self.joined(group);
        Ok(())
    }

    /// As [`Id::join_multicast`], only to send: nothing of the group has to come here. On InfiniBand the subnet manager must know
    /// of such members.
    ///
    /// # Errors
    /// As [`Id::join_multicast`].
    #[doc(alias = "rdma_join_multicast_ex")]
    pub fn join_multicast_to_send(&mut self, group: impl Into<Address>) -> Result<()> {
        let group = group.into();
        self.require_datagrams("rdma_join_multicast_ex")?;
        let mut raw = group.to_raw();
        let mut attr = rdma_cm_join_mc_attr_ex {
            comp_mask: (RDMA_CM_JOIN_MC_ATTR_ADDRESS.0 | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS.0),
            join_flags: RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER.0,
            addr: (&raw mut raw).cast(),
        };
        // SAFETY: the id is valid, and so are the attributes, with their address, for the duration of the call; there is no
        // context.
        self.call_on_device("rdma_join_multicast_ex", |cm, id| unsafe {
            (cm.rdma_join_multicast_ex)(id, &mut attr, null_mut())
        })?;
        self.joined(group);
        Ok(())
    }

    /// Leaves a group that it has joined, or was joining: `rdma_leave_multicast(3)`. Detach the queue pair before. Dropping the id
    /// leaves all.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EADDRNOTAVAIL` for a group that it has not joined.
    #[doc(alias = "rdma_leave_multicast")]
    pub fn leave_multicast(&mut self, group: impl Into<Address>) -> Result<()> {
        let group = group.into();
        let mut raw = group.to_raw();
        // SAFETY: the id is valid, and so is the address for the duration of the call. All events of the group that were read were
        // acknowledged in the same turn, so this waits for none.
        let left =
            self.call("rdma_leave_multicast", |cm, id| unsafe { (cm.rdma_leave_multicast)(id, (&raw mut raw).cast()) });
        self.left(group);
        left
    }

    fn require_datagrams(&self, call: &'static str) -> Result<()> {
        match self.is_datagrams() {
            true => Ok(()),
            false => Err(failed(call, Errno(libc::EINVAL))),
        }
    }
}
