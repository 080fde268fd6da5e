//! Multicast groups on a provider that counts calls, refuses or lacks them, and on InfiniBand. Also Ethernet addresses of
//! peers.

use rdma_safe::address::{AddressError, AddressVector};
use rdma_safe::error::Verb;
use rdma_safe::{
    DatagramEndpoint, Endpoint, Errno, Error, Gid, InitOptions, ProtectionDomain, QueuePairType, WcFields,
};

use crate::fake::{Config, Fake, Live, Port};
use crate::support::{EXTENDED, Raw, raw_with, receive};

const QKEY: u32 = 0x1111_1111;

fn group() -> Gid {
    "::ffff:239.1.2.3".parse().unwrap()
}

fn other_group() -> Gid {
    "ff0e::4".parse().unwrap()
}

fn member(pd: &ProtectionDomain) -> Raw {
    let mut raw = raw_with(pd, EXTENDED, WcFields::STANDARD, |qp| qp.qp_type(QueuePairType::UD));
    raw.qp.init_datagrams(QKEY, &InitOptions::default()).unwrap();
    raw
}

#[test]
fn a_queue_pair_leaves_its_groups_before_it_is_destroyed() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    for explicit in [true, false] {
        let mut raw = member(&pd);
        for gid in [group(), other_group()] {
            raw.qp.attach_mcast(gid, 0).unwrap();
        }
        match explicit {
            true => raw.qp.destroy().unwrap(),
            false => drop(raw.qp),
        }
    }
    assert_eq!((fake.calls("ibv_detach_mcast"), fake.live().qps), (4, 0));
    // A drop during a poll by this thread detaches the groups later, when the poll ends.
    let mut raw = member(&pd);
    raw.qp.attach_mcast(group(), 0).unwrap();
    receive!(raw, 1, rdma_safe::Sge::EMPTY).unwrap();
    fake.break_qp(raw.qp.number());
    let mut poll = raw.cq.poll();
    assert!(poll.next().unwrap().is_some());
    drop(raw.qp);
    assert_eq!((fake.calls("ibv_detach_mcast"), fake.live().qps), (4, 1));
    drop(poll);
    drop(raw.cq);
    assert_eq!((fake.calls("ibv_detach_mcast"), fake.live().qps), (5, 0));
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_queue_pair_that_cannot_leave_its_group_is_not_destroyed_and_keeps_its_parents() {
    let fake = Fake::new(Config::default());
    fake.may_leak();
    let mut raw = member(&fake.pd());
    raw.qp.attach_mcast(group(), 0).unwrap();
    fake.fail("ibv_detach_mcast", libc::EIO);
    let error = raw.qp.destroy().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::DestroyQp, errno: Errno(libc::EBUSY), .. }), "{error}");
    drop(raw.cq);
    assert_eq!(fake.live(), Live { contexts: 1, pds: 1, cqs: 1, qps: 1, ..Live::default() });
    assert_eq!(fake.take_violations().len(), 1, "by this call");
}

fn endpoint(pd: &ProtectionDomain) -> DatagramEndpoint {
    Endpoint::builder(pd).send_depth(4).recv_depth(4).inline_data(16).build_datagrams(QKEY).unwrap()
}

#[test]
fn an_endpoint_finds_a_group_by_gid_and_lid_on_infiniband() {
    let fake = Fake::new(Config { ports: vec![Port::infiniband()], ..Config::default() });
    let pd = fake.pd();
    let (mut sender, mut member) = (endpoint(&pd), endpoint(&pd));
    let error = member.attach_mcast(group(), 0x11).unwrap_err();
    assert!(matches!(error, Error::Multicast { lid: 0x11, .. }), "{error}");
    member.attach_mcast(group(), 0xc001).unwrap();
    member.receive(pd.allocate(8).unwrap()).unwrap();
    let all = sender.multicast_peer(group(), 0xc001).unwrap();
    sender.send_inline(b"to all", &all).unwrap();
    assert_eq!(member.poll().unwrap().unwrap().ok().unwrap().work.buffer.unwrap()[..], *b"to all");
}

