//! The rdma_cm header in private data, and service ids.

use std::net::IpAddr;

use proptest::prelude::*;
use rdma_soft::wire::cm::{IpHeader, PS_TCP, PS_UDP, service_id, service_port};

fn header(source: &str, destination: &str) -> IpHeader {
    IpHeader { source: source.parse().unwrap(), destination: destination.parse().unwrap() }
}

#[test]
fn ipv4_addresses_are_in_the_last_four_bytes() {
    let header = header("192.0.2.1:47918", "198.51.100.7");
    let mut bytes = [0; IpHeader::LEN];
    bytes[1] = 0x40;
    bytes[2..4].copy_from_slice(&[0xbb, 0x2e]);
    bytes[16..20].copy_from_slice(&[192, 0, 2, 1]);
    bytes[32..36].copy_from_slice(&[198, 51, 100, 7]);
    assert_eq!(header.encode(), bytes);
    assert_eq!(IpHeader::decode(&bytes), Some(header));
    // Application data follows, and the bytes before the addresses are ignored.
    let mut longer = bytes.to_vec();
    longer.extend(b"application data");
    longer[1] |= 0xf;
    longer[4..16].fill(1);
    longer[20..32].fill(2);
    assert_eq!(IpHeader::decode(&longer), Some(header));
}

#[test]
fn ipv6_addresses_are_whole() {
    let header = header("[2001:db8::1]:7174", "2001:db8:1:2:3:4:5:6");
    let mut bytes = [0; IpHeader::LEN];
    bytes[1] = 0x60;
    bytes[2..4].copy_from_slice(&[0x1c, 0x06]);
    bytes[4..8].copy_from_slice(&[0x20, 0x01, 0x0d, 0xb8]);
    bytes[19] = 1;
    bytes[20..].copy_from_slice(&[0x20, 0x01, 0x0d, 0xb8, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6]);
    assert_eq!(header.encode(), bytes);
    assert_eq!(IpHeader::decode(&bytes), Some(header));
}

#[test]
fn an_ipv4_address_beside_an_ipv6_address_is_mapped() {
    let mixed = header("192.0.2.1:1", "2001:db8::1").encode();
    assert_eq!(IpHeader::decode(&mixed), Some(header("[::ffff:192.0.2.1]:1", "2001:db8::1")));
    let mixed = header("[2001:db8::1]:1", "192.0.2.1").encode();
    assert_eq!(IpHeader::decode(&mixed), Some(header("[2001:db8::1]:1", "::ffff:192.0.2.1")));
}

#[test]
fn other_versions_and_short_data_are_rejected() {
    let good = header("192.0.2.1:1", "192.0.2.2").encode();
    for len in 0..IpHeader::LEN {
        assert_eq!(IpHeader::decode(&good[..len]), None);
    }
    for version in 1..=u8::MAX {
        let mut bytes = good;
        bytes[0] = version;
        assert_eq!(IpHeader::decode(&bytes), None);
    }
    for ip_version in 0..16 {
        let mut bytes = good;
        bytes[1] = ip_version << 4;
        assert_eq!(IpHeader::decode(&bytes).is_some(), matches!(ip_version, 4 | 6));
    }
}

#[test]
fn service_ids_contain_the_port_space_and_the_port() {
    assert_eq!(service_id(PS_TCP, 7174), 0x0000_0000_0106_1c06);
    assert_eq!(service_id(PS_UDP, 0xffff), 0x0000_0000_0111_ffff);
    assert_eq!(service_port(0x0106_1c06), Some((PS_TCP, 7174)));
    assert_eq!(service_port(0xffff_ffff), Some((0xffff, 0xffff)));
    assert_eq!(service_port(0x1_0106_1c06), None);
    assert_eq!(service_port(u64::MAX), None);
}

fn address() -> impl Strategy<Value = (IpAddr, IpAddr)> {
    prop_oneof![
        any::<[[u8; 4]; 2]>().prop_map(|[source, destination]| (source.into(), destination.into())),
        any::<[[u8; 16]; 2]>().prop_map(|[source, destination]| (source.into(), destination.into())),
    ]
}

proptest! {
    #[test]
    fn headers_round_trip((source, destination) in address(), port in any::<u16>()) {
        let header = IpHeader { source: (source, port).into(), destination };
        prop_assert_eq!(IpHeader::decode(&header.encode()), Some(header));
    }

    #[test]
    fn arbitrary_headers_decode_or_fail(mut bytes in prop::collection::vec(any::<u8>(), 0..60), version in 0_u8..2) {
        bytes.first_mut().into_iter().for_each(|first| *first = version);
        if let Some(header) = IpHeader::decode(&bytes) {
            prop_assert_eq!(IpHeader::decode(&header.encode()), Some(header));
        }
    }

    #[test]
    fn service_ids_round_trip(space in any::<u16>(), port in any::<u16>()) {
        prop_assert_eq!(service_port(service_id(space, port)), Some((space, port)));
    }
}
