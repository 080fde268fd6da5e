//! The owned API for datagrams.

use std::collections::HashMap;
use std::time::Duration;

use rdma_safe::address::AddressError;
use rdma_safe::endpoint::{Armed, DatagramSender};
use rdma_safe::{
    Buffer, Context, DatagramCompletion, DatagramEndpoint, Endpoint, Errno, Error, Gid, Operation, PollError,
    PostError, ProtectionDomain, SendOps, WcStatus, Work,
};
use rdma_sys::{IBV_WC_GRH, IBV_WC_RECV, IBV_WC_SUCCESS};

use crate::failing_destruction::Count;
use crate::fake::{Config, Cqe, Fake, Live, Mode, Port};
use crate::support::{DEADLINE, EXTENDED, Interfaces, on_each_interface};

const QKEY: u32 = 0x1234;

fn endpoint(pd: &ProtectionDomain, interfaces: Interfaces) -> DatagramEndpoint {
    Endpoint::builder(pd)
        .send_depth(4)
        .recv_depth(4)
        .inline_data(64)
        .classic_poll(!interfaces.extended_cq)
        .classic_post(!interfaces.extended_qp)
        .build_datagrams(QKEY)
        .unwrap()
}

fn filled(pd: &ProtectionDomain, bytes: &[u8]) -> Buffer {
    let mut buffer = pd.allocate(bytes.len()).unwrap();
    buffer.copy_from_slice(bytes);
    buffer
}

#[track_caller]
fn done(endpoint: &mut DatagramEndpoint) -> DatagramCompletion {
    endpoint.poll().unwrap().expect("a completion").ok().unwrap()
}

fn address_handles(fake: &Fake) -> usize {
    fake.live().ahs
}

#[test]
fn a_datagram_arrives_without_its_header_and_can_be_answered() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = (endpoint(&pd, interfaces), endpoint(&pd, interfaces));
        let to = a.peer(&b.address()).unwrap();
        let inbox = pd.allocate(5).unwrap();
        let place = inbox.address();
        let receive = b.receive(inbox).unwrap();
        let sent = a.send(filled(&pd, b"hello"), &to).unwrap();
        assert_eq!((a.sends_in_flight(), b.receives_in_flight()), (1, 1));

        let completion = done(&mut a);
        assert_eq!((completion.id, completion.operation), (sent, Operation::Send));
        assert!(completion.sender.is_none());
        assert_eq!(&completion.work.buffer.unwrap()[..], b"hello");

        let arrived = done(&mut b);
        assert_eq!((arrived.id, arrived.operation, arrived.byte_len), (receive, Operation::Receive, 5));
        assert_eq!(arrived.imm(), None);
        let sender = arrived.sender.expect("a sender");
        let buffer = arrived.work.buffer.unwrap();
        assert_eq!((&buffer[..], buffer.address(), buffer.capacity()), (&b"hello"[..], place, 5));
        let gid: Gid = "::ffff:10.9.9.1".parse().unwrap();
        assert_eq!((sender.qp_num(), sender.gid()), (a.queue_pair().number(), Some(gid)));
        assert_eq!(sender.grh().unwrap().payload_len(), 5);

        a.receive(buffer).unwrap();
        let back = b.peer_of(&sender).unwrap();
        b.post(Work::send_inline(b"hi").imm(7), &back).unwrap();
        let answer = done(&mut a);
        assert_eq!((answer.imm(), &answer.buffer.as_ref().unwrap()[..]), (Some(7), &b"hi"[..]));
        assert_eq!(answer.sender.unwrap().qp_num(), b.queue_pair().number());
    });
}

#[test]
fn headers_of_receives_in_flight_are_kept_apart() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = endpoint(&pd, interfaces);
        let mut clients: Vec<_> = (0..3).map(|_| endpoint(&pd, interfaces)).collect();
        let mut seen: HashMap<DatagramSender, u32> = HashMap::new();
        for round in 0..if cfg!(miri) { 3_u32 } else { 100 } {
            for _ in 0..3 {
                service.receive(pd.allocate(8).unwrap()).unwrap();
            }
            for client in &mut clients {
                let to = client.peer(&service.address()).unwrap();
                let text = client.queue_pair().number() ^ round;
                client.send_inline(&text.to_ne_bytes(), &to).unwrap();
                let _ = done(client);
            }
            for _ in 0..3 {
                let arrived = done(&mut service);
                let sender = arrived.sender.unwrap();
                let text = sender.qp_num() ^ round;
                assert_eq!(arrived.buffer.as_ref().unwrap()[..], text.to_ne_bytes());
                *seen.entry(sender).or_default() += 1;
            }
        }
        assert_eq!(seen.len(), 3, "the same sender is equal regardless of other header fields");
    });
}