#[test]
fn attaching_twice_attaches_once_and_detaching_twice_is_an_error() {
    let fake = Fake::new(Config::default());
    let mut raw = member(&fake.pd());
    raw.qp.attach_mcast(group(), 0).unwrap();
    raw.qp.attach_mcast(group(), 0).unwrap();
    assert_eq!(fake.calls("ibv_attach_mcast"), 1);
    raw.qp.detach_mcast(group(), 0).unwrap();
    let error = raw.qp.detach_mcast(group(), 0).unwrap_err();
    assert!(
        matches!(error, Error::Multicast { verb: Verb::DetachMcast, gid, errno: Errno(libc::EINVAL), .. } if gid == group()),
        "{error}"
    );
    drop(raw);
    assert_eq!(fake.calls("ibv_detach_mcast"), 2, "the group is already detached");
}

#[test]
fn a_group_that_cannot_be_joined_is_refused_before_the_call() {
    let fake = Fake::new(Config::default());
    let mut raw = member(&fake.pd());
    let error = raw.qp.attach_mcast("::ffff:10.9.9.1".parse().unwrap(), 0).unwrap_err();
    assert!(matches!(error, Error::NotMulticast { .. }), "{error}");
    assert_eq!(fake.calls("ibv_attach_mcast"), 0);

    let fake = Fake::new(Config { groups: 0, ..Config::default() });
    let mut raw = member(&fake.pd());
    let error = raw.qp.attach_mcast(group(), 0).unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature: "multicast", .. }), "{error}");
    assert_eq!(fake.calls("ibv_attach_mcast"), 0);
}

#[test]
fn a_group_that_the_device_refuses_is_not_remembered() {
    let fake = Fake::new(Config { ports: vec![Port::infiniband()], groups: 1, ..Config::default() });
    let mut raw = member(&fake.pd());
    let error = raw.qp.attach_mcast(group(), 0x11).unwrap_err();
    assert!(matches!(error, Error::Multicast { lid: 0x11, errno: Errno(libc::EINVAL), .. }), "{error}");
    raw.qp.attach_mcast(group(), 0xc001).unwrap();
    let error = raw.qp.attach_mcast(other_group(), 0xc002).unwrap_err();
    assert!(matches!(error, Error::Multicast { errno: Errno(libc::ENOMEM), .. }), "{error}");
    drop(raw);
    assert_eq!(fake.calls("ibv_detach_mcast"), 1);
}

#[test]
fn the_ethernet_address_of_a_peer_comes_with_its_vlan() {
    let unreachable: Gid = "::ffff:10.9.9.77".parse().unwrap();
    let fake = Fake::new(Config {
        unreachable: [(unreachable.0, libc::EHOSTUNREACH)].into_iter().collect(),
        ..Config::default()
    });
    let context = fake.open();
    let resolve = |gid: &str, index| context.ethernet_address(&AddressVector::from_gid(1, gid.parse().unwrap(), index));
    let found = resolve("::ffff:10.9.9.2", 1).unwrap();
    assert_eq!((found.mac, found.vlan_id), ([0xff, 0xff, 10, 9, 9, 2], None));
    assert_eq!(resolve("2005::1", 0).unwrap().vlan_id, Some(5));

    let explained = |result: rdma_safe::Result<_>| match result {
        Err(Error::Address(error)) => *error,
        other => panic!("{other:?}"),
    };
    let error = explained(resolve("::ffff:10.9.9.77", 1));
    assert!(
        matches!(error, AddressError::Unreachable { dgid, errno: Errno(libc::EHOSTUNREACH), .. } if dgid == unreachable),
        "{error}"
    );
    let error = explained(resolve("::ffff:10.9.9.2", 9));
    assert!(matches!(error, AddressError::NoSourceGid { index: 9, .. }), "{error}");
    let error = explained(context.ethernet_address(&AddressVector::from_lid(1, 3)));
    assert!(matches!(error, AddressError::MissingGlobalRoute { port: 1 }), "{error}");
    assert!(matches!(resolve_at(&context, 2), Err(Error::NoSuchPort { port: 2, .. })));
    fake.fail("ibv_resolve_eth_l2_from_gid", libc::ENETDOWN);
    let error = explained(resolve("::ffff:10.9.9.2", 1));
    assert!(matches!(error, AddressError::Unreachable { errno: Errno(libc::ENETDOWN), .. }), "{error}");
}

fn resolve_at(context: &rdma_safe::Context, port: u8) -> rdma_safe::Result<rdma_safe::address::EthernetAddress> {
    context.ethernet_address(&AddressVector::from_gid(port, group(), 1))
}
