//! Lookups of datagram services: SIDR_REQ and SIDR_REP.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::events::Event;
use super::listeners::is_plausible;
use super::manager::{Manager, encode};
use super::timers::Timers;
use super::{CallError, ConnectionId, ListenerId, Peer};
use crate::transport::Time;
use crate::wire::cm::{AdditionalInfo, IpHeader, MAD_LEN, Message, SidrRep, SidrReq, SidrStatus};

/// The lookups of a manager.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Lookups {
    /// Lookups of this side.
    own: BTreeMap<ConnectionId, OwnLookup>,
    /// Lookups of peers, by the id that this side has given them.
    served: BTreeMap<ConnectionId, ServedLookup>,
    /// The same by the address and the id of the peer, to detect duplicates.
    by_remote_id: BTreeMap<(IpAddr, u32), ConnectionId>,
    /// When the answered lookups of peers are forgotten.
    pub(super) answered: Timers,
}

/// A lookup of this side that is not answered yet.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct OwnLookup {
    to: Peer,
    retries: u8,
    mad: Box<[u8; MAD_LEN]>,
}

/// A lookup of a peer.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct ServedLookup {
    from: Peer,
    remote_id: u32,
    transaction: u64,
    service: u64,
    backlog_of: Option<ListenerId>,
    /// The answer, which is sent again for duplicates.
    answer: Option<Box<[u8; MAD_LEN]>>,
}

impl Lookups {
    pub(super) fn has(&self, id: ConnectionId) -> bool {
        self.own.contains_key(&id) || self.served.contains_key(&id)
    }

    /// Number of lookups that are not answered yet.
    pub(super) fn live(&self) -> usize {
        self.own.len() + self.served.len() - self.answered.len()
    }

    /// Lookups of this side at a peer.
    pub(super) fn of_peer(&self, address: IpAddr) -> Vec<ConnectionId> {
        self.own.iter().filter(|(_, lookup)| lookup.to.address == address).map(|(id, _)| *id).collect()
    }

    pub(super) fn take_backlog(&mut self, id: ConnectionId) -> Option<ListenerId> {
        self.served.get_mut(&id)?.backlog_of.take()
    }

    pub(super) fn backlog_of(&self, id: ConnectionId) -> Option<ListenerId> {
        self.served.get(&id)?.backlog_of
    }

    pub(super) fn in_backlogs(&self) -> impl Iterator<Item = (ConnectionId, Option<ListenerId>)> + '_ {
        self.served.iter().map(|(id, served)| (*id, served.backlog_of))
    }

    /// Panics if the indexes do not agree.
    pub(super) fn assert_consistent(&self) {
        assert_eq!(self.by_remote_id.len(), self.served.len());
        for (key, id) in &self.by_remote_id {
            let served = &self.served[id];
            assert_eq!(*key, (served.from.address, served.remote_id));
        }
        for (id, served) in &self.served {
            assert_eq!(served.answer.is_some(), self.answered.has(*id), "the answer of {id:#x}");
        }
    }

    fn remove_served(&mut self, id: ConnectionId) {
        if let Some(removed) = self.served.remove(&id) {
            self.by_remote_id.remove(&(removed.from.address, removed.remote_id));
        }
        self.answered.clear(id);
    }
}

impl Manager {
    /// Looks up the queue pair of a datagram service. `request` has all fields except the id.
    ///
    /// # Errors
    /// [`CallError::Full`].
    pub fn look_up(&mut self, now: Time, to: Peer, request: SidrReq) -> Result<ConnectionId, CallError> {
        self.make_room(now)?;
        let id = self.new_id();
        let mad = encode(self.transaction(id), Message::SidrReq(SidrReq { id, ..request }));
        self.lookups.own.insert(id, OwnLookup { to, retries: 0, mad: mad.clone() });
        self.timers.set(id, now + self.config.lookup_backoff.interval(0));
        self.transmit(to, mad);
        Ok(id)
    }

    /// Ends a lookup of the program that is not answered yet, or refuses one of a peer.
    pub fn release_lookup(&mut self, now: Time, id: ConnectionId) {
        if self.lookups.own.remove(&id).is_some() {
            self.timers.clear(id);
        } else {
            let refusal = SidrRep { status: SidrStatus::REJECT, ..empty_reply() };
            _ = self.reply_lookup(now, id, refusal);
        }
    }

