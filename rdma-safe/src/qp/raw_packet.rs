//! Raw packet queue pairs, which send and receive whole Ethernet frames.

use super::{QueuePair, QueuePairAttributes, QueuePairState, QueuePairType};
use crate::Result;

impl QueuePair {
    /// Brings a RAW_PACKET queue pair from RESET to RTS on `port`, which counts from 1.
    ///
    /// [`SendBatch::send`](crate::SendBatch::send) then sends a frame with all its headers. Flow steering decides which
    /// frames the queue pair receives. Frames are dropped if no receive is posted.
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
