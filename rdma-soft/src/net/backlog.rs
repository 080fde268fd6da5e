//! Backlog of messages that the UDP socket has not accepted.

use std::collections::VecDeque;
use std::io;

use super::To;
use super::batch::path;
use super::mmsg::{MESSAGES, SendMessages};
use super::socket::Link;
use crate::wire::{IcrcSeed, UDP_PORT};

/// Maximum bytes in the backlog. Further messages are dropped.
const MAX_BYTES: usize = 16 << 20;

/// Consecutive out-of-memory errors after which a message is dropped. The kernel does not report when to retry.
const MAX_FAILURES: u32 = 100;

/// Copies of the messages, in sending order.
#[derive(Default)]
pub(super) struct Backlog {
    messages: VecDeque<Message>,
    bytes: usize,
    failures: u32,
    /// The path does not support segmentation offload, although the kernel does.
    pub(super) lacks_gso: bool,
}

/// Packets of `segment` bytes each. The last may be shorter.
struct Message {
    to: To,
    bytes: Vec<u8>,
    segment: usize,
}

impl Backlog {
    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub(super) fn push(&mut self, to: To, bytes: Vec<u8>, segment: usize) {
        if self.bytes + bytes.len() <= MAX_BYTES {
            self.bytes += bytes.len();
            self.messages.push_back(Message { to, bytes, segment });
        }
    }

    fn pop(&mut self) -> Option<Message> {
        let message = self.messages.pop_front()?;
        self.bytes -= message.bytes.len();
        self.failures = 0;
        Some(message)
    }

    /// Sends until the socket accepts no more. Returns whether the backlog is empty.
    pub(super) fn send(&mut self, buffers: &mut SendMessages, link: &impl Link) -> bool {
        while !self.is_empty() {
            let count = self.messages.len().min(MESSAGES);
            for (at, message) in self.messages.iter().take(count).enumerate() {
                buffers.set(at, (message.to, link.interface()), &message.bytes, message.segment);
            }
            // SAFETY: the backlog owns the bytes, and keeps them during the call.
            match unsafe { buffers.send(count, link) } {
                Ok(sent) => (0..sent).for_each(|_| drop(self.pop())),
                Err(error) if !self.handle_error(&error, link) => return false,
                Err(_) => {}
            }
        }
        true
    }

    /// Handles a send error. Returns whether the next message can be sent.
    fn handle_error(&mut self, error: &io::Error, link: &impl Link) -> bool {
        self.failures += 1;
        match error.raw_os_error() {
            Some(libc::EAGAIN) => return false,
            Some(libc::ENOBUFS | libc::ENOMEM) if self.failures < MAX_FAILURES => return false,
            // The interface does not support segmentation offload, or a segment is too long for it.
            Some(code @ (libc::EIO | libc::EINVAL)) => {
                self.lacks_gso |= code == libc::EIO;
                let Some(message) = self.pop() else { return true };
                if message.bytes.len() > message.segment {
                    self.split(message, link);
                }
            }
            // The destination is unreachable, or the packet is too long for the path.
            _ => drop(self.pop()),
        }
        true
    }

    /// Replaces a message by one message per packet.
    fn split(&mut self, message: Message, link: &impl Link) {
        let Some(path) = path(link.address(), UDP_PORT, message.to.address) else { return };
        let seed = IcrcSeed::new(&path);
        for packet in message.bytes.chunks(message.segment).rev() {
            // The identification of each packet was its index in the message. It becomes zero.
            let mut bytes = packet.to_vec();
            seed.write(0, &mut bytes);
            self.bytes += bytes.len();
            self.messages.push_front(Message { to: message.to, segment: bytes.len(), bytes });
        }
    }
}
