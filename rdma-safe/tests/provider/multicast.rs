//! Multicast groups: who gets what is sent to one, and how queue pairs leave them. And addresses of Ethernet.

use rdma_safe::{
    AddressError, AddressVector, Buffer, DatagramEndpoint, Endpoint, Errno, Error, Gid, Grh, InitOptions, Operation,
    ProtectionDomain, QueuePairType, UdTarget, WcFields, WorkRequest,
};

use crate::fake::{Config, Fake, Live, Port};
use crate::support::{EXTENDED, Interfaces, Raw, on_each_interface, post, raw_with, receive, seen};

const QKEY: u32 = 0x1111_1111;

fn group() -> Gid {
    "::ffff:239.1.2.3".parse().unwrap()
}

fn other_group() -> Gid {
    "ff0e::4".parse().unwrap()
}

fn member(pd: &ProtectionDomain, interfaces: Interfaces, qkey: u32) -> Raw {
    let mut raw = raw_with(pd, interfaces, WcFields::STANDARD, |qp| qp.qp_type(QueuePairType::UD));
    raw.qp.init_datagrams(qkey, &InitOptions::default()).unwrap();
    raw
}

fn inbox(pd: &ProtectionDomain, raw: &mut Raw) -> Buffer {
    let buffer = pd.allocate(Grh::LEN + 8).unwrap();
    receive!(raw, 1, buffer.sge()).unwrap();
    buffer
}

#[test]
fn a_datagram_reaches_every_queue_pair_of_its_group_and_key() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut sender = member(&pd, interfaces, QKEY);
        let mut others = [QKEY, QKEY, QKEY, QKEY + 1].map(|qkey| member(&pd, interfaces, qkey));
        for (raw, gid) in others.iter_mut().zip([group(), group(), other_group(), group()]) {
            raw.qp.attach_mcast(gid, 0).unwrap();
        }
        let inboxes = others.each_mut().map(|raw| inbox(&pd, raw));
        let handle = pd.address_handle(&AddressVector::from_gid(1, group(), 1)).unwrap();
        let mut outbox = pd.allocate(8).unwrap();
        outbox.copy_from_slice(b"to group");
        post!(sender, send_to(WorkRequest::new(7).signaled(), UdTarget::multicast(&handle, QKEY), outbox.sge());)
            .unwrap();
        assert_eq!(seen(&mut sender.cq).len(), 1);
        let received = others.each_mut().map(|raw| seen(&mut raw.cq).len());
        assert_eq!(received, [1, 1, 0, 0]);
        for inbox in &inboxes[..2] {
            assert_eq!((&inbox[Grh::LEN..], Grh::of(inbox).unwrap().dgid()), (&b"to group"[..], group()));
        }
        others[1].qp.detach_mcast(group(), 0).unwrap();
        let again = others.each_mut().map(|raw| inbox(&pd, raw));
        post!(sender, send_to(WorkRequest::new(8), UdTarget::multicast(&handle, QKEY), outbox.sge());).unwrap();
        assert_eq!(others.each_mut().map(|raw| seen(&mut raw.cq).len()), [1, 0, 0, 0]);
        drop((others, again, inboxes));
    });
}

#[test]
fn a_queue_pair_leaves_its_groups_before_it_is_destroyed() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    for explicit in [true, false] {
        let mut raw = member(&pd, EXTENDED, QKEY);
        for gid in [group(), other_group()] {
            raw.qp.attach_mcast(gid, 0).unwrap();
        }
        match explicit {
            true => raw.qp.destroy().unwrap(),
            false => drop(raw.qp),
        }
    }
    assert_eq!((fake.calls("ibv_detach_mcast"), fake.live().qps), (4, 0));
    // A drop that has to wait for a cursor of this thread leaves them when it comes to it.
    let mut raw = member(&pd, EXTENDED, QKEY);
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
    let mut raw = member(&fake.pd(), EXTENDED, QKEY);
    raw.qp.attach_mcast(group(), 0).unwrap();
    fake.fail("ibv_detach_mcast", libc::EIO);
    let error = raw.qp.destroy().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: "ibv_destroy_qp", errno: Errno(libc::EBUSY), .. }), "{error}");
    drop(raw.cq);
    assert_eq!(fake.live(), Live { contexts: 1, pds: 1, cqs: 1, qps: 1, ..Live::default() });
    assert_eq!(fake.take_violations().len(), 1, "of that very call");
}

fn endpoint(pd: &ProtectionDomain, interfaces: Interfaces) -> DatagramEndpoint {
    let builder = Endpoint::builder(pd).send_depth(4).recv_depth(4).inline_data(16);
    let builder = builder.classic_poll(!interfaces.extended_cq).classic_post(!interfaces.extended_qp);
    builder.build_datagrams(QKEY).unwrap()
}

