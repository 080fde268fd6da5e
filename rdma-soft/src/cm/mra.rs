//! MRA: a program needs time for its answer.

use std::time::Duration;

use super::Peer;
use super::connection::Phase;
use super::manager::Manager;
use crate::wire::cm::{Answered, Message, Mra, timeout};

/// Service timeout of MRAs: 65 s, `CMA_CM_MRA_SETTING` of Linux.
const SERVICE_TIMEOUT: u8 = 24;

/// Longest service timeout that is accepted from a peer's MRA: the one of Linux. The field can hold more than two hours.
const LONGEST_SERVICE: Duration = Duration::from_millis(1 << 16);

impl Manager {
    /// Handles an MRA: the peer's program needs time for its answer.
    pub(super) fn handle_mra(&mut self, from: Peer, mra: &Mra) {
        let Some(connection) = self.connections.get_mut(&mra.remote_id) else { return };
        let is_from_peer = connection.peer.address == from.address
            && connection.remote_id.is_none_or(|remote_id| remote_id == mra.local_id);
        let is_expected = matches!(
            (connection.phase, mra.answers),
            (Phase::ReqSent, Answered::Req) | (Phase::RepSent, Answered::Rep)
        );
        if is_from_peer && is_expected {
            // The message is still retransmitted, since the answer may be lost. It only takes longer until this side gives up.
            let service = timeout(mra.timeout).min(LONGEST_SERVICE).as_nanos();
            let extra = service.div_ceil(self.config.backoff.longest.as_nanos().max(1));
            connection.extra_retries = u8::try_from(extra).unwrap_or(u8::MAX);
        }
    }
}

/// An MRA of this side: its program needs time for its answer to a REQ or REP.
pub(super) fn mra(local_id: u32, remote_id: u32, answers: Answered) -> Message {
    Message::Mra(Mra { local_id, remote_id, answers, timeout: SERVICE_TIMEOUT, private_data: [0; Mra::PRIVATE_DATA] })
}
