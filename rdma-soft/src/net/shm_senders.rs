//! Connections to same-host peers, and the backlog of messages that their rings have not accepted.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use super::batch::{BATCH_BYTES, Segments};
use super::shm::{Crc, PREFIX, ShmSender, encode_prefix};
use super::socket::Link;
use super::{MAX_MESSAGE, Run, To};
use crate::transport::Time;

/// Interval at which a thread that is awake retries a full ring.
const RETRY_INTERVAL: Duration = Duration::from_micros(10);

/// Time after a missed retry at which a sleeping thread is woken, if its peer has not woken it.
const WAKE_DELAY: Duration = Duration::from_micros(500);

/// Time after which packets for a stalled peer are dropped.
const STALL_TIMEOUT: Duration = Duration::from_secs(1);

/// Time without packets for a peer, after which another connection attempt is made.
const RECONNECT_QUIET_TIME: Duration = Duration::from_millis(10);

/// Time during which UDP is used after a peer has closed a connection without using it. Each attempt loses packets.
const REFUSED_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval of checks for unused rings. A ring is closed after one to two intervals without a message.
const IDLE_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum backlog of one peer. Further packets are dropped.
const MAX_BACKLOG_BYTES: usize = 16 << 20;

/// Same-host peers that packets are sent to.
pub(super) struct ShmSenders {
    peers: Vec<Peer>,
    /// Index of the peer at each address.
    indices: HashMap<IpAddr, usize>,
    /// Index of the peer that was looked up last.
    last_used: usize,
    /// Indices of peers with a backlog.
    backlogged: Vec<usize>,
    /// Indices of peers with an [`Open`] message.
    open: Vec<usize>,
    /// Bytes of packets since all were published.
    unpublished: usize,
    /// Indices of unused entries.
    free: Vec<usize>,
    /// Time of the next check for unused rings. [`NEVER`] if there are no rings.
    idle_check_at: Time,
}

const NEVER: Time = Time(u64::MAX);

struct Peer {
    address: IpAddr,
    sender: Option<ShmSender>,
    /// Time until which packets go over UDP, after a failed connection attempt.
    udp_until: Option<Time>,
    /// Pending messages with their prefixes, in sending order.
    backlog: VecDeque<Vec<u8>>,
    backlog_bytes: usize,
    /// Start of the time in which the ring has been full.
    stalled_since: Option<Time>,
    retry_at: Time,
    /// The message at the end of the ring, which is not published yet. There is no backlog then.
    open: Option<Open>,
}

/// A message whose packets are written to the ring one after the other, behind its prefix.
struct Open {
    class: u8,
    segments: Segments,
}

impl Peer {
    fn new(address: IpAddr) -> Peer {
        Peer {
            address,
            sender: None,
            udp_until: None,
            backlog: VecDeque::new(),
            backlog_bytes: 0,
            stalled_since: None,
            retry_at: Time(0),
            open: None,
        }
    }

    /// Connects to the peer. The connection's number is `index`. Returns whether the peer is connected.
    fn connect(&mut self, index: usize, link: &impl Link, now: Time) -> bool {
        if let Some(until) = self.udp_until.as_mut().filter(|until| **until > now) {
            // Packets that were sent over UDP must not be overtaken, so each packet postpones the next attempt.
            *until = (*until).max(now + RECONNECT_QUIET_TIME);
            return false;
        }
        self.sender = link.connect(self.address, index, now).ok();
        self.udp_until = self.sender.is_none().then(|| now + RECONNECT_QUIET_TIME);
        self.sender.is_some()
    }

