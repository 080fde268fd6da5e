//! Listeners and their backlogs.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::backlog::Backlog;
use super::connection::Phase;
use super::dropped::Dropped;
use super::events::Event;
use super::manager::{Config, Manager};
use super::{ConnectionId, Peer};
use crate::wire::cm::IpHeader;

/// Number of a listener.
pub type ListenerId = u32;

/// The listeners of a manager.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Listeners {
    all: BTreeMap<ListenerId, Listener>,
    last: ListenerId,
    max_backlog: usize,
    dropped: Dropped,
}

/// A listener.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Listener {
    service: u64,
    /// Address that it listens at, or all addresses of both or one of the families.
    address: ListenAddress,
    backlog: Backlog,
}

/// The addresses that a listener accepts requests for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ListenAddress {
    /// One address.
    One(IpAddr),
    /// All IPv4 addresses.
    AnyV4,
    /// All IPv6 addresses.
    AnyV6,
    /// All addresses.
    Any,
}

impl ListenAddress {
    /// How well an address fits: 0 is not at all.
    fn fit(self, address: IpAddr) -> u8 {
        match (self, address) {
            (ListenAddress::One(own), _) if own == address => 3,
            (ListenAddress::AnyV4, IpAddr::V4(_)) | (ListenAddress::AnyV6, IpAddr::V6(_)) => 2,
            (ListenAddress::Any, _) => 1,
            _ => 0,
        }
    }
}

impl Listeners {
    pub(super) fn new(config: &Config) -> Self {
        let (max_backlog, dropped) = (config.max_backlog, Dropped::new(config.seed));
        Listeners { all: BTreeMap::new(), last: 0, max_backlog, dropped }
    }

    fn backlog(&mut self, listener: ListenerId) -> Option<&mut Backlog> {
        self.all.get_mut(&listener).map(|listener| &mut listener.backlog)
    }

    pub(super) fn backlogs(&self) -> impl Iterator<Item = (ListenerId, &Backlog)> {
        self.all.iter().map(|(id, listener)| (*id, &listener.backlog))
    }

    /// Finds the listener of a service that fits an address best.
    pub(super) fn find(&self, service: u64, address: IpAddr) -> Option<ListenerId> {
        let fitting = self.all.iter().filter(|(_, listener)| listener.service == service);
        let best = fitting.map(|(id, listener)| (listener.address.fit(address), *id)).max()?;
        (best.0 > 0).then_some(best.1)
    }
}

/// Whether a request can have come from the addresses in its header.
///
/// A peer on another host must not name an address that only this host can use, and it names the address that its packets come
/// from.
pub(super) fn is_plausible(header: &IpHeader, from: Peer) -> bool {
    from.is_local || (!header.destination.is_loopback() && header.source.ip() == from.address)
}

impl Manager {
    /// Accepts requests for a service. At most `backlog` of them, and at most [`Config::max_backlog`], wait for
    /// [`Manager::take_request`]; further ones are dropped, and the peers retransmit them.
    pub fn listen(&mut self, service: u64, address: ListenAddress, backlog: usize) -> ListenerId {
        let listeners = &mut self.listeners;
        listeners.last += 1;
        let backlog = Backlog::new(backlog.min(listeners.max_backlog));
        listeners.all.insert(listeners.last, Listener { service, address, backlog });
        listeners.last
    }

    /// Removes a listener. Returns the requests that the program has not taken; release them.
    pub fn close_listener(&mut self, listener: ListenerId) -> Vec<ConnectionId> {
        let removed = self.listeners.all.remove(&listener);
        removed.into_iter().flat_map(|listener| listener.backlog.into_ids()).collect()
    }

    /// Takes a request or lookup from the backlog of its listener, which makes room for another one.
    pub fn take_request(&mut self, id: ConnectionId) {
        _ = self.leave_backlog(id);
    }

    /// Removes a request or lookup from the backlog. Returns whether it was there: the program has not taken it.
    pub(super) fn leave_backlog(&mut self, id: ConnectionId) -> bool {
        let of_connection = self.connections.get_mut(&id).and_then(|connection| connection.backlog_of.take());
        let listener = of_connection.or_else(|| self.lookups.take_backlog(id));
        if let Some(backlog) = listener.and_then(|listener| self.listeners.backlog(listener)) {
            backlog.remove(id);
        }
        listener.is_some()
    }

    /// Notes that a request that the program has not taken has ended. It keeps its place, so that requests that end at once do not
    /// pile up before a program that takes none.
    pub(super) fn end_in_backlog(&mut self, id: ConnectionId) {
        let listener = self.connections.get(&id).and_then(|connection| connection.backlog_of);
        if let Some(backlog) = listener.and_then(|listener| self.listeners.backlog(listener)) {
            backlog.end(id);
        }
    }

    pub(super) fn enter_backlog(&mut self, listener: ListenerId, id: ConnectionId, from: Peer, is_repeated: bool) {
        if let Some(backlog) = self.listeners.backlog(listener) {
            backlog.push(id, from.address, is_repeated);
        }
    }

    /// Notes that the peer has retransmitted a request or lookup that may be in a backlog.
    pub(super) fn repeat_in_backlog(&mut self, id: ConnectionId) {
        let of_connection = self.connections.get(&id).and_then(|connection| connection.backlog_of);
        let listener = of_connection.or_else(|| self.lookups.backlog_of(id));
        if let Some(backlog) = listener.and_then(|listener| self.listeners.backlog(listener)) {
            backlog.repeat(id);
        }
    }

    /// Makes a place in a backlog for a request or lookup. Returns whether there is one.
    pub(super) fn make_place(&mut self, listener: ListenerId, from: Peer, is_repeated: bool) -> bool {
        let Some(backlog) = self.listeners.backlog(listener) else { return false };
        if !backlog.is_full() {
            return true;
        }
        let Some(id) = backlog.displaced_by(from.address, is_repeated) else { return false };
        self.withdraw(id);
        true
    }

    pub(super) fn was_dropped(&self, from: Peer, guid: u64, remote_id: u32) -> bool {
        self.listeners.dropped.contains(from.address, guid, remote_id)
    }

    pub(super) fn note_dropped(&mut self, from: Peer, guid: u64, remote_id: u32) {
        self.listeners.dropped.insert(from.address, guid, remote_id);
    }

    /// Removes a request that the program has not taken, as if it had not arrived. The peer retransmits it, unless it has ended it.
    fn withdraw(&mut self, id: ConnectionId) {
        _ = self.leave_backlog(id);
        match self.phase(id) {
            Some(Phase::ReqReceived) => self.remove(id),
            Some(_) => {}
            None => self.forget_lookup(id),
        }
        self.push_event(Event::Withdrawn { id });
    }
}
