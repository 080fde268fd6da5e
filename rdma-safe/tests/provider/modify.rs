//! Changing states: what is wrong is said before the provider is asked, and what only the device knows is found out after.

use std::collections::BTreeMap;

use rdma_safe::{
    Access, AddressError, AddressVector, AttributeMask, ConnectOptions, Errno, Error, Gid, InitOptions, ModifyError,
    Mtu, ProtectionDomain, QueuePair, QueuePairAttributes, QueuePairState, QueuePairType, Remote, Sge, Transition,
    WcStatus, WorkRequest,
};

use crate::fake::{Config, Fake, FakeGid, Port};
use crate::support::{EXTENDED, builder, init, rtr, rts};

type State = QueuePairState;

/// Changes of a reliable connection with the masks of required and optional attributes, as the kernel has them.
fn kernel_table() -> BTreeMap<(State, State), (AttributeMask, AttributeMask)> {
    let state = |name: &str| *State::KNOWN.iter().find(|state| state.to_string() == name).unwrap();
    let mask =
        |text: &str| AttributeMask::from_bits(u32::from_str_radix(text.trim_start_matches("0x"), 16).unwrap()).unwrap();
    include_str!("../../src/qp/state_table.csv")
        .lines()
        .filter(|line| line.contains(",RC,"))
        .map(|line| {
            let fields: Vec<&str> = line.split(',').collect();
            ((state(fields[0]), state(fields[1])), (mask(fields[3]), mask(fields[4])))
        })
        .collect()
}

fn address() -> AddressVector {
    AddressVector::from_gid(1, "::ffff:10.9.9.1".parse().unwrap(), 1)
}

/// Sets one attribute to a good value; `None` for those that cannot be set.
fn set(attributes: QueuePairAttributes, attribute: AttributeMask, state: State) -> Option<QueuePairAttributes> {
    Some(match attribute {
        AttributeMask::STATE => attributes.set_state(state),
        AttributeMask::CUR_STATE => attributes.set_cur_state(state),
        AttributeMask::EN_SQD_ASYNC_NOTIFY => attributes.set_sqd_event(true),
        AttributeMask::ACCESS_FLAGS => attributes.set_access(Access::REMOTE_READ),
        AttributeMask::PKEY_INDEX => attributes.set_pkey_index(0),
        AttributeMask::PORT => attributes.set_port(1),
        AttributeMask::QKEY => attributes.set_qkey(1),
        AttributeMask::AV => attributes.set_address(address()),
        AttributeMask::PATH_MTU => attributes.set_path_mtu(Mtu::MTU_1024),
        AttributeMask::TIMEOUT => attributes.set_timeout(14),
        AttributeMask::RETRY_CNT => attributes.set_retry_count(7),
        AttributeMask::RNR_RETRY => attributes.set_rnr_retry(7),
        AttributeMask::RQ_PSN => attributes.set_rq_psn(1),
        AttributeMask::MAX_QP_RD_ATOMIC => attributes.set_max_rd_atomic(1),
        AttributeMask::MIN_RNR_TIMER => attributes.set_min_rnr_timer(12),
        AttributeMask::SQ_PSN => attributes.set_sq_psn(1),
        AttributeMask::MAX_DEST_RD_ATOMIC => attributes.set_max_dest_rd_atomic(1),
        AttributeMask::DEST_QPN => attributes.set_dest_qp_num(1),
        _ => return None,
    })
}

fn with(mask: AttributeMask, to: State) -> Option<QueuePairAttributes> {
    mask.iter().try_fold(QueuePairAttributes::new(), |attributes, attribute| set(attributes, attribute, to))
}

/// Attributes that can be set, the state apart.
fn all() -> impl Iterator<Item = AttributeMask> {
    let settable = |attribute: &AttributeMask| set(QueuePairAttributes::new(), *attribute, State::INIT).is_some();
    AttributeMask::all().iter().filter(settable).filter(|attribute| *attribute != AttributeMask::STATE)
}

fn queue_pair(pd: &ProtectionDomain) -> QueuePair {
    let cq = pd.context().completion_queue(4).build().unwrap();
    pd.queue_pair(&cq, &cq).build().unwrap()
}

