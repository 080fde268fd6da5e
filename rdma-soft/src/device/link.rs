//! The addresses of the device, each with a socket.

use crate::faults::Faults;
use crate::net::{Group, Inbox, Outbox, Socket};
use crate::transport::Time;

/// An address of the device, and its socket.
pub(crate) struct Link {
    pub(crate) socket: Socket,
    pub(super) inbox: Inbox,
    pub(super) outbox: Outbox,
    /// Multicast groups that the link has joined, by GID.
    pub(crate) groups: Vec<([u8; 16], Group)>,
}

impl Link {
    pub(super) fn new(socket: Socket, faults: Faults) -> Link {
        let (mut inbox, mut outbox) = (Inbox::new(), Outbox::new(faults));
        // Allocate descriptors and memory for packets to the device itself now, not when the first packet is sent.
        outbox.connect(&socket, socket.address(), Time(0));
        inbox.receive(&socket, |_, _| {});
        Link { socket, inbox, outbox, groups: Vec::new() }
    }

    pub(crate) fn set_faults(&mut self, faults: Faults, now: Time) {
        self.outbox.set_faults(&self.socket, faults, now);
    }
}