#[test]
fn batches_go_to_several_peers_and_are_released_together() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut a = endpoint(&pd, interfaces);
        let mut peers = [endpoint(&pd, interfaces), endpoint(&pd, interfaces)];
        for peer in &mut peers {
            peer.receive(pd.allocate(8).unwrap()).unwrap();
            peer.receive(pd.allocate(8).unwrap()).unwrap();
        }
        let to: Vec<_> = peers.iter().map(|peer| a.peer(&peer.address()).unwrap()).collect();
        let mut batch = a.batch().unwrap();
        assert!(batch.is_empty());
        batch.add(Work::send(filled(&pd, b"one")).unsignaled(), &to[0]).unwrap();
        batch.add(Work::send_inline(b"two").unsignaled(), &to[1]).unwrap();
        let last = batch.add(Work::send(filled(&pd, b"three")), &to[1]).unwrap();
        assert_eq!(batch.len(), 3);
        batch.post().unwrap();
        assert_eq!(&done(&mut a).buffer.as_ref().unwrap()[..], b"one");
        assert_eq!(done(&mut a).id, last, "work without a buffer is reported only if it fails");
        assert_eq!(&done(&mut peers[0]).buffer.as_ref().unwrap()[..], b"one");
        assert_eq!(&done(&mut peers[1]).buffer.as_ref().unwrap()[..], b"two");
        assert_eq!(&done(&mut peers[1]).buffer.as_ref().unwrap()[..], b"three");
    });
}

#[test]
fn work_in_flight_keeps_its_address_handle() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        fake.set_mode(Mode::Manual);
        let (mut a, mut b) = (endpoint(&pd, interfaces), endpoint(&pd, interfaces));
        b.receive(pd.allocate(8).unwrap()).unwrap();
        let to = a.peer(&b.address()).unwrap();
        a.send(filled(&pd, b"late"), &to).unwrap();
        drop(to);
        assert_eq!(address_handles(fake), 1);
        fake.progress();
        assert_eq!(&done(&mut b).buffer.as_ref().unwrap()[..], b"late");
        let _ = done(&mut a);
        drop(a);
        assert_eq!(address_handles(fake), 0);
    });
}

#[test]
fn handles_of_batches_that_were_dropped_or_forgotten_are_destroyed_once() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = (endpoint(&pd, interfaces), endpoint(&pd, interfaces));
        for forget in [false, true, false] {
            let to = a.peer(&b.address()).unwrap();
            let mut batch = a.batch().unwrap();
            batch.add(Work::send(filled(&pd, b"never")), &to).unwrap();
            if forget {
                std::mem::forget(batch);
            }
        }
        b.receive(pd.allocate(8).unwrap()).unwrap();
        let to = a.peer(&b.address()).unwrap();
        a.send_inline(b"sent", &to).unwrap();
        assert_eq!(&done(&mut b).buffer.as_ref().unwrap()[..], b"sent");
        assert!(a.close().unwrap().is_empty());
        drop(to);
        assert_eq!(address_handles(fake), 0);
    });
}

