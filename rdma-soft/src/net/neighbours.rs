//! Peers that packets go to by the shorter way, and what of that these have not taken yet.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use super::To;
use super::near::{Lane, prefix};
use super::socket::Link;
use crate::transport::Time;

/// When to try again what was not taken: nothing says when a peer takes more.
const RETRY: Duration = Duration::from_micros(10);

/// How long a peer may take nothing before what is for it is lost, as in networks that pause for a while at most.
const PATIENCE: Duration = Duration::from_secs(1);

/// After how long without packets for it a peer is looked for again that was not to be found.
const QUIET: Duration = Duration::from_millis(10);

/// For how long a peer gets packets the longer way that has not taken up the shorter one: some are lost each time it is tried.
const REFUSED: Duration = Duration::from_secs(10);

/// Bytes that are kept for one peer; what is more is lost.
const LIMIT: usize = 16 << 20;

/// Who is near.
#[derive(Default)]
pub(super) struct Neighbours {
    peers: Vec<Peer>,
    /// Which of them are at those addresses.
    places: HashMap<IpAddr, usize>,
    /// The one that was asked for last.
    last: usize,
    /// Those with something kept for them.
    stuck: Vec<usize>,
    /// Places of peers that are gone.
    spare: Vec<usize>,
}

struct Peer {
    address: IpAddr,
    lane: Option<Lane>,
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
    fn new(address: IpAddr) -> Peer {
        Peer {
            address,
            lane: None,
            is_absent_until: None,
            kept: VecDeque::new(),
            bytes: 0,
            stuck_since: None,
            retry_at: Time(0),
        }
    }

    /// Finds the way there, if there is one. Its place is the way's number.
    fn meet(&mut self, place: usize, link: &impl Link, now: Time) -> bool {
        if let Some(until) = self.is_absent_until.as_mut().filter(|until| **until > now) {
            // What has gone by the longer way is not to be overtaken.
            *until = (*until).max(now + QUIET);
            return false;
        }
        self.lane = link.connect(self.address, place, now).ok();
        self.is_absent_until = self.lane.is_none().then(|| now + QUIET);
        self.lane.is_some()
    }

    /// Sends a message, or keeps it behind those that are kept already. Where nobody is any more it is lost.
    fn send(&mut self, message: &[u8], now: Time) {
        if self.kept.is_empty() {
            let Some(lane) = &mut self.lane else { return };
            match lane.add(message, now) {
                Ok(()) => {
                    self.stuck_since = None;
                    return;
                }
                Err(error) if !self.is_worth_waiting(&error, now) => return,
                Err(_) => {}
            }
        }
        self.keep(message.to_vec());
    }

    fn keep(&mut self, message: Vec<u8>) {
        if self.bytes + message.len() <= LIMIT {
            self.bytes += message.len();
            self.kept.push_back(message);
        }
    }

    /// It has refused a message for that reason: whether it may take it later.
    fn is_worth_waiting(&mut self, error: &io::Error, now: Time) -> bool {
        if error.kind() == io::ErrorKind::WouldBlock {
            self.retry_at = now + RETRY;
            return *self.stuck_since.get_or_insert(now) + PATIENCE > now;
        }
        self.part(now);
        false
    }

    /// It is not there any more. Another may come to be there.
    fn part(&mut self, now: Time) {
        // Or it was there all the time, and does not want this.
        if self.lane.take().is_some_and(|lane| !lane.was_open()) {
            self.is_absent_until = Some(now + REFUSED);
        }
        self.stuck_since = None;
    }

    /// Sends what is kept, if it is time to: whether nothing is left.
    fn send_kept(&mut self, now: Time) -> bool {
        while let (Some(message), Some(lane)) = (self.kept.front(), &mut self.lane) {
            if self.retry_at > now {
                return false;
            }
            match lane.add(message, now) {
                Ok(()) => {
                    self.stuck_since = None;
                    self.bytes -= message.len();
                    self.kept.pop_front();
                }
                Err(error) if self.is_worth_waiting(&error, now) => break,
                Err(_) => self.kept.clear(),
            }
        }
        self.wake();
        if self.lane.is_none() || self.kept.is_empty() {
            (self.kept, self.bytes) = (VecDeque::new(), 0);
        }
        self.kept.is_empty()
    }

