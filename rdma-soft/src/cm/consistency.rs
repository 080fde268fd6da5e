//! Checks of a manager's indexes, for tests.

use super::connection::Phase;
use super::manager::Manager;

impl Manager {
    /// Panics if the indexes, timers and backlogs do not agree with the connections and lookups.
    #[doc(hidden)]
    pub fn assert_consistent(&self) {
        for (key, id) in &self.by_remote_id {
            let connection = &self.connections[id];
            assert_eq!(
                *key,
                (connection.peer.address, connection.guid, connection.remote_id.unwrap_or(0)),
                "the peer's id of {id:#x}"
            );
        }
        for (key, id) in &self.by_remote_qpn {
            let connection = &self.connections[id];
            assert_eq!(
                *key,
                (connection.peer.address, connection.negotiated.remote_qpn),
                "the peer's queue pair of {id:#x}"
            );
        }
        for (qpn, id) in &self.by_local_qpn {
            assert_eq!(*qpn, self.connections[id].negotiated.local_qpn, "the queue pair of {id:#x}");
        }
        for (id, connection) in &self.connections {
            let phase = connection.phase;
            let is_retransmitting = matches!(phase, Phase::ReqSent | Phase::RepSent | Phase::DreqSent);
            assert_eq!(self.timers.has(*id), is_retransmitting, "the timer of {id:#x}, {phase:?}");
            assert!(!is_retransmitting || connection.message.is_some(), "the message of {id:#x}, {phase:?}");
            let has_qp = connection.negotiated.local_qpn != 0;
            assert_eq!(
                self.timewait.has(*id),
                connection.is_in_timewait() && has_qp,
                "the timewait of {id:#x}, {phase:?}"
            );
            assert_eq!(
                self.rejected.has(*id),
                connection.is_in_timewait() && !has_qp,
                "the timewait of {id:#x}, {phase:?}"
            );
            assert!(
                !self.half_open.has(*id) || matches!(phase, Phase::RepSent | Phase::DreqSent),
                "{id:#x}, {phase:?}"
            );
            assert!(phase != Phase::RepSent || self.half_open.has(*id), "{id:#x} waits for an RTU");
            if let Some(remote_id) = connection.remote_id {
                assert_eq!(self.by_remote_id.get(&(connection.peer.address, connection.guid, remote_id)), Some(id));
            }
            let is_open = has_qp && connection.remote_id.is_some() && !connection.is_in_timewait();
            let by_remote_qpn = self.by_remote_qpn.get(&(connection.peer.address, connection.negotiated.remote_qpn));
            assert!(!is_open || by_remote_qpn == Some(id), "the peer's queue pair of {id:#x}, {phase:?}");
            assert!(
                !has_qp || self.by_local_qpn.contains(&(connection.negotiated.local_qpn, *id)),
                "the queue pair of {id:#x}"
            );
        }
        assert!(
            self.half_open
                .ids()
                .chain(self.timers.ids())
                .all(|id| self.connections.contains_key(&id) || self.lookups.has(id))
        );
        let (ended, live) = self.counts();
        assert_eq!(ended + live, self.connections.len());
        self.lookups.assert_consistent();
        for (listener, backlog) in self.listeners.backlogs() {
            backlog.assert_consistent();
            let of_connections = self.connections.iter().map(|(id, connection)| (*id, connection.backlog_of));
            let all = of_connections
                .chain(self.lookups.in_backlogs())
                .filter(|(_, backlog_of)| *backlog_of == Some(listener));
            assert_eq!(all.filter(|(id, _)| backlog.has(*id)).count(), backlog.len(), "backlog {listener}");
        }
    }
}
