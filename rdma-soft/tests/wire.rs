//! Encoding and parsing of packets: captured from Linux, generated, and malformed.

use std::net::Ipv4Addr;

use proptest::prelude::*;
use rdma_soft::wire::{
    Ack, Atomic, Following, Header, ICRC, IcrcSeed, Malformed, Nak, Operation, Packet, Path, Psn, RemoteRange,
    Syndrome, Trailer, Transport,
};

/// Packets between two machines with Linux 6.1's rxe, captured on their Ethernet.
///
/// Messages, writes, reads and atomics over reliable connections, messages over unreliable connections, datagrams, and
/// management.
const RXE: &[u8] = include_bytes!("corpus/rxe-6.1.pcap");

/// Splits a capture into packets with their paths.
fn packets(capture: &[u8]) -> Vec<(Path, &[u8])> {
    const FILE: usize = 24;
    const RECORD: usize = 16;
    const BEFORE: usize = 14 + 20 + 8;
    let mut rest = &capture[FILE..];
    let mut found = Vec::new();
    while let Some(record) = rest.get(..RECORD) {
        let len = u32::from_le_bytes(record[8..12].try_into().unwrap()) as usize;
        let (frame, after) = rest[RECORD..].split_at(len);
        rest = after;
        let octets = |at: usize| Ipv4Addr::from(<[u8; 4]>::try_from(&frame[at..at + 4]).unwrap());
        let source_port = u16::from_be_bytes([frame[34], frame[35]]);
        let udp_len = usize::from(u16::from_be_bytes([frame[38], frame[39]]));
        // Ethernet pads short frames, so take the length from the UDP header.
        found.push((
            Path::V4 { source: octets(26), dest: octets(30), source_port },
            &frame[BEFORE..BEFORE + udp_len - 8],
        ));
    }
    found
}

/// Encodes a packet with an invariant CRC of zero.
fn encode(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = header.encode(payload.len()).to_vec();
    bytes.extend(payload);
    bytes.resize(bytes.len() + Header::padding(payload.len()) + ICRC, 0);
    bytes
}

#[test]
fn packets_of_linux_are_valid_and_round_trip() {
    let packets = packets(RXE);
    assert!(packets.len() > 50, "{}", packets.len());
    for (path, datagram) in packets.into_iter().step_by(if cfg!(miri) { 8 } else { 1 }) {
        assert!(IcrcSeed::new(&path).matches(datagram), "{datagram:02x?}");
        let packet = Packet::parse(datagram).unwrap();
        let again = encode(&packet.header, &packet.payload.to_vec());
        let (content, _) = datagram.split_last_chunk::<ICRC>().unwrap();
        assert_eq!(again[..content.len()], *content, "{packet:?}");
    }
}

