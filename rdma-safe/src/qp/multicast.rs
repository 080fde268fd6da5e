//! Multicast groups that a queue pair is in.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rdma_sys::*;

use super::QueuePair;
use crate::errno::check;
use crate::{Context, Error, Gid, QueuePairType, Result};

const FEATURE: &str = "multicast";

/// The groups that a queue pair was attached to, which it has to leave before it can be destroyed.
#[derive(Default)]
pub(super) struct Groups(Mutex<Vec<(Gid, u16)>>);

impl Groups {
    fn lock(&self) -> MutexGuard<'_, Vec<(Gid, u16)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the queue pair out of all of them. One that it cannot leave is told by its destruction, which fails.
    ///
    /// # Safety
    /// `qp` must be the queue pair, and be valid.
    pub(super) unsafe fn leave(&self, context: &Context, qp: *mut ibv_qp) {
        for (gid, lid) in self.lock().drain(..) {
            // SAFETY: the caller's contract; the GID is for the duration of the call.
            unsafe { (context.verbs().ibv_detach_mcast)(qp, &gid.to_raw(), lid) };
        }
    }
}

impl QueuePair {
    /// Lets a UD queue pair receive what is sent to a multicast group: `ibv_attach_mcast(3)`.
    ///
    /// On InfiniBand `lid` is the group's LID; on RoCE it means nothing, and 0 will do. Datagrams for the group are sent to
    /// [`UdTarget::multicast`](crate::UdTarget::multicast) over an address handle of `gid`, and reach each member that has a
    /// receive posted and the queue key that they carry. To attach a queue pair to a group that it is in already does nothing.
    /// A queue pair that is dropped or destroyed leaves its groups first.
    ///
    /// This is what the device does with datagrams that come to its port. That they come is up to the network: on InfiniBand the
    /// port has to join the group at the subnet manager, and behind an Ethernet switch that filters multicast the host has to, for
    /// which a UDP socket that joins the address serves. So it does for what this host sends itself, which on SoftRoCE comes
    /// back only if the host is in the group.
    ///
    /// ```no_run
    /// # use rdma_safe::*;
    /// # fn example(pd: &ProtectionDomain, member: &mut QueuePair, sender: &mut QueuePair)
    /// #     -> std::result::Result<(), Box<dyn std::error::Error>> {
    /// use std::net::{Ipv4Addr, UdpSocket};
    ///
    /// const QKEY: u32 = 0x1234; // of `QueuePair::init_datagrams` of each member
    /// let group = Ipv4Addr::new(239, 1, 2, 3);
    /// let gid = Gid::from(group.to_ipv6_mapped());
    ///
    /// // On RoCE the host joins by a socket, which stays open. The interface is that of the port.
    /// let socket = UdpSocket::bind("0.0.0.0:0")?;
    /// socket.join_multicast_v4(&group, &"192.0.2.7".parse()?)?;
    /// member.attach_mcast(gid, 0)?; // and post receives, with `Grh::LEN` bytes before the payload
    ///
    /// // To send: an address handle of the group. The sender need not be a member.
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
    /// [`Error::WrongType`] unless it is of the type UD; [`Error::NotMulticast`]; [`Error::Unsupported`] where
    /// [`DeviceAttributes::max_mcast_grp`](crate::DeviceAttributes::max_mcast_grp) is 0; [`Error::Multicast`].
    #[doc(alias = "ibv_attach_mcast")]
    pub fn attach_mcast(&mut self, gid: Gid, lid: u16) -> Result<()> {
        self.check_group(gid)?;
        if self.context().attributes().max_mcast_grp() == 0 {
            return Err(self.context().unsupported(FEATURE));
        }
        let mut groups = self.shared.groups().lock();
        if groups.contains(&(gid, lid)) {
            return Ok(());
        }
        // SAFETY: the queue pair is valid, and the GID is for the duration of the call.
        check(unsafe { (self.context().verbs().ibv_attach_mcast)(self.as_raw(), &gid.to_raw(), lid) })
            .map_err(|errno| self.group_error("ibv_attach_mcast", gid, lid, errno))?;
        groups.push((gid, lid));
        Ok(())
    }

    /// Takes the queue pair out of a multicast group: `ibv_detach_mcast(3)`. `lid` is that which it was attached with.
    ///
    /// # Errors
    /// As [`QueuePair::attach_mcast`]; [`Error::Multicast`] when it is not in the group.
    #[doc(alias = "ibv_detach_mcast")]
    pub fn detach_mcast(&mut self, gid: Gid, lid: u16) -> Result<()> {
        self.check_group(gid)?;
        let mut groups = self.shared.groups().lock();
        // SAFETY: as above.
        check(unsafe { (self.context().verbs().ibv_detach_mcast)(self.as_raw(), &gid.to_raw(), lid) })
            .map_err(|errno| self.group_error("ibv_detach_mcast", gid, lid, errno))?;
        groups.retain(|group| *group != (gid, lid));
        Ok(())
    }

    fn check_group(&self, gid: Gid) -> Result<()> {
        match self.qp_type() {
            QueuePairType::UD if gid.is_multicast() => Ok(()),
            QueuePairType::UD => Err(Error::NotMulticast { gid }),
            qp_type => {
                let instead = "make one with QueuePairBuilder::qp_type(QueuePairType::UD)";
                Err(Error::WrongType { what: "multicast", qp_type, instead })
            }
        }
    }

    fn group_error(&self, verb: &'static str, gid: Gid, lid: u16, errno: crate::Errno) -> Error {
        match errno.is_unsupported() {
            true => self.context().unsupported(FEATURE),
            false => Error::Multicast { verb, gid, lid, errno },
        }
    }
}
