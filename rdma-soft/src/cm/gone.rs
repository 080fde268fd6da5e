//! Peers whose process has ended.

use std::net::IpAddr;

use super::ConnectionId;
use super::connection::{Ended, Phase};
use super::end::rejected;
use super::events::Event;
use super::manager::Manager;
use crate::transport::Time;
use crate::wire::cm::{Rej, RejectReason};

impl Manager {
    /// Ends all connections and lookups with a peer. The caller knows that the peer does not exist any more.
    ///
    /// A connection whose peer has not named its GUID yet may be with a later device at the same address. It ends, too.
    pub fn handle_gone_peer(&mut self, now: Time, address: IpAddr, guid: u64) {
        let of_peer = self.connections.iter().filter(|(_, connection)| {
            connection.peer.address == address && (connection.guid == guid || connection.remote_id.is_none())
        });
        let of_peer: Vec<ConnectionId> = of_peer.map(|(id, _)| *id).collect();
        for id in of_peer.into_iter().chain(self.lookups.of_peer(address)) {
            self.end_gone(now, id);
        }
    }

    /// Ends a connection or a lookup whose peer does not exist any more.
    ///
    /// The events are those that a kernel causes when it destroys the ids of a process that has died.
    pub fn end_gone(&mut self, now: Time, id: ConnectionId) {
        let Some(phase) = self.phase(id) else { return self.fail_lookup(id) };
        let (ended, event) = match phase {
            Phase::Timewait(_) => return,
            Phase::ReqReceived => (Ended::Failed, rejected(id, RejectReason::TIMEOUT, [0; Rej::PRIVATE_DATA])),
            Phase::ReqSent => (Ended::Failed, rejected(id, RejectReason::CONSUMER_DEFINED, [0; Rej::PRIVATE_DATA])),
            Phase::RepReceived | Phase::RepSent => {
                (Ended::Disconnected, rejected(id, RejectReason::CONSUMER_DEFINED, [0; Rej::PRIVATE_DATA]))
            }
            _ => (Ended::Disconnected, Event::Disconnected { id, is_confirmed: true }),
        };
        self.report_end(id, event);
        self.enter_timewait(now, id, ended, None);
    }
}
