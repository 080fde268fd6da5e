//! Packets that the socket has not taken.

use std::collections::VecDeque;
use std::io;

use super::To;
use super::batch::path;
use super::frame::{Frame, MESSAGES};
use super::socket::Link;
use crate::wire::{ICRC, IcrcSeed, UDP_PORT};

/// Bytes that are kept; what is more is lost, as in any queue of a network.
const LIMIT: usize = 16 << 20;

/// How often in a row the kernel may be short of memory before a message is lost: it does not say when to try again.
const PATIENCE: u32 = 100;

/// Copies of messages, in their order.
#[derive(Default)]
pub(super) struct Queue {
    messages: VecDeque<Kept>,
    bytes: usize,
    refusals: u32,
    /// Whether the way does not do segments, though the kernel does.
    pub(super) lacks_segments: bool,
}

/// A message: packets of `segment` bytes, the last perhaps shorter.
struct Kept {
    to: To,
    bytes: Vec<u8>,
    segment: usize,
}

impl Queue {
    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub(super) fn push(&mut self, to: To, bytes: Vec<u8>, segment: usize) {
        if self.bytes + bytes.len() <= LIMIT {
            self.bytes += bytes.len();
            self.messages.push_back(Kept { to, bytes, segment });
        }
    }

    fn pop(&mut self) -> Option<Kept> {
        let kept = self.messages.pop_front()?;
        self.bytes -= kept.bytes.len();
        self.refusals = 0;
        Some(kept)
    }

    /// Sends until the socket takes no more: whether all has gone, or got lost.
    pub(super) fn send(&mut self, frame: &mut Frame, link: &impl Link) -> bool {
        while !self.is_empty() {
            let count = self.messages.len().min(MESSAGES);
            for (at, kept) in self.messages.iter().take(count).enumerate() {
                frame.set(at, (kept.to, link.interface()), &kept.bytes, kept.segment);
            }
            // SAFETY: the bytes are there.
            match unsafe { frame.send(count, link) } {
                Ok(sent) => (0..sent).for_each(|_| drop(self.pop())),
                Err(error) if !self.goes_on_after(&error, link) => return false,
                Err(_) => {}
            }
        }
        true
    }

    /// Whether the first message, which was refused, has been dealt with.
    fn goes_on_after(&mut self, error: &io::Error, link: &impl Link) -> bool {
        self.refusals += 1;
        match error.raw_os_error() {
            Some(libc::EAGAIN) => return false,
            Some(libc::ENOBUFS | libc::ENOMEM) if self.refusals < PATIENCE => return false,
            // The interface does not do segments, or a segment is too long for it.
            Some(code @ (libc::EIO | libc::EINVAL)) => {
                self.lacks_segments |= code == libc::EIO;
                let Some(kept) = self.pop() else { return true };
                if kept.bytes.len() > kept.segment {
                    self.split(kept, link);
                }
            }
            // There is no way to the destination, or the packet is too long for it.
            _ => drop(self.pop()),
        }
        true
    }

    /// Puts back a message as one for each packet.
    fn split(&mut self, kept: Kept, link: &impl Link) {
        let Some(path) = path(link.address(), UDP_PORT, kept.to.address) else { return };
        let seed = IcrcSeed::new(&path);
        for packet in kept.bytes.chunks(kept.segment).rev() {
            // Its place in the message was its identification.
            let Some((content, _)) = packet.split_last_chunk::<ICRC>() else { continue };
            let mut icrc = seed.begin(0, packet.len());
            icrc.headers(content);
            let bytes: Vec<u8> = content.iter().copied().chain(icrc.finish()).collect();
            self.bytes += bytes.len();
            self.messages.push_front(Kept { to: kept.to, segment: bytes.len(), bytes });
        }
    }
}