#[test]
fn the_capture_has_packets_of_each_kind() {
    let packets: Vec<Packet<'_>> = packets(RXE).iter().map(|(_, datagram)| Packet::parse(*datagram).unwrap()).collect();
    let some = |wanted: &dyn Fn(&Packet<'_>) -> bool| assert!(packets.iter().any(wanted));
    let operation = |wanted: fn(&Operation) -> bool| some(&|packet| wanted(&packet.header.operation));
    operation(|operation| matches!(operation, Operation::SendFirst));
    operation(|operation| matches!(operation, Operation::SendLast(Trailer::None)));
    operation(|operation| matches!(operation, Operation::SendOnly(Trailer::None)));
    operation(|operation| matches!(operation, Operation::WriteFirst(range) if range.len == 9000));
    operation(|operation| matches!(operation, Operation::WriteMiddle));
    operation(|operation| matches!(operation, Operation::WriteLast(None)));
    operation(|operation| matches!(operation, Operation::WriteOnly(range, Some(0)) if range.len < 4096));
    operation(|operation| matches!(operation, Operation::ReadRequest(range) if range.len == 9000));
    operation(|operation| matches!(operation, Operation::ReadFirst(_)));
    operation(|operation| matches!(operation, Operation::ReadMiddle));
    operation(|operation| matches!(operation, Operation::ReadLast(_)));
    operation(|operation| matches!(operation, Operation::Acknowledge(ack) if ack.syndrome == Syndrome::ACK));
    operation(|operation| matches!(operation, Operation::FetchAdd(atomic) if atomic.swap == 1));
    operation(|operation| matches!(operation, Operation::CompareSwap(atomic) if atomic.swap == atomic.compare + 1));
    operation(|operation| matches!(operation, Operation::AtomicAcknowledge(..)));
    some(&|packet| packet.header.transport == Transport::Uc);
    some(&|packet| {
        matches!(packet.header.transport, Transport::Ud { qkey: 0x1111_1111, .. }) && packet.payload.len() == 100
    });
    some(&|packet| matches!(packet.header.transport, Transport::Ud { qkey: 0x8001_0000, source_qp: 1 }));
}

#[test]
fn malformed_packets_are_rejected_with_a_reason() {
    let header = Header {
        transport: Transport::Rc,
        operation: Operation::SendOnly(Trailer::None),
        pkey: 0xffff,
        dest_qp: 17,
        psn: Psn::new(1),
        solicited: false,
        ack_request: true,
        migrated: true,
        congestion: (false, false),
    };
    let good = encode(&header, b"hello");
    assert_eq!(Packet::parse(&good).unwrap(), Packet { header, payload: b"hello".into() });
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        change(&mut bytes);
        Packet::parse(&bytes).map(drop)
    };
    assert_eq!(with(&|bytes| bytes.truncate(12)), Err(Malformed::Short));
    assert_eq!(with(&|bytes| bytes.clear()), Err(Malformed::Short));
    assert_eq!(with(&|bytes| bytes.push(0)), Err(Malformed::Unaligned));
    assert_eq!(with(&|bytes| bytes[1] |= 1), Err(Malformed::Version(1)));
    // Padding is longer than the payload.
    assert_eq!(with(&|bytes| bytes.truncate(16)), Err(Malformed::Padding));
    for opcode in [21, 24, 31, 2 << 5, 4 << 5 | 1, 0xff, 0x60, 0x64 + 2, 0x20 | 12, 0x20 | 17, 0x20 | 23] {
        assert_eq!(
            with(&|bytes| {
                bytes[0] = opcode;
                bytes.extend([0; 32]);
            }),
            Err(Malformed::Opcode(opcode)),
            "{opcode:#x}"
        );
    }
    // An ACK with a payload, and one with an unknown syndrome.
    let ack = Ack { syndrome: Syndrome::Nak(Nak::RemoteAccess), msn: Psn::new(3) };
    let ack = Header { operation: Operation::Acknowledge(ack), ..header };
    assert_eq!(Packet::parse(&encode(&ack, b"")).unwrap().header, ack);
    assert_eq!(Packet::parse(&encode(&ack, b"four")), Err(Malformed::Padding));
    let mut meaningless = encode(&ack, b"");
    meaningless[12] = 0x44;
    assert_eq!(Packet::parse(&meaningless), Err(Malformed::Syndrome(0x44)));
}

fn ack() -> impl Strategy<Value = Ack> {
    let syndrome = prop_oneof![
        (0_u8..32).prop_map(Syndrome::Ack),
        (0_u8..32).prop_map(Syndrome::ReceiverNotReady),
        prop::sample::select(vec![Nak::SequenceError, Nak::InvalidRequest, Nak::RemoteAccess, Nak::RemoteOperation])
            .prop_map(Syndrome::Nak),
    ];
    (syndrome, any::<u32>()).prop_map(|(syndrome, msn)| Ack { syndrome, msn: Psn::new(msn) })
}

fn range() -> impl Strategy<Value = RemoteRange> {
    (any::<u64>(), any::<u32>(), any::<u32>()).prop_map(|(address, rkey, len)| RemoteRange { address, rkey, len })
}

fn atomic() -> impl Strategy<Value = Atomic> {
    (any::<u64>(), any::<u32>(), any::<u64>(), any::<u64>()).prop_map(|(address, rkey, swap, compare)| Atomic {
        address,
        rkey,
        swap,
        compare,
    })
}

fn trailer() -> impl Strategy<Value = Trailer> {
    prop_oneof![
        Just(Trailer::None),
        any::<u32>().prop_map(Trailer::Immediate),
        any::<u32>().prop_map(Trailer::Invalidate)
    ]
}

fn operation() -> impl Strategy<Value = Operation> {
    let imm = || prop::option::of(any::<u32>());
    prop_oneof![
        prop::sample::select(vec![
            Operation::SendFirst,
            Operation::SendMiddle,
            Operation::WriteMiddle,
            Operation::ReadMiddle
        ]),
        trailer().prop_map(Operation::SendLast),
        trailer().prop_map(Operation::SendOnly),
        range().prop_map(Operation::WriteFirst),
        imm().prop_map(Operation::WriteLast),
        (range(), imm()).prop_map(|(range, imm)| Operation::WriteOnly(range, imm)),
        range().prop_map(Operation::ReadRequest),
        ack().prop_map(Operation::ReadFirst),
        ack().prop_map(Operation::ReadLast),
        ack().prop_map(Operation::ReadOnly),
        ack().prop_map(Operation::Acknowledge),
        (ack(), any::<u64>()).prop_map(|(ack, old)| Operation::AtomicAcknowledge(ack, old)),
        atomic().prop_map(Operation::CompareSwap),
        atomic().prop_map(Operation::FetchAdd),
    ]
}

