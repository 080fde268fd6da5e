//! Peers, and address handles of senders.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::hash::{Hash, Hasher};

use rdma_safe::Gid;
use rdma_safe::endpoint::{DatagramIdentity, DatagramSender};

use crate::Sharing;

/// A destination of datagrams: a service that was looked up, or the sender of a datagram.
///
/// Made by [`Datagrams::peer`](crate::Datagrams::peer) and [`Datagrams::receive_from`](crate::Datagrams::receive_from). Cloning is
/// cheap. Two peers are equal if they are the same queue pair of the same port, so a peer can be the key of a map. On InfiniBand,
/// datagrams of a group have a global route header, and others have none. Their sender then counts as two peers.
#[derive(Clone)]
pub struct Peer(Kind);

#[derive(Clone)]
enum Kind {
    Found(rdma_safe::Peer),
    /// Its address handle is made when it is first answered, which takes system calls on most devices.
    Sender(DatagramSender),
}

impl From<rdma_safe::Peer> for Peer {
    fn from(peer: rdma_safe::Peer) -> Self {
        Peer(Kind::Found(peer))
    }
}

impl From<DatagramSender> for Peer {
    fn from(sender: DatagramSender) -> Self {
        Peer(Kind::Sender(sender))
    }
}

impl Peer {
    /// Number of the peer's queue pair.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        match &self.0 {
            Kind::Found(peer) => peer.qp_num(),
            Kind::Sender(sender) => sender.qp_num(),
        }
    }

    /// GID of the peer's port, which contains its IP address on RoCE v2. `None` on InfiniBand within a subnet.
    #[must_use]
    pub fn gid(&self) -> Option<Gid> {
        match &self.0 {
            Kind::Found(peer) => peer.gid(),
            Kind::Sender(sender) => sender.gid(),
        }
    }

    fn lid(&self) -> u16 {
        match &self.0 {
            Kind::Found(peer) => peer.lid(),
            Kind::Sender(sender) => sender.lid(),
        }
    }

    /// The port of the peer: its GID or, within a subnet of InfiniBand, its LID.
    fn port(&self) -> Result<Gid, u16> {
        self.gid().ok_or_else(|| self.lid())
    }

    /// The peer with its address handle.
    pub(super) fn resolve<S: Sharing>(
        &self,
        handles: &S::Cell<Handles>,
        identity: &DatagramIdentity,
    ) -> rdma_safe::Result<rdma_safe::Peer> {
        let sender = match &self.0 {
            Kind::Found(peer) => return Ok(peer.clone()),
            Kind::Sender(sender) => sender,
        };
        if let Some(known) = S::with(handles, |handles| handles.known.get(sender).cloned()) {
            return Ok(known);
        }
        let made = identity.peer_of(sender)?;
        // Dropped without the lock, since that takes a system call.
        drop(S::with(handles, |handles| handles.keep(*sender, made.clone())));
        Ok(made)
    }
}

impl AsRef<Peer> for Peer {
    fn as_ref(&self) -> &Peer {
        self
    }
}

impl PartialEq for Peer {
    fn eq(&self, other: &Self) -> bool {
        (self.qp_num(), self.port()) == (other.qp_num(), other.port())
    }
}

impl Eq for Peer {}

impl Hash for Peer {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.qp_num(), self.port()).hash(state);
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer")
            .field("qp_num", &format_args!("{:#08x}", self.qp_num()))
            .field("gid", &self.gid())
            .finish_non_exhaustive()
    }
}

/// The address handles of senders that were answered, at most [`HANDLES`].
#[derive(Default)]
pub(super) struct Handles {
    known: HashMap<DatagramSender, rdma_safe::Peer>,
    /// Oldest first.
    order: VecDeque<DatagramSender>,
}

/// Most address handles to keep. Devices have many more.
const HANDLES: usize = 4096;

impl Handles {
    /// Keeps the handle of a sender. Returns handles to drop.
    fn keep(&mut self, sender: DatagramSender, handle: rdma_safe::Peer) -> [Option<rdma_safe::Peer>; 2] {
        let oldest = match self.order.len() >= HANDLES {
            true => self.order.pop_front().and_then(|oldest| self.known.remove(&oldest)),
            false => None,
        };
        let before = self.known.insert(sender, handle);
        if before.is_none() {
            self.order.push_back(sender);
        }
        [oldest, before]
    }
}
