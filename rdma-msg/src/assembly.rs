//! What the frames of a peer mean. Does no input or output, and trusts nothing.

use std::sync::Arc;

use rdma_safe::RemoteMemory;

use crate::error::{Error, Violation};
use crate::long::Long;
use crate::parts::Parts;
use crate::wire::{self, Kind};

/// The state between the frames of a peer.
#[derive(Debug)]
pub(crate) struct Assembly {
    /// The long message of which parts have arrived.
    long: Option<Partial>,
    /// Longest message that is accepted, in bytes.
    max_message: usize,
    /// Whether the peer has said that it sends no more.
    has_ended: bool,
}

/// A message that arrives in parts.
#[derive(Debug)]
struct Partial {
    bytes: Long,
    /// Length of the whole message in bytes.
    len: usize,
}

/// What a frame is for the reader.
#[derive(Debug)]
pub(crate) enum Meaning {
    /// Its payload is a message.
    Message,
    /// It completes a long message.
    Long(Long),
    /// A message is to be read from the memory of the peer.
    Offer(Parts<RemoteMemory>),
    /// A message was written to the memory with this number. Also its length.
    Written(u32, u64),
    /// Nothing yet.
    Nothing,
}

impl Assembly {
    pub(crate) fn new(max_message: u64) -> Self {
        Assembly { long: None, max_message: usize::try_from(max_message).unwrap_or(usize::MAX), has_ended: false }
    }

    /// Whether the peer has said that it sends no more.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Maximum length of a whole message in bytes. `None` within a long message or after the end.
    pub(crate) fn max_whole(&self) -> Option<usize> {
        (self.long.is_none() && !self.has_ended).then_some(self.max_message)
    }

    /// Forgets the parts of a long message.
    pub(crate) fn clear(&mut self) {
        self.long = None;
    }

    /// Takes the next frame.
    pub(crate) fn frame(&mut self, kind: Kind, payload: &[u8]) -> Result<Meaning, Error> {
        if kind == Kind::Abort {
            return Err(aborted(payload)?);
        }
        if self.has_ended {
            return Err(Violation::AfterEnd.into());
        }
        match (kind, &mut self.long) {
            (Kind::Whole, None) if payload.len() > self.max_message => return Err(Violation::TooLong.into()),
            (Kind::Whole, None) => return Ok(Meaning::Message),
            (Kind::Long, None) => {
                let len = usize::try_from(wire::decode_long(payload)?).unwrap_or(usize::MAX);
                if len == 0 {
                    return Err(Violation::Truncated.into());
                }
                if len > self.max_message {
                    return Err(Violation::TooLong.into());
                }
                self.long = Some(Partial { bytes: Long::default(), len });
            }
            (Kind::Part, Some(Partial { bytes, len })) => {
                if payload.len() > *len - bytes.len() {
                    return Err(Violation::TooLong.into());
                }
                if bytes.is_empty() {
                    *bytes = Long::with_capacity(*len).ok_or(Error::OutOfMemory { len: *len })?;
                }
                bytes.extend_from_slice(payload);
                if bytes.len() == *len {
                    let whole = std::mem::take(bytes);
                    self.long = None;
                    return Ok(Meaning::Long(whole));
                }
            }
            (Kind::Offer, None) => {
                return Ok(Meaning::Offer(wire::decode_offer(payload, self.max_message as u64)?));
            }
            (Kind::Written, None) => {
                let (number, len) = wire::decode_written(payload)?;
                if len == 0 || len > self.max_message as u64 {
                    return Err(Violation::TooLong.into());
                }
                return Ok(Meaning::Written(number, len));
            }
            (Kind::Cancelled, long) => *long = None,
            (Kind::End, None) => self.has_ended = true,
            (Kind::Whole | Kind::Long | Kind::Offer | Kind::Written | Kind::End, Some(_))
            | (Kind::Part, None)
            | (Kind::Abort, _) => {
                return Err(Violation::UnknownKind.into());
            }
        }
        Ok(Meaning::Nothing)
    }
}