#[test]
fn what_cannot_be_sent_comes_back_with_the_reason() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let other = pd.context().alloc_pd().unwrap();
        let (mut a, b) = (endpoint(&pd, interfaces), endpoint(&other, interfaces));
        let (to, foreign) = (a.peer(&b.address()).unwrap(), b.peer(&a.address()).unwrap());
        let mut refused = |work: Work<'_>, peer| {
            let rejected = a.post(work, peer).unwrap_err();
            assert!(rejected.buffer.is_some());
            rejected.error
        };
        let text = |len| filled(&pd, &vec![1; len]);
        assert_eq!(refused(Work::send(text(8)), &foreign), PostError::ForeignPeer);
        assert_eq!(refused(Work::send(filled(&other, b"x")), &to), PostError::ForeignBuffer);
        let long = PostError::DatagramTooLong { len: 1025, max: 1024 };
        assert_eq!(refused(Work::send(text(1025)), &to), long);
        let not_here = PostError::NotEnabled { op: SendOps::SEND_WITH_INV };
        assert_eq!(refused(Work::send_invalidate(text(8), 1), &to), not_here);
        assert_eq!(a.max_datagram(), 1024);
        assert_eq!(a.send_inline(&[0; 65], &to).unwrap_err(), PostError::InlineTooLong { len: 65, max: 64 });
        for _ in 0..4 {
            a.send_inline(b"fits", &to).unwrap();
        }
        assert!(matches!(a.send_inline(b"full", &to), Err(PostError::EndpointFull { send_depth: 4, .. })));
        let _ = done(&mut a);
        a.send_inline(b"room", &to).unwrap();
    });
}

#[test]
fn datagrams_are_not_received_into_a_pool_and_the_refusal_says_so() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let pool = rdma_safe::ReceivePool::new(&pd, 4).unwrap();
    let error = Endpoint::builder(&pd).receive_pool(&pool).build_datagrams(QKEY).unwrap_err();
    assert!(matches!(error, Error::WrongType { operation: "EndpointBuilder::receive_pool", .. }), "{error}");
    assert_eq!(fake.calls("ibv_create_qp_ex"), 0);
}

#[test]
fn datagrams_with_a_wrong_qkey_or_number_are_dropped() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = (endpoint(&pd, interfaces), endpoint(&pd, interfaces));
        b.receive(pd.allocate(8).unwrap()).unwrap();
        let to = a.peer(&b.address()).unwrap();
        a.send_inline(b"wrong key", &to.clone().with_qkey(QKEY + 1)).unwrap();
        a.send_inline(b"nobody", &to.clone().with_qp_num(0xff_fff0)).unwrap();
        assert_eq!((done(&mut a).status, done(&mut a).status), (WcStatus::SUCCESS, WcStatus::SUCCESS));
        assert!(b.poll().unwrap().is_none());
        a.send_inline(b"right", &to).unwrap();
        assert_eq!(&done(&mut b).buffer.as_ref().unwrap()[..], b"right");
    });
}

#[test]
fn datagrams_can_be_waited_for() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let build = || {
            let builder = Endpoint::builder(&pd).events(true).inline_data(8);
            let builder = builder.classic_poll(!interfaces.extended_cq).classic_post(!interfaces.extended_qp);
            builder.build_datagrams(QKEY).unwrap()
        };
        let (mut a, mut b) = (build(), build());
        assert!(b.channel().is_some());
        let error = b.wait(Duration::from_millis(1)).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        b.receive(pd.allocate(8).unwrap()).unwrap();
        assert_eq!(b.arm().unwrap(), Armed::Wait);
        a.send_inline(b"now", &a.peer(&b.address()).unwrap()).unwrap();
        assert_eq!(b.arm().unwrap(), Armed::Poll, "the completion is already there");
        let arrived = b.wait(DEADLINE).unwrap();
        assert_eq!(arrived.sender.unwrap().qp_num(), a.queue_pair().number());
        assert_eq!(&arrived.buffer.as_ref().unwrap()[..], b"now");
    });
}

#[test]
fn on_infiniband_a_sender_of_the_same_subnet_has_a_lid_and_no_header() {
    on_each_interface(|_, interfaces| {
        let fake = Fake::new(Config { ports: vec![Port::infiniband()], ..Config::default() });
        let pd = fake.pd();
        let (mut a, mut b) = (endpoint(&pd, interfaces), endpoint(&pd, interfaces));
        b.receive(pd.allocate(8).unwrap()).unwrap();
        a.send_inline(b"local", &a.peer(&b.address()).unwrap()).unwrap();
        let arrived = done(&mut b);
        let sender = arrived.sender.unwrap();
        assert_eq!((sender.gid(), sender.lid()), (None, 0x11));
        a.receive(arrived.work.buffer.unwrap()).unwrap();
        b.send_inline(b"answer", &b.peer_of(&sender).unwrap()).unwrap();
        assert_eq!(done(&mut a).operation, Operation::Send);
        assert_eq!(&done(&mut a).buffer.as_ref().unwrap()[..], b"answer");
    });
}