/// A queue pair that was brought to `state`; `None` where only the hardware can do that.
fn in_state(pd: &ProtectionDomain, state: State) -> Option<QueuePair> {
    let mut qp = queue_pair(pd);
    let go = |to| QueuePairAttributes::new().set_state(to);
    let steps = match state {
        State::RESET => vec![],
        State::INIT => vec![init()],
        State::RTR => vec![init(), rtr(1)],
        State::RTS => vec![init(), rtr(1), rts()],
        State::SQD => vec![init(), rtr(1), rts(), go(State::SQD)],
        State::ERR => vec![init(), go(State::ERR)],
        _ => return None,
    };
    steps.iter().for_each(|step| qp.modify(step).unwrap());
    assert_eq!(qp.state(), state);
    Some(qp)
}

const REACHABLE: [State; 6] = [State::RESET, State::INIT, State::RTR, State::RTS, State::SQD, State::ERR];

fn modify_error(result: rdma_safe::Result<()>) -> ModifyError {
    match result {
        Err(Error::Modify(error)) => *error,
        other => panic!("not the error of a change: {other:?}"),
    }
}

/// Checks that the attributes are refused for exactly what is missing and what is too much, without a call.
fn refused(
    fake: &Fake,
    qp: &mut QueuePair,
    to: State,
    set: AttributeMask,
    missing: AttributeMask,
    excess: AttributeMask,
) {
    let (from, calls) = (qp.state(), fake.calls("ibv_modify_qp"));
    let error = modify_error(qp.modify(&with(set, to).unwrap()));
    let ModifyError::Attributes { transition, missing: found_missing, excess: found_excess } = &error else {
        panic!("{from} to {to} with {set}: {error}")
    };
    assert_eq!(*transition, Transition { from, to, qp_type: QueuePairType::RC });
    assert_eq!((*found_missing, *found_excess), (missing, excess), "{from} to {to} with {set}");
    let text = error.to_string();
    for attribute in (missing | excess).iter_names() {
        assert!(text.contains(attribute.0), "{text}");
    }
    assert_eq!(fake.calls("ibv_modify_qp"), calls, "the provider is not asked");
    assert_eq!(qp.state(), from);
}

#[test]
fn each_attribute_that_is_missing_or_too_much_is_named() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut checked = 0;
    for ((from, to), (required, optional)) in kernel_table() {
        let Some(mut qp) = in_state(&pd, from) else { continue };
        let base = AttributeMask::STATE | required;
        for attribute in required.iter() {
            refused(&fake, &mut qp, to, base - attribute, attribute, AttributeMask::empty());
            checked += 1;
        }
        for attribute in all().filter(|attribute| !(required | optional).contains(*attribute)) {
            refused(&fake, &mut qp, to, base | attribute, AttributeMask::empty(), attribute);
            checked += 1;
        }
        if let (Some(first), Some(other)) =
            (required.iter().next(), all().find(|a| !(required | optional).contains(*a)))
        {
            refused(&fake, &mut qp, to, (base - first) | other, first, other);
        }
    }
    assert!(checked > 250, "{checked} cases");
}

#[test]
fn every_change_with_what_it_needs_and_each_option_reaches_the_provider() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    for ((from, to), (required, optional)) in kernel_table() {
        let base = AttributeMask::STATE | required;
        for option in optional.iter().filter(|option| with(*option, to).is_some()).chain([AttributeMask::empty()]) {
            let Some(mut qp) = in_state(&pd, from) else { continue };
            let calls = fake.calls("ibv_modify_qp");
            qp.modify(&with(base | option, to).unwrap()).unwrap();
            assert_eq!(fake.calls("ibv_modify_qp"), calls + 1);
            assert_eq!(qp.state(), to, "{from} to {to} with {option}");
            let (_, mask) = fake.take_modified().pop().unwrap();
            assert_eq!(mask, (base | option).bits());
        }
    }
}

#[test]
fn a_change_that_does_not_exist_names_those_that_do() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let table = kernel_table();
    for from in REACHABLE {
        for to in State::KNOWN.iter().copied().chain([QueuePairState(77)]) {
            if table.contains_key(&(from, to)) {
                continue;
            }
            let mut qp = in_state(&pd, from).unwrap();
            let calls = fake.calls("ibv_modify_qp");
            let error = modify_error(qp.modify(&QueuePairAttributes::new().set_state(to)));
            let expected = Transition { from, to, qp_type: QueuePairType::RC };
            assert!(
                matches!(error, ModifyError::InvalidTransition { transition } if transition == expected),
                "{error}"
            );
            let text = error.to_string();
            for (next, _) in table.keys().filter(|(other, _)| *other == from).map(|(_, next)| (next, ())) {
                assert!(text.contains(&next.to_string()), "{next} in {text}");
            }
            assert_eq!(fake.calls("ibv_modify_qp"), calls);
        }
    }
}

