//! Packets collected into messages for `sendmmsg(2)` or shared memory.

use std::net::IpAddr;

use super::backlog::Backlog;
use super::mmsg::{MESSAGES, SendMessages};
use super::shm::{Crc, encode_prefix};
use super::shm_senders::ShmSenders;
use super::socket::{Link, Route};
use super::{MAX_MESSAGE, Part, To};
use crate::transport::Time;
use crate::wire::{Header, ICRC, IcrcSeed, Path, UDP_PORT};

/// Maximum packets per message: the limit of Linux before 6.9 (`UDP_MAX_SEGMENTS`).
const MAX_SEGMENTS: usize = 64;

/// Bytes after which the batch is sent. They are still in the cache, and the peer can start with them.
const BATCH_BYTES: usize = 64 << 10;

/// Messages in the order in which they are sent.
pub(super) struct Batch {
    /// Bytes of all messages. The capacity suffices for a full batch.
    bytes: Vec<u8>,
    messages: Vec<Message>,
    /// Path of the last packet, with its CRC seed.
    seed: Option<(Path, IcrcSeed)>,
}

/// Packets of one system call's message, or of one message in the ring.
struct Message {
    to: To,
    /// Route. A message in shared memory starts with a prefix.
    route: Route,
    /// Bytes of each packet. The last may be shorter.
    segment: usize,
    segments: usize,
    start: usize,
    len: usize,
}

impl Message {
    fn can_append(&self, to: To, route: Route, len: usize) -> bool {
        let is_last_short = self.len - self.route.prefix() < self.segment * self.segments;
        let has_room = self.segments < MAX_SEGMENTS && self.len + len <= MAX_MESSAGE;
        self.to == to && self.route == route && len <= self.segment && has_room && !is_last_short
    }
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
        route: Route,
        use_gso: bool,
    ) -> bool {
        let len = packet_len(headers, payload);
        // A packet without a path to its destination is dropped.
        let Some(path) = path(link.address(), UDP_PORT, to.address).filter(|_| len <= MAX_MESSAGE) else { return true };
        let seed = match (&self.seed, route) {
            (_, Route::Shm) => None,
            (Some((last, seed)), Route::Udp) if *last == path => Some(*seed),
            (_, Route::Udp) => Some(self.seed.insert((path, IcrcSeed::new(&path))).1),
        };
        if !self.messages.last().is_some_and(|message| use_gso && message.can_append(to, route, len)) {
            if self.messages.len() == MESSAGES || self.bytes.len() >= BATCH_BYTES {
                return false;
            }
            let start = self.bytes.len();
            self.messages.push(Message { to, route, segment: len, segments: 0, start, len: route.prefix() });
            if route == Route::Shm {
                self.bytes.extend_from_slice(&encode_prefix(len, to.class, Crc::Omitted));
            }
        }
        let Some(message) = self.messages.last_mut() else { return false };
        // Linux counts the IPv4 identifications of a message's segments up from its own, which is zero with "don't fragment".
        let identification = message.segments as u16;
        message.segments += 1;
        message.len += len;
        // SAFETY: the caller keeps the payload valid.
        unsafe { append(&mut self.bytes, seed.as_ref(), identification, headers, payload) };
        true
    }

    /// Sends all messages. Messages that are not accepted go to the backlog or stay with `shm`.
    pub(super) fn send(
        &mut self,
        buffers: &mut SendMessages,
        link: &impl Link,
        backlog: &mut Backlog,
        shm: &mut ShmSenders,
        now: Time,
    ) {
        let mut at = 0;
        while let Some(message) = self.messages.get(at) {
            at += match message.route {
                Route::Udp => self.send_udp(at, buffers, link, backlog),
                Route::Shm => self.send_shm(at, shm, now),
            };
        }
        self.bytes.clear();
        self.messages.clear();
    }

    fn bytes_of(&self, message: &Message) -> &[u8] {
        &self.bytes[message.start..][..message.len]
    }

    /// Sends a run of UDP messages that starts at `from`. Returns the length of the run.
    fn send_udp(&self, from: usize, buffers: &mut SendMessages, link: &impl Link, backlog: &mut Backlog) -> usize {
        let run = self.messages[from..].iter().take_while(|message| message.route == Route::Udp);
        let count = run.clone().count();
        let mut sent = 0;
        if backlog.is_empty() {
            for (at, message) in run.clone().enumerate() {
                buffers.set(at, (message.to, link.interface()), self.bytes_of(message), message.segment);
            }
            // SAFETY: the batch owns the bytes, and keeps them during the call.
            sent = unsafe { buffers.send(count, link) }.unwrap_or(0);
        }
        for message in run.skip(sent) {
            backlog.push(message.to, self.bytes_of(message).to_vec(), message.segment);
        }
        count
    }

    /// Sends a run of messages for one same-host peer that starts at `from`. Returns the length of the run.
    fn send_shm(&self, from: usize, shm: &mut ShmSenders, now: Time) -> usize {
        let to = self.messages[from].to.address;
        let run =
            self.messages[from..].iter().take_while(|message| message.route == Route::Shm && message.to.address == to);
        let count = run.clone().count();
        shm.send(to, run.map(|message| self.bytes_of(message)), now);
        count
    }
}

/// Bytes of a packet, including padding and CRC.
pub(super) fn packet_len(headers: &[u8], payload: &[Part]) -> usize {
    let content = payload.iter().fold(headers.len(), |len, part| len.saturating_add(part.len));
    content.saturating_add(Header::padding(content) + ICRC)
}

/// Appends a packet with padding and CRC. Without a seed, the CRC is zero.
///
/// # Safety
/// The payload is valid for reads. A peer may write to exposed parts concurrently. The packet then has a mix of old and new
/// bytes, with a matching CRC.
pub(super) unsafe fn append(
    to: &mut Vec<u8>,
    seed: Option<&IcrcSeed>,
    identification: u16,
    headers: &[u8],
    payload: &[Part],
) {
    let (start, len) = (to.len(), packet_len(headers, payload));
    to.reserve(len);
    to.extend_from_slice(headers);
    for part in payload.iter().filter(|part| part.len > 0) {
        // SAFETY: the caller's promise. No part overlaps the vector.
        unsafe { part.append_to(to) };
    }
    to.resize(start + len - ICRC, 0);
    let icrc = seed.map_or([0; ICRC], |seed| {
        let mut icrc = seed.begin(identification, len);
        icrc.headers(&to[start..]);
        icrc.finish()
    });
    to.extend_from_slice(&icrc);
}

/// Returns the path between two addresses, or `None` if their families differ.
pub(super) fn path(from: IpAddr, source_port: u16, to: IpAddr) -> Option<Path> {
    match (from, to) {
        (IpAddr::V4(source), IpAddr::V4(dest)) => Some(Path::V4 { source, dest, source_port }),
        (IpAddr::V6(source), IpAddr::V6(dest)) => Some(Path::V6 { source, dest, source_port }),
        _ => None,
    }
}
