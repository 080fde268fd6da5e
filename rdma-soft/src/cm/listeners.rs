//! Listeners and their backlogs.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::connection::Phase;
use super::events::Event;
use super::manager::Manager;
use super::{ConnectionId, Peer};
use crate::wire::cm::IpHeader;

/// Number of a listener.
pub type ListenerId = u32;

/// The listeners of a manager.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Listeners {
    all: BTreeMap<ListenerId, Listener>,
    last: ListenerId,
}

/// A listener.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Listener {
    service: u64,
    /// Address that it listens at, or all addresses of both or one of the families.
    address: ListenAddress,
    limit: usize,
    /// Requests and lookups that the program has not taken yet, in the order of their arrival, with their sources.
    backlog: Vec<(ConnectionId, IpAddr)>,
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
    /// Accepts requests for a service. At most `backlog` of them wait for [`Manager::take_request`]; further ones are dropped, and
    /// the peers retransmit them.
    pub fn listen(&mut self, service: u64, address: ListenAddress, backlog: usize) -> ListenerId {
        let listeners = &mut self.listeners;
        listeners.last += 1;
        listeners.all.insert(listeners.last, Listener { service, address, limit: backlog, backlog: Vec::new() });
        listeners.last
    }

    /// Removes a listener. Returns the requests that the program has not taken; release them.
    pub fn close_listener(&mut self, listener: ListenerId) -> Vec<ConnectionId> {
        let removed = self.listeners.all.remove(&listener);
        removed.into_iter().flat_map(|listener| listener.backlog).map(|(id, _)| id).collect()
    }

    /// Takes a request or lookup from the backlog of its listener, which makes room for another one.
    pub fn take_request(&mut self, id: ConnectionId) {
        self.leave_backlog(id);
    }

    pub(super) fn leave_backlog(&mut self, id: ConnectionId) {
        let of_connection = self.connections.get_mut(&id).and_then(|connection| connection.backlog_of.take());
        let listener = of_connection.or_else(|| self.lookups.take_backlog(id));
        if let Some(listener) = listener.and_then(|listener| self.listeners.all.get_mut(&listener)) {
            listener.backlog.retain(|(of, _)| *of != id);
        }
    }

    /// Adds a request or lookup to a backlog. Returns whether there was room.
    ///
    /// A full backlog gives the place of the newest request of the address that has the most requests to an address that has
    /// fewer. So a peer that floods a listener does not keep others from it.
    pub(super) fn enter_backlog(&mut self, listener: ListenerId, id: ConnectionId, from: Peer) -> bool {
        let Some(of) = self.listeners.all.get_mut(&listener) else { return false };
        if of.backlog.len() >= of.limit {
            let Some(victim) = displaced(&of.backlog, from.address) else { return false };
            self.withdraw(victim);
        }
        if let Some(of) = self.listeners.all.get_mut(&listener) {
            of.backlog.push((id, from.address));
        }
        true
    }

    /// Removes a request that the program has not taken, as if it had not arrived. The peer retransmits it.
    fn withdraw(&mut self, id: ConnectionId) {
        self.leave_backlog(id);
        if self.phase(id) == Some(Phase::ReqReceived) {
            self.remove(id);
        } else {
            self.forget_lookup(id);
        }
        self.push_event(Event::Withdrawn { id });
    }
}

/// The request that gives its place to a request from `address`, if that address has fewer requests than another one.
fn displaced(backlog: &[(ConnectionId, IpAddr)], address: IpAddr) -> Option<ConnectionId> {
    let mut counts = BTreeMap::<IpAddr, usize>::new();
    for (_, from) in backlog {
        *counts.entry(*from).or_default() += 1;
    }
    let own = counts.get(&address).copied().unwrap_or(0);
    let (most, count) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    // Two addresses that both flood the listener must not displace each other for ever.
    (count > own + 1).then(|| backlog.iter().rev().find(|(_, from)| *from == most).map(|(id, _)| *id))?
}