#[test]
fn attributes_arrive_as_they_were_set_and_come_back_from_a_query() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut qp = queue_pair(&pd);
    let to_rtr = rtr(0xabcdef)
        .set_rq_psn(0x123456)
        .set_path_mtu(Mtu::MTU_4096)
        .set_address(AddressVector { sl: 3, ..address() });
    for attributes in [init(), to_rtr, rts().set_timeout(31).set_sq_psn(0xffffff)] {
        qp.modify(&attributes).unwrap();
    }
    let attr = fake.take_modified()[1].0;
    assert_eq!((attr.dest_qp_num, attr.rq_psn, attr.path_mtu.0), (0xabcdef, 0x123456, 5));
    assert_eq!((attr.ah_attr.sl, attr.ah_attr.is_global, attr.ah_attr.grh.hop_limit), (3, 1, 64));
    let found = qp.query().unwrap();
    assert_eq!((found.state(), found.dest_qp_num(), found.timeout()), (Some(State::RTS), Some(0xabcdef), Some(31)));
    assert_eq!((found.sq_psn(), found.rq_psn(), found.port()), (Some(0xffffff), Some(0x123456), Some(1)));
    assert_eq!(found.access(), Some(Access::REMOTE));
    assert_eq!(found.address(), Some(AddressVector { sl: 3, ..address() }));
    fake.fail("ibv_query_qp", libc::EIO);
    let error = qp.query().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: "ibv_query_qp", errno: Errno(libc::EIO), .. }), "{error}");
}

#[test]
fn a_query_finds_out_that_the_device_moved_on() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let qp = in_state(&pd, State::RTS).unwrap();
    fake.break_qp(qp.number());
    assert_eq!(qp.state(), State::RTS, "nobody told");
    assert_eq!(qp.query().unwrap().state(), Some(State::ERR));
    assert_eq!(qp.state(), State::ERR);
}

#[test]
fn values_out_of_range_are_named_with_their_range() {
    let fake = Fake::new(Config { max_qp_rd_atom: 8, max_qp_init_rd_atom: 4, ..Config::default() });
    let pd = fake.pd();
    let port = |port| AddressVector { port, ..address() };
    let sl = AddressVector { sl: 16, ..address() };
    let cases = [
        (State::RESET, init().set_port(0), "port", 0, "1 to 1"),
        (State::RESET, init().set_port(2), "port", 2, "1 to 1"),
        (State::INIT, rtr(1).set_address(port(0)), "port of the address vector", 0, "1 to 1"),
        (State::INIT, rtr(1).set_address(sl), "sl of the address vector", 16, "0 to 15"),
        (State::INIT, rtr(1 << 24), "dest_qp_num", 1 << 24, "0 to 16777215"),
        (State::INIT, rtr(1).set_rq_psn(u32::MAX), "rq_psn", u64::from(u32::MAX), "0 to 16777215"),
        (State::INIT, rtr(1).set_path_mtu(Mtu::from_code(0)), "path_mtu (its code)", 0, "1 to 5"),
        (State::INIT, rtr(1).set_path_mtu(Mtu::from_code(6)), "path_mtu (its code)", 6, "1 to 5"),
        (State::INIT, rtr(1).set_min_rnr_timer(32), "min_rnr_timer", 32, "0 to 31"),
        (State::INIT, rtr(1).set_max_dest_rd_atomic(9), "max_dest_rd_atomic", 9, "0 to 8"),
        (State::RTR, rts().set_max_rd_atomic(5), "max_rd_atomic", 5, "0 to 4"),
        (State::RTR, rts().set_timeout(32), "timeout", 32, "0 to 31"),
        (State::RTR, rts().set_retry_count(8), "retry_count", 8, "0 to 7"),
        (State::RTR, rts().set_rnr_retry(8), "rnr_retry", 8, "0 to 7"),
        (State::RTR, rts().set_sq_psn(1 << 24), "sq_psn", 1 << 24, "0 to 16777215"),
    ];
    for (from, attributes, name, value, range) in cases {
        let mut qp = in_state(&pd, from).unwrap();
        let calls = fake.calls("ibv_modify_qp");
        let error = modify_error(qp.modify(&attributes));
        let ModifyError::OutOfRange { attribute, value: found, allowed } = &error else { panic!("{name}: {error}") };
        assert_eq!((*attribute, *found, allowed.as_str()), (name, value, range));
        assert_eq!(error.to_string(), format!("{name} is {value}, but must be {range}"));
        assert_eq!(fake.calls("ibv_modify_qp"), calls, "the provider is not asked");
    }
}

