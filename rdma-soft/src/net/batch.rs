//! Packets collected into messages for `sendmmsg(2)`.

use std::iter::repeat_with;
use std::net::{IpAddr, Ipv4Addr};

use super::backlog::Backlog;
use super::mmsg::{MESSAGES, SendMessages};
use super::socket::Link;
use super::{MAX_MESSAGE, Run, To};
use crate::wire::{IcrcSeed, Path, UDP_PORT, connected_qp};

/// Maximum packets per message: the limit of Linux before 6.9 (`UDP_MAX_SEGMENTS`).
const MAX_SEGMENTS: usize = 64;

/// Bytes after which the batch is sent. They are still in the cache, and the peer can start with them.
pub(super) const BATCH_BYTES: usize = 64 << 10;

/// Messages in the order in which they are sent.
///
/// The packets of a message have one length; only the last one may be shorter. So packets of one length for several queue pairs of
/// a peer share a message, and overtake packets of other lengths. Packets for one queue pair keep their order. Nothing overtakes a
/// datagram, or is overtaken by one, since connection management uses datagrams.
pub(super) struct Batch {
    /// Those in use, and then spare ones. Each has memory for its longest length, so that no packet allocates.
    messages: Vec<Message>,
    /// Messages in use.
    count: usize,
    /// Bytes of all packets.
    bytes: usize,
    seed: SeedCache,
}

/// The path of the last packet, with its CRC seed.
#[derive(Default)]
struct SeedCache(Option<(Path, IcrcSeed)>);

impl SeedCache {
    fn of(&mut self, path: Path) -> IcrcSeed {
        match &self.0 {
            Some((last, seed)) if *last == path => *seed,
            _ => self.0.insert((path, IcrcSeed::new(&path))).1,
        }
    }
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

    /// Adds a packet. Returns its index.
    pub(super) fn add(&mut self, len: usize) -> u16 {
        let index = self.count as u16;
        self.count += 1;
        self.bytes += len;
        index
    }

    /// Bytes of all packets.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A message of the batch. It is empty if its only packet was moved.
struct Message {
    to: To,
    segments: Segments,
    /// The [order](order_of) of all its packets.
    order: u128,
    bytes: Vec<u8>,
}

impl Message {
    /// Whether a packet of this length may follow, and more after it.
    fn continues(&self, to: To, len: usize) -> bool {
        len == self.segments.segment && self.ends(to, len)
    }

    /// Whether a packet of this length may follow. A shorter one ends the message.
    fn ends(&self, to: To, len: usize) -> bool {
        !self.is_empty() && self.to == to && self.segments.fits(len, MAX_MESSAGE)
    }

