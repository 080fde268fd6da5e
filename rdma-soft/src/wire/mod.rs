//! RoCEv2 packets: what comes after the UDP header (InfiniBand Architecture Specification, volume 1, chapter 9 and annex A17).
//!
//! A packet is the base transport header, the headers that its opcode calls for, payload padded to four bytes, and the invariant
//! CRC. [`Packet::parse`] takes anything that may come by a network; [`Header::encode`] writes what it would take.

mod fields;
mod header;
mod icrc;
mod opcode;
mod psn;
mod syndrome;

pub use header::{Encoded, Header, Malformed, Packet};
pub use icrc::{ICRC, Icrc, IcrcSeed, Path};
pub use opcode::{Atomic, Operation, RemoteRange, Trailer, Transport};
pub use psn::Psn;
pub use syndrome::{Ack, Nak, Syndrome};

/// The UDP port that RoCEv2 packets go to.
pub const UDP_PORT: u16 = 4791;