/// The error of a connection that the peer has aborted.
pub(crate) fn aborted(payload: &[u8]) -> Result<Error, Violation> {
    let (code, reason) = wire::decode_abort(payload)?;
    Ok(Error::Aborted { code, reason: Arc::from(reason) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{FRAME, HEADER, Hello, Purpose, VERSIONS, aligned};

    fn refused(assembly: &mut Assembly, kind: Kind, payload: &[u8]) -> Option<Violation> {
        match assembly.frame(kind, payload) {
            Err(Error::Protocol(violation)) => Some(violation),
            _ => None,
        }
    }

    #[test]
    fn a_long_message_is_complete_when_its_parts_have_its_length() {
        let mut assembly = Assembly::new(10);
        assert!(matches!(assembly.frame(Kind::Long, &5_u64.to_be_bytes()), Ok(Meaning::Nothing)));
        assert!(matches!(assembly.frame(Kind::Part, b"abc"), Ok(Meaning::Nothing)));
        assert!(matches!(assembly.frame(Kind::Part, b"de"), Ok(Meaning::Long(whole)) if *whole == b"abcde"));
        assert!(matches!(assembly.frame(Kind::Whole, b"next"), Ok(Meaning::Message)));
        assembly.frame(Kind::Long, &9_u64.to_be_bytes()).unwrap();
        assembly.frame(Kind::Cancelled, b"").unwrap();
        assert!(matches!(assembly.frame(Kind::Whole, b"after it"), Ok(Meaning::Message)));
        assembly.frame(Kind::End, b"").unwrap();
        assert!(assembly.has_ended());
    }

    #[test]
    fn frames_that_do_not_fit_together_are_refused() {
        let long = |len: u64| {
            let mut assembly = Assembly::new(10);
            assembly.frame(Kind::Long, &len.to_be_bytes()).unwrap();
            assembly
        };
        assert_eq!(refused(&mut Assembly::new(10), Kind::Long, &11_u64.to_be_bytes()), Some(Violation::TooLong));
        assert_eq!(refused(&mut Assembly::new(10), Kind::Long, &[0; 8]), Some(Violation::Truncated));
        let mut huge = Assembly::new(u64::MAX);
        huge.frame(Kind::Long, &[0xff; 8]).unwrap();
        assert!(matches!(huge.frame(Kind::Part, b"more than there is"), Err(Error::OutOfMemory { .. })));
        assert_eq!(refused(&mut Assembly::new(10), Kind::Long, &[0; 7]), Some(Violation::Truncated));
        assert_eq!(refused(&mut Assembly::new(10), Kind::Whole, &[0; 11]), Some(Violation::TooLong));
        assert_eq!(refused(&mut long(5), Kind::Part, b"abcdef"), Some(Violation::TooLong));
        for kind in [Kind::Whole, Kind::Long, Kind::Offer, Kind::Written, Kind::End] {
            assert_eq!(refused(&mut long(5), kind, b""), Some(Violation::UnknownKind));
        }
        assert_eq!(refused(&mut Assembly::new(10), Kind::Part, b""), Some(Violation::UnknownKind));
        for len in [0, 11, u64::MAX] {
            let offer = wire::memory(RemoteMemory { address: 1, len, rkey: 1 });
            assert_eq!(refused(&mut Assembly::new(10), Kind::Offer, &offer), Some(Violation::TooLong));
        }
        let mut ended = Assembly::new(10);
        ended.frame(Kind::End, b"").unwrap();
        assert_eq!(refused(&mut ended, Kind::Whole, b""), Some(Violation::AfterEnd));
        let abort = wire::abort(42, "after its end");
        assert!(matches!(ended.frame(Kind::Abort, &abort), Err(Error::Aborted { code: 42, .. })));
    }

    /// Packets of random and of nearly valid bytes. `RDMA_MSG_PACKETS` is their number.
    #[test]
    fn no_bytes_of_a_peer_cause_a_panic_or_take_more_memory_than_a_message() {
        const MOST: usize = 300;
        let packets = std::env::var("RDMA_MSG_PACKETS").ok().and_then(|number| number.parse().ok());
        let packets = packets.unwrap_or(if cfg!(miri) { 300 } else { 300_000_u64 });
        let own = Hello {
            versions: VERSIONS,
            purpose: Purpose::Messages,
            window: 4,
            packet: 8192,
            message: MOST as u64,
            max_window: 4,
            keepalive: None,
        };
        let mut seed = 1_u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (seed >> 33) % below
        };
        let (mut assembly, mut messages, mut violations) = (Assembly::new(MOST as u64), 0_u64, 0_u64);
        let mut packet = Vec::new();
        for _ in 0..packets {
            packet.clear();
            packet.extend((0..HEADER).map(|_| random(3) as u8));
            // Length of the parts that are missing, if the frames so far are taken.
            let mut missing = None;
            for _ in 0..random(4) {
                let any = Kind::ALL[random(Kind::ALL.len() as u64) as usize];
                let (kind, len) = match missing.take() {
                    Some(missing) if random(4) != 0 => (Kind::Part, missing),
                    _ if any == Kind::Long => (any, wire::LONG),
                    _ if any == Kind::Written => (any, wire::WRITTEN),
                    _ if any == Kind::Offer => (any, wire::MEMORY * random(4) as usize),
                    _ => (any, random(200) as usize),
                };
                packet.extend(wire::frame(kind, len as u32));
                if kind == Kind::Long {
                    let whole = random(MOST as u64 + 20);
                    packet.extend(whole.to_be_bytes());
                    missing = Some(whole as usize);
                } else {
                    packet.extend((0..len).map(|_| random(256) as u8));
                }
                packet.resize(aligned(packet.len() - HEADER) + HEADER, 0);
            }
            if random(4) == 0 {
                let at = random(packet.len() as u64) as usize;
                packet[at] = random(256) as u8;
            }
            if random(8) == 0 {
                packet.truncate(random(packet.len() as u64 + 1) as usize);
            }
            let _ = own.decode(&packet);
            let _ = wire::decode_header(&packet);
            let mut at = HEADER;
            loop {
                let meaning = match wire::decode_frame(&packet, at) {
                    Ok(None) => break,
                    Err(violation) => Err(violation.into()),
                    Ok(Some(frame)) => {
                        assert!(frame.start >= at + FRAME && frame.start + frame.len <= packet.len());
                        at = frame.end();
                        assembly.frame(frame.kind, &packet[frame.start..frame.start + frame.len])
                    }
                };
                match meaning {
                    Ok(Meaning::Long(whole)) => {
                        assert!(whole.len() <= MOST);
                        messages += 1;
                    }
                    Ok(Meaning::Offer(parts)) => {
                        let len = parts.iter().try_fold(0_u64, |len, part| len.checked_add(part.len));
                        assert!(len.is_some_and(|len| (1..=MOST as u64).contains(&len)));
                    }
                    Ok(Meaning::Message | Meaning::Written(..) | Meaning::Nothing) => {}
                    Err(_) => {
                        violations += 1;
                        assembly = Assembly::new(MOST as u64);
                        break;
                    }
                }
                assert!(assembly.long.as_ref().is_none_or(|long| long.bytes.capacity() <= MOST));
            }
        }
        assert!(messages > packets / 1000 && violations > packets / 10, "{messages} {violations}");
    }
}
