//! Packets collected into messages for `sendmmsg(2)`.

use std::net::IpAddr;

use super::backlog::Backlog;
use super::mmsg::{MESSAGES, SendMessages};
use super::socket::Link;
use super::{MAX_MESSAGE, Part, To};
use crate::wire::{Header, ICRC, IcrcSeed, Path, UDP_PORT};

/// Maximum packets per message: the limit of Linux before 6.9 (`UDP_MAX_SEGMENTS`).
const MAX_SEGMENTS: usize = 64;

/// Bytes after which the batch is sent. They are still in the cache, and the peer can start with them.
pub(super) const BATCH_BYTES: usize = 64 << 10;

/// Messages in the order in which they are sent.
pub(super) struct Batch {
    /// Bytes of all messages. The capacity suffices for a full batch.
    bytes: Vec<u8>,
    messages: Vec<Message>,
    /// Path of the last packet, with its CRC seed.
    seed: Option<(Path, IcrcSeed)>,
}

/// The packets of a message: `segment` bytes each. The last may be shorter.
pub(super) struct Segments {
    segment: usize,
    count: usize,
    bytes: usize,
}

impl Segments {
    pub(super) fn new(segment: usize) -> Segments {
        Segments { segment, count: 0, bytes: 0 }
    }

    /// Whether a packet of `len` bytes may follow, in a message of at most `most` bytes.
    pub(super) fn fits(&self, len: usize, most: usize) -> bool {
        let is_last_whole = self.bytes == self.segment * self.count;
        is_last_whole && len <= self.segment && self.count < MAX_SEGMENTS && self.bytes + len <= most
    }

    pub(super) fn add(&mut self, len: usize) {
        self.count += 1;
        self.bytes += len;
    }

    /// Bytes of all packets.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A message of the batch.
struct Message {
    to: To,
    start: usize,
    segments: Segments,
}

impl Batch {
    pub(super) fn new() -> Batch {
        Batch {
            bytes: Vec::with_capacity(BATCH_BYTES + MAX_MESSAGE),
            messages: Vec::with_capacity(MESSAGES),
            seed: None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Adds a packet. Returns `false` if the batch must be sent first.
    ///
    /// # Safety
    /// The payload is valid for reads.
    pub(super) unsafe fn push(
        &mut self,
        link: &impl Link,
        to: To,
        headers: &[u8],
        payload: &[Part],
        use_gso: bool,
    ) -> bool {
        let len = packet_len(headers, payload);
        // A packet without a path to its destination is dropped.
        let Some(path) = path(link.address(), UDP_PORT, to.address).filter(|_| len <= MAX_MESSAGE) else { return true };
        let seed = match &self.seed {
            Some((last, seed)) if *last == path => *seed,
            _ => self.seed.insert((path, IcrcSeed::new(&path))).1,
        };
        if !self
            .messages
            .last()
            .is_some_and(|message| use_gso && message.to == to && message.segments.fits(len, MAX_MESSAGE))
        {
            if self.messages.len() == MESSAGES || self.bytes.len() >= BATCH_BYTES {
                return false;
            }
            let start = self.bytes.len();
            self.messages.push(Message { to, start, segments: Segments::new(len) });
        }
        let Some(message) = self.messages.last_mut() else { return false };
        // Linux counts the IPv4 identifications of a message's segments up from its own, which is zero with "don't fragment".
        let identification = message.segments.count as u16;
        message.segments.add(len);
        // SAFETY: the caller keeps the payload valid.
        unsafe { append(&mut self.bytes, &seed, identification, headers, payload) };
        true
    }

    /// Sends all messages. Messages that are not accepted go to the backlog.
    pub(super) fn send(&mut self, buffers: &mut SendMessages, link: &impl Link, backlog: &mut Backlog) {
        let mut sent = 0;
        if backlog.is_empty() {
            for (at, message) in self.messages.iter().enumerate() {
                buffers.set(at, (message.to, link.interface()), self.bytes_of(message), message.segments.segment);
            }
            // SAFETY: the batch owns the bytes, and keeps them during the call.
            sent = unsafe { buffers.send(self.messages.len(), link) }.unwrap_or(0);
        }
        for message in &self.messages[sent..] {
            backlog.push(message.to, self.bytes_of(message).to_vec(), message.segments.segment);
        }
        self.bytes.clear();
        self.messages.clear();
    }

    fn bytes_of(&self, message: &Message) -> &[u8] {
        &self.bytes[message.start..][..message.segments.bytes]
    }
}

/// Bytes of a packet, including padding and CRC.
pub(super) fn packet_len(headers: &[u8], payload: &[Part]) -> usize {
    let content = payload.iter().fold(headers.len(), |len, part| len.saturating_add(part.len));
    content.saturating_add(Header::padding(content) + ICRC)
}

/// Appends a packet with padding and CRC.
///
/// # Safety
/// The payload is valid for reads. A peer may write to exposed parts concurrently. The packet then has a mix of old and new
/// bytes, with a matching CRC.
pub(super) unsafe fn append(to: &mut Vec<u8>, seed: &IcrcSeed, identification: u16, headers: &[u8], payload: &[Part]) {
    let (start, len) = (to.len(), packet_len(headers, payload));
    to.reserve(len);
    to.extend_from_slice(headers);
    for part in payload.iter().filter(|part| part.len > 0) {
        // SAFETY: the caller's promise. No part overlaps the vector.
        unsafe { part.append_to(to) };
    }
    to.resize(start + len - ICRC, 0);
    let mut icrc = seed.begin(identification, len);
    icrc.headers(&to[start..]);
    to.extend_from_slice(&icrc.finish());
}

/// Returns the path between two addresses, or `None` if their families differ.
pub(super) fn path(from: IpAddr, source_port: u16, to: IpAddr) -> Option<Path> {
    match (from, to) {
        (IpAddr::V4(source), IpAddr::V4(dest)) => Some(Path::V4 { source, dest, source_port }),
        (IpAddr::V6(source), IpAddr::V6(dest)) => Some(Path::V6 { source, dest, source_port }),
        _ => None,
    }
}
