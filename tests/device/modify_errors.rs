//! Changes of queue pair attributes: errors name the cause, and queries return the attributes that were set.

use std::net::{Ipv4Addr, Ipv6Addr};

use rdma_safe::address::{AddressError, AddressVector, GlobalRoute};
use rdma_safe::qp::{AttributeMask, ModifyError, QueuePairAttributes, Transition};
use rdma_safe::{Access, Errno, Error, Gid, GidType, LinkLayer, Mtu, QueuePair, QueuePairState, WcStatus};

use crate::support::lab::{Data, Lab, Mode, Op, Wr};
use crate::support::link::{Link, PSN, address};
use crate::support::{Rdma, device, error_of, within_deadline};

/// A queue pair in RESET, which keeps its completion queue.
fn new_qp(rdma: &Rdma) -> QueuePair {
    let cq = rdma.completion_queue(4).build().unwrap();
    rdma.pd().queue_pair(&cq, &cq).build().unwrap()
}

/// A queue pair in INIT.
fn in_init(rdma: &Rdma) -> QueuePair {
    let mut qp = new_qp(rdma);
    qp.modify(&Link::default().to_init(rdma)).unwrap();
    qp
}

#[track_caller]
fn refused(qp: &mut QueuePair, attributes: &QueuePairAttributes) -> ModifyError {
    let before = qp.state();
    let error = error_of(qp.modify(attributes));
    assert_eq!(qp.state(), before);
    let Error::Modify(error) = error else { panic!("{error:?}") };
    *error
}

/// A change to RTR with an address vector modified by `change`.
fn to_rtr_with(rdma: &Rdma, qp: &QueuePair, change: impl FnOnce(&mut AddressVector)) -> QueuePairAttributes {
    let mut address = address(rdma);
    change(&mut address);
    Link::default().to_rtr(rdma, qp.number()).set_address(address)
}

