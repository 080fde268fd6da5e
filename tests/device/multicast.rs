//! Multicast groups, and the Ethernet addresses of GIDs.

use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::Duration;

use rdma_safe::address::{AddressError, AddressVector, GidEntry, Grh};
use rdma_safe::error::Verb;
use rdma_safe::{
    Error, Gid, InitOptions, LinkLayer, Operation, Peer, ProtectionDomain, QueuePairType, UdTarget, WorkRequest,
};

use crate::support::lab::{MEMORY, Memory, Mode, Side, cq_builder, try_next};
use crate::support::program::{Program, TIME_LIMIT};
use crate::support::{DEADLINE, Rdma, device, error_of, lossless_device, skip, within};

const QKEY: u32 = 0x2468;

fn ethernet() -> Option<Rdma> {
    let rdma = device()?;
    let link = rdma.query_port(rdma.port).unwrap().link_layer();
    // On InfiniBand, a subnet manager creates the groups.
    if link != LinkLayer::ETHERNET {
        return skip(&format!("the link layer is {link}, where the subnet manager makes the groups"));
    }
    Some(rdma)
}

fn side(rdma: &Rdma, pd: &ProtectionDomain, mode: Mode, gid: &GidEntry) -> Side {
    side_with(rdma, pd, mode, gid, QKEY)
}

fn side_with(rdma: &Rdma, pd: &ProtectionDomain, mode: Mode, gid: &GidEntry, qkey: u32) -> Side {
    let cq = cq_builder(rdma, 64, mode).build().expect("a completion queue");
    let builder = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).classic(mode.classic_qp);
    let mut qp = builder.build().expect("a queue pair");
    qp.init_datagrams(qkey, &InitOptions::default().port(rdma.port).gid_index(gid.index)).expect("it is ready");
    Side { qp, cq, memory: Memory::new(pd, MEMORY) }
}

/// Joins `group` with the host on the interface of `gid`. Otherwise the host does not receive its own multicasts. Packets in
/// memory have no interface.
fn join(group: Gid, gid: &GidEntry) -> Option<UdpSocket> {
    if cfg!(miri) {
        return None;
    }
    Some(match (group.ipv4(), gid.gid.ipv4()) {
        (Some(group), Some(interface)) => {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
            socket.join_multicast_v4(&group, &interface).expect("to join the group");
            socket
        }
        _ => {
            let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap();
            socket.join_multicast_v6(&group.into(), gid.interface_index).expect("to join the group");
            socket
        }
    })
}

/// A group with the IP version of `gid`.
fn group_for(gid: &GidEntry, number: u8) -> Gid {
    match gid.gid.ipv4() {
        Some(_) => Gid::from(Ipv4Addr::new(239, 1, 2, number)),
        None => Gid::from(Ipv6Addr::new(0xff0e, 0, 0, 0, 0, 0, 0, number.into())),
    }
}

#[test]
fn a_datagram_to_a_group_reaches_each_queue_pair_that_is_in_it() {
    let Some(rdma) = ethernet() else { return };
    for mode in Mode::each() {
        println!("{mode}");
        let (pd, gid) = (rdma.pd(), &rdma.gid);
        let (group, other) = (group_for(gid, 3), group_for(gid, 4));
        let _host = [join(group, gid), join(other, gid)];
        let mut sender = side(&rdma, &pd, mode, gid);
        let mut members = [QKEY, QKEY, QKEY, QKEY + 1].map(|qkey| side_with(&rdma, &pd, mode, gid, qkey));
        for (side, group) in members.iter_mut().zip([group, group, other, group]) {
            side.qp.attach_mcast(group, 0).expect("it is in the group");
            side.receive(1, 0..200).unwrap();
            side.receive(2, 200..400).unwrap();
        }
        let send = |sender: &mut Side, group: Gid, text: &[u8]| {
            let handle = pd.address_handle(&AddressVector::from_gid(rdma.port, group, gid.index as u8)).unwrap();
            sender.memory.put(0, text);
            let sge = sender.memory.sge(0..text.len());
            let mut batch = sender.qp.send_batch().unwrap();
            // SAFETY: the memory tolerates any access, and the handle is dropped after the completion was taken.
            unsafe { batch.send_to(WorkRequest::new(9).signaled(), UdTarget::multicast(&handle, QKEY), sge) }.unwrap();
            batch.post().unwrap();
            sender.next_ok(9);
        };
        send(&mut sender, group, b"for two");
        for side in &mut members[..2] {
            let wc = side.next_ok(1);
            assert_eq!(wc.byte_len, Some((Grh::LEN + 7) as u32));
            assert_eq!(side.memory.get(40..47), b"for two");
            assert_eq!(Grh::parse(&side.memory.get(0..40)).unwrap().dgid(), group);
        }
        // Datagrams arrive in order, so a misdirected earlier datagram would have arrived by then.
        send(&mut sender, other, b"for one");
        members[2].next_ok(1);
        assert_eq!(members[2].memory.get(40..47), b"for one");
        members[0].qp.detach_mcast(group, 0).expect("it was in the group");
        send(&mut sender, group, b"for the other");
        members[1].next_ok(2);
        assert_eq!(members[1].memory.get(240..253), b"for the other");
        for side in &mut members {
            assert_eq!(try_next(&mut side.cq), None);
        }
    }
}