fn header() -> impl Strategy<Value = Header> {
    let transport = prop_oneof![
        Just(Transport::Rc),
        Just(Transport::Uc),
        (any::<u32>(), 0_u32..1 << 24).prop_map(|(qkey, source_qp)| Transport::Ud { qkey, source_qp }),
    ];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<(bool, bool)>());
    (transport, operation(), any::<u16>(), 0_u32..1 << 24, any::<u32>(), flags).prop_map(
        |(transport, operation, pkey, dest_qp, psn, (solicited, ack_request, migrated, congestion))| Header {
            transport,
            operation,
            pkey,
            dest_qp,
            psn: Psn::new(psn),
            solicited,
            ack_request,
            migrated,
            congestion,
        },
    )
}

fn cases() -> ProptestConfig {
    if cfg!(miri) { ProptestConfig::with_cases(3) } else { ProptestConfig::default() }
}

/// Up to `most` random bytes. Fewer under Miri, which is slow.
fn bytes(most: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..if cfg!(miri) { most / 5 } else { most })
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn packets_round_trip(
        header in header().prop_filter("of the service", |header| header.transport.has(&header.operation)),
        payload in bytes(100),
    ) {
        let payload = if header.operation.carries_payload() { &payload[..] } else { &[] };
        let bytes = encode(&header, payload);
        prop_assert_eq!(Packet::parse(&bytes), Ok(Packet { header, payload: payload.into() }));
        // Opcodes 13 to 18: read responses, ACKs and atomic responses.
        prop_assert_eq!(header.operation.is_answer(), (13..19).contains(&(bytes[0] & 0x1f)));
    }

    #[test]
    fn arbitrary_bytes_parse_or_fail(bytes in bytes(200)) {
        if let Ok(packet) = Packet::parse(&bytes) {
            prop_assert!(packet.payload.len() + 16 <= bytes.len());
            // A parsed packet round-trips.
            let again = encode(&packet.header, &packet.payload.to_vec());
            prop_assert_eq!(Packet::parse(&again), Ok(packet));
        }
    }

    #[test]
    fn following_packets_match_the_parser(
        header in header().prop_filter("of the service", |header| header.transport.has(&header.operation)),
        is_middle in any::<bool>(),
        payload in bytes(40),
        at in any::<prop::sample::Index>(),
        flipped in 1_u8..,
    ) {
        let middle = Header { transport: Transport::Rc, operation: Operation::SendMiddle, ..header };
        let header = if is_middle { middle } else { header };
        let payload = if header.operation.carries_payload() { &payload[..] } else { &[] };
        let bytes = encode(&header, payload);
        let first = Packet::parse(&bytes).unwrap();
        let following = Following::after(&first);
        prop_assert_eq!(following.is_some(), header.operation.is_middle());
        let Some(following) = following else { return Ok(()) };
        fn next<'a>(mut following: Following, datagram: &'a [u8]) -> Option<Packet<'a>> {
            following.next(datagram.into())
        }
        prop_assert_eq!(next(following, &bytes), None, "its PSN is not the next");
        let header = Header { psn: header.psn.add(1), ..header };
        let reversed: Vec<u8> = payload.iter().rev().copied().collect();
        let mut bytes = encode(&header, &reversed);
        prop_assert_eq!(next(following, &bytes), Packet::parse(&bytes).ok());
        prop_assert_eq!(next(following, &bytes[..bytes.len() - 4]), None);
        let at = at.index(bytes.len());
        bytes[at] ^= flipped;
        if let Some(found) = next(following, &bytes) {
            prop_assert_eq!(Packet::parse(&bytes), Ok(found));
        }
        bytes[at] ^= flipped;
        bytes.extend([0; 4]);
        prop_assert_eq!(next(following, &bytes), None);
    }

    #[test]
    fn damaged_packets_parse_or_fail(
        header in header(),
        payload in bytes(20),
        at in any::<prop::sample::Index>(),
        to in any::<u8>(),
        cut in 0_usize..30,
    ) {
        let mut bytes = encode(&header, &payload);
        let at = at.index(bytes.len());
        bytes[at] = to;
        bytes.truncate(bytes.len().saturating_sub(cut));
        let _ = Packet::parse(&bytes);
    }
}