    /// Writes the next packet of a run to the ring, or queues it in the backlog.
    ///
    /// Returns `false` if the peer is gone or stalled. The caller then drops the rest of the run.
    ///
    /// # Safety
    /// Each part of the payload is valid for reads.
    unsafe fn push(&mut self, class: u8, run: &mut Run<'_>, now: Time) -> bool {
        let len = run.packet_len();
        let fits = |open: &Open| open.class == class && open.segments.fits(len, MAX_MESSAGE - PREFIX);
        if self.open.as_ref().is_some_and(|open| !fits(open)) {
            self.publish();
        }
        if self.backlog.is_empty() {
            // SAFETY: the caller's promise.
            match unsafe { self.append(class, run, now) } {
                Ok(()) => return true,
                Err(error) => {
                    self.publish();
                    if !self.should_retry(&error, now) {
                        return false;
                    }
                }
            }
        }
        let mut message = Vec::with_capacity(PREFIX + len);
        message.extend_from_slice(&encode_prefix(len, class, Crc::Omitted));
        // SAFETY: the caller's promise. No part overlaps the new vector.
        unsafe { run.append_next(&mut message) };
        self.queue(message);
        true
    }

    /// Writes the next packet of a run to the open message, or to a new one.
    ///
    /// # Safety
    /// Same as [`Peer::push`].
    ///
    /// # Errors
    /// Same as [`ShmSender::reserve`].
    unsafe fn append(&mut self, class: u8, run: &mut Run<'_>, now: Time) -> io::Result<()> {
        let len = run.packet_len();
        let Some(sender) = &mut self.sender else { return Err(io::ErrorKind::BrokenPipe.into()) };
        let start = PREFIX + self.open.as_ref().map_or(0, |open| open.segments.bytes());
        let message = sender.reserve(start + len, now)?;
        if self.open.is_none() {
            // SAFETY: the memory has room for the prefix.
            unsafe { message.copy_from_nonoverlapping(encode_prefix(len, class, Crc::Omitted).as_ptr(), PREFIX) };
        }
        // SAFETY: the memory has room for this packet. No other code of this process accesses it, and what the peer writes there is
        // never read here. The caller promises the rest.
        unsafe { run.write_next(message.add(start)) };
        self.open.get_or_insert(Open { class, segments: Segments::new(len) }).segments.add(len);
        self.stalled_since = None;
        Ok(())
    }

    /// Passes the open message to the peer, and wakes it.
    fn publish(&mut self) {
        if let (Some(open), Some(sender)) = (self.open.take(), &mut self.sender) {
            sender.commit(PREFIX + open.segments.bytes());
            sender.wake();
        }
    }

    fn queue(&mut self, message: Vec<u8>) {
        if self.backlog_bytes + message.len() <= MAX_BACKLOG_BYTES {
            self.backlog_bytes += message.len();
            self.backlog.push_back(message);
        }
    }

    /// Whether to retry a message after this error.
    fn should_retry(&mut self, error: &io::Error, now: Time) -> bool {
        if error.kind() == io::ErrorKind::WouldBlock {
            self.retry_at = now + RETRY_INTERVAL;
            if self.sender.as_mut().is_some_and(ShmSender::take_moved) {
                self.stalled_since = None;
            }
            return *self.stalled_since.get_or_insert(now) + STALL_TIMEOUT > now;
        }
        self.disconnect(now);
        false
    }

    /// Drops the connection. Another process may use the address later.
    fn disconnect(&mut self, now: Time) {
        // The peer closed a connection that it never used. It does not want shared memory.
        if self.sender.take().is_some_and(|sender| !sender.was_opened()) {
            self.udp_until = Some(now + REFUSED_TIMEOUT);
        }
        (self.stalled_since, self.open) = (None, None);
    }

    /// Sends the backlog if it is time to retry. Returns whether the backlog is empty.
    fn send_backlog(&mut self, now: Time) -> bool {
        while let (Some(message), Some(sender)) = (self.backlog.front(), &mut self.sender) {
            if self.retry_at > now {
                return false;
            }
            match sender.add(message, now) {
                Ok(()) => {
                    self.stalled_since = None;
                    self.backlog_bytes -= message.len();
                    self.backlog.pop_front();
                }
                Err(error) if self.should_retry(&error, now) => break,
                Err(_) => self.backlog.clear(),
            }
        }
        self.wake();
        if self.sender.is_none() || self.backlog.is_empty() {
            (self.backlog, self.backlog_bytes) = (VecDeque::new(), 0);
        }
        self.backlog.is_empty()
    }

    fn wake(&mut self) {
        if let Some(sender) = &mut self.sender {
            sender.wake();
        }
    }
}

