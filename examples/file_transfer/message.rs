//! What the two ends say to each other beside the file itself: JSON in messages, one for each receive.

use rdma_safe::RemoteMemory;
use serde::{Deserialize, Serialize};

/// Goes with the request for a connection and with its acceptance, so that programs of another kind are told apart.
pub(crate) const HELLO: &[u8] = b"file_transfer 1";

/// Most bytes of a message.
pub(crate) const MESSAGE: usize = 1024;

/// Pieces of a file that can be on their way at a time, each with a place of its own in the receiver's memory,
pub(crate) const PLACES: u32 = 16;
/// and most bytes of a piece.
pub(crate) const PIECE: u32 = 256 * 1024;

/// A SHA-256 in hexadecimal digits, as `sha256sum(1)` has it.
pub(crate) type Checksum = String;

/// From the sender.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum ToReceiver {
    /// There is a file of that name and size in bytes.
    Offer { name: String, size: u64 },
    /// What the receiver has is being compared: wait.
    Comparing,
    /// Pieces follow from that byte on, which is 0 or how much is there already.
    Start { at: u64 },
    /// That was all of it; the checksum is of the whole file.
    Done { checksum: Checksum },
}

/// From the receiver.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum ToSender {
    /// What there is already is being read: wait.
    Reading,
    /// So many bytes are there already, with that checksum; pieces are to be written to the memory, place after place.
    Ready { stored: u64, checksum: Checksum, memory: RemoteMemory },
    /// A piece was taken out of its place.
    Taken,
    /// The file is there, whole.
    Stored,
    /// It is not to be.
    Refused { reason: String },
}

/// Where the piece of that number is written.
pub(crate) fn place(number: u64) -> u32 {
    (number % u64::from(PLACES)) as u32
}

/// The first byte of a place.
pub(crate) fn offset(place: u32) -> u64 {
    u64::from(place) * u64::from(PIECE)
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
        // A byte that has to be escaped takes six.
        assert!(offer.len() <= MESSAGE, "{}", offer.len());
        let ready = serde_json::to_vec(&ToSender::Ready { stored: u64::MAX, checksum, memory }).unwrap();
        assert!(ready.len() <= MESSAGE, "{}", ready.len());
    }

    #[test]
    fn places_follow_each_other_and_come_again() {
        assert_eq!([0, 1, 15, 16, 35].map(place), [0, 1, 15, 0, 3]);
        assert_eq!(offset(PLACES - 1) + u64::from(PIECE), u64::from(PLACES) * u64::from(PIECE));
    }
}
