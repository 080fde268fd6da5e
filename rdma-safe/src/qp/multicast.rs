//! Multicast group membership of queue pairs.

use rdma_sys::*;

use super::QueuePair;
use crate::errno::check;
use crate::error::Verb;
use crate::{Context, Error, Gid, QueuePairType, Result};

const FEATURE: &str = "multicast";

/// The groups that a queue pair is attached to. It must leave them before it can be destroyed.
#[derive(Default)]
pub(super) struct Groups(Vec<(Gid, u16)>);

impl Groups {
    /// Detaches the queue pair from all groups. Errors are ignored: destroying the queue pair then fails and reports
    /// them.
    ///
    /// # Safety
    /// `qp` must be valid, and must be the queue pair that these groups belong to.
    pub(super) unsafe fn leave(&mut self, context: &Context, qp: *mut ibv_qp) {
        for (gid, lid) in self.0.drain(..) {
            // SAFETY: the caller's contract; the GID is valid during the call.
            unsafe { (context.verbs().ibv_detach_mcast)(qp, &gid.to_raw(), lid) };
        }
    }
}

impl QueuePair {
    /// Attaches a UD queue pair to a multicast group: `ibv_attach_mcast(3)`.
    ///
    /// On InfiniBand `lid` is the group's LID; on RoCE it is ignored and can be 0. To send to the group, use
    /// [`UdTarget::multicast`](crate::UdTarget::multicast) with an address handle of `gid`. A datagram reaches each
    /// member that has a receive posted and the datagram's queue key. Attaching a queue pair again to one of its groups
    /// does nothing. A queue pair that is dropped or destroyed leaves its groups first.
    ///
    /// This only affects datagrams that have reached the port. The network must deliver them there. On InfiniBand the
    /// port must join the group at the subnet manager. Behind an Ethernet switch that filters multicast, the host must
    /// join it, for example with a UDP socket. The host must also join to receive its own datagrams on SoftRoCE, which
    /// loops them back only if the host is in the group.
    ///
    /// ```no_run
    /// # use rdma_safe::*;
    /// # fn example(pd: &ProtectionDomain, member: &mut QueuePair, sender: &mut QueuePair)
    /// #     -> std::result::Result<(), Box<dyn std::error::Error>> {
    /// use std::net::{Ipv4Addr, UdpSocket};
    ///
    /// use rdma_safe::address::AddressVector;
    ///
    /// const QKEY: u32 = 0x1234; // of `QueuePair::init_datagrams` of each member
    /// let group = Ipv4Addr::new(239, 1, 2, 3);
    /// let gid = Gid::from(group.to_ipv6_mapped());
    ///
    /// // On RoCE, join with a UDP socket and keep it open. Use the address of the port's interface.
    /// let socket = UdpSocket::bind("0.0.0.0:0")?;
    /// socket.join_multicast_v4(&group, &"192.0.2.7".parse()?)?;
    /// member.attach_mcast(gid, 0)?; // and post receives, with `Grh::LEN` bytes before the payload
    ///
    /// // To send, use an address handle of the group. The sender need not be a member.
    /// let ours = pd.context().recommended_gid(1)?;
    /// let handle = pd.address_handle(&AddressVector::from_gid(1, gid, u8::try_from(ours.index)?))?;
    /// let mut batch = sender.send_batch()?;
    /// // SAFETY: the bytes are copied in the call; `handle` stays until the completion was taken.
    /// unsafe { batch.send_to(WorkRequest::new(1).signaled(), UdTarget::multicast(&handle, QKEY), Inline(b"to all"))? };
    /// batch.post()?;
    /// // … take its completion
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::WrongType`] on queue pairs of other types than UD; [`Error::NotMulticast`]; [`Error::Unsupported`] if
    /// [`DeviceAttributes::max_mcast_grp`](crate::device::DeviceAttributes::max_mcast_grp) is 0; [`Error::Multicast`].
    #[doc(alias = "ibv_attach_mcast")]
    pub fn attach_mcast(&mut self, gid: Gid, lid: u16) -> Result<()> {
        self.check_group(gid)?;
        if self.context().attributes().max_mcast_grp() == 0 {
            return Err(self.context().unsupported(FEATURE));
        }
        let mut extras = self.core().extras();
        let groups = &mut extras.get_or_insert_default().groups.0;
        if groups.contains(&(gid, lid)) {
            return Ok(());
        }
        // SAFETY: the queue pair is valid, and the GID is valid during the call.
        check(unsafe { (self.context().verbs().ibv_attach_mcast)(self.as_raw(), &gid.to_raw(), lid) })
            .map_err(|errno| self.group_error(Verb::AttachMcast, gid, lid, errno))?;
        groups.push((gid, lid));
        Ok(())
    }

    /// Detaches the queue pair from a multicast group: `ibv_detach_mcast(3)`. `lid` must be that of
    /// [`QueuePair::attach_mcast`].
    ///
    /// # Errors
    /// Those of [`QueuePair::attach_mcast`]; [`Error::Multicast`] if it is not in the group.
    #[doc(alias = "ibv_detach_mcast")]
    pub fn detach_mcast(&mut self, gid: Gid, lid: u16) -> Result<()> {
        self.check_group(gid)?;
        let mut extras = self.core().extras();
        let groups = &mut extras.get_or_insert_default().groups.0;
        // SAFETY: the queue pair is valid, and the GID is valid during the call.
        check(unsafe { (self.context().verbs().ibv_detach_mcast)(self.as_raw(), &gid.to_raw(), lid) })
            .map_err(|errno| self.group_error(Verb::DetachMcast, gid, lid, errno))?;
        groups.retain(|group| *group != (gid, lid));
        Ok(())
    }

    fn check_group(&self, gid: Gid) -> Result<()> {
        match self.qp_type() {
            QueuePairType::UD if gid.is_multicast() => Ok(()),
            QueuePairType::UD => Err(Error::NotMulticast { gid }),
            qp_type => {
                let advice = "create one with QueuePairBuilder::qp_type(QueuePairType::UD)";
                Err(Error::WrongType { operation: "multicast", qp_type, advice })
            }
        }
    }

    fn group_error(&self, verb: Verb, gid: Gid, lid: u16, errno: crate::Errno) -> Error {
        match errno.is_unsupported() {
            true => self.context().unsupported(FEATURE),
            false => Error::Multicast { verb, gid, lid, errno },
        }
    }
}
