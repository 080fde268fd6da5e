//! Packets that are gathered.

use std::net::IpAddr;

use super::frame::{Frame, MESSAGES};
use super::near::prefix;
use super::neighbours::Neighbours;
use super::queue::Queue;
use super::socket::{Link, Way};
use super::{LONGEST, Part, To};
use crate::transport::Time;
use crate::wire::{Header, ICRC, IcrcSeed, Path, UDP_PORT};

/// The most packets of one message: Linux before 6.9 takes no more.
const SEGMENTS: usize = 64;

/// Bytes after which the next message waits until those before are sent: they are in the cache, and the peer can begin with them.
const ENOUGH: usize = 64 << 10;

/// Messages, one after the other.
pub(super) struct Batch {
    /// Of a capacity that is enough.
    bytes: Vec<u8>,
    messages: Vec<Message>,
    /// Where the last packet went, and what its CRC began with.
    seed: Option<(Path, IcrcSeed)>,
}

/// Packets that go as one.
struct Message {
    to: To,
    /// The longer way, or the shorter, by which it begins with a prefix.
    way: Way,
    /// Bytes of each packet; the last may be shorter.
    segment: usize,
    segments: usize,
    start: usize,
    len: usize,
}

impl Message {
    fn takes(&self, to: To, way: Way, len: usize) -> bool {
        let is_last_short = self.len - self.way.prefix() < self.segment * self.segments;
        let has_room = self.segments < SEGMENTS && self.len + len <= LONGEST;
        self.to == to && self.way == way && len <= self.segment && has_room && !is_last_short
    }
}

impl Batch {
    pub(super) fn new() -> Batch {
        Batch { bytes: Vec::with_capacity(ENOUGH + LONGEST), messages: Vec::with_capacity(MESSAGES), seed: None }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Adds a packet; `false` when there is no room for it before those of before are sent.
    ///
    /// # Safety
    /// The payload may be read.
    pub(super) unsafe fn push(
        &mut self,
        link: &impl Link,
        to: To,
        headers: &[u8],
        payload: &[Part],
        way: Way,
        segmented: bool,
    ) -> bool {
        let len = packet_len(headers, payload);
        // What there is no way for is lost.
        let Some(path) = path(link.address(), UDP_PORT, to.address).filter(|_| len <= LONGEST) else { return true };
        let seed = match &self.seed {
            Some((last, seed)) if *last == path => *seed,
            _ => self.seed.insert((path, IcrcSeed::new(&path))).1,
        };
        if !self.messages.last().is_some_and(|message| segmented && message.takes(to, way, len)) {
            if self.messages.len() == MESSAGES || self.bytes.len() >= ENOUGH {
                return false;
            }
            let start = self.bytes.len();
            self.messages.push(Message { to, way, segment: len, segments: 0, start, len: way.prefix() });
            if way == Way::Near {
                self.bytes.extend_from_slice(&prefix(len, to.class));
            }
        }
        let Some(message) = self.messages.last_mut() else { return false };
        // Linux numbers the packets of a message from that of the message on, which is zero as it is not to be fragmented.
        let identification = message.segments as u16;
        message.segments += 1;
        message.len += len;
        // SAFETY: the caller's promise.
        unsafe { append(&mut self.bytes, &seed, identification, headers, payload) };
        true
    }

    /// Sends what is taken, and leaves the rest to the queue, or to what is kept for neighbours.
    pub(super) fn send(
        &mut self,
        frame: &mut Frame,
        link: &impl Link,
        queue: &mut Queue,
        near: &mut Neighbours,
        now: Time,
    ) {
        let mut at = 0;
        while let Some(message) = self.messages.get(at) {
            at += match message.way {
                Way::Wire => self.send_far(at, frame, link, queue),
                Way::Near => self.send_near(at, near, now),
            };
        }
        self.bytes.clear();
        self.messages.clear();
    }

    fn bytes_of(&self, message: &Message) -> &[u8] {
        &self.bytes[message.start..][..message.len]
    }

    /// Sends those from there on that go by UDP, up to one that does not: how many have been dealt with.
    fn send_far(&self, from: usize, frame: &mut Frame, link: &impl Link, queue: &mut Queue) -> usize {
        let run = self.messages[from..].iter().take_while(|message| message.way == Way::Wire);
        let count = run.clone().count();
        let mut sent = 0;
        if queue.is_empty() {
            for (at, message) in run.clone().enumerate() {
                frame.set(at, (message.to, link.interface()), self.bytes_of(message), message.segment);
            }
            // SAFETY: the bytes are there.
            sent = unsafe { frame.send(count, link) }.unwrap_or(0);
        }
        for message in run.skip(sent) {
            queue.push(message.to, self.bytes_of(message).to_vec(), message.segment);
        }
        count
    }

    /// Sends those from there on that go to one neighbour, up to one that does not: how many have been dealt with.
    fn send_near(&self, from: usize, near: &mut Neighbours, now: Time) -> usize {
        let to = self.messages[from].to.address;
        let run = self.messages[from..].iter().take_while(|of| of.way == Way::Near && of.to.address == to);
        let count = run.clone().count();
        near.send(to, run.map(|message| self.bytes_of(message)), now);
        count
    }
}

/// Bytes of a packet, with its CRC.
pub(super) fn packet_len(headers: &[u8], payload: &[Part]) -> usize {
    let content = payload.iter().fold(headers.len(), |len, part| len.saturating_add(part.len));
    content.saturating_add(Header::padding(content) + ICRC)
}

/// Adds a packet.
///
/// # Safety
/// The payload is valid for reads. A peer may write to exposed parts of it meanwhile. The packet then has old and new bytes,
/// with a CRC that matches them.
pub(super) unsafe fn append(to: &mut Vec<u8>, seed: &IcrcSeed, identification: u16, headers: &[u8], payload: &[Part]) {
    let (start, len) = (to.len(), packet_len(headers, payload));
    to.reserve(len);
    to.extend_from_slice(headers);
    for part in payload.iter().filter(|part| part.len > 0) {
        // SAFETY: the caller's promise. No part lies in the vector's memory.
        unsafe { part.append_to(to) };
    }
    to.resize(start + len - ICRC, 0);
    let mut icrc = seed.begin(identification, len);
    icrc.headers(&to[start..]);
    to.extend_from_slice(&icrc.finish());
}

/// From there to there; `None` where they are not of one kind.
pub(super) fn path(from: IpAddr, source_port: u16, to: IpAddr) -> Option<Path> {
    match (from, to) {
        (IpAddr::V4(source), IpAddr::V4(dest)) => Some(Path::V4 { source, dest, source_port }),
        (IpAddr::V6(source), IpAddr::V6(dest)) => Some(Path::V6 { source, dest, source_port }),
        _ => None,
    }
}
