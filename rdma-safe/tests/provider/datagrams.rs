//! Unreliable datagrams on a provider that records calls, lacks a function or fails, and on InfiniBand.

use rdma_safe::address::{AddressError, AddressVector, Grh};
use rdma_safe::error::Verb;
use rdma_safe::post::InlineList;
use rdma_safe::qp::ModifyError;
use rdma_safe::{
    AddressHandle, Buffer, ConnectOptions, Errno, Error, Gid, InitOptions, Inline, ProtectionDomain, QueuePairAddress,
    QueuePairState, QueuePairType, SendOps, Sge, UdTarget, WcFields, WcFlags, WcStatus, WorkRequest,
};

use crate::fake::{Config, Fake, Live, Port};
use crate::support::{EXTENDED, Interfaces, Raw, on_each_interface, post, raw_with, receive, seen};

const QKEY: u32 = 0x1111_1111;

fn datagrams(pd: &ProtectionDomain, interfaces: Interfaces) -> Raw {
    raw_with(pd, interfaces, WcFields::STANDARD, |qp| qp.qp_type(QueuePairType::UD).send_sges(4).recv_sges(4))
}

/// A queue pair that sends and receives, and its address.
fn ready(pd: &ProtectionDomain, interfaces: Interfaces) -> (Raw, QueuePairAddress) {
    let mut raw = datagrams(pd, interfaces);
    let address = raw.qp.init_datagrams(QKEY, &InitOptions::default().psn(7)).unwrap();
    assert_eq!((address.qp_num, address.psn), (raw.qp.number(), 7));
    (raw, address)
}

fn handle(from: &Raw, pd: &ProtectionDomain, to: &QueuePairAddress) -> AddressHandle {
    pd.address_handle(&from.qp.address_of(to, &ConnectOptions::default()).unwrap()).unwrap()
}

/// Posts a receive with room for `len` bytes after the header.
fn inbox(pd: &ProtectionDomain, raw: &mut Raw, wr_id: u64, len: usize) -> Buffer {
    let buffer = pd.allocate(Grh::LEN + len).unwrap();
    receive!(raw, wr_id, buffer.sge()).unwrap();
    buffer
}

#[test]
fn datagrams_are_posted_with_the_flags_of_their_requests() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let ((mut a, _), (_b, to)) = (ready(&pd, interfaces), ready(&pd, interfaces));
        let handle = handle(&a, &pd, &to);
        let target = UdTarget::new(&handle, to.qp_num, QKEY);
        fake.take_posted();
        post!(a,
            send_to(WorkRequest::new(1), target, Sge::EMPTY);
            send_imm_to(WorkRequest::new(2).solicited(), target, 7, Inline(b"inline"));
            send_to(WorkRequest::new(3).signaled(), target, InlineList(&[b"li", b"st"]));
        )
        .unwrap();
        let flags: Vec<_> = fake.take_posted().iter().map(|posted| posted.flags).collect();
        assert_eq!(flags, [0, 4 | 8, 2 | 8], "signaled 2, solicited 4, inline 8");
    });
}

#[test]
fn on_infiniband_the_lid_of_a_datagram_is_enough_for_the_answer() {
    on_each_interface(|_, interfaces| {
        let fake = Fake::new(Config { ports: vec![Port::infiniband()], ..Config::default() });
        let pd = fake.pd();
        let ((mut a, _), (mut b, to)) = (ready(&pd, interfaces), ready(&pd, interfaces));
        let options = ConnectOptions::default().service_level(3);
        let there = pd.address_handle(&a.qp.address_of(&to, &options).unwrap()).unwrap();
        let (answer, _question) = (inbox(&pd, &mut a, 1, 8), inbox(&pd, &mut b, 2, 8));
        let target = UdTarget::new(&there, to.qp_num, QKEY);
        post!(a, send_to(WorkRequest::new(3), target, Inline(b"who?"));).unwrap();
        let (back, number) = {
            let mut poll = b.cq.poll();
            let wc = poll.next().unwrap().unwrap();
            assert!(!wc.flags().contains(WcFlags::GRH));
            let address = pd.context().sender_address(1, &wc, None).unwrap();
            assert_eq!((address.port, address.dlid), (1, Port::infiniband().lid));
            assert_eq!((wc.sl(), address.sl), (Some(3), 3));
            (pd.address_handle_to_sender(1, &wc, None).unwrap(), wc.src_qp().unwrap())
        };
        let target = UdTarget::new(&back, number, QKEY);
        post!(b, send_to(WorkRequest::new(4), target, Inline(b"me"));).unwrap();
        assert_eq!(seen(&mut a.cq)[0].byte_len, Some(42));
        assert_eq!(&answer[Grh::LEN..][..3], b"me\0");
    });
}