#[test]
fn endpoints_receive_multicasts_of_their_group() {
    let Some(rdma) = ethernet() else { return };
    for mode in Mode::each() {
        println!("{mode}");
        let (pd, gid) = (rdma.pd(), &rdma.gid);
        let (group, other) = (group_for(gid, 5), group_for(gid, 6));
        let _host = [join(group, gid), join(other, gid)];
        let endpoint = || {
            let builder =
                rdma.endpoint(&pd).inline_data(32).classic_post(mode.classic_qp).classic_poll(mode.classic_cq);
            builder.build_datagrams(QKEY).expect("an endpoint")
        };
        let mut sender = endpoint();
        let mut members = [endpoint(), endpoint(), endpoint()];
        for (member, group) in members.iter_mut().zip([group, group, other]) {
            member.attach_mcast(group, 0).expect("it is in the group");
            for _ in 0..2 {
                member.receive(pd.allocate(32).unwrap()).unwrap();
            }
        }
        let ours = rdma.gid.gid;
        for refused in [sender.multicast_peer(ours, 0).map(drop), sender.attach_mcast(ours, 0)] {
            let error = error_of(refused);
            assert!(matches!(error, Error::NotMulticast { gid } if gid == ours), "{error}");
        }
        let error = error_of(sender.detach_mcast(group, 0));
        assert!(matches!(error, Error::Multicast { verb: Verb::DetachMcast, .. }), "{error}");
        let number = sender.queue_pair().number();
        let [for_two, for_one] =
            [group, other].map(|group| sender.multicast_peer(group, 0).expect("a way to the group"));
        let mut send = |text: &[u8], to: &Peer| {
            sender.send_inline(text, to).unwrap();
            assert_eq!(sender.wait(DEADLINE).unwrap().ok().unwrap().operation, Operation::Send);
        };
        send(b"for two", &for_two);
        for member in &mut members[..2] {
            let done = member.wait(DEADLINE).unwrap().ok().unwrap();
            let from = done.sender.expect("a sender");
            assert_eq!((from.qp_num(), from.grh().expect("a header").dgid()), (number, group));
            assert_eq!(*done.work.buffer.unwrap(), *b"for two");
        }
        // Datagrams arrive in order, so a misdirected earlier datagram would have arrived by then.
        send(b"for one", &for_one);
        assert_eq!(*members[2].wait(DEADLINE).unwrap().ok().unwrap().work.buffer.unwrap(), *b"for one");
        members[0].detach_mcast(group, 0).expect("it was in the group");
        send(b"for the other", &for_two);
        assert_eq!(*members[1].wait(DEADLINE).unwrap().ok().unwrap().work.buffer.unwrap(), *b"for the other");
        for member in &mut members {
            assert!(member.poll().unwrap().is_none());
        }
        for (member, left) in members.into_iter().zip([1, 0, 1]) {
            assert_eq!(member.close().expect("it leaves its groups first").len(), left);
        }
    }
}

#[test]
fn a_member_of_a_group_receives_datagrams_to_its_own_address() {
    let Some(rdma) = lossless_device() else { return };
    let Some(_) = ethernet() else { return };
    let (pd, group) = (rdma.pd(), group_for(&rdma.gid, 8));
    let _host = join(group, &rdma.gid);
    let endpoint = || rdma.endpoint(&pd).inline_data(32).build_datagrams(QKEY).expect("an endpoint");
    let (mut sender, mut member) = (endpoint(), endpoint());
    member.attach_mcast(group, 0).expect("it is in the group");
    member.receive(pd.allocate(32).unwrap()).unwrap();
    let peer = sender.peer(&member.address()).unwrap();
    sender.send_inline(b"alone", &peer).unwrap();
    assert_eq!(*member.wait(DEADLINE).unwrap().ok().unwrap().work.buffer.unwrap(), *b"alone");
}

/// Marks the process that the test below starts as a member of the group.
const MEMBER: &str = "RDMA_TEST_GROUP_MEMBER";

