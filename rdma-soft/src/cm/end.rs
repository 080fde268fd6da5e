//! Ends of connections: DREQ, DREP, REJ, timeouts, and timewait.

use super::connection::{Ended, Phase};
use super::events::{Event, Failure};
use super::manager::{Manager, encode};
use super::{CallError, ConnectionId, Peer};
use crate::transport::Time;
use crate::wire::cm::{AdditionalInfo, Answered, Apr, Drep, Dreq, Lap, Message, Rej, RejectReason};

impl Manager {
    /// Ends a connection, or confirms an [`Event::Disconnected`].
    ///
    /// # Errors
    /// [`CallError::State`] unless the connection is established or its end was reported.
    pub fn disconnect(&mut self, now: Time, id: ConnectionId) -> Result<(), CallError> {
        let connection = self.connections.get(&id).ok_or(CallError::State)?;
        match connection.phase {
            Phase::Established => self.start_disconnect(now, id),
            Phase::DreqReceived => {
                self.send_drep_of(id);
                self.enter_timewait(now, id, Ended::Disconnected, None);
            }
            // The peer knows that the connection has ended, or is being told.
            Phase::DreqSent | Phase::Timewait(Ended::Disconnected) if connection.is_end_reported => {}
            _ => return Err(CallError::State),
        }
        Ok(())
    }

    /// Sends DREQ until the peer confirms the end of the connection.
    fn start_disconnect(&mut self, now: Time, id: ConnectionId) {
        let Some(dreq) = self.dreq(id) else { return };
        let transaction = self.transaction(id);
        self.advance(id, Phase::DreqSent);
        self.send_until_answered(now, id, transaction, dreq);
    }

    /// Ends a connection that has ended at the peer: the peer now uses the queue pair number for another connection.
    pub(super) fn end_stale(&mut self, now: Time, id: ConnectionId) {
        let failed = rejected(id, RejectReason::STALE_CONN, [0; Rej::PRIVATE_DATA]);
        match self.phase(id) {
            Some(Phase::Established | Phase::DreqReceived) => {
                self.report_end(id, Event::Disconnected { id, is_confirmed: true });
                _ = self.disconnect(now, id);
            }
            Some(Phase::ReqReceived | Phase::RepReceived) => {
                self.report_end(id, failed);
                _ = self.send_rejection(now, id, RejectReason::STALE_CONN, [0; Rej::PRIVATE_DATA]);
            }
            Some(Phase::RepSent) => {
                self.report_end(id, failed);
                self.withdraw_rep(now, id, RejectReason::STALE_CONN);
            }
            Some(Phase::ReqSent | Phase::DreqSent | Phase::Timewait(_)) | None => {}
        }
    }

    fn dreq(&self, id: ConnectionId) -> Option<Message> {
        let connection = self.connections.get(&id)?;
        let remote_id = connection.remote_id?;
        let remote_qpn = connection.negotiated.remote_qpn;
        Some(Message::Dreq(Dreq { local_id: id, remote_id, remote_qpn, private_data: [0; Dreq::PRIVATE_DATA] }))
    }

    /// Tells a peer that sends late messages that the connection has ended.
    pub(super) fn send_dreq_once(&mut self, id: ConnectionId) {
        let (Some(dreq), Some(peer)) = (self.dreq(id), self.peer(id)) else { return };
        let transaction = self.transaction(id);
        self.send(peer, transaction, dreq);
    }

    fn send_drep_of(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get(&id) else { return };
        let (peer, transaction) = (connection.peer, connection.transaction);
        let Some(remote_id) = connection.remote_id else { return };
        self.send(peer, transaction, drep(id, remote_id));
    }