#[test]
fn the_address_of_a_sender_needs_a_complete_completion() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let ((mut a, _), (mut b, to)) = (ready(&pd, EXTENDED), ready(&pd, EXTENDED));
    let handle = handle(&a, &pd, &to);
    let target = UdTarget::new(&handle, to.qp_num, QKEY);
    let (good, short) = (inbox(&pd, &mut b, 1, 8), inbox(&pd, &mut b, 2, 1));
    post!(a, send_to(WorkRequest::new(1), target, Inline(b"one")); send_to(WorkRequest::new(2), target, Inline(b"two"));)
        .unwrap();
    let grh = Grh::parse(&good);
    let context = pd.context();
    {
        let mut poll = b.cq.poll();
        let wc = poll.next().unwrap().unwrap();
        assert!(matches!(context.sender_address(1, &wc, None), Err(Error::NoGrh)));
        assert!(matches!(context.sender_address(2, &wc, grh.as_ref()), Err(Error::NoSuchPort { port: 2, .. })));
        fake.fail("ibv_init_ah_from_wc", libc::ENOENT);
        let error = context.sender_address(1, &wc, grh.as_ref()).unwrap_err();
        assert!(matches!(error, Error::Verb { verb: Verb::InitAhFromWc, errno: Errno(libc::ENOENT), .. }), "{error}");
        fake.heal("ibv_init_ah_from_wc");
        let wc = poll.next().unwrap().unwrap();
        let error = context.sender_address(1, &wc, grh.as_ref()).unwrap_err();
        assert!(matches!(error, Error::Work(error) if error.status == WcStatus::LOC_LEN_ERR));
    }
    drop(short);

    let fields = WcFields::BYTE_LEN | WcFields::SRC_QP;
    let mut poor = raw_with(&pd, EXTENDED, fields, |qp| qp.qp_type(QueuePairType::UD));
    poor.qp.init_datagrams(QKEY, &InitOptions::default()).unwrap();
    let inbox = inbox(&pd, &mut poor, 1, 8);
    let target = UdTarget::new(&handle, poor.qp.number(), QKEY);
    post!(a, send_to(WorkRequest::new(3), target, Inline(b"x"));).unwrap();
    let mut poll = poor.cq.poll();
    let wc = poll.next().unwrap().unwrap();
    let error = context.sender_address(1, &wc, Grh::parse(&inbox).as_ref()).unwrap_err();
    let missing = WcFields::SLID | WcFields::SL | WcFields::DLID_PATH_BITS;
    assert!(matches!(error, Error::MissingFields { fields } if fields == missing), "{error}");
}

#[test]
fn a_type_that_cannot_be_built_is_refused_without_a_call() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    let error = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::DRIVER).build().unwrap_err();
    assert!(matches!(error, Error::WrongType { qp_type: QueuePairType::DRIVER, .. }), "{error}");
    assert_eq!((fake.calls("create_qp_ex"), fake.calls("ibv_create_qp")), (0, 0));
}

#[test]
fn a_queue_pair_without_wr_set_ud_addr_falls_back_to_post_send() {
    let fake = Fake::new(Config { no_ud_addr: true, ..Config::default() });
    let pd = fake.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    let qp = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).build().unwrap();
    assert_eq!((qp.is_extended(), qp.operations()), (false, SendOps::UD), "falls back to ibv_post_send");
}

#[test]
fn a_datagram_queue_pair_gets_the_attributes_of_its_type() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut raw = datagrams(&pd, EXTENDED);
    fake.take_modified();
    let error = raw.qp.init(&InitOptions::default()).unwrap_err();
    assert!(matches!(error, Error::WrongType { operation: "QueuePair::init", .. }), "{error}");
    let address = raw.qp.init_datagrams(0x1234_5678, &InitOptions::default().psn(0xabcdef)).unwrap();
    assert_eq!(raw.qp.state(), QueuePairState::RTS);
    let modified: Vec<_> = fake.take_modified().iter().map(|(attr, mask)| (attr.qp_state.0, *mask)).collect();
    assert_eq!(modified, [(1, 0x71), (2, 0x1), (3, 0x1_0001)], "INIT with P_Key, port and Q_Key; RTR; RTS with PSN");
    assert_eq!(raw.qp.query().unwrap().qkey(), Some(0x1234_5678));
    assert_eq!(raw.qp.query().unwrap().sq_psn(), Some(0xabcdef));
    let error = raw.qp.connect(&address, &ConnectOptions::default()).unwrap_err();
    assert!(error.to_string().contains("UD") && error.to_string().contains("address_handle"), "{error}");

    let mut rc = raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
    let error = rc.qp.init_datagrams(QKEY, &InitOptions::default()).unwrap_err();
    assert!(matches!(error, Error::WrongType { qp_type: QueuePairType::RC, .. }), "{error}");
    assert!(matches!(rc.qp.address_of(&address, &ConnectOptions::default()), Err(Error::NotInitialised)));
    let init = rdma_safe::qp::QueuePairAttributes::new().set_state(QueuePairState::INIT).set_port(1).set_pkey_index(0);
    let Error::Modify(error) = datagrams(&pd, EXTENDED).qp.modify(&init).unwrap_err() else { panic!() };
    assert!(matches!(*error, ModifyError::Attributes { .. }) && error.to_string().contains("QKEY"), "{error}");
}

