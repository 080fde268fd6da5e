//! Packets collected into messages for `sendmmsg(2)`.

use std::iter::successors;
use std::net::IpAddr;
use std::ops::Range;

use super::backlog::Backlog;
use super::mmsg::{MESSAGES, SendMessages};
use super::socket::Link;
use super::{MAX_MESSAGE, Part, To};
use crate::wire::{Header, ICRC, IcrcSeed, Path, UDP_PORT, connected_qp};

/// Maximum packets per message: the limit of Linux before 6.9 (`UDP_MAX_SEGMENTS`).
const MAX_SEGMENTS: usize = 64;

/// Bytes after which the batch is sent. They are still in the cache, and the peer can start with them.
pub(super) const BATCH_BYTES: usize = 64 << 10;

/// Most runs of a batch.
pub(super) const MOST_RUNS: usize = 256;

/// Groups of queue pairs, by the last bits of their numbers. Packets for a group keep their order.
const GROUPS: usize = 256;

/// Messages in the order in which they are sent.
///
/// The packets of a message have one length; only the last one may be shorter. So packets of one length for several queue pairs of
/// a peer share a message, and overtake packets of other lengths. Packets for one queue pair keep their order. Nothing overtakes a
/// datagram, or is overtaken by one, since connection management uses datagrams.
pub(super) struct Batch {
    /// Bytes of all packets, in the order in which they were added. The capacity suffices for a full batch.
    bytes: Vec<u8>,
    messages: Vec<Message>,
    runs: Vec<Run>,
    /// For each group, the message with its last packet.
    last_of_group: Box<[u8; GROUPS]>,
    /// The message with the last datagram.
    barrier: usize,
    seeds: Seeds,
}

/// The path of the last packet, with its CRC seed.
#[derive(Default)]
struct Seeds(Option<(Path, IcrcSeed)>);

impl Seeds {
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

/// A message of the batch. It has no packets if its only one was moved.
struct Message {
    to: To,
    segments: Segments,
    /// Its first and its last run.
    runs: [usize; 2],
    /// Its first packet must not overtake the packets of this message.
    after: usize,
}

/// Packets of a message that were added in succession.
struct Run {
    bytes: Range<usize>,
    /// The next run of the message.
    next: Option<usize>,
}

impl Message {
    /// Whether another packet of this length may follow, and more after it.
    fn continues(&self, to: To, len: usize) -> bool {
        len == self.segments.segment && self.to == to && self.segments.fits(len, MAX_MESSAGE)
    }

