//! Unreliable datagrams: destinations, headers, handles, and what is refused.

use rdma_safe::sys::IBV_LINK_LAYER_ETHERNET;
use rdma_safe::{
    AddressError, AddressHandle, AddressVector, Buffer, ConnectOptions, Errno, Error, Gid, Grh, InitOptions, Inline,
    InlineList, ModifyError, PostError, ProtectionDomain, QueuePairAddress, QueuePairState, QueuePairType, Remote,
    SendOps, Sge, UdTarget, WcFields, WcFlags, WcOpcode, WcStatus, WorkRequest,
};

use crate::fake::{Config, Fake, Live, Port};
use crate::support::{EXTENDED, Interfaces, Raw, on_each_interface, post, raw_pair, raw_with, receive, seen};

const QKEY: u32 = 0x1111_1111;

fn datagrams(pd: &ProtectionDomain, interfaces: Interfaces) -> Raw {
    raw_with(pd, interfaces, WcFields::STANDARD, |qp| qp.qp_type(QueuePairType::UD).send_sges(4).recv_sges(4))
}

/// One that sends and receives, and its address.
fn ready(pd: &ProtectionDomain, interfaces: Interfaces) -> (Raw, QueuePairAddress) {
    let mut raw = datagrams(pd, interfaces);
    let address = raw.qp.init_datagrams(QKEY, &InitOptions::default().psn(7)).unwrap();
    assert_eq!((address.qp_num, address.psn), (raw.qp.number(), 7));
    (raw, address)
}

fn handle(from: &Raw, pd: &ProtectionDomain, to: &QueuePairAddress) -> AddressHandle {
    pd.address_handle(&from.qp.address_of(to, &ConnectOptions::default()).unwrap()).unwrap()
}

/// A receive that has room for `len` bytes behind the header.
fn inbox(pd: &ProtectionDomain, raw: &mut Raw, wr_id: u64, len: usize) -> Buffer {
    let buffer = pd.allocate(Grh::LEN + len).unwrap();
    receive!(raw, wr_id, buffer.sge()).unwrap();
    buffer
}

fn filled(pd: &ProtectionDomain, bytes: &[u8]) -> Buffer {
    let mut buffer = pd.allocate(bytes.len()).unwrap();
    buffer.copy_from_slice(bytes);
    buffer
}

#[test]
fn a_datagram_arrives_behind_its_header_and_says_who_sent_it() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let ((mut a, _), (mut b, to)) = (ready(&pd, interfaces), ready(&pd, interfaces));
        let options = ConnectOptions::default().traffic_class(0x20).hop_limit(9).service_level(3);
        let handle = pd.address_handle(&a.qp.address_of(&to, &options).unwrap()).unwrap();
        let target = UdTarget::new(&handle, to.qp_num, QKEY);
        let (outbox, inbox) = (filled(&pd, b"hello"), inbox(&pd, &mut b, 77, 24));
        post!(a, send_to(WorkRequest::new(11).signaled(), target, outbox.sge());).unwrap();
        let sent = &seen(&mut a.cq)[0];
        assert_eq!((sent.wr_id, sent.status, sent.opcode), (11, WcStatus::SUCCESS, WcOpcode::SEND));
        {
            let mut poll = b.cq.poll();
            let wc = poll.next().unwrap().unwrap();
            assert_eq!((wc.wr_id(), wc.opcode(), wc.byte_len()), (77, WcOpcode::RECV, Some(45)));
            assert_eq!((wc.src_qp(), wc.sl(), wc.imm()), (Some(a.qp.number()), Some(3), None));
            assert!(wc.flags().contains(WcFlags::GRH));
        }
        assert_eq!(&inbox[Grh::LEN..][..6], b"hello\0");
        let grh = Grh::of(&inbox).unwrap();
        let gid: Gid = "::ffff:10.9.9.1".parse().unwrap();
        assert_eq!((grh.version(), grh.traffic_class(), grh.hop_limit()), (4, 0x20, 9));
        assert_eq!((grh.sgid(), grh.dgid(), grh.payload_len()), (gid, gid, 5));
    });
}

