//! Peers whose process has ended.

use super::ConnectionId;
use super::connection::{Ended, Phase};
use super::end::rejected;
use super::events::Event;
use super::manager::Manager;
use crate::transport::Time;
use crate::wire::cm::RejectReason;
use std::net::IpAddr;

impl Manager {
    /// Ends all connections and lookups with a peer. The caller knows that the peer does not exist any more.
    ///
    /// The events are those that a kernel causes when it destroys the ids of a process that has died.
    pub fn handle_gone_peer(&mut self, now: Time, address: IpAddr) {
        let of_peer = self.connections.iter().filter(|(_, connection)| connection.peer.address == address);
        let of_peer: Vec<(ConnectionId, Phase)> = of_peer.map(|(id, connection)| (*id, connection.phase)).collect();
        for (id, phase) in of_peer {
            let ended = match phase {
                Phase::Timewait(_) => continue,
                Phase::ReqSent | Phase::ReqReceived => Ended::Failed,
                _ => Ended::Disconnected,
            };
            let event = match phase {
                Phase::ReqReceived => rejected(id, RejectReason::TIMEOUT, [0; 148]),
                Phase::ReqSent | Phase::RepReceived | Phase::RepSent => {
                    rejected(id, RejectReason::CONSUMER_DEFINED, [0; 148])
                }
                _ => Event::Disconnected { id, is_confirmed: true },
            };
            self.report_end(id, event);
            self.enter_timewait(now, id, ended, None);
        }
        for id in self.lookups.of_peer(address) {
            self.fail_lookup(id);
        }
    }
}