#[test]
fn an_address_vector_of_another_port_is_refused() {
    let fake = Fake::new(Config { ports: vec![Port::ethernet(), Port::ethernet()], ..Config::default() });
    let pd = fake.pd();
    let mut qp = in_state(&pd, State::INIT).unwrap();
    let calls = fake.calls("ibv_modify_qp");
    let error = modify_error(qp.modify(&rtr(1).set_address(AddressVector { port: 2, ..address() })));
    assert!(matches!(error, ModifyError::PortMismatch { port: 1, address_port: 2 }), "{error}");
    assert_eq!(fake.calls("ibv_modify_qp"), calls);
    // The port counts as set in the last INIT.
    qp.modify(&init().set_port(2)).unwrap();
    qp.modify(&rtr(1).set_address(AddressVector { port: 2, ..address() })).unwrap();
}

#[test]
fn an_address_without_a_route_is_refused_on_ethernet_only() {
    let fake = Fake::new(Config { ports: vec![Port::ethernet(), Port::infiniband()], ..Config::default() });
    let pd = fake.pd();
    let mut qp = in_state(&pd, State::INIT).unwrap();
    let calls = fake.calls("ibv_modify_qp");
    let error = modify_error(qp.modify(&rtr(1).set_address(AddressVector::from_lid(1, 5))));
    assert!(matches!(error, ModifyError::Address(AddressError::MissingGlobalRoute { port: 1 })), "{error}");
    assert_eq!(fake.calls("ibv_modify_qp"), calls);
    qp.modify(&init().set_port(2)).unwrap();
    qp.modify(&rtr(1).set_address(AddressVector::from_lid(2, 5))).unwrap();
}

#[test]
fn the_kernels_refusal_is_explained() {
    let (source, peer): (Gid, Gid) = ("::ffff:10.9.9.1".parse().unwrap(), "::ffff:10.9.9.2".parse().unwrap());
    for errno in [libc::EINVAL, libc::ENETUNREACH, libc::EHOSTUNREACH, libc::ETIMEDOUT, libc::ENODATA] {
        let mut port = Port::ethernet();
        port.max_mtu = rdma_sys::IBV_MTU_2048;
        port.gids.push(FakeGid::roce_v2(3, "10.9.9.3".parse().unwrap()));
        let unreachable = BTreeMap::from([(peer.0, errno)]);
        let fake = Fake::new(Config { ports: vec![port], unreachable, ..Config::default() });
        let pd = fake.pd();
        let to = |gid, index| rtr(1).set_address(AddressVector::from_gid(1, gid, index));

        let mut qp = in_state(&pd, State::INIT).unwrap();
        let error = modify_error(qp.modify(&to(peer, 1)));
        let ModifyError::Address(AddressError::Unreachable { port: 1, index: 1, source_gid, dgid, errno: found }) =
            &error
        else {
            panic!("{error}")
        };
        assert_eq!((*source_gid, *dgid, *found), (source, peer, Errno(errno)));
        let text = error.to_string();
        assert!(text.contains("10.9.9.1") && text.contains("10.9.9.2") && text.contains("index 1"), "{text}");
        assert_eq!(qp.state(), State::INIT);

        let error = modify_error(qp.modify(&to(source, 9)));
        assert!(matches!(error, ModifyError::Address(AddressError::NoSourceGid { port: 1, index: 9 })), "{error}");
        assert!(error.to_string().contains("no GID at index 9"), "{error}");

        let error = modify_error(qp.modify(&to(source, 1).set_path_mtu(Mtu::MTU_4096)));
        let ModifyError::OutOfRange { attribute: "path_mtu", value: 4096, allowed } = &error else { panic!("{error}") };
        assert!(allowed.contains("2048"), "{allowed}");

        let error = modify_error(qp.modify(&init().set_pkey_index(7)));
        let ModifyError::OutOfRange { attribute: "pkey_index", value: 7, allowed } = &error else { panic!("{error}") };
        assert_eq!(allowed, "0 to 0");
        qp.modify(&to(source, 3)).unwrap();
    }
}