#[test]
fn every_payload_can_be_sent_with_and_without_immediate_data() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let ((mut a, _), (mut b, to)) = (ready(&pd, interfaces), ready(&pd, interfaces));
        let handle = handle(&a, &pd, &to);
        let target = UdTarget::new(&handle, to.qp_num, QKEY);
        let outbox = filled(&pd, b"abcdef");
        let part = |offset: u64, len: u32| Sge { address: outbox.address() + offset, len, lkey: outbox.lkey() };
        let inboxes: Vec<Buffer> = (0..5).map(|wr_id| inbox(&pd, &mut b, wr_id, 8)).collect();
        fake.take_posted();
        post!(a,
            send_to(WorkRequest::new(1), target, &[part(4, 2), part(0, 1)][..]);
            send_imm_to(WorkRequest::new(2).solicited(), target, 0x0102_0304, Inline(b"inline"));
            send_to(WorkRequest::new(3), target, InlineList(&[b"li", b"st"]));
            send_imm_to(WorkRequest::new(4), target, 5, outbox.sge());
            send_to(WorkRequest::new(5).signaled(), target, Inline(&[]));
        )
        .unwrap();
        assert_eq!(seen(&mut a.cq).iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [5]);
        let received: Vec<_> = seen(&mut b.cq).iter().map(|wc| (wc.byte_len.unwrap() - 40, wc.imm)).collect();
        assert_eq!(received, [(3, None), (6, Some(0x0102_0304)), (4, None), (6, Some(5)), (0, None)]);
        let texts: Vec<&[u8]> = inboxes.iter().map(|inbox| &inbox[Grh::LEN..]).collect();
        assert_eq!(texts, [b"efa\0\0\0\0\0", b"inline\0\0", b"list\0\0\0\0", b"abcdef\0\0", &[0; 8]]);
        let flags: Vec<_> = fake.take_posted().iter().map(|posted| posted.flags).collect();
        assert_eq!(flags, [0, 4 | 8, 8, 0, 2 | 8], "signaled 2, solicited 4, inline 8");
    });
}

#[test]
fn who_received_a_datagram_can_answer_it() {
    for port in [Port::ethernet(), Port::infiniband()] {
        for extended in [true, false] {
            let interfaces = Interfaces { extended_cq: extended, extended_qp: extended };
            let fake = Fake::new(Config { ports: vec![port.clone()], ..Config::default() });
            let pd = fake.pd();
            let ((mut a, _), (mut b, to)) = (ready(&pd, interfaces), ready(&pd, interfaces));
            let options = ConnectOptions::default().service_level(3);
            let there = pd.address_handle(&a.qp.address_of(&to, &options).unwrap()).unwrap();
            let answer = inbox(&pd, &mut a, 1, 8);
            let question = inbox(&pd, &mut b, 2, 8);
            let target = UdTarget::new(&there, to.qp_num, QKEY);
            post!(a, send_to(WorkRequest::new(3), target, Inline(b"who?"));).unwrap();
            let (back, number) = {
                let mut poll = b.cq.poll();
                let wc = poll.next().unwrap().unwrap();
                let grh = Grh::of(&question).filter(|_| wc.flags().contains(WcFlags::GRH));
                assert_eq!(grh.is_some(), port.lid == 0, "on InfiniBand the LID is enough");
                let address = sender(&pd, &wc, grh.as_ref());
                assert_eq!((address.port, address.dlid), (1, port.lid));
                let is_ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
                assert_eq!((wc.sl(), address.sl), (Some(3), if is_ethernet { 0 } else { 3 }), "no level on Ethernet");
                (pd.address_handle_to_sender(1, &wc, grh.as_ref()).unwrap(), wc.src_qp().unwrap())
            };
            let target = UdTarget::new(&back, number, QKEY);
            post!(b, send_to(WorkRequest::new(4), target, Inline(b"me"));).unwrap();
            assert_eq!(seen(&mut a.cq)[0].byte_len, Some(42));
            assert_eq!(&answer[Grh::LEN..][..3], b"me\0");
        }
    }
}

