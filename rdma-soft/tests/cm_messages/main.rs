//! Encoding and decoding of connection-management messages: each field, captured from Linux, random, and malformed.

mod capture;
mod ip;
mod layout;

use std::mem;

use layout::{Kind, LEN, for_each_kind};
use proptest::prelude::*;
use rdma_soft::wire::cm::{
    AdditionalInfo, Apr, Drep, Dreq, Lap, MAD_LEN, Mad, MadError, Message, Mra, Path, Rej, RejectReason, Rep, Req, Rtu,
    SidrRep, SidrReq, SidrStatus, local_id,
};

/// Bytes of the MAD header.
const HEADER: usize = 24;

/// A MAD, with a header written by hand.
fn mad(attribute: u16, transaction: u64, body: &[u8; LEN]) -> [u8; MAD_LEN] {
    let mut bytes = [0; MAD_LEN];
    bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
    bytes[8..16].copy_from_slice(&transaction.to_be_bytes());
    bytes[16..18].copy_from_slice(&attribute.to_be_bytes());
    bytes[HEADER..].copy_from_slice(body);
    bytes
}

/// Decodes a message and its transaction id. Panics on an error or another kind.
fn decode<K: Kind>(transaction: u64, body: &[u8; LEN]) -> K {
    let mad = Mad::decode(&mad(K::ATTRIBUTE, transaction, body)).unwrap();
    assert_eq!(mad.transaction, transaction);
    K::unwrap(mad.message)
}

/// Encodes with the transaction id and checks the header.
fn encode<K: Kind>(transaction: u64, message: K) -> [u8; LEN] {
    let bytes = Mad { transaction, message: message.wrap() }.encode();
    assert_eq!(bytes[..HEADER], mad(K::ATTRIBUTE, transaction, &[0; LEN])[..HEADER]);
    bytes[HEADER..].try_into().unwrap()
}

/// Values with each bit set and clear, with different bytes, and with more bits than any field.
const SEEDS: [u64; 4] = [0x5555_5555_5555_5555, 0xaaaa_aaaa_aaaa_aaaa, 0x0123_4567_89ab_cdef, u64::MAX];

#[test]
fn each_field_is_at_its_offset() {
    for_each_kind!(check_offsets);
}

fn check_offsets<K: Kind>() {
    let fields = K::fields();
    for field in &fields {
        for seed in SEEDS {
            // An alternate path without a local address would be decoded as none.
            let addressed = |message: &mut K, body: &mut [u8; LEN]| {
                let lid = fields.iter().find(|lid| lid.name == "alternate.local_lid" && lid.name != field.name);
                lid.inspect(|lid| lid.set(message, body, 1));
            };
            let mut wide = decode::<K>(seed, &[0; LEN]);
            let mut fitting = wide.clone();
            let mut body = [0; LEN];
            addressed(&mut wide, &mut body);
            addressed(&mut fitting, &mut [0; LEN]);
            field.set(&mut wide, &mut body, seed);
            field.set_fitting(&mut fitting, seed);
            assert_eq!(encode(seed, wide), body, "{:#x} {} = {seed:#x}", K::ATTRIBUTE, field.name);
            assert_eq!(encode(seed, fitting.clone()), body, "{:#x} {} = {seed:#x}", K::ATTRIBUTE, field.name);
            let decoded = decode::<K>(seed, &body).wrap();
            assert_eq!(decoded, fitting.wrap(), "{:#x} {} = {seed:#x}", K::ATTRIBUTE, field.name);
        }
    }
}

#[test]
fn all_other_bits_are_reserved() {
    for_each_kind!(check_reserved);
}

/// Reserved bits are ignored and encoded as zeros. The fields of the layout have no bit in common.
fn check_reserved<K: Kind>() {
    let (mut expected, mut seen) = ([0; LEN], [false; 8 * LEN]);
    for field in K::fields() {
        field.fill(&mut expected);
        field.bits().for_each(|bit| assert!(!mem::replace(&mut seen[bit], true), "{:#x} {}", K::ATTRIBUTE, field.name));
    }
    assert_eq!(encode(7, decode::<K>(7, &[0xff; LEN])), expected, "{:#x}", K::ATTRIBUTE);
}

