//! RoCEv2 packets: InfiniBand Architecture Specification, volume 1, chapter 9 and annex A17.
//!
//! A packet starts after the UDP header. It has a base transport header, the extended headers of its opcode, payload padded to
//! 4 bytes, and the invariant CRC. [`Packet::parse`] accepts any bytes from the network. [`Header::encode`] writes the headers.
//!
//! [`cm`] has the messages of connection management, which are payloads of such packets.

pub mod cm;
mod data;
mod fields;
mod header;
mod icrc;
mod opcode;
mod psn;
mod syndrome;

pub use data::{Chunks, Data};
pub use header::{Encoded, Following, Header, Malformed, Packet, connected_qp, increment_psn};
pub use icrc::{ICRC, IcrcSeed, Path};
pub use opcode::{Atomic, Operation, RemoteRange, Trailer, Transport};
pub use psn::Psn;
pub use syndrome::{Ack, Nak, Syndrome};

/// UDP destination port of RoCEv2.
pub const UDP_PORT: u16 = 4791;