fn sender(pd: &ProtectionDomain, wc: &rdma_safe::WorkCompletion<'_>, grh: Option<&Grh>) -> AddressVector {
    pd.context().sender_address(1, wc, grh).unwrap()
}

#[test]
fn a_sender_is_not_looked_for_where_the_completion_does_not_say_enough() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let ((mut a, _), (mut b, to)) = (ready(&pd, EXTENDED), ready(&pd, EXTENDED));
    let handle = handle(&a, &pd, &to);
    let target = UdTarget::new(&handle, to.qp_num, QKEY);
    let (good, short) = (inbox(&pd, &mut b, 1, 8), inbox(&pd, &mut b, 2, 1));
    post!(a, send_to(WorkRequest::new(1), target, Inline(b"one")); send_to(WorkRequest::new(2), target, Inline(b"two"));)
        .unwrap();
    let grh = Grh::of(&good);
    let context = pd.context();
    {
        let mut poll = b.cq.poll();
        let wc = poll.next().unwrap().unwrap();
        assert!(matches!(context.sender_address(1, &wc, None), Err(Error::NoGrh)));
        assert!(matches!(context.sender_address(2, &wc, grh.as_ref()), Err(Error::NoSuchPort { port: 2, .. })));
        fake.fail("ibv_init_ah_from_wc", libc::ENOENT);
        let error = context.sender_address(1, &wc, grh.as_ref()).unwrap_err();
        assert!(
            matches!(error, Error::Verb { verb: "ibv_init_ah_from_wc", errno: Errno(libc::ENOENT), .. }),
            "{error}"
        );
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
    let error = context.sender_address(1, &wc, Grh::of(&inbox).as_ref()).unwrap_err();
    let missing = WcFields::SLID | WcFields::SL | WcFields::DLID_PATH_BITS;
    assert!(matches!(error, Error::MissingFields { fields } if fields == missing), "{error}");
}

#[test]
fn a_datagram_that_nobody_takes_is_lost_without_an_error() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let ((mut a, _), (mut b, to)) = (ready(&pd, interfaces), ready(&pd, interfaces));
        let handle = handle(&a, &pd, &to);
        let good = UdTarget::new(&handle, to.qp_num, QKEY);
        post!(a, send_to(WorkRequest::new(1).signaled(), good, Inline(b"no receive"));).unwrap();
        let inbox = inbox(&pd, &mut b, 7, 16);
        post!(a,
            send_to(WorkRequest::new(2).signaled(), UdTarget::new(&handle, to.qp_num, QKEY + 1), Inline(b"wrong key"));
            send_to(WorkRequest::new(3).signaled(), UdTarget::new(&handle, 0xabcdef, QKEY), Inline(b"nobody"));
            send_to(WorkRequest::new(4).signaled(), UdTarget::new(&handle, to.qp_num, 1 << 31), Inline(b"own key"));
        )
        .unwrap();
        let sent: Vec<_> = seen(&mut a.cq).iter().map(|wc| (wc.wr_id, wc.status)).collect();
        assert_eq!(sent, [1, 2, 3, 4].map(|wr_id| (wr_id, WcStatus::SUCCESS)));
        let received = seen(&mut b.cq);
        assert_eq!((received.len(), received[0].byte_len), (1, Some(47)));
        assert_eq!(&inbox[Grh::LEN..][..7], b"own key");
    });
}