    fn wake(&mut self) {
        if let Some(lane) = &mut self.lane {
            lane.wake();
        }
    }
}

impl Neighbours {
    fn find(&self, address: &IpAddr) -> Option<usize> {
        match self.peers.get(self.last) {
            Some(peer) if peer.address == *address => Some(self.last),
            _ => self.places.get(address).copied(),
        }
    }

    /// Whether packets go there by the shorter way.
    pub(super) fn has(&mut self, link: &impl Link, address: IpAddr, now: Time) -> bool {
        let place = match self.find(&address) {
            Some(place) => place,
            None if !link.is_near(&address) => return false,
            None => self.add(Peer::new(address)),
        };
        self.last = place;
        let peer = &mut self.peers[place];
        peer.lane.is_some() || peer.meet(place, link, now)
    }

    fn add(&mut self, peer: Peer) -> usize {
        let place = self.spare.pop().unwrap_or(self.peers.len());
        self.places.insert(peer.address, place);
        match self.peers.get_mut(place) {
            Some(spare) => *spare = peer,
            None => self.peers.push(peer),
        }
        place
    }

    /// The way to the peer in that place has ended, unless it is another one by now.
    pub(super) fn end(&mut self, place: usize, now: Time) {
        let Some(peer) = self.peers.get_mut(place) else { return };
        if peer.lane.as_ref().is_some_and(|lane| lane.look().is_ok()) || self.places.get(&peer.address) != Some(&place)
        {
            return;
        }
        peer.part(now);
        (peer.kept, peer.bytes) = (VecDeque::new(), 0);
        self.stuck.retain(|stuck| *stuck != place);
        if peer.is_absent_until.is_none() {
            self.places.remove(&peer.address);
            self.spare.push(place);
            self.last = usize::MAX;
        }
    }

    /// How many there are.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.peers.iter().filter(|peer| peer.lane.is_some()).count()
    }

    /// Whether there is a way to it.
    pub(super) fn is_met(&self, address: &IpAddr) -> bool {
        self.find(address).is_some_and(|place| self.peers[place].lane.is_some())
    }

    /// Whether something is kept for it, behind which all waits that is for it.
    pub(super) fn is_stuck(&self, address: &IpAddr) -> bool {
        !self.stuck.is_empty() && self.find(address).is_some_and(|place| !self.peers[place].kept.is_empty())
    }

    /// Whether no packets are kept for any peer.
    #[inline]
    pub(super) fn keeps_nothing(&self) -> bool {
        self.stuck.is_empty()
    }

    /// When to call [`Neighbours::retry`].
    pub(super) fn wake_at(&self) -> Option<Time> {
        self.stuck.iter().map(|place| self.peers[*place].retry_at).min()
    }

    /// Sends messages, each behind its prefix, to who was [met](Neighbours::has), and keeps what is not taken. Where nobody is
    /// any more they are lost.
    pub(super) fn send<'a>(&mut self, to: IpAddr, messages: impl Iterator<Item = &'a [u8]>, now: Time) {
        let Some(place) = self.find(&to) else { return };
        let peer = &mut self.peers[place];
        for message in messages {
            peer.send(message, now);
        }
        peer.wake();
        self.note(place);
    }

    /// Keeps a packet for who was met: it goes with the next [`retry`](Neighbours::retry).
    pub(super) fn keep_packet(&mut self, to: To, packet: &[u8], now: Time) {
        let Some(place) = self.find(&to.address) else { return };
        let peer = &mut self.peers[place];
        if peer.kept.is_empty() {
            peer.retry_at = now;
        }
        peer.keep([&prefix(packet.len(), to.class), packet].concat());
        self.note(place);
    }

    /// Wakes the peers to which packets were sent since the last call, even if they have not asked for it.
    pub(super) fn kick(&mut self) {
        self.peers.iter_mut().filter_map(|peer| peer.lane.as_mut()).for_each(Lane::kick);
    }

    fn note(&mut self, place: usize) {
        if !self.peers[place].kept.is_empty() && !self.stuck.contains(&place) {
            self.stuck.push(place);
        }
    }

    /// Sends what is kept, to those that it is time to try again.
    pub(super) fn retry(&mut self, now: Time) {
        let Neighbours { peers, stuck, .. } = self;
        stuck.retain(|place| !peers[*place].send_kept(now));
    }
}