    pub(super) fn handle_sidr_rep(&mut self, from: Peer, reply: SidrRep) {
        let id = reply.id;
        if self.lookups.own.get(&id).is_some_and(|lookup| lookup.to.address == from.address) {
            self.lookups.own.remove(&id);
            self.timers.clear(id);
            self.push_event(Event::LookupReply { id, reply: Box::new(reply) });
        }
    }

    pub(super) fn handle_sidr_req(&mut self, now: Time, from: Peer, transaction: u64, request: SidrReq) {
        let key = (from.address, request.id);
        if let Some(id) = self.lookups.by_remote_id.get(&key) {
            let id = *id;
            match self.lookups.served.get(&id).and_then(|served| served.answer.clone()) {
                Some(answer) => self.transmit(from, answer),
                None => self.repeat_in_backlog(id),
            }
            return;
        }
        let service = request.service;
        let header = IpHeader::decode(&request.private_data).filter(|header| is_plausible(header, from));
        let listener = header.as_ref().and_then(|header| self.listeners.find(service, header.destination));
        let (Some(header), Some(listener)) = (header, listener) else {
            let status = SidrStatus::UNSUPPORTED;
            let reply = SidrRep { id: request.id, status, service, ..empty_reply() };
            return self.send(from, transaction, Message::SidrRep(reply));
        };
        let is_repeated = self.was_dropped(from, 0, request.id);
        if !self.make_place(listener, from, is_repeated) || self.make_room(now).is_err() {
            return self.note_dropped(from, 0, request.id);
        }
        let id = self.new_id();
        self.enter_backlog(listener, id, from, is_repeated);
        let remote_id = request.id;
        let served = ServedLookup { from, remote_id, transaction, service, backlog_of: Some(listener), answer: None };
        self.lookups.served.insert(id, served);
        self.lookups.by_remote_id.insert(key, id);
        self.push_event(Event::Lookup { listener, id, header, request: Box::new(request), peer: from });
    }

    /// Number of answered lookups of peers, and number of lookups that are not answered yet.
    #[must_use]
    pub fn lookup_counts(&self) -> (usize, usize) {
        (self.lookups.answered.len(), self.lookups.live())
    }

    /// Answers a lookup of a peer. `reply` has all fields except the id and the service.
    ///
    /// # Errors
    /// [`CallError::State`] if it is answered already.
    pub fn reply_lookup(&mut self, now: Time, id: ConnectionId, reply: SidrRep) -> Result<(), CallError> {
        _ = self.leave_backlog(id);
        let served = self.lookups.served.get_mut(&id).filter(|served| served.answer.is_none());
        let served = served.ok_or(CallError::State)?;
        let reply = SidrRep { id: served.remote_id, service: served.service, ..reply };
        let answer = encode(served.transaction, Message::SidrRep(reply));
        served.answer = Some(answer.clone());
        let from = served.from;
        self.lookups.answered.set(id, now + self.config.answer_lifetime);
        if self.lookups.answered.len() > self.config.max_timewait {
            if let Some((_, oldest)) = self.lookups.answered.first() {
                self.lookups.remove_served(oldest);
            }
        }
        self.transmit(from, answer);
        Ok(())
    }

    /// Reports that a lookup of the program gets no answer.
    pub(super) fn fail_lookup(&mut self, id: ConnectionId) {
        self.timers.clear(id);
        self.lookups.own.remove(&id);
        self.push_event(Event::LookupUnreachable { id });
    }

    /// Removes a lookup of a peer that gave up its place in a backlog.
    pub(super) fn forget_lookup(&mut self, id: ConnectionId) {
        self.lookups.remove_served(id);
    }

    pub(super) fn handle_lookup_timeout(&mut self, now: Time, id: ConnectionId) {
        let backoff = self.config.lookup_backoff;
        let Some(lookup) = self.lookups.own.get_mut(&id) else {
            return self.lookups.remove_served(id);
        };
        if lookup.retries >= backoff.retries {
            return self.fail_lookup(id);
        }
        lookup.retries += 1;
        let (to, mad, interval) = (lookup.to, lookup.mad.clone(), backoff.interval(lookup.retries));
        self.timers.set(id, now + interval);
        self.transmit(to, mad);
    }
}

/// A reply without a queue pair.
fn empty_reply() -> SidrRep {
    SidrRep {
        id: 0,
        status: SidrStatus::SUCCESS,
        qpn: 0,
        service: 0,
        qkey: 0,
        info: AdditionalInfo::NONE,
        vendor_id: 0,
        ece_options: 0,
        private_data: [0; SidrRep::PRIVATE_DATA],
    }
}