#[test]
fn a_refusal_without_a_cause_that_can_be_found_shows_what_was_asked() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    for errno in [libc::EINVAL, libc::EPERM, libc::EIO] {
        fake.fail("ibv_modify_qp", errno);
        let mut qp = queue_pair(&pd);
        let error = modify_error(qp.modify(&init()));
        let ModifyError::Refused { transition, attributes, errno: found } = &error else { panic!("{error}") };
        assert_eq!((transition.from, transition.to, *found), (State::RESET, State::INIT, Errno(errno)));
        assert_eq!(attributes.port(), Some(1));
        let text = error.to_string();
        assert!(text.contains("RESET to INIT of an RC queue pair") && text.contains("pkey_index: 0"), "{text}");
        assert_eq!(qp.state(), State::RESET, "it did not happen");
        fake.heal("ibv_modify_qp");
        qp.modify(&init()).unwrap();
    }
}

#[test]
fn iwarp_has_rules_of_its_own() {
    let fake = Fake::new(Config { transport: rdma_sys::IBV_TRANSPORT_IWARP, ..Config::default() });
    let pd = fake.pd();
    let mut qp = queue_pair(&pd);
    let short = QueuePairAttributes::new().set_state(State::INIT);
    let error = modify_error(qp.modify(&short));
    assert!(matches!(error, ModifyError::Refused { .. }), "the device was asked: {error}");
    assert_eq!(fake.calls("ibv_modify_qp"), 1);
}

#[test]
fn connecting_an_endpoint_twice_or_to_nowhere_is_an_error() {
    let peer: Gid = "::ffff:10.9.9.2".parse().unwrap();
    let fake = Fake::new(Config { unreachable: BTreeMap::from([(peer.0, libc::ENETUNREACH)]), ..Config::default() });
    let pd = fake.pd();
    let mut endpoint = builder(&pd, EXTENDED).build().unwrap();
    let nowhere = rdma_safe::QueuePairAddress { gid: peer, ..endpoint.address() };
    let error = modify_error(endpoint.connect(&nowhere));
    assert!(matches!(error, ModifyError::Address(AddressError::Unreachable { .. })), "{error}");
    let address = endpoint.address();
    endpoint.connect(&address).unwrap();
    let error = modify_error(endpoint.connect(&address));
    assert!(matches!(error, ModifyError::InvalidTransition { .. }), "{error}");
    let forged = rdma_safe::QueuePairAddress { qp_num: u32::MAX, ..address };
    let mut endpoint = builder(&pd, EXTENDED).build().unwrap();
    let error = modify_error(endpoint.connect(&forged));
    assert!(matches!(error, ModifyError::OutOfRange { attribute: "dest_qp_num", .. }), "{error}");
    let forged = rdma_safe::QueuePairAddress { gid: Gid::ZERO, ..address };
    let error = modify_error(endpoint.connect(&forged));
    assert!(matches!(error, ModifyError::Address(AddressError::MissingGlobalRoute { port: 1 })), "{error}");
}

#[test]
fn queue_pairs_connect_by_the_addresses_they_give() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut cq = pd.context().completion_queue(8).build().unwrap();
    let (mut a, mut b) = (pd.queue_pair(&cq, &cq).build().unwrap(), pd.queue_pair(&cq, &cq).build().unwrap());
    let options = InitOptions::default().psn(5);
    let (ours, theirs) = (a.init(&options).unwrap(), b.init(&InitOptions::default()).unwrap());
    assert_eq!((ours.qp_num, ours.psn), (a.number(), 5));
    a.connect(&theirs, &ConnectOptions::default()).unwrap();
    b.connect(&ours, &ConnectOptions::default().mtu(Mtu::MTU_512)).unwrap();
    assert_eq!((a.state(), b.state()), (QueuePairState::RTS, QueuePairState::RTS));
    let mut batch = a.send_batch().unwrap();
    // SAFETY: no bytes are named.
    unsafe { batch.write(WorkRequest::new(9).signaled(), Remote { address: 0, rkey: 0 }, &[] as &[Sge]).unwrap() };
    batch.post().unwrap();
    let mut poll = cq.poll();
    let completion = poll.next().unwrap().unwrap();
    assert_eq!((completion.wr_id(), completion.status()), (9, WcStatus::SUCCESS));
}

#[test]
fn a_queue_pair_without_an_address_does_not_connect() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let cq = pd.context().completion_queue(8).build().unwrap();
    let mut initialised = pd.queue_pair(&cq, &cq).build().unwrap();
    let address = initialised.init(&InitOptions::default()).unwrap();
    let mut qp = pd.queue_pair(&cq, &cq).build().unwrap();
    assert!(matches!(qp.connect(&address, &ConnectOptions::default()), Err(Error::NotInitialised)));
    assert_eq!(qp.state(), QueuePairState::RESET);
}