#[test]
fn reserved_header_fields_are_ignored() {
    let mut bytes = mad(0x14, 9, &[3; LEN]);
    let plain = Mad::decode(&bytes).unwrap();
    bytes[4..8].fill(0xff);
    bytes[18..24].fill(0xff);
    assert_eq!(Mad::decode(&bytes), Ok(plain));
}

#[test]
fn the_attribute_modifier_has_the_options_of_connection_establishment() {
    for_each_kind!(check_modifier);
}

/// Checks that REQ, REP and SIDR_REP have options in bytes 20 to 23 of the header, and that other messages ignore these bytes.
fn check_modifier<K: Kind>() {
    let mut bytes = mad(K::ATTRIBUTE, 9, &[0; LEN]);
    bytes[20..24].copy_from_slice(&[1, 2, 3, 4]);
    let decoded = Mad::decode(&bytes).unwrap();
    let options = match &decoded.message {
        Message::Req(req) => Some(req.ece_options),
        Message::Rep(rep) => Some(rep.ece_options),
        Message::SidrRep(rep) => Some(rep.ece_options),
        _ => None,
    };
    let has_options = matches!(K::ATTRIBUTE, 0x10 | 0x13 | 0x18);
    assert_eq!(options, has_options.then_some(0x0102_0304), "{:#x}", K::ATTRIBUTE);
    let expected = if has_options { bytes } else { mad(K::ATTRIBUTE, 9, &[0; LEN]) };
    assert_eq!(decoded.encode(), expected, "{:#x}", K::ATTRIBUTE);
}

#[test]
fn the_id_of_the_sender_follows_the_header() {
    let mut bytes = mad(0x16, 9, &[0; LEN]);
    bytes[24..28].copy_from_slice(&[1, 2, 3, 4]);
    assert_eq!(local_id(&bytes), 0x0102_0304);
    assert!(matches!(Mad::decode(&bytes).unwrap().message, Message::Drep(Drep { local_id: 0x0102_0304, .. })));
}

#[test]
fn other_mads_are_rejected_with_a_reason() {
    let good = mad(0x14, 9, &[3; LEN]);
    assert!(Mad::decode(&good).is_ok());
    let with = |at: usize, byte: u8| {
        let mut bytes = good;
        bytes[at] = byte;
        Mad::decode(&bytes)
    };
    assert_eq!(with(0, 2), Err(MadError::BaseVersion(2)));
    assert_eq!(with(1, 3), Err(MadError::Class(3)));
    assert_eq!(with(2, 1), Err(MadError::ClassVersion(1)));
    assert_eq!(with(3, 0x83), Err(MadError::Method(0x83)));
    assert_eq!(with(16, 1), Err(MadError::Attribute(0x114)));
    for attribute in 0..=u8::MAX {
        let known = (0x10..=0x1a).contains(&attribute);
        let error = MadError::Attribute(attribute.into());
        assert_eq!(with(17, attribute).err(), (!known).then_some(error), "{attribute:#x}");
    }
    assert_eq!(Mad::decode(&[]), Err(MadError::Length(0)));
    assert_eq!(Mad::decode(&good[..255]), Err(MadError::Length(255)));
    assert_eq!(Mad::decode(&[&good[..], &[0]].concat()), Err(MadError::Length(257)));
}

#[test]
fn a_path_without_a_local_address_is_no_alternate_path() {
    let mut req = decode::<Req>(1, &[0; LEN]);
    assert_eq!(req.alternate, None);
    let zero = Path::default();
    for (path, survives) in [
        (Path { local_lid: 1, ..zero }, true),
        (Path { local_gid: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], ..zero }, true),
        (Path { remote_lid: 1, remote_gid: [1; 16], flow_label: 1, hop_limit: 1, ..zero }, false),
    ] {
        req.alternate = Some(path);
        assert_eq!(decode::<Req>(1, &encode(1, req.clone())).alternate, survives.then_some(path));
    }
}