#[test]
fn a_datagram_is_no_longer_than_the_mtu() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let fresh = datagrams(&pd, interfaces);
        assert_eq!(fresh.qp.max_datagram(), None, "it has no port yet");
        let ((mut a, _), (mut b, to)) = (ready(&pd, interfaces), ready(&pd, interfaces));
        assert_eq!(a.qp.max_datagram(), Some(1024));
        let handle = handle(&a, &pd, &to);
        let target = UdTarget::new(&handle, to.qp_num, QKEY);
        let (long, inbox) = (filled(&pd, &[7; 1025]), inbox(&pd, &mut b, 1, 1024));
        let whole = Sge { len: 1024, ..long.sge() };
        let mut batch = a.qp.send_batch().unwrap();
        // SAFETY: the memory and the handle outlive the work.
        unsafe {
            let refused = batch.send_to(WorkRequest::new(1), target, long.sge());
            assert_eq!(refused, Err(PostError::DatagramTooLong { len: 1025, max: 1024 }));
            let lists = [whole, Sge { len: 1, ..whole }];
            let refused = batch.send_imm_to(WorkRequest::new(1), target, 1, &lists[..]);
            assert_eq!(refused, Err(PostError::DatagramTooLong { len: 1025, max: 1024 }));
            assert!(batch.is_empty());
            batch.send_to(WorkRequest::new(2).signaled(), target, whole).unwrap();
        }
        batch.post().unwrap();
        assert_eq!(seen(&mut a.cq).len(), 1);
        assert_eq!(seen(&mut b.cq)[0].byte_len, Some(1064));
        assert_eq!(inbox[Grh::LEN..], [7; 1024]);
    });
}

#[test]
fn each_type_refuses_what_belongs_to_another() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut ud, to) = ready(&pd, interfaces);
        assert_eq!((ud.qp.qp_type(), ud.qp.operations()), (QueuePairType::UD, SendOps::UD));
        let handle = handle(&ud, &pd, &to);
        let target = UdTarget::new(&handle, to.qp_num, QKEY);
        let remote = Remote { address: 64, rkey: 1 };
        let wr = WorkRequest::new(1);
        let result = Sge { address: 64, len: 8, lkey: 1 };
        let not_enabled = |op| Err(PostError::NotEnabled { op });
        // SAFETY: nothing of it is posted.
        unsafe {
            let mut batch = ud.qp.send_batch().unwrap();
            assert_eq!(batch.send(wr, Inline(b"")), Err(PostError::NoDestination));
            assert_eq!(batch.send_imm(wr, 1, Inline(b"")), Err(PostError::NoDestination));
            assert_eq!(batch.send_invalidate(wr, 1, Inline(b"")), not_enabled(SendOps::SEND_WITH_INV));
            assert_eq!(batch.write(wr, remote, Inline(b"")), not_enabled(SendOps::RDMA_WRITE));
            assert_eq!(batch.write_imm(wr, remote, 1, Inline(b"")), not_enabled(SendOps::RDMA_WRITE_WITH_IMM));
            assert_eq!(batch.read(wr, remote, result), not_enabled(SendOps::RDMA_READ));
            assert_eq!(batch.fetch_add(wr, remote, 1, result), not_enabled(SendOps::ATOMIC_FETCH_AND_ADD));
            assert!(batch.is_empty());
            drop(batch);

            let (mut rc, _peer) = raw_pair(&pd, interfaces);
            let mut batch = rc.qp.send_batch().unwrap();
            assert_eq!(batch.send_to(wr, target, Inline(b"")), Err(PostError::NotDatagram));
            assert_eq!(batch.send_imm_to(wr, target, 1, Inline(b"")), Err(PostError::NotDatagram));
            let long = Sge { len: u32::MAX, ..result };
            assert_eq!(batch.send_to(wr, target, long), Err(PostError::NotDatagram));
            assert!(batch.is_empty());
        }
    });
}

