//! Multicast groups of ids.

use std::ptr::null_mut;

use rdma_sys::*;

use super::channel::EndedIds;
use super::error::failed;
use super::{Address, Id};
use crate::errno::check_neg;
use crate::error::Verb;
use crate::{Errno, Result};

impl Id {
    /// Starts to join the multicast group of an IP address: `rdma_join_multicast(3)`.
    ///
    /// The id must be for datagrams and have a device: it was [bound](Id::bind) to an address of one, or has
    /// [resolved](Id::resolve_address) the group's address. [`MulticastJoined`](super::EventKind::MulticastJoined)
    /// follows, with the address of the group. Attach the queue pair to its GID
    /// ([`QueuePair::attach_mcast`](crate::QueuePair::attach_mcast)), and create an address handle to send to it.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` without a device or on an id that is not for datagrams.
    #[doc(alias = "rdma_join_multicast")]
    pub fn join_multicast(&mut self, group: impl Into<Address>) -> Result<()> {
        let group = group.into();
        self.require_datagrams(Verb::RdmaJoinMulticast)?;
        let mut raw = group.to_raw();
        // SAFETY: the id is valid, and so is the address during the call. There is no context.
        self.call_on_device(Verb::RdmaJoinMulticast, |cm, id| unsafe {
            (cm.rdma_join_multicast)(id, (&raw mut raw).cast(), null_mut())
        })?;
        self.add_group(group);
        Ok(())
    }

    /// Like [`Id::join_multicast`], but only to send: the port receives no datagrams of the group.
    ///
    /// On InfiniBand the subnet manager must support send-only members.
    ///
    /// # Errors
    /// Like [`Id::join_multicast`].
    #[doc(alias = "rdma_join_multicast_ex")]
    pub fn join_multicast_send_only(&mut self, group: impl Into<Address>) -> Result<()> {
        let group = group.into();
        self.require_datagrams(Verb::RdmaJoinMulticastEx)?;
        let mut raw = group.to_raw();
        let mut attr = rdma_cm_join_mc_attr_ex {
            comp_mask: (RDMA_CM_JOIN_MC_ATTR_ADDRESS.0 | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS.0),
            join_flags: RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER.0,
            addr: (&raw mut raw).cast(),
        };
        // SAFETY: the id is valid, and so are the attributes with their address during the call. There is no context.
        self.call_on_device(Verb::RdmaJoinMulticastEx, |cm, id| unsafe {
            (cm.rdma_join_multicast_ex)(id, &mut attr, null_mut())
        })?;
        self.add_group(group);
        Ok(())
    }

    /// Leaves a group that it has joined or is joining: `rdma_leave_multicast(3)`.
    ///
    /// Detach the queue pair first. Dropping the id leaves all groups.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EADDRNOTAVAIL` for a group that the id has not joined. After any other
    /// error, such as `ENXIO` because the device was removed, drop the id. Until then its channel may return
    /// [`CmError::FailedLeave`](super::CmError::FailedLeave) and no events.
    #[doc(alias = "rdma_leave_multicast")]
    pub fn leave_multicast(&mut self, group: impl Into<Address>) -> Result<()> {
        let group = group.into();
        let mut ended = self.channel().lock();
        ended.check(self.id(), Verb::RdmaLeaveMulticast)?;
        let left = self.leave(&mut ended, group);
        drop(ended);
        self.remove_group(group);
        left.map_err(|errno| failed(Verb::RdmaLeaveMulticast, errno))
    }

    /// Leaves a group. `ended` shows that the channel is locked.
    ///
    /// librdmacm frees its state of the group also if the kernel refuses. Then unread events of the group still have the
    /// address of that state, and reading them would use it.
    pub(super) fn leave(&self, ended: &mut EndedIds, group: Address) -> Result<(), Errno> {
        let mut raw = group.to_raw();
        // SAFETY: the id is valid, and so is the address during the call. All events of the group that were read were
        // acknowledged under the same lock, so this call waits for none.
        let left =
            check_neg(|| unsafe { (self.channel().cm().rdma_leave_multicast)(self.as_raw(), (&raw mut raw).cast()) });
        match left {
            Ok(_) => Ok(()),
            Err(errno @ Errno(libc::EADDRNOTAVAIL)) => Err(errno),
            Err(errno) => {
                ended.add_failed_leave(self.id());
                Err(errno)
            }
        }
    }

    fn require_datagrams(&self, verb: Verb) -> Result<()> {
        match self.is_datagrams() {
            true => Ok(()),
            false => Err(failed(verb, Errno(libc::EINVAL))),
        }
    }
}
