//! What an acknowledgement says.

use super::Psn;

/// The acknowledge header: 9.3.5.1 of the specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ack {
    /// What the responder has to say.
    pub syndrome: Syndrome,
    /// Messages that it has completed, 24 bits.
    pub msn: Psn,
}

/// What a responder has to say: table 44 of the specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Syndrome {
    /// All well. The credits are a code of 0 to 31, of which the last says that none are counted.
    Ack(u8),
    /// No receive is posted: try again after the time of that code, 0 to 31.
    ReceiverNotReady(u8),
    /// Something is wrong.
    Nak(Nak),
}

/// Why a request is not acknowledged: table 45 of the specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Nak {
    /// Packets are missing before this one.
    SequenceError,
    /// It is longer, or another, than it may be.
    InvalidRequest,
    /// The key does not open the memory for it.
    RemoteAccess,
    /// The responder could not do it.
    RemoteOperation,
}

impl Syndrome {
    /// All well, and no credits counted.
    pub const ACK: Syndrome = Syndrome::Ack(31);

    pub(super) fn parse(byte: u8) -> Option<Syndrome> {
        let value = byte & 0x1f;
        // The highest bit is reserved, and ignored.
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
    fn every_byte_is_refused_or_comes_back() {
        let known = (0..=u8::MAX).filter(|byte| {
            let Some(syndrome) = Syndrome::parse(*byte) else { return false };
            assert_eq!(syndrome.encode(), byte & 0x7f);
            true
        });
        // 32 of credits, 32 of timers, four reasons, each with the reserved bit and without it.
        assert_eq!(known.count(), 2 * (32 + 32 + 4));
    }
}