#[test]
fn missing_and_excess_attributes_are_named() {
    let Some(rdma) = device() else { return };
    let mut qp = new_qp(&rdma);
    let incomplete = QueuePairAttributes::new().set_state(QueuePairState::INIT).set_port(rdma.port).set_sq_psn(1);
    let error = refused(&mut qp, &incomplete);
    let text = error.to_string();
    let ModifyError::Attributes { transition, missing, excess } = error else { panic!("{error:?}") };
    assert_eq!((transition.from, transition.to), (QueuePairState::RESET, QueuePairState::INIT));
    assert_eq!(missing, AttributeMask::ACCESS_FLAGS | AttributeMask::PKEY_INDEX);
    assert_eq!(excess, AttributeMask::SQ_PSN);
    for part in ["RESET to INIT", "missing: ACCESS_FLAGS | PKEY_INDEX", "not allowed: SQ_PSN"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn an_invalid_transition_names_the_valid_ones() {
    let Some(rdma) = device() else { return };
    let mut qp = new_qp(&rdma);
    let error = refused(&mut qp, &Link::default().to_rts());
    let text = error.to_string();
    let ModifyError::InvalidTransition { transition: Transition { from, to, .. } } = error else { panic!("{error:?}") };
    assert_eq!((from, to), (QueuePairState::RESET, QueuePairState::RTS));
    assert!(text.contains("can change to are: RESET, INIT"), "{text}");
}

#[test]
fn values_out_of_range_are_named_with_the_range() {
    let Some(rdma) = device() else { return };
    let limits = rdma.attributes();
    let link = Link::default();
    let (init, rtr, rts) = (link.to_init(&rdma), |qp: &QueuePair| link.to_rtr(&rdma, qp.number()), link.to_rts());
    let mut fresh = new_qp(&rdma);
    let mut qp = in_init(&rdma);
    let mut ready = in_init(&rdma);
    let number = ready.number();
    ready.modify(&link.to_rtr(&rdma, number)).unwrap();
    let check = |qp: &mut QueuePair, attributes: QueuePairAttributes, name: &str, bad: u64, range: &str| {
        let error = refused(qp, &attributes);
        let text = error.to_string();
        let ModifyError::OutOfRange { attribute, value, limits: allowed } = error else { panic!("{name}: {error:?}") };
        assert_eq!((attribute, value, allowed.as_str()), (name, bad, range));
        assert_eq!(text, format!("{name} is {bad}, but must be {range}"));
    };
    let ports = format!("1 to {}", limits.ports());
    check(&mut fresh, init.set_port(0), "port", 0, &ports);
    check(&mut fresh, init.set_port(255), "port", 255, &ports);
    let base = rtr(&qp);
    let with_address = |change: fn(&mut AddressVector)| to_rtr_with(&rdma, &new_qp(&rdma), change);
    check(&mut qp, with_address(|address| address.port = 0), "port of the address vector", 0, &ports);
    check(&mut qp, with_address(|address| address.port = 200), "port of the address vector", 200, &ports);
    check(&mut qp, with_address(|address| address.sl = 16), "sl of the address vector", 16, "0 to 15");
    check(&mut qp, base.set_path_mtu(Mtu::from_code(0)), "path_mtu (its code)", 0, "1 to 5");
    check(&mut qp, base.set_path_mtu(Mtu::from_code(6)), "path_mtu (its code)", 6, "1 to 5");
    check(&mut qp, base.set_rq_psn(1 << 24), "rq_psn", 1 << 24, "0 to 16777215");
    check(&mut qp, base.set_dest_qp_num(1 << 24), "dest_qp_num", 1 << 24, "0 to 16777215");
    check(&mut qp, base.set_min_rnr_timer(32), "min_rnr_timer", 32, "0 to 31");
    check(&mut ready, rts.set_timeout(32), "timeout", 32, "0 to 31");
    check(&mut ready, rts.set_retry_count(8), "retry_count", 8, "0 to 7");
    check(&mut ready, rts.set_rnr_retry(8), "rnr_retry", 8, "0 to 7");
    check(&mut ready, rts.set_sq_psn(u32::MAX), "sq_psn", u32::MAX.into(), "0 to 16777215");
    if let Ok(most) = u8::try_from(limits.max_qp_rd_atom()) {
        let range = format!("0 to {most}");
        check(&mut qp, base.set_max_dest_rd_atomic(most + 1), "max_dest_rd_atomic", u64::from(most) + 1, &range);
    }
    if let Ok(most) = u8::try_from(limits.max_qp_init_rd_atom()) {
        let range = format!("0 to {most}");
        check(&mut ready, rts.set_max_rd_atomic(most + 1), "max_rd_atomic", u64::from(most) + 1, &range);
    }
    // The refused calls have changed nothing.
    qp.modify(&base).unwrap();
    ready.modify(&rts).unwrap();
}

#[test]
fn a_partition_key_index_beyond_the_table_is_named() {
    let Some(rdma) = device() else { return };
    let len = rdma.query_port(rdma.port).unwrap().pkey_table_len();
    let mut qp = new_qp(&rdma);
    let attributes = Link::default().to_init(&rdma).set_pkey_index(len);
    match qp.modify(&attributes) {
        Err(Error::Modify(error)) => {
            let ModifyError::OutOfRange { attribute, value, limits: allowed } = *error else { panic!("{error:?}") };
            assert_eq!((attribute, value, allowed), ("pkey_index", len.into(), format!("0 to {}", len - 1)));
        }
        Err(error) => panic!("{error:?}"),
        // SoftRoCE does not check the index in this call.
        Ok(()) => assert!(rdma.is_rxe()),
    }
}

#[test]
fn an_address_vector_must_use_the_port_of_its_queue_pair() {
    let Some(rdma) = device() else { return };
    let other = if rdma.port == 1 { 2 } else { 1 };
    let mut qp = in_init(&rdma);
    let error = refused(&mut qp, &to_rtr_with(&rdma, &new_qp(&rdma), |address| address.port = other));
    match error {
        ModifyError::PortMismatch { port, address_port } => assert_eq!((port, address_port), (rdma.port, other)),
        ModifyError::OutOfRange { attribute: "port of the address vector", value, .. } => {
            assert!(rdma.attributes().ports() == 1, "port {value} exists");
        }
        error => panic!("{error:?}"),
    }
}

#[test]
fn an_address_without_a_global_route_is_refused_on_ethernet() {
    let Some(rdma) = device() else { return };
    if rdma.query_port(rdma.port).unwrap().link_layer() != LinkLayer::ETHERNET {
        return println!("skipped: the link layer is not Ethernet");
    }
    let mut qp = in_init(&rdma);
    let error = refused(&mut qp, &to_rtr_with(&rdma, &new_qp(&rdma), |address| address.route = None));
    let text = error.to_string();
    assert!(
        matches!(error, ModifyError::Address(AddressError::MissingGlobalRoute { port }) if port == rdma.port),
        "{error:?}"
    );
    assert!(text.contains("addressed by GID"), "{text}");
}

fn route(address: &mut AddressVector) -> &mut GlobalRoute {
    address.route.as_mut().unwrap()
}

#[test]
fn a_missing_source_gid_is_named_by_its_index() {
    let Some(rdma) = device() else { return };
    let used: Vec<u32> = rdma.gids(rdma.port).unwrap().iter().map(|entry| entry.index).collect();
    let empty = (0..=255).rev().find(|index| !used.contains(&u32::from(*index))).unwrap();
    for wanted in [empty, (0..=255).find(|index| !used.contains(&u32::from(*index))).unwrap()] {
        let mut qp = in_init(&rdma);
        let attributes = to_rtr_with(&rdma, &qp, |address| route(address).sgid_index = wanted);
        let error = refused(&mut qp, &attributes);
        let text = error.to_string();
        let ModifyError::Address(AddressError::NoSourceGid { port, index }) = error else { panic!("{error:?}") };
        assert_eq!((port, index), (rdma.port, wanted));
        assert!(text.contains(&format!("no GID at index {wanted}")), "{text}");
    }
}

#[test]
fn an_unreachable_peer_is_named_with_gid_index_and_address() {
    let Some(rdma) = device() else { return };
    if rdma.gid.gid_type != GidType::ROCE_V2 || rdma.gid.gid.ipv4().is_none() {
        return println!("skipped: the GID of the tests is not RoCE v2 with an IPv4 address");
    }
    for (peer, why) in [
        (Gid::from(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 77)), "IPv6 from an IPv4 address"),
        (Gid::ZERO, "no address at all"),
    ] {
        let mut qp = in_init(&rdma);
        let attributes = to_rtr_with(&rdma, &qp, |address| route(address).dgid = peer);
        let error = match qp.modify(&attributes) {
            Err(Error::Modify(error)) => *error,
            Err(error) => panic!("{why}: {error:?}"),
            Ok(()) => panic!("{why}: the call succeeded"),
        };
        let text = error.to_string();
        let ModifyError::Address(AddressError::Unreachable { port, index, source_gid, dgid, errno }) = error else {
            panic!("{why}: {error:?}");
        };
        assert_eq!(
            (port, u32::from(index), source_gid, dgid),
            (rdma.port, rdma.gid.index, rdma.gid.gid, peer),
            "{why}"
        );
        assert_ne!(errno, Errno(0), "{why}");
        for part in [peer.to_string(), source_gid.to_string(), format!("index {index}")] {
            assert!(text.contains(&part), "{why}: {text}");
        }
        // The same queue pair then accepts a reachable peer.
        let number = qp.number();
        qp.modify(&Link::default().to_rtr(&rdma, number)).unwrap();
    }
}

/// Two unused addresses: one of the device's network, and one without a route. The kernel treats the latter as a neighbour too,
/// since the GID determines the interface. On an interface without address resolution, such as the dummy below SoftRoCE, the change
/// to RTR succeeds and the send fails. On other interfaces the address resolution fails. Neither case hangs.
#[test]
fn an_absent_neighbour_is_an_error_when_connecting_or_sending() {
    let Some(rdma) = device() else { return };
    let Some(own) = rdma.gid.gid.ipv4() else { return };
    let [a, b, c, d] = own.octets();
    for absent in [Ipv4Addr::new(a, b, c, if d == 77 { 78 } else { 77 }), Ipv4Addr::new(203, 0, 113, 77)] {
        let link = Link { timeout: 8, retry_count: 1, ..Link::default() };
        let mut lab = Lab::builder(&rdma, Mode::EXTENDED).connected(false).build();
        lab.a.qp.modify(&link.to_init(&rdma)).unwrap();
        let mut to = address(&rdma);
        route(&mut to).dgid = absent.into();
        let peer = lab.b.qp.number();
        match lab.a.qp.modify(&link.to_rtr(&rdma, peer).set_address(to)) {
            Ok(()) => {
                lab.a.qp.modify(&link.to_rts()).unwrap();
                lab.a.post(&[Wr::new(1, Op::Send, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
                assert_eq!(lab.a.next().status, WcStatus::RETRY_EXC_ERR, "{absent}");
            }
            Err(Error::Modify(error)) => {
                let ModifyError::Address(AddressError::Unreachable { dgid, .. }) = *error else { panic!("{error:?}") };
                assert_eq!(dgid, absent.into());
            }
            Err(error) => panic!("{error:?}"),
        }
    }
}

#[test]
fn a_query_returns_what_was_set() {
    let Some(rdma) = device() else { return };
    let mut qp = new_qp(&rdma);
    assert_eq!(qp.query().unwrap().state(), Some(QueuePairState::RESET));
    let link = Link {
        psn: PSN,
        access: Access::REMOTE_READ | Access::REMOTE_WRITE,
        timeout: 13,
        retry_count: 5,
        rnr_retry: 3,
        min_rnr_timer: 7,
        rd_atomic: 8,
    };
    qp.modify(&link.to_init(&rdma)).unwrap();
    let set = qp.query().unwrap();
    assert_eq!((set.state(), set.port(), set.pkey_index()), (Some(QueuePairState::INIT), Some(rdma.port), Some(0)));
    assert_eq!(set.access().map(|access| access & Access::REMOTE), Some(link.access));

    let mut to = address(&rdma);
    if let Some(route) = &mut to.route {
        (route.hop_limit, route.traffic_class, route.flow_label) = (17, 4, 0xa_bcde);
    }
    qp.modify(&link.to_rtr(&rdma, 0x00_0123).set_address(to).set_path_mtu(Mtu::MTU_512)).unwrap();
    let set = qp.query().unwrap();
    assert_eq!((set.state(), set.path_mtu()), (Some(QueuePairState::RTR), Some(Mtu::MTU_512)));
    assert_eq!((set.dest_qp_num(), set.rq_psn()), (Some(0x123), Some(0x12_3456)));
    assert_eq!((set.min_rnr_timer(), set.max_dest_rd_atomic()), (Some(7), Some(8)));
    let queried = set.address().unwrap();
    assert_eq!((queried.port, queried.route.map(|route| route.dgid)), (rdma.port, to.route.map(|route| route.dgid)));
    let reported = queried.route.unwrap();
    assert_eq!((reported.traffic_class, reported.flow_label), (4, 0xa_bcde));
    if rdma.gid.gid_type != GidType::ROCE_V2 {
        // On RoCE v2 the kernel uses the hop limit of its route.
        assert_eq!(reported.hop_limit, 17);
    }
    assert_eq!(u32::from(reported.sgid_index), rdma.gid.index);

    qp.modify(&link.to_rts()).unwrap();
    let set = qp.query().unwrap();
    assert_eq!((set.state(), qp.state()), (Some(QueuePairState::RTS), QueuePairState::RTS));
    assert_eq!((set.timeout(), set.retry_count(), set.rnr_retry()), (Some(13), Some(5), Some(3)));
    assert_eq!((set.sq_psn(), set.max_rd_atomic()), (Some(0x12_3456), Some(8)));

    // These attributes may be changed in RTS.
    let change = QueuePairAttributes::new().set_access(Access::REMOTE_READ).set_min_rnr_timer(20);
    qp.modify(&change).unwrap();
    let set = qp.query().unwrap();
    assert_eq!(set.access().map(|access| access & Access::REMOTE), Some(Access::REMOTE_READ));
    assert_eq!((set.state(), set.min_rnr_timer()), (Some(QueuePairState::RTS), Some(20)));
}

#[test]
fn a_query_after_a_failure_returns_the_error_state() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::new(&rdma, mode);
        let mut to = lab.b.memory.remote(0);
        to.rkey ^= 0xff;
        lab.a.post(&[Wr::new(1, Op::Write(to), Data::One(lab.a.memory.sge(0..8)))]).unwrap();
        assert_eq!(lab.a.next().status, WcStatus::REM_ACCESS_ERR);
        assert_eq!(lab.a.qp.state(), QueuePairState::RTS, "{mode}: as last set");
        assert_eq!(lab.a.qp.query().unwrap().state(), Some(QueuePairState::ERR), "{mode}");
        assert_eq!(lab.a.qp.state(), QueuePairState::ERR, "{mode}: as last queried");
        let error = refused(&mut lab.a.qp, &Link::default().to_init(&rdma));
        assert!(matches!(error, ModifyError::InvalidTransition { .. }), "{mode}: {error:?}");
    }
}

#[test]
fn sends_continue_after_the_send_queue_was_drained() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::EXTENDED);
    let from = Data::One(lab.a.memory.sge(0..8));
    lab.b.receive(1, 0..64).unwrap();
    lab.b.receive(2, 0..64).unwrap();
    lab.a.post(&[Wr::new(1, Op::Send, from)]).unwrap();
    lab.a.next_ok(1);
    lab.a.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::SQD)).unwrap();
    let drained = || lab.a.qp.query().unwrap().as_raw().sq_draining == 0;
    within_deadline("a drained queue", || drained().then_some(()));
    assert_eq!(lab.a.qp.query().unwrap().state(), Some(QueuePairState::SQD));
    lab.a.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::RTS)).unwrap();
    lab.a.post(&[Wr::new(2, Op::Send, from)]).unwrap();
    lab.a.next_ok(2);
    lab.b.next_ok(1);
    lab.b.next_ok(2);
}