    /// Releases a connection: the program has no more use for it, and gets no more events of it.
    ///
    /// A request is rejected and a connection ended. The manager keeps it until the peer knows that, and through timewait.
    pub fn release(&mut self, now: Time, id: ConnectionId) {
        let Some(phase) = self.phase(id) else { return };
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.is_released = true;
        }
        match phase {
            Phase::ReqSent => self.abandon_req(now, id),
            Phase::ReqReceived | Phase::RepReceived => {
                _ = self.reject(now, id, RejectReason::CONSUMER_DEFINED, [0; Rej::PRIVATE_DATA]);
            }
            Phase::RepSent => self.withdraw_rep(now, id, RejectReason::CONSUMER_DEFINED),
            Phase::Established | Phase::DreqReceived => _ = self.disconnect(now, id),
            Phase::DreqSent | Phase::Timewait(_) => {}
        }
    }

    /// Rejects a request, or a reply that was received.
    ///
    /// # Errors
    /// [`CallError::State`].
    pub fn reject(
        &mut self,
        now: Time,
        id: ConnectionId,
        reason: RejectReason,
        private_data: [u8; Rej::PRIVATE_DATA],
    ) -> Result<(), CallError> {
        _ = self.leave_backlog(id);
        self.send_rejection(now, id, reason, private_data)
    }

    /// Like [`Manager::reject`], but the program need not have taken the request. If it has not, the request keeps its place in the
    /// backlog.
    pub(super) fn send_rejection(
        &mut self,
        now: Time,
        id: ConnectionId,
        reason: RejectReason,
        private_data: [u8; Rej::PRIVATE_DATA],
    ) -> Result<(), CallError> {
        let connection = self.connections.get(&id).ok_or(CallError::State)?;
        let answers = match connection.phase {
            Phase::ReqReceived => Answered::Req,
            Phase::RepReceived => Answered::Rep,
            _ => return Err(CallError::State),
        };
        let (peer, transaction) = (connection.peer, connection.transaction);
        let remote_id = connection.remote_id.ok_or(CallError::State)?;
        let rejection = Rej { private_data, ..self.rej(id, remote_id, answers, reason) };
        let answer = encode(transaction, Message::Rej(rejection));
        self.transmit(peer, answer.clone());
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.is_end_reported = true;
        }
        self.enter_timewait(now, id, Ended::Failed, Some(answer));
        Ok(())
    }

    /// Ends a request that was not answered. A later REP gets a REJ.
    fn abandon_req(&mut self, now: Time, id: ConnectionId) {
        if let Some(connection) = self.connections.get(&id) {
            let (peer, transaction) = (connection.peer, connection.transaction);
            let answer = self.rej(id, 0, Answered::Req, RejectReason::TIMEOUT);
            self.send(peer, transaction, Message::Rej(answer));
        }
        self.enter_timewait(now, id, Ended::Failed, None);
    }

    /// Ends a connection whose REP was not answered.
    ///
    /// The peer may have received the REP and sent an RTU that was lost. It is told until it confirms: the REJ is for a peer that
    /// has not sent the RTU yet, the DREQ for one that has.
    fn withdraw_rep(&mut self, now: Time, id: ConnectionId, reason: RejectReason) {
        if let Some(connection) = self.connections.get(&id) {
            let (peer, transaction) = (connection.peer, connection.transaction);
            let answer = self.rej(id, connection.remote_id.unwrap_or(0), Answered::Other, reason);
            self.send(peer, transaction, Message::Rej(answer));
        }
        self.start_disconnect(now, id);
    }

    /// Ends a connection whose REP was not answered, at once, to make room for another connection. The peer is told once.
    pub(super) fn give_up_half_open(&mut self, now: Time, id: ConnectionId) {
        self.report_end(id, Event::Failed { id, failure: Failure::Unreachable });
        self.send_dreq_once(id);
        self.enter_timewait(now, id, Ended::Disconnected, None);
    }

    /// A REJ without private data.
    pub(super) fn rej(&self, local_id: u32, remote_id: u32, answers: Answered, reason: RejectReason) -> Rej {
        // A peer may know the connection only by the GUID and the local id of this side. Linux looks it up by them for this reason.
        let guid = self.config.guid.to_be_bytes();
        let info = if reason == RejectReason::TIMEOUT { AdditionalInfo::new(&guid) } else { AdditionalInfo::NONE };
        Rej { local_id, remote_id, answers, reason, info, private_data: [0; Rej::PRIVATE_DATA] }
    }

    pub(super) fn handle_dreq(&mut self, now: Time, from: Peer, transaction: u64, dreq: &Dreq) {
        let known = self.find(from, dreq.remote_id, dreq.local_id);
        let Some(id) = known.or_else(|| self.find_unanswered(from, dreq.remote_id)) else {
            // The connection has left timewait here, and the DREP of that time was lost.
            return self.send(from, transaction, drep(dreq.remote_id, dreq.local_id));
        };
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.negotiated.local_qpn != dreq.remote_qpn {
            return;
        }
        match connection.phase {
            phase @ (Phase::Established | Phase::RepSent | Phase::RepReceived) => {
                connection.transaction = transaction;
                self.half_open.clear(id);
                if phase == Phase::RepSent {
                    // A peer that disconnects has established the connection. Its RTU was lost.
                    self.report(id, Event::Established { id });
                }
                self.advance(id, Phase::DreqReceived);
                self.report_end(id, Event::Disconnected { id, is_confirmed: true });
            }
            Phase::DreqSent => {
                self.send(from, transaction, drep(id, dreq.local_id));
                self.confirm_end(now, id);
            }
            Phase::Timewait(_) => self.send(from, transaction, drep(id, dreq.local_id)),
            // The peer has withdrawn a REP that has not arrived yet.
            Phase::ReqSent => {
                self.send(from, transaction, drep(id, dreq.local_id));
                self.report_end(id, rejected(id, RejectReason::CONSUMER_DEFINED, [0; Rej::PRIVATE_DATA]));
                self.enter_timewait(now, id, Ended::Failed, None);
            }
            // The program confirms the end of the connection, as with Linux.
            Phase::DreqReceived | Phase::ReqReceived => {}
        }
    }

    pub(super) fn handle_drep(&mut self, now: Time, from: Peer, drep: &Drep) {
        if let Some(id) = self.find(from, drep.remote_id, drep.local_id) {
            if self.phase(id) == Some(Phase::DreqSent) {
                self.confirm_end(now, id);
            }
        }
    }

    /// The peer knows that the connection has ended.
    fn confirm_end(&mut self, now: Time, id: ConnectionId) {
        self.report_end(id, Event::Disconnected { id, is_confirmed: true });
        self.enter_timewait(now, id, Ended::Disconnected, None);
    }

    pub(super) fn handle_rej(&mut self, now: Time, from: Peer, rej: &Rej) {
        let Some(id) = self.find_rejected(from, rej) else { return };
        let failed = rejected(id, rej.reason, rej.private_data);
        match self.phase(id) {
            Some(Phase::ReqSent | Phase::ReqReceived) => {
                self.report_end(id, failed);
                self.enter_timewait(now, id, Ended::Failed, None);
            }
            Some(Phase::RepReceived | Phase::RepSent) => {
                self.report_end(id, failed);
                self.enter_timewait(now, id, Ended::Disconnected, None);
            }
            // The peer has no such connection any more.
            Some(Phase::Established | Phase::DreqSent) => self.confirm_end(now, id),
            Some(Phase::DreqReceived | Phase::Timewait(_)) | None => {}
        }
    }

    /// Finds the connection that a REJ ends.
    fn find_rejected(&self, from: Peer, rej: &Rej) -> Option<ConnectionId> {
        if rej.reason == RejectReason::TIMEOUT && rej.remote_id == 0 {
            // The sender has got no answer to its REQ, so it does not know the id of this side.
            let guid = u64::from_be_bytes(rej.info.as_slice().try_into().ok()?);
            return self.by_remote_id.get(&(from.address, guid, rej.local_id)).copied();
        }
        self.find(from, rej.remote_id, rej.local_id).or_else(|| self.find_unanswered(from, rej.remote_id))
    }

    pub(super) fn handle_connection_timeout(&mut self, now: Time, id: ConnectionId) {
        let backoff = self.config.backoff;
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let phase = connection.phase;
        if connection.is_in_timewait() {
            return self.leave_timewait(id);
        }
        if connection.retries < backoff.retries.saturating_add(connection.extra_retries) {
            connection.retries += 1;
            let (to, interval) = (connection.peer, backoff.interval(connection.retries));
            if let Some(mad) = connection.message.clone() {
                self.timers.set(id, now + interval);
                self.transmit(to, mad);
            }
            return;
        }
        let unreachable = Event::Failed { id, failure: Failure::Unreachable };
        match phase {
            Phase::ReqSent => {
                self.report_end(id, unreachable);
                self.abandon_req(now, id);
            }
            Phase::RepSent => {
                self.report_end(id, unreachable);
                self.withdraw_rep(now, id, RejectReason::TIMEOUT);
            }
            Phase::DreqSent => {
                self.report_end(id, Event::Disconnected { id, is_confirmed: false });
                self.enter_timewait(now, id, Ended::Disconnected, None);
            }
            // The timer of timewait was handled above, and the other states have none.
            Phase::ReqReceived | Phase::RepReceived | Phase::Established | Phase::DreqReceived | Phase::Timewait(_) => {
            }
        }
    }

    /// Refuses an alternate path. RoCE has no path migration.
    pub(super) fn handle_lap(&mut self, from: Peer, transaction: u64, lap: &Lap) {
        if let Some(id) = self.find(from, lap.remote_id, lap.local_id) {
            if self.phase(id) == Some(Phase::Established) {
                let apr = Apr {
                    local_id: id,
                    remote_id: lap.local_id,
                    status: Apr::UNSUPPORTED,
                    info: AdditionalInfo::NONE,
                    private_data: [0; Apr::PRIVATE_DATA],
                };
                self.send(from, transaction, Message::Apr(apr));
            }
        }
    }
}

/// The event of a connection that the peer has rejected.
pub(super) fn rejected(id: ConnectionId, reason: RejectReason, private_data: [u8; Rej::PRIVATE_DATA]) -> Event {
    Event::Failed { id, failure: Failure::Rejected { reason, private_data: Box::new(private_data) } }
}

fn drep(local_id: u32, remote_id: u32) -> Message {
    Message::Drep(Drep { local_id, remote_id, private_data: [0; Drep::PRIVATE_DATA] })
}
