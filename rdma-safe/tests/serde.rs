//! What peers exchange survives the way through a text format, and a forged one is refused.

use rdma_safe::{Ece, Gid, Mtu, QueuePairAddress, RemoteMemory};

fn address() -> QueuePairAddress {
    QueuePairAddress {
        qp_num: 0x11,
        psn: 0xabcdef,
        lid: 0,
        gid: "::ffff:10.9.9.1".parse().unwrap(),
        mtu: Mtu::MTU_4096,
        rd_atomic: 16,
    }
}

#[test]
fn an_address_is_readable_and_comes_back() {
    let text = serde_json::to_string(&address()).unwrap();
    assert_eq!(text, r#"{"qp_num":17,"psn":11259375,"lid":0,"gid":"::ffff:10.9.9.1","mtu":4096,"rd_atomic":16}"#);
    assert_eq!(serde_json::from_str::<QueuePairAddress>(&text).unwrap(), address());
}

#[test]
fn remote_memory_comes_back() {
    let memory = RemoteMemory { address: 0x7f00_0000_1000, len: 4096, rkey: 0x1ff };
    let text = serde_json::to_string(&memory).unwrap();
    assert_eq!(serde_json::from_str::<RemoteMemory>(&text).unwrap(), memory);
}

#[test]
fn options_of_a_connection_come_back() {
    let ece = Ece { vendor_id: 0x15b3, options: 0b101 };
    let text = serde_json::to_string(&ece).unwrap();
    assert_eq!(text, r#"{"vendor_id":5555,"options":5}"#);
    assert_eq!(serde_json::from_str::<Ece>(&text).unwrap(), ece);
}

#[test]
fn values_that_cannot_be_are_refused() {
    let error = serde_json::from_str::<Mtu>("1500").unwrap_err().to_string();
    assert!(error.contains("1500 is not a path MTU"), "{error}");
    assert!(serde_json::from_str::<Gid>("\"10.9.9.1\"").is_err(), "a GID is 128 bits");
}
