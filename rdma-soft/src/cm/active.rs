//! The active side: REQ, the reply to it, and RTU.

use super::connection::{Connection, Ended, Negotiated, Phase};
use super::end::rejected;
use super::events::Event;
use super::manager::Manager;
use super::mra::mra;
use super::{CallError, ConnectionId, Peer};
use crate::transport::Time;
use crate::wire::cm::{Answered, Message, Rej, RejectReason, Rep, Req, Rtu};

/// CM response timeout in the REQs of this side: the peer may expect an answer within a second, and retransmits after that.
const RESPONSE_TIMEOUT: u8 = 18;

/// Retransmissions that the REQs of this side allow the peer.
const MAX_CM_RETRIES: u8 = 15;

impl Manager {
    /// Requests a connection. `request` has all fields except those that identify the manager.
    ///
    /// # Errors
    /// [`CallError::Full`].
    pub fn connect(&mut self, now: Time, to: Peer, request: Req) -> Result<ConnectionId, CallError> {
        self.make_room(now)?;
        let id = self.new_id();
        let transaction = self.transaction(id);
        let request = Req {
            local_id: id,
            guid: self.config.guid,
            local_timeout: RESPONSE_TIMEOUT,
            remote_timeout: RESPONSE_TIMEOUT,
            max_cm_retries: MAX_CM_RETRIES,
            ..request
        };
        let connection = Connection::new(Phase::ReqSent, to, transaction, Negotiated::of_own_request(&request));
        self.connections.insert(id, connection);
        self.by_local_qpn.insert((request.qpn, id));
        self.send_until_answered(now, id, transaction, Message::Req(request));
        Ok(id)
    }

    pub(super) fn handle_rep(&mut self, now: Time, from: Peer, transaction: u64, rep: Rep) {
        let id = rep.remote_id;
        let known = self.connections.get_mut(&id).filter(|connection| connection.peer.address == from.address);
        let Some(connection) = known else {
            // The peer would retransmit the REP until its retries are exhausted.
            return self.reject_rep(from, transaction, &rep, RejectReason::INVALID_COMM_ID);
        };
        if connection.phase != Phase::ReqSent {
            return self.handle_late_rep(from, transaction, &rep);
        }
        let (remote_id, stale) = ((from.address, rep.guid, rep.local_id), (from.address, rep.qpn));
        let old = self.by_remote_qpn.get(&stale).copied();
        if old.is_some() || self.by_remote_id.contains_key(&remote_id) {
            self.reject_rep(from, transaction, &rep, RejectReason::STALE_CONN);
            self.report_end(id, rejected(id, RejectReason::STALE_CONN, [0; Rej::PRIVATE_DATA]));
            self.enter_timewait(now, id, Ended::Failed, None);
            return old.into_iter().for_each(|old| self.end_stale(now, old));
        }
        (connection.remote_id, connection.guid) = (Some(rep.local_id), rep.guid);
        connection.negotiated.add_reply(&rep);
        self.by_remote_qpn.insert(stale, id);
        self.by_remote_id.insert(remote_id, id);
        self.advance(id, Phase::RepReceived);
        self.report(id, Event::Reply { id, reply: Box::new(rep) });
    }

    /// Handles a REP for a connection that does not wait for one.
    fn handle_late_rep(&mut self, from: Peer, transaction: u64, rep: &Rep) {
        let Some(connection) = self.connections.get(&rep.remote_id) else { return };
        let is_of_peer = connection.remote_id == Some(rep.local_id);
        match connection.phase {
            Phase::Established if is_of_peer => {
                self.send(from, transaction, rtu(rep.remote_id, rep.local_id));
            }
            Phase::RepReceived if is_of_peer => {
                self.send(from, transaction, mra(rep.remote_id, rep.local_id, Answered::Rep));
            }
            Phase::Timewait(Ended::Failed) => match connection.message.clone().filter(|_| is_of_peer) {
                Some(answer) => self.transmit(from, answer),
                None => self.reject_rep(from, transaction, rep, RejectReason::TIMEOUT),
            },
            // The DREQ of this side tells the peer that the connection has ended.
            Phase::Timewait(Ended::Disconnected) if is_of_peer => self.send_dreq_once(rep.remote_id),
            _ if is_of_peer => {}
            // The peer was restarted, and has accepted a duplicate of the REQ.
            _ => self.reject_rep(from, transaction, rep, RejectReason::INVALID_COMM_ID),
        }
    }

    fn reject_rep(&mut self, to: Peer, transaction: u64, rep: &Rep, reason: RejectReason) {
        let answer = self.rej(rep.remote_id, rep.local_id, Answered::Rep, reason);
        self.send(to, transaction, Message::Rej(answer));
    }

    /// Confirms the reply of the peer. The queue pair is in RTS.
    ///
    /// # Errors
    /// [`CallError::State`].
    pub fn establish(&mut self, id: ConnectionId) -> Result<(), CallError> {
        let connection = self.connections.get(&id).filter(|connection| connection.phase == Phase::RepReceived);
        let connection = connection.ok_or(CallError::State)?;
        let (peer, transaction) = (connection.peer, connection.transaction);
        let remote_id = connection.remote_id.ok_or(CallError::State)?;
        self.advance(id, Phase::Established);
        self.send(peer, transaction, rtu(id, remote_id));
        Ok(())
    }
}

fn rtu(local_id: u32, remote_id: u32) -> Message {
    Message::Rtu(Rtu { local_id, remote_id, private_data: [0; Rtu::PRIVATE_DATA] })
}
