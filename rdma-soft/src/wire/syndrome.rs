//! Acknowledgements: the ACK extended transport header (AETH).

use super::Psn;

/// The ACK extended transport header (AETH): section 9.3.5.1 of the specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ack {
    /// ACK, RNR NAK or NAK.
    pub syndrome: Syndrome,
    /// Message sequence number: completed messages, 24 bits.
    pub msn: Psn,
}

/// AETH syndrome: table 44 of the specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Syndrome {
    /// ACK with a credit code of 0 to 31. 31 means that credits are not used.
    Ack(u8),
    /// RNR NAK with a timer code of 0 to 31.
    ReceiverNotReady(u8),
    /// NAK with its code.
    Nak(Nak),
}

/// NAK codes: `enum aeth_syndrome` in Linux's drivers/infiniband/sw/rxe/rxe_hdr.h.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Nak {
    /// PSN sequence error: packets before this one are missing.
    SequenceError,
    /// Invalid request.
    InvalidRequest,
    /// Remote access error: the key does not grant access to the memory.
    RemoteAccess,
    /// Remote operational error.
    RemoteOperation,
}

impl Syndrome {
    /// An ACK without credits.
    pub const ACK: Syndrome = Syndrome::Ack(31);

    pub(super) fn parse(byte: u8) -> Option<Syndrome> {
        let value = byte & 0x1f;
        // The highest bit is reserved and ignored.
        match (byte >> 5) & 3 {
            0 => Some(Syndrome::Ack(value)),
            1 => Some(Syndrome::ReceiverNotReady(value)),
            3 => Some(Syndrome::Nak(match value {
                0 => Nak::SequenceError,
                1 => Nak::InvalidRequest,
                2 => Nak::RemoteAccess,
                3 => Nak::RemoteOperation,
                _ => return None,
            })),
            _ => None,
        }
    }

    pub(super) fn encode(self) -> u8 {
        match self {
            Syndrome::Ack(credits) => credits & 0x1f,
            Syndrome::ReceiverNotReady(timer) => 0x20 | (timer & 0x1f),
            Syndrome::Nak(nak) => {
                0x60 | match nak {
                    Nak::SequenceError => 0,
                    Nak::InvalidRequest => 1,
                    Nak::RemoteAccess => 2,
                    Nak::RemoteOperation => 3,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_rejected_or_round_trips() {
        let known = (0..=u8::MAX).filter(|byte| {
            let Some(syndrome) = Syndrome::parse(*byte) else { return false };
            assert_eq!(syndrome.encode(), byte & 0x7f);
            true
        });
        // 32 credit codes, 32 timer codes and four NAK codes, each with and without the reserved bit.
        assert_eq!(known.count(), 2 * (32 + 32 + 4));
    }
}
