//! State changes that only a provider can show: calls that do not happen, refusals of the kernel, two ports, InfiniBand, iWARP.
//!
//! The rules of RoCE are tested on a device: `tests/device/modify.rs` and `tests/device/modify_errors.rs`.

use std::collections::BTreeMap;

use rdma_safe::address::{AddressError, AddressVector};
use rdma_safe::error::Verb;
use rdma_safe::qp::{ModifyError, QueuePairAttributes};
use rdma_safe::{Errno, Error, Gid, Mtu, ProtectionDomain, QueuePair, QueuePairState};

use crate::fake::{Config, Fake, Port};
use crate::support::{init, rtr};

fn address() -> AddressVector {
    AddressVector::from_gid(1, "::ffff:10.9.9.1".parse().unwrap(), 1)
}

/// A queue pair in RESET.
fn queue_pair(pd: &ProtectionDomain) -> QueuePair {
    let cq = pd.context().completion_queue(4).build().unwrap();
    pd.queue_pair(&cq, &cq).build().unwrap()
}

/// A queue pair in INIT.
fn in_init(pd: &ProtectionDomain) -> QueuePair {
    let mut qp = queue_pair(pd);
    qp.modify(&init()).unwrap();
    qp
}

fn modify_error(result: rdma_safe::Result<()>) -> ModifyError {
    match result {
        Err(Error::Modify(error)) => *error,
        other => panic!("not a ModifyError: {other:?}"),
    }
}

#[test]
fn mistakes_that_need_no_device_are_refused_without_a_call() {
    let fake = Fake::new(Config { ports: vec![Port::ethernet(), Port::ethernet()], ..Config::default() });
    let pd = fake.pd();
    let mut qp = in_init(&pd);
    let calls = fake.calls("ibv_modify_qp");
    let to_rtr = QueuePairAttributes::new().set_state(QueuePairState::RTR);
    for (attributes, expected) in [
        (to_rtr, "missing: AV"),
        (rtr(1).set_timeout(14), "not allowed: TIMEOUT"),
        (to_rtr.set_state(QueuePairState::RTS), "no change from INIT to RTS"),
        (to_rtr.set_state(QueuePairState(77)), "no change from INIT to"),
        (rtr(1).set_min_rnr_timer(32), "min_rnr_timer is 32"),
        (rtr(1).set_address(AddressVector { port: 2, ..address() }), "port 1 in INIT"),
        (rtr(1).set_address(AddressVector::from_lid(1, 5)), "addressed by GID"),
    ] {
        let error = modify_error(qp.modify(&attributes)).to_string();
        assert!(error.contains(expected), "{expected:?} is missing: {error}");
    }
    assert_eq!(fake.calls("ibv_modify_qp"), calls);
}

#[test]
fn an_address_vector_must_use_the_port_of_the_last_init() {
    let fake = Fake::new(Config { ports: vec![Port::ethernet(), Port::ethernet()], ..Config::default() });
    let pd = fake.pd();
    let mut qp = in_init(&pd);
    let from_port_2 = rtr(1).set_address(AddressVector { port: 2, ..address() });
    let error = modify_error(qp.modify(&from_port_2));
    assert!(matches!(error, ModifyError::PortMismatch { port: 1, address_port: 2 }), "{error}");
    qp.modify(&init().set_port(2)).unwrap();
    qp.modify(&from_port_2).unwrap();
}

#[test]
fn an_address_without_a_global_route_is_accepted_on_infiniband() {
    let fake = Fake::new(Config { ports: vec![Port::infiniband()], ..Config::default() });
    in_init(&fake.pd()).modify(&rtr(1).set_address(AddressVector::from_lid(1, 5))).unwrap();
}

#[test]
fn each_errno_of_a_missing_route_is_explained_by_the_addresses() {
    let (source, peer): (Gid, Gid) = ("::ffff:10.9.9.1".parse().unwrap(), "::ffff:10.9.9.2".parse().unwrap());
    for errno in [libc::EINVAL, libc::ENETUNREACH, libc::EHOSTUNREACH, libc::ETIMEDOUT, libc::ENODATA] {
        let fake = Fake::new(Config { unreachable: BTreeMap::from([(peer.0, errno)]), ..Config::default() });
        let pd = fake.pd();
        let mut qp = in_init(&pd);
        let error = modify_error(qp.modify(&rtr(1).set_address(AddressVector::from_gid(1, peer, 1))));
        let ModifyError::Address(AddressError::Unreachable { port: 1, index: 1, source_gid, dgid, errno: found }) =
            error
        else {
            panic!("{error}")
        };
        assert_eq!((source_gid, dgid, found), (source, peer, Errno(errno)));
        assert_eq!(qp.state(), QueuePairState::INIT);
    }
}

#[test]
fn a_path_mtu_beyond_the_port_is_explained_by_the_limit() {
    let mut port = Port::ethernet();
    port.max_mtu = rdma_sys::IBV_MTU_2048;
    let fake = Fake::new(Config { ports: vec![port], ..Config::default() });
    let mut qp = in_init(&fake.pd());
    let error = modify_error(qp.modify(&rtr(1).set_path_mtu(Mtu::MTU_4096)));
    let ModifyError::OutOfRange { attribute: "path_mtu", value: 4096, limits: allowed } = &error else {
        panic!("{error}")
    };
    assert!(allowed.contains("2048"), "{allowed}");
    qp.modify(&rtr(1).set_path_mtu(Mtu::MTU_2048)).unwrap();
}

#[test]
fn a_refusal_without_a_known_cause_shows_the_attributes() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    for errno in [libc::EINVAL, libc::EPERM, libc::EIO] {
        fake.fail("ibv_modify_qp", errno);
        let mut qp = queue_pair(&pd);
        let error = modify_error(qp.modify(&init()));
        let ModifyError::Refused { transition, attributes, errno: found } = &error else { panic!("{error}") };
        assert_eq!((transition.from, transition.to), (QueuePairState::RESET, QueuePairState::INIT));
        assert_eq!((attributes.port(), *found), (Some(1), Errno(errno)));
        let text = error.to_string();
        assert!(text.contains("RESET to INIT of an RC queue pair") && text.contains("pkey_index: 0"), "{text}");
        assert_eq!(qp.state(), QueuePairState::RESET);
        fake.heal("ibv_modify_qp");
        qp.modify(&init()).unwrap();
    }
}

#[test]
fn iwarp_state_changes_are_checked_by_the_device_alone() {
    let fake = Fake::new(Config { transport: rdma_sys::IBV_TRANSPORT_IWARP, ..Config::default() });
    let mut qp = queue_pair(&fake.pd());
    let error = modify_error(qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::INIT)));
    assert!(matches!(error, ModifyError::Refused { .. }), "{error}");
    assert_eq!(fake.calls("ibv_modify_qp"), 1);
}

#[test]
fn a_failed_query_names_the_verb() {
    let fake = Fake::new(Config::default());
    let qp = queue_pair(&fake.pd());
    fake.fail("ibv_query_qp", libc::EIO);
    let error = qp.query().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::QueryQp, errno: Errno(libc::EIO), .. }), "{error}");
}