#[test]
#[cfg_attr(miri, ignore = "Miri starts no programs")]
fn a_process_receives_multicasts_of_another_process() {
    let Some(rdma) = ethernet() else { return };
    let (pd, gid) = (rdma.pd(), &rdma.gid);
    let group = group_for(gid, 7);
    let _host = join(group, gid);
    let mut endpoint = rdma.endpoint(&pd).inline_data(32).build_datagrams(QKEY).expect("an endpoint");
    if std::env::var_os(MEMBER).is_some() {
        endpoint.attach_mcast(group, 0).expect("it is in the group");
        endpoint.receive(pd.allocate(32).unwrap()).unwrap();
        println!("in the group");
        let done = endpoint.wait(DEADLINE).unwrap().ok().unwrap();
        assert_eq!(*done.work.buffer.unwrap(), *b"for another process");
        return;
    }
    let this = Program::Rust(std::env::current_exe().expect("the test's program has a path"));
    let name = "multicast::a_process_receives_multicasts_of_another_process";
    let mut member = this.start_in(&[(MEMBER, "1".to_owned())], &["--exact", name, "--nocapture"]);
    member.wait_for("in the group");
    let to = endpoint.multicast_peer(group, 0).expect("a way to the group");
    within(TIME_LIMIT, "the other process", || {
        // The datagram may be lost.
        endpoint.send_inline(b"for another process", &to).unwrap();
        assert_eq!(endpoint.wait(DEADLINE).unwrap().ok().unwrap().operation, Operation::Send);
        std::thread::sleep(Duration::from_millis(20));
        member.has_ended().then_some(())
    });
    let (status, text) = member.finish();
    assert!(status.success(), "{text}");
}

#[test]
fn a_queue_pair_that_is_in_groups_can_be_destroyed() {
    let Some(rdma) = ethernet() else { return };
    let pd = rdma.pd();
    let mut side = side(&rdma, &pd, Mode::EXTENDED, &rdma.gid);
    for number in 1..4 {
        side.qp.attach_mcast(group_for(&rdma.gid, number), 0).unwrap();
        // The queue pair is already in this group.
        side.qp.attach_mcast(group_for(&rdma.gid, number), 0).unwrap();
    }
    side.qp.detach_mcast(group_for(&rdma.gid, 2), 0).unwrap();
    let error = error_of(side.qp.detach_mcast(group_for(&rdma.gid, 2), 0));
    assert!(matches!(error, Error::Multicast { verb: Verb::DetachMcast, .. }), "{error}");
    side.qp.destroy().expect("it leaves its groups first");
}

#[test]
fn only_datagrams_and_multicast_addresses_have_groups() {
    let Some(rdma) = ethernet() else { return };
    let pd = rdma.pd();
    let mut side = side(&rdma, &pd, Mode::EXTENDED, &rdma.gid);
    for unicast in [rdma.gid.gid, "fe80::1".parse().unwrap(), "::".parse().unwrap()] {
        let error = error_of(side.qp.attach_mcast(unicast, 0));
        assert!(matches!(error, Error::NotMulticast { gid } if gid == unicast), "{error}");
    }
    let mut connected = pd.queue_pair(&side.cq, &side.cq).build().unwrap();
    let error = error_of(connected.attach_mcast(group_for(&rdma.gid, 1), 0));
    assert!(matches!(error, Error::WrongType { qp_type: QueuePairType::RC, .. }), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "packets in memory have no interface")]
fn the_ethernet_address_behind_a_gid_is_that_of_the_host() {
    let Some(rdma) = ethernet() else { return };
    let (port, gid) = (rdma.port, &rdma.gid);
    let resolve = |dgid| rdma.ethernet_address(&AddressVector::from_gid(port, dgid, gid.index as u8));
    if gid.gid.ipv4().is_some() {
        // RFC 1112: the last 23 bits of the group.
        let found = resolve(group_for(gid, 9)).unwrap();
        assert_eq!((found.mac, found.vlan_id), ([1, 0, 0x5e, 1, 2, 9], None));
    }
    // The address of the port itself can be resolved. Other addresses depend on the network.
    let interfaces = std::fs::read_dir("/sys/class/net").unwrap().map(|entry| entry.unwrap().path());
    let read = |path: &std::path::Path, what| std::fs::read_to_string(path.join(what)).unwrap_or_default();
    let ours = |path: &std::path::PathBuf| read(path, "ifindex").trim() == gid.interface_index.to_string();
    let interface = interfaces.into_iter().find(ours).expect("the interface of the GID");
    let found = resolve(gid.gid).unwrap();
    let mac = found.mac.map(|byte| format!("{byte:02x}")).join(":");
    assert_eq!((mac.as_str(), found.vlan_id), (read(&interface, "address").trim(), None));
    let empty = (0..255).rev().find(|index| rdma.gid(port, u32::from(*index)).is_err()).expect("an empty entry");
    let error = error_of(rdma.ethernet_address(&AddressVector::from_gid(port, gid.gid, empty)));
    assert!(matches!(error, Error::Address(error) if matches!(*error, AddressError::NoSourceGid { .. })));
    let error = error_of(rdma.ethernet_address(&AddressVector::from_lid(port, 1)));
    assert!(matches!(error, Error::Address(error) if matches!(*error, AddressError::MissingGlobalRoute { .. })));
}
