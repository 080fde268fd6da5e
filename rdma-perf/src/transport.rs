//! Queue pair types.

use rdma_safe::QueuePairType;
use rdma_safe::address::Grh;
use serde::{Deserialize, Serialize};

/// Bytes of the GRH, which precedes a datagram in its receive buffer.
pub(crate) const GRH_LEN: u64 = Grh::LEN as u64;

/// The largest path MTU of InfiniBand and RoCE. A path may have a smaller one.
pub(crate) const MAX_MTU: u64 = 4096;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "UPPER")]
pub(crate) enum Transport {
    /// Reliable connection
    Rc,
    /// Unreliable connection: sends and writes
    Uc,
    /// Unreliable datagrams: sends of one packet
    Ud,
}

impl Transport {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Transport::Rc => "RC",
            Transport::Uc => "UC",
            Transport::Ud => "UD",
        }
    }

    pub(crate) fn queue_pair(self) -> QueuePairType {
        match self {
            Transport::Rc => QueuePairType::RC,
            Transport::Uc => QueuePairType::UC,
            Transport::Ud => QueuePairType::UD,
        }
    }

    /// Whether lost packets are retransmitted.
    pub(crate) fn is_reliable(self) -> bool {
        self == Transport::Rc
    }

    /// Bytes of a receive buffer before the message.
    pub(crate) fn receive_header(self) -> u64 {
        if self == Transport::Ud { GRH_LEN } else { 0 }
    }
}