    /// Whether a packet of this length may follow as the last one.
    fn ends(&self, to: To, len: usize) -> bool {
        self.segments.count > 0 && self.to == to && self.segments.fits(len, MAX_MESSAGE)
    }
}

impl Batch {
    pub(super) fn new() -> Batch {
        Batch {
            bytes: Vec::with_capacity(BATCH_BYTES + MAX_MESSAGE),
            messages: Vec::with_capacity(MESSAGES),
            runs: Vec::with_capacity(MOST_RUNS),
            last_of_group: Box::new([0; GROUPS]),
            barrier: 0,
            seeds: Seeds::default(),
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
        let Some(at) = self.place(to, connected_qp(headers), len, use_gso) else { return false };
        // Linux counts the IPv4 identifications of a message's segments up from its own, which is zero with "don't fragment".
        let identification = self.messages[at].segments.add(len);
        // SAFETY: the caller keeps the payload valid.
        unsafe { append(&mut self.bytes, &self.seeds.of(path), identification, headers, payload) };
        true
    }

    /// Makes room for the next packet, of `len` bytes. Returns its message. `None` if the batch must be sent first.
    ///
    /// `qp` is its queue pair, or `None` for a datagram.
    fn place(&mut self, to: To, qp: Option<u32>, len: usize, use_gso: bool) -> Option<usize> {
        let end = self.messages.len();
        let last = end.saturating_sub(1);
        let group = qp.map(|qp| qp as usize % GROUPS);
        let after = group.map_or(last, |group| usize::from(self.last_of_group[group]).max(self.barrier));
        let start = self.bytes.len();
        let found = if start < BATCH_BYTES {
            let mut candidates = self.messages.iter().enumerate().skip(after).rev();
            candidates.find(|(_, message)| use_gso && message.continues(to, len)).map(|(at, _)| at)
        } else if use_gso && self.messages.last()?.ends(to, len) {
            Some(last)
        } else {
            return None;
        };
        let (at, has_room) = match found {
            Some(at) => (at, self.extend(at, start..start + len)),
            None => (end, self.open(to, len, after)),
        };
        match group {
            Some(group) => self.last_of_group[group] = at as u8,
            None => self.barrier = at,
        }
        has_room.then_some(at)
    }

    /// Adds a message for the next packet, of `len` bytes. Returns `false` if there are too many.
    fn open(&mut self, to: To, len: usize, after: usize) -> bool {
        let (run, start) = (self.runs.len(), self.bytes.len());
        let has_room = self.messages.len() < MESSAGES && run < MOST_RUNS;
        if has_room {
            self.messages.push(Message { to, segments: Segments::new(len), runs: [run; 2], after });
            self.runs.push(Run { bytes: start..start + len, next: None });
        }
        has_room
    }

    /// Adds the next bytes to a message. Returns `false` if there are too many runs.
    fn extend(&mut self, at: usize, bytes: Range<usize>) -> bool {
        let run = self.runs.len();
        let [_, last] = &mut self.messages[at].runs;
        let Run { bytes: of, next } = &mut self.runs[*last];
        if of.end == bytes.start {
            of.end = bytes.end;
        } else if run < MOST_RUNS {
            (*next, *last) = (Some(run), run);
            self.runs.push(Run { bytes, next: None });
        } else {
            return false;
        }
        true
    }

    /// Moves packets that are alone in their message to the end of a message of longer packets.
    fn close(&mut self, link: &impl Link) {
        for at in 1..self.messages.len() {
            let Message { to, ref segments, runs: [run, _], after } = self.messages[at];
            let len = segments.segment;
            if segments.count != 1 {
                continue;
            }
            let Some(before) = self.messages[after..at].iter_mut().rfind(|message| message.ends(to, len)) else {
                continue;
            };
            let identification = before.segments.add(len);
            let [_, last] = &mut before.runs;
            (self.runs[*last].next, *last) = (Some(run), run);
            self.messages[at].segments.count = 0;
            if let Some(path) = path(link.address(), UDP_PORT, to.address) {
                renumber(&mut self.bytes[self.runs[run].bytes.clone()], &self.seeds.of(path), identification);
            }
        }
        self.messages.retain(|message| message.segments.count > 0);
    }

    /// Sends all messages. Messages that are not accepted go to the backlog.
    pub(super) fn send(&mut self, buffers: &mut SendMessages, link: &impl Link, backlog: &mut Backlog, use_gso: bool) {
        if use_gso {
            self.close(link);
        }
        let mut sent = 0;
        if backlog.is_empty() {
            for message in &self.messages {
                buffers.add((message.to, link.interface()), self.bytes_of(message), message.segments.segment);
            }
            // SAFETY: the batch owns the bytes, and keeps them during the call.
            sent = unsafe { buffers.send(link) }.unwrap_or(0);
        }
        for message in &self.messages[sent..] {
            let bytes = self.bytes_of(message).flatten().copied().collect();
            backlog.push(message.to, bytes, message.segments.segment);
        }
        self.bytes.clear();
        self.messages.clear();
        self.runs.clear();
        self.last_of_group.fill(0);
        self.barrier = 0;
    }

    /// The bytes of a message, in parts.
    fn bytes_of(&self, message: &Message) -> impl Iterator<Item = &[u8]> {
        let [first, _] = message.runs;
        let runs = successors(Some(&self.runs[first]), |run| run.next.map(|next| &self.runs[next]));
        runs.map(|run| &self.bytes[run.bytes.clone()])
    }
}

/// Changes the identification that the CRC of a packet is for.
pub(super) fn renumber(packet: &mut [u8], seed: &IcrcSeed, identification: u16) {
    let mut icrc = seed.begin(identification, packet.len());
    if let Some((content, value)) = packet.split_last_chunk_mut::<ICRC>() {
        icrc.headers(content);
        *value = icrc.finish();
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
