//! The network below: a UDP socket, and memory shared with peers on the host; what gathers packets and what takes them.
//!
//! System calls, and the way through the kernel, are what packets cost most: so they go and come many at once, as UDP segmentation
//! and receive offload of Linux (`udp(7)`: `UDP_SEGMENT`, `UDP_GRO`) have it.

#![allow(clippy::unnecessary_cast, reason = "lengths in messages are of other types with other C libraries")]

mod batch;
mod callers;
mod frame;
mod group;
mod inbox;
mod interface;
mod name;
mod near;
mod neighbours;
mod outbox;
mod queue;
mod ring;
mod socket;
#[cfg(test)]
mod tests;
mod trouble;

pub(crate) use group::Group;
pub(crate) use inbox::{Inbox, Readable};
pub(crate) use outbox::Outbox;
pub(crate) use socket::{OpenError, Socket};

use std::net::IpAddr;

/// Where a packet goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct To {
    pub(crate) address: IpAddr,
    /// The type of service of IPv4, the traffic class of IPv6.
    pub(crate) class: u8,
}

/// A part of a packet's payload.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    pub(crate) address: *const u8,
    pub(crate) len: usize,
    /// Peers may access the memory, and the program may, atomically, at the same time.
    pub(crate) is_exposed: bool,
}

impl Part {
    /// Appends a copy of it.
    ///
    /// # Safety
    /// It is valid for reads, by [`rdma_sys::dma`] if it is exposed, and does not overlap `to`.
    pub(crate) unsafe fn append_to(&self, to: &mut Vec<u8>) {
        to.reserve(self.len);
        // SAFETY: `reserve` has made room, and the copy initialises all bytes by which the vector grows. The rest is the caller's
        // promise.
        unsafe {
            let end = to.as_mut_ptr().add(to.len());
            if self.is_exposed {
                rdma_sys::dma::read(self.address, end, self.len);
            } else {
                end.copy_from_nonoverlapping(self.address, self.len);
            }
            to.set_len(to.len() + self.len);
        }
    }
}

/// Where a packet has come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Origin {
    pub(crate) address: IpAddr,
    /// As of [`To`].
    pub(crate) class: u8,
    /// How many more routers it might have passed.
    pub(crate) hops: u8,
}

impl Origin {
    /// Hops that a packet begins with, and what is taken for the number where it is not known.
    pub(crate) const HOPS: u8 = 64;
}

/// Bytes of the largest datagram, and of all segments of one message: what IPv4 can say, less its header and that of UDP.
const LONGEST: usize = 65_535 - 20 - 8;
