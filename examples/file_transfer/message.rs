//! Control messages of a transfer. Each is one JSON value.

use rdma_safe::RemoteMemory;
use serde::{Deserialize, Serialize};

/// Private data of the connection request and its answer. It identifies this program and its version.
pub(crate) const HELLO: &[u8] = b"file_transfer 1";

/// Longest message in bytes.
pub(crate) const MESSAGE: usize = 1024;

/// Chunks of a file that can be in flight at a time. Each has its own slot in the receiver's memory.
pub(crate) const SLOTS: u32 = 16;
/// Longest chunk in bytes, which is the length of a slot.
pub(crate) const CHUNK: u32 = 256 * 1024;

/// A SHA-256 in hexadecimal digits, as `sha256sum(1)` prints it.
pub(crate) type Checksum = String;

/// Messages of the sender.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum ToReceiver {
    /// Offers a file of this name and size in bytes.
    Offer { name: String, size: u64 },
    /// The sender computes the checksum of the stored part: wait.
    Comparing,
    /// Chunks follow, starting at this byte: 0, or the number of bytes that are stored.
    Start { at: u64 },
    /// All chunks are written. Includes the checksum of the whole file.
    Done { checksum: Checksum },
}

/// Messages of the receiver.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum ToSender {
    /// The receiver computes the checksum of the stored part: wait.
    Reading,
    /// This many bytes are stored, with this checksum. The sender writes chunks to the memory, one slot after the other.
    Ready { stored: u64, checksum: Checksum, memory: RemoteMemory },
    /// A chunk was copied out of its slot, which is free again.
    Taken,
    /// The whole file is stored.
    Stored,
    /// The transfer is rejected.
    Refused { reason: String },
}

/// The slot of the chunk with this number.
pub(crate) fn slot(number: u64) -> u32 {
    (number % u64::from(SLOTS)) as u32
}

/// The first byte of a slot.
pub(crate) fn offset(slot: u32) -> u64 {
    u64::from(slot) * u64::from(CHUNK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_fits_into_a_receive() {
        let checksum = "f".repeat(64);
        let name = "\u{1}".repeat(crate::store::LONGEST_NAME);
        let memory = RemoteMemory { address: u64::MAX, len: u64::MAX, rkey: u32::MAX };
        let offer = serde_json::to_vec(&ToReceiver::Offer { name, size: u64::MAX }).unwrap();
        // An escaped byte takes six.
        assert!(offer.len() <= MESSAGE, "{}", offer.len());
        let ready = serde_json::to_vec(&ToSender::Ready { stored: u64::MAX, checksum, memory }).unwrap();
        assert!(ready.len() <= MESSAGE, "{}", ready.len());
    }

    #[test]
    fn chunks_use_the_slots_in_turn() {
        assert_eq!([0, 1, 15, 16, 35].map(slot), [0, 1, 15, 0, 3]);
        assert_eq!(offset(SLOTS - 1) + u64::from(CHUNK), u64::from(SLOTS) * u64::from(CHUNK));
    }
}
