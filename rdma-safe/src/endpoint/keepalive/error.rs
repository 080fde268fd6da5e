//! Errors of the keepalive.

use std::fmt;
use std::time::Duration;

use super::LIMITS;
use crate::WcStatus;

/// The connection of an idle endpoint was lost: [`EndpointBuilder::keepalive`](crate::EndpointBuilder::keepalive).
///
/// From [`Completion::connection_lost`](crate::Completion::connection_lost). The connection cannot be used any more: take the
/// buffers back, and connect another endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ConnectionLost {
    /// Number of the peer's queue pair.
    pub qp_num: u32,
    /// The time limit.
    pub within: Duration,
    /// The reason.
    ///
    /// | status | reason |
    /// |---|---|
    /// | [`WcStatus::RESP_TIMEOUT_ERR`] | the peer is gone: its device has acknowledged nothing within the limit |
    /// | [`WcStatus::RETRY_EXC_ERR`] | the same, after all retries of the local device |
    /// | [`WcStatus::REM_INV_REQ_ERR`], [`WcStatus::REM_ACCESS_ERR`] | the peer's queue pair does not permit RDMA writes |
    /// | [`WcStatus::FATAL_ERR`] | the local device refuses the writes of the keepalive: it may have failed or been removed |
    /// | [`WcStatus::WR_FLUSH_ERR`] | the device has moved the local queue pair to the error state |
    pub status: WcStatus,
}

/// What to do after the connection was lost.
const ADVICE: &str =
    "drop the connection and make another (Endpoint::close and EndpointSet::remove return its buffers)";

impl fmt::Display for ConnectionLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ConnectionLost { qp_num, within, status } = self;
        match *status {
            WcStatus::RESP_TIMEOUT_ERR | WcStatus::RETRY_EXC_ERR => write!(
                f,
                "the peer is gone: its queue pair {qp_num:#08x} has acknowledged nothing within {within:?} ({status}); \
                 {ADVICE}. If the peer is alive, its queue pair has failed, or the network drops writes of zero bytes, as \
                 virtual NICs of some clouds do: then turn its keepalive off"
            ),
            WcStatus::REM_INV_REQ_ERR | WcStatus::REM_ACCESS_ERR => write!(
                f,
                "the peer's queue pair {qp_num:#08x} has refused the keepalive, which ended the connection ({status}): it must \
                 permit RDMA writes (the option keepalive or peer_access, in C IBV_ACCESS_REMOTE_WRITE), or turn the \
                 keepalive off here; {ADVICE}"
            ),
            WcStatus::FATAL_ERR => write!(
                f,
                "the connection to the peer's queue pair {qp_num:#08x} is lost: the local device refuses the writes of the \
                 keepalive, so it may have failed or been removed ({status}); the device's asynchronous events and the \
                 kernel's log may have the reason; {ADVICE}, on another device if there is one"
            ),
            _ => write!(
                f,
                "the connection to the peer's queue pair {qp_num:#08x} is lost ({status}): the device's asynchronous events \
                 and the kernel's log may have the reason; {ADVICE}"
            ),
        }
    }
}

impl std::error::Error for ConnectionLost {}

/// A keepalive that an endpoint cannot have.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeepaliveError {
    /// The time limit is too short or too long.
    #[error("a keepalive within {within:?} is not possible: choose {:?} to {:?}, or None", LIMITS[0], LIMITS[1])]
    OutOfRange {
        /// The requested time limit.
        within: Duration,
    },

    /// The provider of the device drops or rejects writes of zero bytes.
    #[error(
        "{device} cannot tell within {within:?} that a peer is gone, because {driver} drops or rejects RDMA writes of zero \
         bytes: build the endpoint with EndpointBuilder::keepalive(None), and let the peers send messages regularly"
    )]
    Unsupported {
        /// Name of the device.
        device: String,
        /// Its driver.
        driver: &'static str,
        /// The time limit.
        within: Duration,
    },

    /// The peer's queue pair does not permit RDMA writes, so it would refuse the keepalive and fail the connection.
    #[error(
        "the peer's queue pair {qp_num:#08x} does not permit the RDMA writes of a keepalive: build it with \
         EndpointBuilder::keepalive or peer_access(Access::REMOTE_WRITE), or build this endpoint without a keepalive. If the \
         address comes in another format from a program whose queue pair has IBV_ACCESS_REMOTE_WRITE, add \
         QueuePairAddress::with_remote_write"
    )]
    RefusedByPeer {
        /// Number of the peer's queue pair.
        qp_num: u32,
    },
}