    fn is_empty(&self) -> bool {
        self.segments.count == 0
    }
}

impl Batch {
    pub(super) fn new() -> Batch {
        let to = To { address: Ipv4Addr::UNSPECIFIED.into(), class: 0 };
        let spare = || Message { to, segments: Segments::new(0), order: 0, bytes: Vec::with_capacity(MAX_MESSAGE) };
        let messages = repeat_with(spare).take(MESSAGES).collect();
        Batch { messages, count: 0, bytes: 0, seed: SeedCache::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds the packets of a run. Returns `false` if the batch is full: send it, and call this again.
    ///
    /// # Safety
    /// The payload is valid for reads.
    pub(super) unsafe fn push(&mut self, link: &impl Link, to: To, run: &mut Run<'_>, use_gso: bool) -> bool {
        let len = run.packet_len();
        // Packets without a path to their destination are dropped.
        let Some(path) = path(link.address(), UDP_PORT, to.address).filter(|_| len <= MAX_MESSAGE) else { return true };
        let (order, seed) = (order_of(run.headers()), self.seed.of(path));
        while !run.is_empty() {
            let Some(at) = self.place(to, order, len, use_gso) else { return false };
            let message = &mut self.messages[at];
            message.order |= order;
            // `place` would return this message again while it has room and the batch is not full.
            loop {
                // Linux counts the IPv4 identifications of a message's segments up from its own, which is zero with "don't
                // fragment".
                let identification = message.segments.add(len);
                self.bytes += len;
                // SAFETY: the caller keeps the payload valid.
                unsafe { append(&mut message.bytes, &seed, identification, run) };
                let is_full = self.bytes >= BATCH_BYTES || !use_gso;
                if run.is_empty() || is_full || !message.segments.fits(len, MAX_MESSAGE) {
                    break;
                }
            }
        }
        true
    }

    /// The message for the next packet. `None` if the batch must be sent first.
    fn place(&mut self, to: To, order: u128, len: usize, use_gso: bool) -> Option<usize> {
        let is_full = self.bytes >= BATCH_BYTES;
        let found = match self.count.checked_sub(1) {
            Some(last) if use_gso && is_full => Some(last).filter(|last| self.messages[*last].ends(to, len)),
            Some(_) if use_gso => self.find(self.count, order, |message| message.continues(to, len)),
            _ => None,
        };
        if found.is_some() {
            return found;
        }
        (self.count < MESSAGES && !is_full).then(|| self.add_message(to, len))
    }

    /// The last one of the first `end` messages that `fits`, unless later ones have packets that must not be overtaken.
    fn find(&self, end: usize, order: u128, fits: impl Fn(&Message) -> bool) -> Option<usize> {
        for (at, message) in self.messages[..end].iter().enumerate().rev() {
            if fits(message) {
                return Some(at);
            }
            if message.order & order != 0 {
                break;
            }
        }
        None
    }

    /// Adds a message with packets of `len` bytes. Returns its index.
    fn add_message(&mut self, to: To, len: usize) -> usize {
        let at = self.count;
        self.count += 1;
        let spare = &mut self.messages[at];
        spare.bytes.clear();
        (spare.to, spare.segments, spare.order) = (to, Segments::new(len), 0);
        at
    }

    /// Moves packets that are alone in their messages to the ends of earlier messages, whose packets are longer.
    fn merge(&mut self, link: &impl Link) {
        for at in 1..self.count {
            let Message { to, order, ref segments, .. } = self.messages[at];
            let len = segments.segment;
            if segments.count != 1 {
                continue;
            }
            let Some(found) = self.find(at, order, |message| message.ends(to, len)) else { continue };
            let Some(path) = path(link.address(), UDP_PORT, to.address) else { continue };
            let (before, after) = self.messages.split_at_mut(at);
            let (message, moved) = (&mut before[found], &mut after[0]);
            let start = message.bytes.len();
            message.bytes.extend_from_slice(&moved.bytes);
            let identification = message.segments.add(len);
            self.seed.of(path).write(identification, &mut message.bytes[start..]);
            message.order |= order;
            (moved.segments, moved.order) = (Segments::new(len), 0);
        }
    }

    /// Sends all messages. Messages that are not accepted go to the backlog.
    pub(super) fn send(&mut self, buffers: &mut SendMessages, link: &impl Link, backlog: &mut Backlog, use_gso: bool) {
        if use_gso {
            self.merge(link);
        }
        let messages = || self.messages[..self.count].iter().filter(|message| !message.is_empty());
        let mut sent = 0;
        if backlog.is_empty() {
            for (at, message) in messages().enumerate() {
                buffers.set(at, (message.to, link.interface()), &message.bytes, message.segments.segment);
            }
            // SAFETY: the batch owns the bytes, and keeps them during the call.
            sent = unsafe { buffers.send(messages().count(), link) }.unwrap_or(0);
        }
        for message in messages().skip(sent) {
            backlog.push(message.to, message.bytes.clone(), message.segments.segment);
        }
        (self.count, self.bytes) = (0, 0);
    }
}

/// A bit for the queue pair of a packet, which some others share, or all bits for a datagram. Packets with a common bit keep their
/// order.
fn order_of(headers: &[u8]) -> u128 {
    connected_qp(headers).map_or(u128::MAX, |qp| 1 << (qp % u128::BITS))
}

/// Appends the next packet of a run, with its CRC.
///
/// # Safety
/// The payload is valid for reads. A peer may write to exposed parts concurrently. The packet then has a mix of old and new
/// bytes, with a matching CRC.
pub(super) unsafe fn append(to: &mut Vec<u8>, seed: &IcrcSeed, identification: u16, run: &mut Run<'_>) {
    let start = to.len();
    // SAFETY: the caller's promise. No part overlaps the vector, which the device owns.
    unsafe { run.append_next(to) };
    seed.write(identification, &mut to[start..]);
}

/// Returns the path between two addresses, or `None` if their families differ.
pub(super) fn path(from: IpAddr, source_port: u16, to: IpAddr) -> Option<Path> {
    match (from, to) {
        (IpAddr::V4(source), IpAddr::V4(dest)) => Some(Path::V4 { source, dest, source_port }),
        (IpAddr::V6(source), IpAddr::V6(dest)) => Some(Path::V6 { source, dest, source_port }),
        _ => None,
    }
}