#[test]
fn endpoints_send_to_groups_and_receive_as_their_members() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut sender = endpoint(&pd, interfaces);
        let mut members = [(); 3].map(|()| endpoint(&pd, interfaces));
        for (member, gid) in members.iter_mut().zip([group(), group(), other_group()]) {
            member.attach_mcast(gid, 0).unwrap();
            for _ in 0..2 {
                member.receive(pd.allocate(8).unwrap()).unwrap();
            }
        }
        let all = sender.multicast_peer(group(), 0).unwrap();
        assert_eq!(all.qp_num(), 0xff_ffff);
        sender.send_inline(b"to all", &all).unwrap();
        assert_eq!(sender.poll().unwrap().unwrap().ok().unwrap().operation, Operation::Send);
        let number = sender.queue_pair().number();
        for member in &mut members[..2] {
            let done = member.poll().unwrap().expect("a datagram").ok().unwrap();
            let from = done.sender.unwrap();
            assert_eq!((from.qp_num(), from.grh().unwrap().dgid()), (number, group()));
            assert_eq!(done.work.buffer.unwrap()[..], *b"to all");
        }
        members[0].detach_mcast(group(), 0).unwrap();
        sender.send_inline(b"again", &all).unwrap();
        assert_eq!(members.each_mut().map(|member| member.poll().unwrap().is_some()), [false, true, false]);
        // One that is in a group still gets what is sent to it alone.
        let alone = sender.peer(&members[1].address()).unwrap();
        members[1].receive(pd.allocate(8).unwrap()).unwrap();
        sender.send_inline(b"alone", &alone).unwrap();
        assert_eq!(members[1].poll().unwrap().unwrap().ok().unwrap().work.buffer.unwrap()[..], *b"alone");

        let ours: Gid = "::ffff:10.9.9.1".parse().unwrap();
        let error = sender.multicast_peer(ours, 0).unwrap_err();
        assert!(matches!(error, Error::NotMulticast { gid } if gid == ours), "{error}");
        let error = sender.attach_mcast(ours, 0).unwrap_err();
        assert!(matches!(error, Error::NotMulticast { gid } if gid == ours), "{error}");
        let error = sender.detach_mcast(group(), 0).unwrap_err();
        assert!(matches!(error, Error::Multicast { verb: "ibv_detach_mcast", .. }), "{error}");

        // Whether it is dropped or closed, a member leaves first: the provider would not destroy its queue pair.
        let left = fake.calls("ibv_detach_mcast");
        let [_, closed, dropped] = members;
        assert_eq!(closed.close().unwrap().len(), 0);
        drop(dropped);
        assert_eq!(fake.calls("ibv_detach_mcast"), left + 2);
    });
}

#[test]
fn an_endpoint_finds_a_group_by_gid_and_lid_on_infiniband() {
    let fake = Fake::new(Config { ports: vec![Port::infiniband()], ..Config::default() });
    let pd = fake.pd();
    let (mut sender, mut member) = (endpoint(&pd, EXTENDED), endpoint(&pd, EXTENDED));
    let error = member.attach_mcast(group(), 0x11).unwrap_err();
    assert!(matches!(error, Error::Multicast { lid: 0x11, .. }), "{error}");
    member.attach_mcast(group(), 0xc001).unwrap();
    member.receive(pd.allocate(8).unwrap()).unwrap();
    let all = sender.multicast_peer(group(), 0xc001).unwrap();
    sender.send_inline(b"to all", &all).unwrap();
    assert_eq!(member.poll().unwrap().unwrap().ok().unwrap().work.buffer.unwrap()[..], *b"to all");
}

#[test]
fn to_attach_twice_is_to_attach_once_and_to_detach_twice_is_an_error() {
    let fake = Fake::new(Config::default());
    let mut raw = member(&fake.pd(), EXTENDED, QKEY);
    raw.qp.attach_mcast(group(), 0).unwrap();
    raw.qp.attach_mcast(group(), 0).unwrap();
    assert_eq!(fake.calls("ibv_attach_mcast"), 1);
    raw.qp.detach_mcast(group(), 0).unwrap();
    let error = raw.qp.detach_mcast(group(), 0).unwrap_err();
    assert!(
        matches!(error, Error::Multicast { verb: "ibv_detach_mcast", gid, errno: Errno(libc::EINVAL), .. } if gid == group()),
        "{error}"
    );
    drop(raw);
    assert_eq!(fake.calls("ibv_detach_mcast"), 2, "nothing is left to detach");
}

#[test]
fn what_cannot_be_in_a_group_is_refused_before_the_call() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut raw = member(&pd, EXTENDED, QKEY);
    for gid in ["fe80::1", "::ffff:10.9.9.1", "::"] {
        let error = raw.qp.attach_mcast(gid.parse().unwrap(), 0).unwrap_err();
        assert!(matches!(error, Error::NotMulticast { gid: refused } if refused == gid.parse().unwrap()), "{error}");
    }
    let mut connected = raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    let error = connected.qp.attach_mcast(group(), 0).unwrap_err();
    assert!(matches!(error, Error::WrongType { qp_type: QueuePairType::RC, .. }), "{error}");
    assert_eq!(fake.calls("ibv_attach_mcast"), 0);

    let fake = Fake::new(Config { groups: 0, ..Config::default() });
    let mut raw = member(&fake.pd(), EXTENDED, QKEY);
    let error = raw.qp.attach_mcast(group(), 0).unwrap_err();
    assert!(matches!(error, Error::Unsupported { feature: "multicast", .. }), "{error}");
    assert_eq!(fake.calls("ibv_attach_mcast"), 0);
}

#[test]
fn a_group_that_the_device_refuses_is_not_remembered() {
    let fake = Fake::new(Config { ports: vec![Port::infiniband()], groups: 1, ..Config::default() });
    let mut raw = member(&fake.pd(), EXTENDED, QKEY);
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

fn resolve_at(context: &rdma_safe::Context, port: u8) -> rdma_safe::Result<rdma_safe::EthernetAddress> {
    context.ethernet_address(&AddressVector::from_gid(port, group(), 1))
}
