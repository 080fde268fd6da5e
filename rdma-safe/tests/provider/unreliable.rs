//! Unreliable connections: attributes set by connecting.

use rdma_safe::{
    Access, ConnectOptions, InitOptions, ProtectionDomain, QueuePairAddress, QueuePairState, QueuePairType, WcFields,
};

use crate::support::{Interfaces, Raw, on_each_interface, raw_with};

fn initialised(pd: &ProtectionDomain, interfaces: Interfaces) -> (Raw, QueuePairAddress) {
    let mut raw = raw_with(pd, interfaces, WcFields::STANDARD, |qp| qp.qp_type(QueuePairType::UC));
    let address = raw.qp.init(&InitOptions::default().peer_access(Access::REMOTE)).unwrap();
    (raw, address)
}

fn pair(pd: &ProtectionDomain, interfaces: Interfaces) -> (Raw, Raw) {
    let ((mut a, to_a), (mut b, to_b)) = (initialised(pd, interfaces), initialised(pd, interfaces));
    a.qp.connect(&to_b, &ConnectOptions::default()).unwrap();
    b.qp.connect(&to_a, &ConnectOptions::default()).unwrap();
    assert_eq!((a.qp.state(), a.qp.qp_type()), (QueuePairState::RTS, QueuePairType::UC));
    (a, b)
}

#[test]
fn connecting_sets_the_attributes_of_the_type() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        fake.take_modified();
        let _pair = pair(&pd, interfaces);
        let masks: Vec<_> = fake.take_modified().iter().map(|(_, mask)| *mask).collect();
        assert_eq!(masks, [0x39, 0x39, 0x10_1181, 0x1_0001, 0x10_1181, 0x1_0001]);
    });
}