#[test]
fn a_sender_is_answered_only_from_the_port_at_which_it_was_heard() {
    on_each_interface(|_, interfaces| {
        let fake = Fake::new(Config { ports: vec![Port::infiniband(), Port::infiniband()], ..Config::default() });
        let other = Fake::new(Config { ports: vec![Port::infiniband()], ..Config::default() });
        let pd = fake.pd();
        let (mut a, mut b) = (endpoint(&pd, interfaces), endpoint(&pd, interfaces));
        b.receive(pd.allocate(8).unwrap()).unwrap();
        a.send_inline(b"local", &a.peer(&b.address()).unwrap()).unwrap();
        let sender = done(&mut b).sender.unwrap();
        let second_port = Endpoint::builder(&pd).port(2).build_datagrams(QKEY).unwrap();
        for (endpoint, port) in [(second_port, 2), (endpoint(&other.pd(), interfaces), 1)] {
            let error = endpoint.peer_of(&sender).unwrap_err();
            let Error::Address(reason) = &error else { panic!("{error}") };
            let AddressError::OtherPort { device, port: at } = &**reason else { panic!("{error}") };
            assert_eq!((&**device, *at), (endpoint.pd().context().device_name(), port));
        }
        assert!(endpoint(&pd, interfaces).peer_of(&sender).is_ok(), "of the same port");
    });
}

#[test]
fn a_completion_that_claims_less_than_a_header_has_an_empty_payload() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        fake.set_mode(Mode::Manual);
        let mut a = endpoint(&pd, interfaces);
        for (claimed, len) in [(0, 0), (39, 0), (40, 0), (41, 1), (1 << 31, 8)] {
            let receive = a.receive(pd.allocate(8).unwrap()).unwrap();
            // SAFETY: the queue pair is valid, and the field is set at creation.
            let cq = unsafe { (*a.queue_pair().as_raw()).recv_cq };
            let cqe = Cqe {
                // The first receive.
                wr_id: 1 << 63 | 1,
                status: IBV_WC_SUCCESS.0,
                opcode: IBV_WC_RECV.0,
                byte_len: claimed,
                wc_flags: IBV_WC_GRH.0,
                ..Cqe::default()
            };
            fake.inject(cq, cqe);
            let arrived = done(&mut a);
            assert_eq!((arrived.id, arrived.buffer.as_ref().unwrap().len()), (receive, len));
            assert!(arrived.sender.is_some());
            fake.inject(cq, cqe);
            assert!(matches!(a.poll(), Err(PollError::NotInFlight { .. })));
            a = endpoint(&pd, interfaces);
        }
        let _ = fake.take_violations();
    });
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_datagram_queue_pair_that_cannot_be_destroyed_keeps_all_memory() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let count = Count::default();
    let mut a = endpoint(&pd, EXTENDED);
    let to = a.peer(&a.address()).unwrap();
    fake.set_mode(Mode::Manual);
    a.receive(count.buffer(&pd)).unwrap();
    a.send(count.buffer(&pd), &to).unwrap();
    let before = fake.live();
    fake.fail("ibv_destroy_qp", libc::EBUSY);
    fake.may_leak();
    assert!(matches!(a.close(), Err(Error::Verb { errno: Errno(libc::EBUSY), .. })));
    drop((to, pd));
    assert_eq!((count.freed(), address_handles(&fake)), (0, 1));
    let Live { mrs, .. } = fake.live();
    assert_eq!(mrs, before.mrs, "including the memory for the headers");
}

#[test]
fn a_datagram_endpoint_and_its_peers_can_be_on_different_threads() {
    fn is_send<T: Send>() {}
    fn is_sync<T: Sync>() {}
    is_send::<DatagramEndpoint>();
    is_send::<rdma_safe::Peer>();
    is_sync::<rdma_safe::Peer>();
    is_send::<DatagramSender>();
    is_send::<Context>();
}