#[test]
fn an_invalid_address_is_refused_with_the_reason() {
    let far: Gid = "::ffff:10.1.2.3".parse().unwrap();
    let fake = Fake::new(Config {
        unreachable: [(far.0, libc::EHOSTUNREACH)].into(),
        ports: vec![Port::ethernet(), Port::infiniband()],
        ..Config::default()
    });
    let pd = fake.pd();
    let near = AddressVector::from_gid(1, "::ffff:10.9.9.1".parse().unwrap(), 1);
    let explained = |address: AddressVector| match pd.address_handle(&address).unwrap_err() {
        Error::Address(error) => *error,
        error => panic!("{error}"),
    };
    let error = explained(AddressVector { sl: 16, ..near });
    assert!(matches!(error, AddressError::ServiceLevel { sl: 16 }), "{error}");
    let error = explained(AddressVector::from_lid(1, 5));
    assert!(matches!(error, AddressError::MissingGlobalRoute { port: 1 }), "{error}");
    assert_eq!(fake.calls("ibv_create_ah"), 0);
    let error = explained(AddressVector::from_gid(1, far, 9));
    assert!(matches!(error, AddressError::NoSourceGid { port: 1, index: 9 }), "{error}");
    let error = explained(AddressVector::from_gid(1, far, 1));
    assert!(matches!(error, AddressError::Unreachable { dgid, errno: Errno(libc::EHOSTUNREACH), .. } if dgid == far));
    let error = pd.address_handle(&AddressVector { port: 3, ..near }).unwrap_err();
    assert!(matches!(error, Error::NoSuchPort { port: 3, ports: 2, .. }), "{error}");
    fake.fail("ibv_create_ah", libc::ENOMEM);
    let error = explained(near);
    assert!(matches!(error, AddressError::Refused { errno: Errno(libc::ENOMEM), .. }), "{error}");
    fake.heal("ibv_create_ah");
    pd.address_handle(&AddressVector::from_lid(2, 5)).unwrap();
}

#[test]
fn a_handle_is_destroyed_once_and_keeps_its_domain() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let near = AddressVector::from_gid(1, "::ffff:10.9.9.1".parse().unwrap(), 1);
    let (dropped, destroyed) = (pd.address_handle(&near).unwrap(), pd.address_handle(&near).unwrap());
    assert!(destroyed.pd().is_same(&pd));
    drop(pd);
    assert_eq!(fake.live(), Live { contexts: 1, pds: 1, ahs: 2, ..Live::default() });
    destroyed.destroy().unwrap();
    drop(dropped);
    assert_eq!((fake.calls("ibv_destroy_ah"), fake.live()), (2, Live::default()));
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_handle_that_cannot_be_destroyed_keeps_its_domain_for_good() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let near = AddressVector::from_gid(1, "::ffff:10.9.9.1".parse().unwrap(), 1);
    let handles = [pd.address_handle(&near).unwrap(), pd.address_handle(&near).unwrap()];
    fake.fail("ibv_destroy_ah", libc::EIO);
    let [first, second] = handles;
    let error = first.destroy().unwrap_err();
    assert!(matches!(error, Error::Verb { verb: Verb::DestroyAh, errno: Errno(libc::EIO), .. }), "{error}");
    drop((second, pd));
    assert_eq!(fake.calls("ibv_destroy_ah"), 2, "one attempt for each");
    assert_eq!(fake.live(), Live { contexts: 1, pds: 1, ahs: 2, ..Live::default() });
    fake.may_leak();
}

#[test]
fn the_provider_notices_a_handle_that_is_destroyed_too_early() {
    let fake = Fake::new(Config::default());
    fake.set_mode(crate::fake::Mode::Manual);
    let pd = fake.pd();
    let (mut a, to) = ready(&pd, EXTENDED);
    let handle = handle(&a, &pd, &to);
    let target = UdTarget::new(&handle, to.qp_num, QKEY);
    post!(a, send_to(WorkRequest::new(1), target, Inline(b"x"));).unwrap();
    // This breaks the contract, to prove that the provider would notice a mistake in the tests above.
    drop(handle);
    assert_eq!(fake.take_violations(), ["ibv_destroy_ah of a handle that work in flight names"]);
}
