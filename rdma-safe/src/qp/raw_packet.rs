//! Queue pairs that send and receive whole frames.

use super::{QueuePair, QueuePairAttributes, QueuePairState, QueuePairType};
use crate::Result;

impl QueuePair {
    /// Brings a RAW_PACKET queue pair from RESET to RTS, on `port`, which counts from 1. From then on
    /// [`SendBatch::send`](crate::SendBatch::send) sends a frame, with all of its headers.
    ///
    /// What it receives is up to flow steering. Frames that find no receive are dropped.
    ///
    /// # Errors
    /// [`Error::WrongType`](crate::Error::WrongType) on queue pairs of other types; [`Error::Modify`](crate::Error::Modify).
    pub fn init_packets(&mut self, port: u8) -> Result<()> {
        let is_raw = self.qp_type() == QueuePairType::RAW_PACKET;
        self.require("QueuePair::init_packets", is_raw, "use QueuePair::init")?;
        self.modify(&QueuePairAttributes::new().set_state(QueuePairState::INIT).set_port(port))?;
        self.modify(&QueuePairAttributes::new().set_state(QueuePairState::RTR))?;
        self.modify(&QueuePairAttributes::new().set_state(QueuePairState::RTS))
    }
}