impl ShmSenders {
    pub(super) fn new() -> ShmSenders {
        ShmSenders {
            peers: Vec::new(),
            indices: HashMap::new(),
            last_used: 0,
            backlogged: Vec::new(),
            open: Vec::new(),
            unpublished: 0,
            free: Vec::new(),
            idle_check_at: NEVER,
        }
    }

    #[inline]
    fn find(&self, address: &IpAddr) -> Option<usize> {
        match self.peers.get(self.last_used) {
            Some(peer) if peer.address == *address => Some(self.last_used),
            _ => self.indices.get(address).copied(),
        }
    }

    /// Whether packets for `address` go through shared memory. Connects if necessary.
    pub(super) fn connect(&mut self, link: &impl Link, address: IpAddr, now: Time) -> bool {
        let index = match self.find(&address) {
            Some(index) => index,
            None if !link.is_local(&address) => return false,
            None => self.add(Peer::new(address)),
        };
        self.last_used = index;
        let peer = &mut self.peers[index];
        if peer.sender.is_some() {
            return true;
        }
        let is_connected = peer.connect(index, link, now);
        // The ring of the process to itself stays. There is only one.
        if is_connected && address != link.address() {
            self.idle_check_at = self.idle_check_at.min(now + IDLE_INTERVAL);
        }
        is_connected
    }

    fn add(&mut self, peer: Peer) -> usize {
        let index = self.free.pop().unwrap_or(self.peers.len());
        self.indices.insert(peer.address, index);
        match self.peers.get_mut(index) {
            Some(free) => *free = peer,
            None => self.peers.push(peer),
        }
        index
    }

    /// Handles an event of the connection with this number: there is room, or it has ended, unless a new one has replaced it.
    pub(super) fn handle_event(&mut self, index: usize, now: Time) {
        let Some(peer) = self.peers.get_mut(index) else { return };
        if let Some(sender) = &peer.sender {
            sender.drain();
            if sender.check_alive().is_ok() {
                peer.retry_at = now;
                return;
            }
        }
        if self.indices.get(&peer.address) != Some(&index) {
            return;
        }
        peer.disconnect(now);
        (peer.backlog, peer.backlog_bytes) = (VecDeque::new(), 0);
        self.backlogged.retain(|backlogged| *backlogged != index);
        if peer.udp_until.is_none() {
            self.remove(index);
        }
    }

    fn remove(&mut self, index: usize) {
        self.indices.remove(&self.peers[index].address);
        self.free.push(index);
        self.last_used = usize::MAX;
    }

    /// Closes rings that were not used for [`IDLE_INTERVAL`], if it is time for a check. All packets must be
    /// [published](ShmSenders::publish).
    ///
    /// The peer has taken all messages of a closed ring, so the messages of the next ring do not overtake any. A ring stays open
    /// while its peer is stopped. There is one timer for all rings, so an idle process is woken at most twice.
    pub(super) fn close_idle(&mut self, link: &impl Link, now: Time) {
        if !self.is_idle_check_due(now) {
            return;
        }
        self.idle_check_at = NEVER;
        for index in 0..self.peers.len() {
            let peer = &mut self.peers[index];
            let is_idle = |sender: &mut ShmSender| sender.is_unused_for(IDLE_INTERVAL, now);
            if peer.sender.is_none() || peer.address == link.address() {
                continue;
            }
            let idle = if peer.backlog.is_empty() { peer.sender.take_if(is_idle) } else { None };
            match idle {
                Some(sender) => {
                    link.disconnect(sender);
                    self.remove(index);
                }
                None => self.idle_check_at = now + IDLE_INTERVAL,
            }
        }
    }

    /// Whether [`close_idle`](ShmSenders::close_idle) would check for unused rings.
    #[inline]
    pub(super) fn is_idle_check_due(&self, now: Time) -> bool {
        self.idle_check_at <= now
    }

    /// Number of connected peers.
    #[cfg(test)]
    pub(super) fn connected(&self) -> usize {
        self.peers.iter().filter(|peer| peer.sender.is_some()).count()
    }

