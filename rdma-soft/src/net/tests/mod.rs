mod faults;
mod group;
mod link;
mod loopback;
mod memory;
mod shm;

use std::net::IpAddr;

use super::{Outbox, Part, Socket, To};
use crate::transport::Time;
use crate::wire::{Ack, Header, Operation, Packet, Psn, Syndrome, Transport};

/// Lock of the address `::1`, of which there is only one.
static IPV6_LOOPBACK: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// Payload length that needs padding.
const LONG: usize = 1021;

fn header(psn: u32, payload: usize) -> Header {
    let ack = Ack { syndrome: Syndrome::ACK, msn: Psn::new(0) };
    Header {
        transport: Transport::Rc,
        operation: if payload == 0 { Operation::Acknowledge(ack) } else { Operation::ReadMiddle },
        pkey: 0xffff,
        dest_qp: 17,
        psn: Psn::new(psn),
        solicited: false,
        ack_request: false,
        migrated: true,
        congestion: (false, false),
    }
}

fn to(address: IpAddr) -> To {
    To { address, class: 0 }
}

/// Payload of packet `psn`. Copied in pieces, because Miri is slow with single bytes.
fn payload(psn: u32, len: usize) -> Vec<u8> {
    static BYTES: [u8; 512] = {
        let (mut bytes, mut at) = ([0; 512], 0);
        while at < bytes.len() {
            bytes[at] = (at * 7) as u8;
            at += 1;
        }
        bytes
    };
    let mut payload = BYTES[psn as usize * 13 % 256..][..256].repeat(len.div_ceil(256));
    payload.truncate(len);
    payload
}

fn part(bytes: &[u8]) -> Part {
    Part { address: bytes.as_ptr(), len: bytes.len(), is_exposed: false }
}

/// Checks header and payload of a packet. Returns its number and its payload length.
fn parse_checked(datagram: &[u8]) -> (u32, usize) {
    let packet = Packet::parse(datagram).unwrap();
    let psn = packet.header.psn.get();
    assert_eq!(packet.header, header(psn, packet.payload.len()));
    assert_eq!(packet.payload, payload(psn, packet.payload.len()), "{psn}");
    (psn, packet.payload.len())
}

/// Sends packets of these lengths, numbered from zero.
fn send(outbox: &mut Outbox, socket: &Socket, to: IpAddr, lens: &[usize], now: Time) {
    let payloads: Vec<Vec<u8>> = (0..).zip(lens).map(|(psn, len)| payload(psn, *len)).collect();
    for (psn, payload) in (0..).zip(&payloads) {
        // SAFETY: the payload is valid.
        unsafe {
            outbox.push(socket, self::to(to), &header(psn, payload.len()).encode(payload.len()), &[part(payload)], now);
        }
    }
    outbox.flush(socket, now);
}
