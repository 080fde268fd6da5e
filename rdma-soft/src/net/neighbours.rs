//! Peers that packets go to by the shorter way, and what of that these have not taken yet.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use super::To;
use super::frame::{Frame, MESSAGES};
use super::near::prefix;
use super::socket::Link;
use crate::transport::Time;

/// When to try again what was not taken: nothing says when a peer takes more.
const RETRY: Duration = Duration::from_micros(10);

/// How long a peer may take nothing before what is for it is lost, as in networks that pause for a while at most.
const PATIENCE: Duration = Duration::from_secs(1);

/// After how long without packets for it a peer is looked for again that was not to be found.
const QUIET: Duration = Duration::from_millis(10);

/// Bytes that are kept for one peer; what is more is lost.
const LIMIT: usize = 16 << 20;

/// Who is near.
pub(super) struct Neighbours {
    peers: HashMap<IpAddr, Peer>,
    /// One that is there, which most packets are for.
    last: Option<IpAddr>,
    /// Those with something kept for them.
    stuck: Vec<IpAddr>,
    /// Some have taken nothing for so long that what was for them got lost.
    has_lost: bool,
}

struct Peer {
    connection: Option<OwnedFd>,
    /// Nobody was there, and is not looked for before then.
    is_absent_until: Option<Time>,
    /// Messages, each behind its prefix, in their order.
    kept: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Since when it takes nothing.
    stuck_since: Option<Time>,
    retry_at: Time,
}

impl Peer {
    fn keep(&mut self, message: Vec<u8>) {
        if self.bytes + message.len() <= LIMIT {
            self.bytes += message.len();
            self.kept.push_back(message);
        }
    }

    fn pop(&mut self) {
        self.bytes -= self.kept.pop_front().map_or(0, |message| message.len());
    }
}

impl Neighbours {
    pub(super) fn new() -> Neighbours {
        Neighbours { peers: HashMap::new(), last: None, stuck: Vec::new(), has_lost: false }
    }

    /// Whether packets go there by the shorter way.
    pub(super) fn has(&mut self, link: &impl Link, address: IpAddr, now: Time) -> bool {
        if self.last == Some(address) {
            return true;
        }
        if !link.is_near(&address) {
            return false;
        }
        let peer = self.peers.entry(address).or_insert_with(|| Peer {
            connection: None,
            is_absent_until: None,
            kept: VecDeque::new(),
            bytes: 0,
            stuck_since: None,
            retry_at: now,
        });
        match &mut peer.is_absent_until {
            // What has gone by the longer way is not to be overtaken.
            Some(until) if *until > now => {
                *until = now + QUIET;
                return false;
            }
            _ => peer.is_absent_until = None,
        }
        if peer.connection.is_none() {
            match link.connect(address) {
                Ok(connection) => peer.connection = Some(connection),
                Err(_) => {
                    peer.is_absent_until = Some(now + QUIET);
                    return false;
                }
            }
        }
        self.last = Some(address);
        true
    }

    /// Whether something is kept for it, behind which all waits that is for it.
    pub(super) fn is_stuck(&self, address: &IpAddr) -> bool {
        self.stuck.contains(address)
    }

    /// The way to it, where there is one.
    pub(super) fn way(&self, address: &IpAddr) -> Option<BorrowedFd<'_>> {
        Some(self.peers.get(address)?.connection.as_ref()?.as_fd())
    }

    /// When to call [`Neighbours::retry`].
    pub(super) fn wake_at(&self) -> Option<Time> {
        self.stuck.iter().filter_map(|address| self.peers.get(address)).map(|peer| peer.retry_at).min()
    }

    /// Keeps a message, which is behind its prefix.
    pub(super) fn keep(&mut self, to: IpAddr, message: Vec<u8>, now: Time) {
        let Some(peer) = self.peers.get_mut(&to) else { return };
        peer.keep(message);
        if !self.stuck.contains(&to) {
            peer.retry_at = now;
            self.stuck.push(to);
        }
    }

    /// Keeps a packet.
    pub(super) fn keep_packet(&mut self, to: To, packet: &[u8], now: Time) {
        self.keep(to.address, [&prefix(packet.len(), to.class), packet].concat(), now);
    }

    /// It has taken a message.
    pub(super) fn took(&mut self, address: &IpAddr) {
        if self.has_lost
            && let Some(peer) = self.peers.get_mut(address)
        {
            peer.stuck_since = None;
            self.has_lost = self.peers.values().any(|peer| peer.stuck_since.is_some());
        }
    }

    /// It has refused a message, which is behind its prefix, for that reason.
    pub(super) fn hold(&mut self, to: IpAddr, message: Vec<u8>, error: &io::Error, now: Time) {
        self.keep(to, message, now);
        self.refused(&to, error, now);
        if self.peers.get(&to).is_none_or(|peer| peer.kept.is_empty()) {
            self.stuck.retain(|address| *address != to);
        }
    }

    /// It has refused the first message that is kept for it, for that reason.
    fn refused(&mut self, address: &IpAddr, error: &io::Error, now: Time) {
        let Some(peer) = self.peers.get_mut(address) else { return };
        if let Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) = error.raw_os_error() {
            peer.retry_at = now + RETRY;
            if *peer.stuck_since.get_or_insert(now) + PATIENCE > now {
                return;
            }
            self.has_lost = true;
        } else {
            // It is not there any more. Another may come to be there.
            (peer.connection, peer.stuck_since) = (None, None);
            self.last = None;
        }
        (peer.kept, peer.bytes) = (VecDeque::new(), 0);
    }

    /// Sends what is kept, to those that it is time to try again.
    pub(super) fn retry(&mut self, frame: &mut Frame, now: Time) {
        for at in (0..self.stuck.len()).rev() {
            let address = self.stuck[at];
            if self.send_kept(&address, frame, now) {
                self.stuck.swap_remove(at);
            }
        }
    }

    /// Whether nothing is left.
    fn send_kept(&mut self, address: &IpAddr, frame: &mut Frame, now: Time) -> bool {
        while let Some(peer) = self.peers.get_mut(address)
            && !peer.kept.is_empty()
        {
            let Some(connection) = peer.connection.as_ref().filter(|_| peer.retry_at <= now) else { return false };
            let count = peer.kept.len().min(MESSAGES);
            for (at, message) in peer.kept.iter().take(count).enumerate() {
                frame.set_near(at, message);
            }
            // SAFETY: the messages are there.
            match unsafe { frame.send_near(count, connection.as_fd()) } {
                Ok(sent) => {
                    peer.stuck_since = None;
                    (0..sent).for_each(|_| peer.pop());
                }
                Err(error) => self.refused(address, &error, now),
            }
        }
        true
    }
}