#[test]
fn additional_information_has_at_most_72_bytes() {
    assert_eq!(AdditionalInfo::new(&[]), AdditionalInfo::NONE);
    assert_eq!(AdditionalInfo::new(b"guid").as_slice(), b"guid");
    assert_eq!(AdditionalInfo::new(b"guid").bytes[4..], [0; 68]);
    assert_eq!(AdditionalInfo::new(&[5; 100]), AdditionalInfo { len: 72, bytes: [5; 72] });
    // A length from the network may be too great.
    assert_eq!(AdditionalInfo { len: 255, bytes: [6; 72] }.as_slice(), [6; 72]);
}

#[test]
fn reasons_and_statuses_are_those_of_linux() {
    assert_eq!(RejectReason::INVALID_SERVICE_ID, RejectReason(8));
    assert_eq!(RejectReason::STALE_CONN, RejectReason(10));
    assert_eq!(RejectReason::INVALID_MTU, RejectReason(26));
    assert_eq!(RejectReason::CONSUMER_DEFINED, RejectReason(28));
    assert_eq!(RejectReason::DUPLICATE_LOCAL_COMM_ID, RejectReason(30));
    assert_eq!(RejectReason::CONSUMER_DEFINED.to_string(), "the application rejected the connection");
    // Linux names 1 to 33 and 35.
    for code in 0..100 {
        let unknown = RejectReason(code).to_string() == format!("unknown reject reason {code}");
        assert_eq!(unknown, !matches!(code, 1..=33 | 35), "{code}");
    }
    assert_eq!(SidrStatus::UNSUPPORTED_VERSION, SidrStatus(5));
    assert_eq!(SidrStatus::NO_QP.to_string(), "no queue pair is available");
    assert_eq!(SidrStatus(9).to_string(), "unknown service id resolution status 9");
    assert_eq!(Apr::UNSUPPORTED, 2);
}

/// Sets all fields to values made from the seed, encodes, and decodes.
fn round_trip<K: Kind>(seed: u64) {
    let (mut message, mut body) = (decode::<K>(0, &[0; LEN]), [0; LEN]);
    let mut state = seed;
    for field in K::fields() {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let value = state ^ state >> 29;
        field.set(&mut message, &mut body, value);
        field.set_fitting(&mut message, value);
    }
    assert_eq!(encode(seed, message.clone()), body);
    assert_eq!(decode::<K>(seed, &body).wrap(), message.wrap());
}

/// Checks that a decoded MAD round-trips.
fn check(decoded: Result<Mad, MadError>) {
    if let Ok(mad) = decoded {
        assert_eq!(Mad::decode(&mad.encode()), Ok(mad));
    }
}

proptest! {
    #[test]
    fn messages_round_trip(seed in any::<u64>()) {
        for_each_kind!(round_trip, seed);
    }

    #[test]
    fn arbitrary_bytes_decode_or_fail(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        check(Mad::decode(&bytes));
    }

    #[test]
    fn arbitrary_messages_decode_or_fail(
        attribute in 0_u16..0x20,
        transaction in any::<u64>(),
        body in prop::collection::vec(any::<u8>(), LEN),
    ) {
        let decoded = Mad::decode(&mad(attribute, transaction, &body.try_into().unwrap()));
        prop_assert_eq!(decoded.is_ok(), (0x10..=0x1a).contains(&attribute));
        check(decoded);
    }

    #[test]
    fn damaged_messages_decode_or_fail(
        attribute in 0x10_u16..=0x1a,
        body in prop::collection::vec(any::<u8>(), LEN),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        len in prop_oneof![4 => Just(MAD_LEN), 1 => 0..2 * MAD_LEN],
    ) {
        let mut bytes = mad(attribute, 1, &body.try_into().unwrap()).to_vec();
        for (at, to) in damage {
            let at = at.index(bytes.len());
            bytes[at] = to;
        }
        bytes.resize(len, 0);
        check(Mad::decode(&bytes));
    }
}