#[test]
fn handles_that_know_their_interface_refuse_the_same() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let ((mut a, _), (mut b, to)) = (ready(&pd, interfaces), ready(&pd, interfaces));
        let handle = handle(&a, &pd, &to);
        let target = UdTarget::new(&handle, to.qp_num, QKEY);
        let inbox = inbox(&pd, &mut b, 1, 16);
        let sends = a.qp.split().0;
        macro_rules! check {
            ($sends:expr) => {{
                let mut sends = $sends;
                // SAFETY: inline data, and a handle that outlives the work.
                unsafe {
                    let refused = sends.post(|batch| batch.send(WorkRequest::new(1), Inline(b"x")));
                    assert_eq!(refused, Err(PostError::NoDestination));
                    sends.post(|batch| batch.send_imm_to(WorkRequest::new(2), target, 9, Inline(b"known"))).unwrap();
                }
            }};
        }
        match interfaces.extended_qp {
            true => check!(sends.extended().unwrap()),
            false => check!(sends.classic().unwrap()),
        }
        assert_eq!(seen(&mut b.cq)[0].imm, Some(9));
        assert_eq!(&inbox[Grh::LEN..][..5], b"known");
    });
}

#[test]
fn operations_are_those_of_the_type() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let cq = pd.context().completion_queue(4).build().unwrap();
        let builder = || pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).classic(!interfaces.extended_qp);
        let error = builder().operations(SendOps::BASIC).build().unwrap_err();
        assert!(
            matches!(error, Error::UnsupportedOperations { ops } if ops == SendOps::BASIC - SendOps::UD),
            "{error}"
        );
        let qp = builder().operations(SendOps::SEND_WITH_IMM).build().unwrap();
        assert_eq!(qp.operations(), SendOps::SEND_WITH_IMM);
        let mut only_imm = Raw { qp, cq };
        let to = only_imm.qp.init_datagrams(QKEY, &InitOptions::default()).unwrap();
        let handle = handle(&only_imm, &pd, &to);
        let target = UdTarget::new(&handle, to.qp_num, QKEY);
        let mut batch = only_imm.qp.send_batch().unwrap();
        // SAFETY: inline data of no bytes, and a handle that outlives the work.
        unsafe {
            let refused = batch.send_to(WorkRequest::new(1), target, Inline(b""));
            assert_eq!(refused, Err(PostError::NotEnabled { op: SendOps::SEND }));
            batch.send_imm_to(WorkRequest::new(1), target, 1, Inline(b"")).unwrap();
        }
        batch.post().unwrap();
    });
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
fn a_queue_pair_that_cannot_take_destinations_is_not_used_that_way() {
    let fake = Fake::new(Config { no_ud_addr: true, ..Config::default() });
    let pd = fake.pd();
    let cq = pd.context().completion_queue(4).build().unwrap();
    let qp = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).build().unwrap();
    assert_eq!((qp.is_extended(), qp.operations()), (false, SendOps::UD), "posted to by ibv_post_send instead");
}

#[test]
fn the_way_to_ready_is_that_of_the_type() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut raw = datagrams(&pd, EXTENDED);
    fake.take_modified();
    let error = raw.qp.init(&InitOptions::default()).unwrap_err();
    assert!(matches!(error, Error::WrongType { what: "QueuePair::init", .. }), "{error}");
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
    let init = rdma_safe::QueuePairAttributes::new().set_state(QueuePairState::INIT).set_port(1).set_pkey_index(0);
    let Error::Modify(error) = datagrams(&pd, EXTENDED).qp.modify(&init).unwrap_err() else { panic!() };
    assert!(matches!(*error, ModifyError::Attributes { .. }) && error.to_string().contains("QKEY"), "{error}");
}

#[test]
fn an_address_that_cannot_be_is_explained() {
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
    assert!(matches!(error, Error::Verb { verb: "ibv_destroy_ah", errno: Errno(libc::EIO), .. }), "{error}");
    drop((second, pd));
    assert_eq!(fake.calls("ibv_destroy_ah"), 2, "each was tried once");
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
    // Against the contract, of which this shows that the tests above would notice a breach.
    drop(handle);
    assert_eq!(fake.take_violations(), ["ibv_destroy_ah of a handle that work in flight names"]);
}