    /// Whether a peer is connected.
    pub(super) fn is_connected(&self, address: &IpAddr) -> bool {
        self.find(address).is_some_and(|index| self.peers[index].sender.is_some())
    }

    /// Whether a peer has a backlog. New packets for it should wait.
    pub(super) fn has_backlog_for(&self, address: &IpAddr) -> bool {
        !self.backlogged.is_empty() && self.find(address).is_some_and(|index| !self.peers[index].backlog.is_empty())
    }

    /// Whether no peer has a backlog.
    #[inline]
    pub(super) fn has_no_backlog(&self) -> bool {
        self.backlogged.is_empty()
    }

    /// Returns when a sleeping thread has to call [`ShmSenders::retry`] and [`ShmSenders::close_idle`].
    pub(super) fn wake_at(&self) -> Option<Time> {
        let idle_check = Some(self.idle_check_at).filter(|at| *at != NEVER);
        self.backlogged.iter().map(|index| self.peers[*index].retry_at + WAKE_DELAY).chain(idle_check).min()
    }

    /// Adds packets for a [connected](ShmSenders::connect) peer, with zeros instead of CRCs.
    ///
    /// They are published after [`BATCH_BYTES`], or by [`publish`](ShmSenders::publish). Packets wait in the backlog if the ring is
    /// full. They are dropped if the peer is gone or stalled.
    ///
    /// # Safety
    /// Each part of the payload is valid for reads.
    pub(super) unsafe fn push(&mut self, to: To, mut run: Run<'_>, now: Time) {
        let len = run.packet_len();
        let Some(index) = self.find(&to.address).filter(|_| len <= MAX_MESSAGE - PREFIX) else { return };
        // SAFETY: the caller's promise.
        while !run.is_empty() && unsafe { self.peers[index].push(to.class, &mut run, now) } {
            if self.peers[index].open.is_some() && !self.open.contains(&index) {
                self.open.push(index);
            }
            self.unpublished += len;
            if self.unpublished >= BATCH_BYTES {
                self.publish();
            }
        }
        self.track_backlog(index);
    }

    /// Whether [`publish`](ShmSenders::publish) would do nothing.
    #[inline]
    pub(super) fn is_published(&self) -> bool {
        self.open.is_empty()
    }

    /// Passes all packets in the rings to the peers, and wakes the peers.
    pub(super) fn publish(&mut self) {
        self.unpublished = 0;
        for index in self.open.drain(..) {
            self.peers[index].publish();
        }
    }

    /// Queues a packet with its CRC for a connected peer. The next [`retry`](ShmSenders::retry) sends it.
    pub(super) fn queue_packet(&mut self, to: To, packet: &[u8], now: Time) {
        let Some(index) = self.find(&to.address) else { return };
        let peer = &mut self.peers[index];
        peer.publish();
        if peer.backlog.is_empty() {
            peer.retry_at = now;
        }
        peer.queue([&encode_prefix(packet.len(), to.class, Crc::Invariant), packet].concat());
        self.track_backlog(index);
    }

    /// Wakes the peers that packets were sent to since the last call, even if they have not armed their wake-up.
    pub(super) fn kick(&mut self) {
        self.peers.iter_mut().filter_map(|peer| peer.sender.as_mut()).for_each(ShmSender::kick);
    }

    fn track_backlog(&mut self, index: usize) {
        if !self.peers[index].backlog.is_empty() && !self.backlogged.contains(&index) {
            self.backlogged.push(index);
        }
    }

    /// Asks the peers with a backlog to wake this process when there is room. Returns `false` if one has room, or is gone.
    pub(super) fn arm(&mut self) -> bool {
        let mut is_armed = true;
        for index in &self.backlogged {
            let peer = &mut self.peers[*index];
            if !peer.sender.as_mut().is_some_and(ShmSender::arm) {
                peer.retry_at = Time(0);
                is_armed = false;
            }
        }
        is_armed
    }

    /// Sends the backlog of each peer whose retry is due.
    pub(super) fn retry(&mut self, now: Time) {
        let ShmSenders { peers, backlogged, .. } = self;
        backlogged.retain(|index| !peers[*index].send_backlog(now));
    }
}
