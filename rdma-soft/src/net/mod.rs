//! The network: a UDP socket, and memory shared with peers on this host.
//!
//! System calls and the kernel's network stack dominate the cost of a packet. Packets are therefore sent and received in
//! batches, with UDP segmentation and receive offload (`UDP_SEGMENT` and `UDP_GRO` of `udp(7)`).

#![allow(clippy::unnecessary_cast, reason = "the types of message lengths differ between C libraries")]

mod backlog;
mod batch;
pub(crate) mod directory;
pub(crate) mod eventfd;
mod fault_queue;
mod group;
mod inbox;
mod interface;
mod memory;
mod mmsg;
mod outbox;
mod poll;
pub(crate) mod presence;
mod ring;
pub(crate) mod route;
mod run;
mod shm;
mod shm_handshake;
mod shm_receivers;
mod shm_senders;
mod sockaddr;
mod socket;
#[cfg(test)]
mod tests;
mod unix;
mod wakeup;

pub(crate) use group::Group;
pub(crate) use group::Membership;
pub(crate) use inbox::{Inbox, Readable};
pub(crate) use outbox::Outbox;
pub(crate) use run::Run;
pub(crate) use socket::{OpenError, Socket};

use std::net::IpAddr;

/// Destination of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct To {
    pub(crate) address: IpAddr,
    /// IPv4 type of service or IPv6 traffic class.
    pub(crate) class: u8,
}

/// Part of the payload of one or more packets.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) address: *const u8,
    pub(crate) len: usize,
    /// Whether peers and the program may access the memory concurrently, with atomic accesses.
    pub(crate) is_exposed: bool,
}

impl Part {
    /// Appends a copy of the data.
    ///
    /// # Safety
    /// The data is valid for reads, through [`rdma_sys::dma`] if it is exposed, and does not overlap `to`.
    pub(crate) unsafe fn append_to(&self, to: &mut Vec<u8>) {
        to.reserve(self.len);
        // SAFETY: `reserve` has made room, and the copy initialises all bytes by which the vector grows. The caller promises
        // the rest.
        unsafe {
            self.copy_to(to.as_mut_ptr().add(to.len()));
            to.set_len(to.len() + self.len);
        }
    }

    /// Copies the data to `to`.
    ///
    /// # Safety
    /// Same as [`Part::append_to`]. `to` is valid for writes of that length.
    pub(crate) unsafe fn copy_to(&self, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.is_exposed {
                rdma_sys::dma::read(self.address, to, self.len);
            } else {
                to.copy_from_nonoverlapping(self.address, self.len);
            }
        }
    }
}

/// Source of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Origin {
    pub(crate) address: IpAddr,
    /// IPv4 type of service or IPv6 traffic class.
    pub(crate) class: u8,
    /// Remaining hop limit (TTL).
    pub(crate) hops: u8,
}

impl Origin {
    /// Initial hop limit. Also reported if the kernel does not report one.
    pub(crate) const HOPS: u8 = 64;
}

/// Maximum bytes of a datagram, and of all segments of one message: the IPv4 maximum without IP and UDP headers.
const MAX_MESSAGE: usize = 65_535 - 20 - 8;
