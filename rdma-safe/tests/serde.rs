//! Serialization of the values that peers exchange, and refusal of invalid ones.

use rdma_safe::qp::Ece;
use rdma_safe::{Gid, Mtu, QueuePairAddress, RemoteMemory};

fn address() -> QueuePairAddress {
    let gid: Gid = "::ffff:10.9.9.1".parse().unwrap();
    QueuePairAddress::new(0x11, 0xabcdef, gid, Mtu::MTU_4096).with_rd_atomic(16)
}

#[test]
fn an_address_is_serialized_as_readable_text() {
    let text = serde_json::to_string(&address()).unwrap();
    assert_eq!(
        text,
        r#"{"qp_num":17,"psn":11259375,"lid":0,"gid":"::ffff:10.9.9.1","mtu":4096,"rd_atomic":16,"remote_write":false}"#
    );
    let older = text.replace(r#","remote_write":false"#, "");
    assert_eq!(serde_json::from_str::<QueuePairAddress>(&older).unwrap(), address());
    assert_eq!(serde_json::from_str::<QueuePairAddress>(&text).unwrap(), address());
}

#[test]
fn remote_memory_survives_a_round_trip() {
    let memory = RemoteMemory { address: 0x7f00_0000_1000, len: 4096, rkey: 0x1ff };
    let text = serde_json::to_string(&memory).unwrap();
    assert_eq!(serde_json::from_str::<RemoteMemory>(&text).unwrap(), memory);
}

#[test]
fn connection_options_survive_a_round_trip() {
    let ece = Ece::new(0x15b3, 0b101);
    let text = serde_json::to_string(&ece).unwrap();
    assert_eq!(text, r#"{"vendor_id":5555,"options":5}"#);
    assert_eq!(serde_json::from_str::<Ece>(&text).unwrap(), ece);
}

#[test]
fn invalid_values_are_refused() {
    let error = serde_json::from_str::<Mtu>("1500").unwrap_err().to_string();
    assert!(error.contains("1500 is not a path MTU"), "{error}");
    assert!(serde_json::from_str::<Gid>("\"10.9.9.1\"").is_err(), "a GID is 128 bits");
}
