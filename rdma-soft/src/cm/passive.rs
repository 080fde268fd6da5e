//! The passive side: REQ, the program's reply, and RTU.

use super::connection::{Connection, Negotiated, Phase};
use super::events::Event;
use super::listeners::is_plausible;
use super::manager::Manager;
use super::mra::mra;
use super::{CallError, ConnectionId, Peer};
use crate::transport::Time;
use crate::wire::cm::{Answered, IpHeader, Message, RejectReason, Rep, Req, Rtu};

impl Manager {
    pub(super) fn handle_req(&mut self, now: Time, from: Peer, transaction: u64, req: Req) {
        let key = (from.address, req.guid, req.local_id);
        if let Some(id) = self.by_remote_id.get(&key).copied() {
            return self.handle_duplicate_req(from, transaction, id);
        }
        let reject = |reason| Message::Rej(self.rej(0, req.local_id, Answered::Req, reason));
        let header = IpHeader::decode(&req.private_data).filter(|header| is_plausible(header, from));
        let listener = header.as_ref().and_then(|header| self.listeners.find(req.service, header.destination));
        let (Some(header), Some(listener)) = (header, listener) else {
            let answer = reject(RejectReason::INVALID_SERVICE_ID);
            return self.send(from, transaction, answer);
        };
        let stale = (from.address, req.qpn);
        if let Some(old) = self.by_remote_qpn.get(&stale).copied() {
            let answer = reject(RejectReason::STALE_CONN);
            self.send(from, transaction, answer);
            let has_other_guid = self.connections.get(&old).is_some_and(|old| old.guid != req.guid);
            // Any user of this host can send from the address of a device. If a peer on this host restarts, which changes its GUID,
            // the owner of this manager learns that the old one is gone: `Manager::handle_gone_peer`.
            if !(from.is_local && has_other_guid) {
                self.end_stale(now, old);
            }
            return;
        }
        let no_resources = reject(RejectReason::NO_RESOURCES);
        let is_repeated = self.was_dropped(from, req.guid, req.local_id);
        if !self.make_place(listener, from, is_repeated) {
            return self.note_dropped(from, req.guid, req.local_id);
        }
        if self.make_room(now).is_err() {
            return self.send(from, transaction, no_resources);
        }
        let id = self.new_id();
        self.enter_backlog(listener, id, from, is_repeated);
        let mut connection = Connection::new(Phase::ReqReceived, from, transaction, Negotiated::of_request(&req));
        (connection.remote_id, connection.guid) = (Some(req.local_id), req.guid);
        connection.backlog_of = Some(listener);
        self.connections.insert(id, connection);
        self.by_remote_id.insert(key, id);
        self.by_remote_qpn.insert(stale, id);
        self.push_event(Event::Request { listener, id, header, request: Box::new(req), peer: from });
    }

    fn handle_duplicate_req(&mut self, from: Peer, transaction: u64, id: ConnectionId) {
        let Some(connection) = self.connections.get(&id) else { return };
        match (connection.phase, connection.remote_id) {
            (Phase::ReqReceived, Some(remote_id)) => {
                self.repeat_in_backlog(id);
                self.send(from, transaction, mra(id, remote_id, Answered::Req));
            }
            (Phase::Timewait(_), Some(remote_id)) => match connection.message.clone() {
                Some(answer) => self.transmit(from, answer),
                None => {
                    let answer = self.rej(id, remote_id, Answered::Req, RejectReason::STALE_CONN);
                    self.send(from, transaction, Message::Rej(answer));
                }
            },
            // The REP is retransmitted until the peer answers it.
            _ => {}
        }
    }

    /// Accepts a request. `reply` has all fields except those that identify the manager and the connection.
    ///
    /// # Errors
    /// [`CallError::State`], also if the peer has withdrawn its request.
    pub fn accept(&mut self, now: Time, id: ConnectionId, reply: Rep) -> Result<(), CallError> {
        let guid = self.config.guid;
        let connection = self.connections.get_mut(&id).filter(|connection| connection.phase == Phase::ReqReceived);
        let connection = connection.ok_or(CallError::State)?;
        let remote_id = connection.remote_id.ok_or(CallError::State)?;
        let reply = Rep { local_id: id, remote_id, guid, ..reply };
        connection.negotiated.add_own_reply(&reply);
        let transaction = connection.transaction;
        _ = self.leave_backlog(id);
        self.by_local_qpn.insert((reply.qpn, id));
        self.half_open.set(id, now + self.config.backoff.interval(0) * 2);
        self.advance(id, Phase::RepSent);
        self.send_until_answered(now, id, transaction, Message::Rep(reply));
        Ok(())
    }

    pub(super) fn handle_rtu(&mut self, from: Peer, transaction: u64, rtu: &Rtu) {
        let Some(id) = self.find(from, rtu.remote_id, rtu.local_id) else {
            // The peer has a connection that this side does not have, for example because this side was restarted.
            if !self.connections.contains_key(&rtu.remote_id) {
                let answer = self.rej(rtu.remote_id, rtu.local_id, Answered::Other, RejectReason::INVALID_COMM_ID);
                self.send(from, transaction, Message::Rej(answer));
            }
            return;
        };
        match self.phase(id) {
            Some(Phase::RepSent) => self.confirm(id),
            Some(Phase::Timewait(_)) => self.send_dreq_once(id),
            _ => {}
        }
    }

    /// Handles the first packet of data for a queue pair whose connection waits for an RTU, which may be lost.
    pub fn establish_by_data(&mut self, qpn: u32) {
        let of_qpn = self.by_local_qpn.range((qpn, 0)..=(qpn, u32::MAX)).map(|(_, id)| *id);
        let waiting: Vec<ConnectionId> = of_qpn.filter(|id| self.phase(*id) == Some(Phase::RepSent)).collect();
        waiting.into_iter().for_each(|id| self.confirm(id));
    }

    fn confirm(&mut self, id: ConnectionId) {
        self.half_open.clear(id);
        self.advance(id, Phase::Established);
        self.report(id, Event::Established { id });
    }
}
