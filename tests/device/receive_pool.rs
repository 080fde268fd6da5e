//! The owned API of shared receives: several endpoints receive into the buffers of one pool.

use std::collections::BTreeSet;
use std::sync::mpsc;

use rdma_safe::endpoint::Armed;
use rdma_safe::mr::Pages;
use rdma_safe::sys::{IBV_WC_RECV, Zeroed, ibv_wc};
use rdma_safe::{
    Access, Buffer, Endpoint, Errno, Error, Operation, PollError, PostError, ProtectionDomain, ReceivePool, WcStatus,
    Work,
};

use crate::support::interposer::rig::{Count, builder, cq_of, done, next, nothing, on_each_mode};
use crate::support::interposer::{Bad, PostFault, interposed};
use crate::support::lab::Mode;
use crate::support::link::connect;
use crate::support::miri::one_under_miri;
use crate::support::{DEADLINE, Rdma, in_flight, skips_when_checked};

/// Two endpoints that use one pool of four receives, and their peers.
struct Service {
    pool: ReceivePool,
    clients: [Endpoint; 2],
    peers: [Endpoint; 2],
}

impl Service {
    fn new(rdma: &Rdma, pd: &ProtectionDomain, mode: Mode) -> Self {
        let pool = ReceivePool::new(pd, 4).unwrap();
        let client = || builder(rdma, pd, mode).receive_pool(&pool).build().unwrap();
        let peer = || builder(rdma, pd, mode).build().unwrap();
        let (mut clients, mut peers) = ([client(), client()], [peer(), peer()]);
        for (client, peer) in clients.iter_mut().zip(&mut peers) {
            connect(client, peer);
        }
        Service { pool, clients, peers }
    }

    fn fill(&mut self, pd: &ProtectionDomain) -> Vec<rdma_safe::WorkId> {
        let buffers = pd.allocate(4 * 16).unwrap().into_chunks(16).unwrap();
        buffers.into_iter().map(|buffer| self.pool.receive(buffer).unwrap()).collect()
    }

    fn say(&mut self, peer: usize, text: &[u8]) {
        self.peers[peer].send_inline(text).unwrap();
        assert_eq!(done(&mut self.peers[peer]).operation, Operation::Send);
    }
}

/// An endpoint with events, its pool with one posted receive, and its peer.
fn waiting(rdma: &Rdma, pd: &ProtectionDomain, mode: Mode) -> (ReceivePool, Endpoint, Endpoint) {
    let mut pool = ReceivePool::new(pd, 4).unwrap();
    let mut client = builder(rdma, pd, mode).events(true).receive_pool(&pool).build().unwrap();
    let mut peer = builder(rdma, pd, mode).build().unwrap();
    connect(&mut client, &mut peer);
    pool.receive(pd.allocate(16).unwrap()).unwrap();
    (pool, client, peer)
}

fn text(buffer: Option<Buffer>) -> Vec<u8> {
    buffer.expect("a buffer").to_vec()
}

#[test]
fn messages_get_their_buffers_in_any_order_of_polling() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut service = Service::new(soft, &pd, mode);
        let ids = service.fill(&pd);
        assert!(ids.iter().all(|id| id.is_receive()));
        assert_eq!(service.pool.receives_in_flight(), 4);
        service.say(0, b"first");
        service.say(1, b"second");
        service.say(0, b"third");

        let [a, b] = &mut service.clients;
        let second = done(b);
        assert_eq!((second.id, second.operation, second.byte_len), (ids[1], Operation::Receive, 6));
        assert_eq!(text(second.buffer), b"second");
        let first = done(a);
        assert_eq!((first.id, first.status), (ids[0], WcStatus::SUCCESS));
        assert_eq!(text(first.buffer), b"first");
        assert_eq!(text(done(a).buffer), b"third");
        nothing(a);
        nothing(b);
        assert_eq!((service.pool.receives_in_flight(), in_flight(&service.clients[0])), (1, (0, 0)));
    });
}

#[test]
fn a_buffer_can_be_received_into_many_times() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut service = Service::new(soft, &pd, mode);
        service.fill(&pd);
        for round in 0..if cfg!(miri) { 10_u32 } else { 1000 } {
            let client = (round % 3 / 2) as usize;
            service.say(client, &round.to_ne_bytes());
            let received = done(&mut service.clients[client]);
            let buffer = received.buffer.unwrap();
            assert_eq!(buffer[..], round.to_ne_bytes());
            service.pool.receive(buffer).unwrap();
            assert_eq!(service.pool.receives_in_flight(), 4);
        }
    });
}

#[test]
fn all_receives_of_the_pool_may_complete_before_an_endpoint_is_polled() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut pool = ReceivePool::new(&pd, 16).unwrap();
        for buffer in pd.allocate(16 * 4).unwrap().into_chunks(4).unwrap() {
            pool.receive(buffer).unwrap();
        }
        let short = || builder(soft, &pd, mode).send_depth(2).recv_depth(2);
        let mut client = short().receive_pool(&pool).build().unwrap();
        let mut peer = builder(soft, &pd, mode).build().unwrap();
        connect(&mut client, &mut peer);
        for number in 0..16_u32 {
            peer.send_inline(&number.to_ne_bytes()).unwrap();
            assert_eq!(done(&mut peer).operation, Operation::Send);
        }
        for number in 0..16_u32 {
            assert_eq!(text(done(&mut client).buffer), number.to_ne_bytes());
        }
        nothing(&mut client);
        assert_eq!(pool.receives_in_flight(), 0);
    });
}

#[test]
fn a_shared_receive_reports_the_same_completion_fields() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut service = Service::new(soft, &pd, mode);
        service.fill(&pd);
        let exposed = pd.expose(Pages::new(16).unwrap(), Access::REMOTE).unwrap();
        let peer = &mut service.peers[0];
        peer.post(Work::send_inline(b"with").imm(7)).unwrap();
        peer.post(Work::write_inline(b"written", exposed.remote()).imm(9)).unwrap();
        let [client, _] = &mut service.clients;
        let message = done(client);
        assert_eq!((message.operation, message.imm()), (Operation::Receive, Some(7)));
        assert_eq!(text(message.buffer), b"with");
        let written = done(client);
        assert_eq!((written.operation, written.imm(), written.byte_len), (Operation::ReceiveWrite, Some(9), 7));
        assert_eq!(written.buffer.unwrap().len(), 0);
    });
}

#[test]
fn endpoints_of_a_pool_can_send_and_wait() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (_pool, mut client, mut peer) = waiting(soft, &pd, mode);
        assert_eq!(client.arm().unwrap(), Armed::Wait, "nothing has arrived");
        peer.send_inline(b"hello").unwrap();
        soft.await_completions(cq_of(client.queue_pair()), 1);
        assert_eq!(client.arm().unwrap(), Armed::Poll, "there is a completion to poll");
        assert_eq!(client.arm().unwrap(), Armed::Poll, "the completion is still there");
        assert_eq!(done(&mut peer).operation, Operation::Send);
        peer.receive(pd.allocate(16).unwrap()).unwrap();
        client.send_inline(b"answer").unwrap();
        let first = client.wait(DEADLINE).unwrap();
        assert_eq!((first.operation, text(first.buffer)), (Operation::Receive, b"hello".to_vec()));
        assert_eq!(done(&mut client).operation, Operation::Send);
        nothing(&mut client);
        assert_eq!(text(done(&mut peer).buffer), b"answer");
    });
}

#[test]
fn a_receive_that_cannot_be_posted_comes_back_with_the_reason() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let other = soft.pd();
        let mut service = Service::new(soft, &pd, mode);
        let here = service.clients[0].receive(pd.allocate(16).unwrap()).unwrap_err();
        assert_eq!((here.error, here.buffer.is_some()), (PostError::SharedReceives, true));
        let foreign = service.pool.receive(other.allocate(16).unwrap()).unwrap_err();
        assert_eq!((foreign.error, foreign.buffer.is_some()), (PostError::ForeignBuffer, true));

        soft.fail_post_recv(PostFault { errno: libc::EINVAL, taken: 0, bad: Bad::FirstNotTaken });
        let refused = service.pool.receive(pd.allocate(16).unwrap()).unwrap_err();
        assert_eq!(refused.error, PostError::Refused { posted: 0, errno: Errno(libc::EINVAL) });
        assert!(refused.buffer.is_some());
        assert_eq!(service.pool.receives_in_flight(), 0);

        service.fill(&pd);
        let full = service.pool.receive(pd.allocate(16).unwrap()).unwrap_err();
        assert_eq!((full.error, full.buffer.is_some()), (PostError::QueueFull { posted: 0 }, true));
        service.say(0, b"room");
        let _ = done(&mut service.clients[0]);
        service.pool.receive(full.buffer.unwrap()).unwrap();
    });
}

#[test]
fn a_receive_in_doubt_keeps_its_buffer_until_the_shared_queue_is_destroyed() {
    let Some(soft) = interposed() else { return };
    let pd = soft.pd();
    let count = Count::default();
    let mut pool = ReceivePool::new(&pd, 4).unwrap();
    soft.fail_post_recv(PostFault { errno: libc::EIO, taken: 1, bad: Bad::Null });
    let doubt = pool.receive(count.buffer(&pd)).unwrap_err();
    assert_eq!((doubt.error, doubt.buffer.is_none()), (PostError::MaybePosted { errno: Errno(libc::EIO) }, true));
    let after = pool.receive(count.buffer(&pd)).unwrap_err();
    assert_eq!((after.error, after.buffer.is_some()), (PostError::EndpointFailed, true));
    drop(after);
    assert_eq!((pool.receives_in_flight(), count.freed()), (1, 1));
    assert_eq!(pool.close().unwrap().len(), 1);
    assert_eq!(count.freed(), 2);
}

#[test]
fn a_pool_is_destroyed_with_its_last_endpoint_and_not_before() {
    for endpoint_first in [true, false] {
        let Some(soft) = interposed() else { return };
        let pd = soft.pd();
        let count = Count::default();
        let mut pool = ReceivePool::new(&pd, 4).unwrap();
        let client = builder(&soft, &pd, Mode::EXTENDED).receive_pool(&pool).build().unwrap();
        pool.receive(count.buffer(&pd)).unwrap();
        if endpoint_first {
            drop(client);
            assert_eq!(count.freed(), 0);
            assert_eq!(pool.close().unwrap().len(), 1, "the unused receive comes back");
        } else {
            let error = pool.close().unwrap_err();
            assert!(matches!(error, Error::InUse { object: "shared receive queue", .. }), "{error}");
            assert_eq!((count.freed(), soft.calls("ibv_destroy_srq")), (0, 0));
            assert!(client.close().unwrap().is_empty(), "receives of the pool do not belong to the endpoint");
        }
        assert_eq!((count.freed(), soft.calls("ibv_destroy_srq")), (1, 1));
    }
}

#[test]
fn closing_an_endpoint_frees_the_pool_slots_of_its_unpolled_receives() {
    on_each_mode(|soft, mode| {
        for closed in [true, false] {
            let pd = soft.pd();
            let mut service = Service::new(soft, &pd, mode);
            service.fill(&pd);
            for text in [b"1", b"2", b"3"] {
                service.say(0, text);
            }
            let Service { mut pool, clients: [mut a, mut b], mut peers } = service;
            assert_eq!(text(done(&mut a).buffer), b"1");
            if closed {
                let buffers = a.close().unwrap();
                assert_eq!(buffers.iter().map(|buffer| &buffer[..]).collect::<Vec<_>>(), [b"2", b"3"]);
            } else {
                drop(a);
            }
            assert_eq!(pool.receives_in_flight(), 1);
            for _ in 0..3 {
                pool.receive(pd.allocate(16).unwrap()).unwrap();
            }
            // The other endpoint is not affected.
            for text in [b"4", b"5", b"6", b"7"] {
                peers[1].send_inline(text).unwrap();
                assert_eq!(done(&mut peers[1]).operation, Operation::Send);
            }
            assert_eq!(text(done(&mut b).buffer), b"4");
        }
    });
}

#[test]
fn closing_returns_a_message_that_arming_found() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let (_pool, mut client, mut peer) = waiting(soft, &pd, mode);
        peer.send_inline(b"hello").unwrap();
        soft.await_completions(cq_of(client.queue_pair()), 1);
        assert_eq!(client.arm().unwrap(), Armed::Poll, "there is a completion to poll");
        let buffers = client.close().unwrap();
        assert_eq!(buffers.iter().map(|buffer| &buffer[..]).collect::<Vec<_>>(), [b"hello"]);
    });
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn buffers_of_a_queue_that_cannot_be_destroyed_are_never_freed() {
    for closed in [true, false] {
        let Some(soft) = interposed() else { return };
        let pd = soft.pd();
        let count = Count::default();
        let mut pool = ReceivePool::new(&pd, 4).unwrap();
        pool.receive(count.buffer(&pd)).unwrap();
        soft.fail("ibv_destroy_srq", libc::EBUSY);
        soft.may_leak();
        match closed {
            true => assert!(matches!(pool.close(), Err(Error::Verb { errno: Errno(libc::EBUSY), .. }))),
            false => drop(pool),
        }
        drop(pd);
        assert_eq!(count.freed(), 0);
    }
}

#[test]
fn a_receive_that_a_broken_endpoint_has_taken_comes_back_flushed() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut service = Service::new(soft, &pd, mode);
        service.fill(&pd);
        // The message is longer than the buffers, which breaks the connection.
        service.peers[0].send_inline(&[1; 32]).unwrap();
        let failed = next(&mut service.clients[0]).ok().unwrap_err();
        assert_eq!((failed.0.operation, failed.0.status), (Operation::Receive, WcStatus::LOC_LEN_ERR));
        service.pool.receive(failed.0.buffer.unwrap()).unwrap();
        service.say(1, b"others");
        assert_eq!(text(done(&mut service.clients[1]).buffer), b"others");
    });
}

/// The lowest bit of the posting counter in the `wr_id` of a pool's receive. The bits below are the index of a slot.
const COUNTER: u64 = 1 << 31;

#[test]
fn a_completion_without_a_matching_receive_returns_no_buffer() {
    if skips_when_checked("memory of receives whose completion is invented is deregistered, which the checker reports")
    {
        return;
    }
    for &mode in one_under_miri(&[Mode::EXTENDED, Mode::CLASSIC]) {
        let Some(soft) = interposed() else { return };
        let pd = soft.pd();
        let wrong = |ticket: u64| {
            let other_postings = [ticket ^ COUNTER, ticket + COUNTER, ticket & !(COUNTER - 1) | 77];
            // An empty slot, no mark, half of the mark, and identifiers of a ring.
            let others = [ticket - 1, ticket & (u64::MAX >> 2), ticket ^ 1 << 62, u64::MAX, 1 << 63 | 1, 1 << 63];
            other_postings.into_iter().chain(others)
        };
        for nth in 0..if cfg!(miri) { 3 } else { 9 } {
            let mut service = Service::new(&soft, &pd, mode);
            let posted = service.pool.receive(pd.allocate(16).unwrap()).unwrap();
            service.clients[1].send_inline(b"not answered").unwrap();
            let client = &mut service.clients[0];
            let cq = cq_of(client.queue_pair());
            let [ticket] = soft.shared_receives(service.pool.shared_receive_queue().as_raw())[..] else {
                panic!("one receive")
            };
            let wr_id = wrong(ticket).nth(nth).unwrap();
            let wc = ibv_wc { wr_id, opcode: IBV_WC_RECV, byte_len: 4, ..ibv_wc::zeroed() };
            soft.inject(cq, wc);
            assert!(matches!(client.poll(), Err(PollError::NotInFlight { .. })), "{wr_id:#x}");
            // The correct completion is accepted once, and not again.
            soft.inject(cq, ibv_wc { wr_id: ticket, ..wc });
            soft.inject(cq, ibv_wc { wr_id: ticket, ..wc });
            let true_one = client.poll().unwrap().unwrap();
            assert_eq!((true_one.id, true_one.buffer.unwrap().len()), (posted, 4));
            assert!(matches!(client.poll(), Err(PollError::NotInFlight { wr_id }) if wr_id == ticket));
        }
        // The receives whose completion was invented are still in the queue, and their memory was deregistered.
        let violations = soft.take_violations();
        assert!(
            violations.iter().all(|what| what == "ibv_dereg_mr of memory that posted work names"),
            "{violations:?}"
        );
    }
}

#[test]
fn a_completion_of_an_earlier_receive_in_the_same_slot_returns_no_buffer() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut service = Service::new(soft, &pd, mode);
        service.fill(&pd);
        let tickets = |service: &Service| soft.shared_receives(service.pool.shared_receive_queue().as_raw());
        let earlier = tickets(&service);
        for _ in 0..4 {
            service.say(0, b"first");
            let received = done(&mut service.clients[0]);
            service.pool.receive(received.buffer.unwrap()).unwrap();
        }
        let slots = |tickets: &[u64]| tickets.iter().map(|ticket| ticket % COUNTER).collect::<BTreeSet<_>>();
        assert_eq!(slots(&earlier), slots(&tickets(&service)), "the slots are used again");
        for (nth, wr_id) in earlier.into_iter().enumerate() {
            let client = &mut service.clients[nth % 2];
            let wc = ibv_wc { wr_id, opcode: IBV_WC_RECV, byte_len: 4, ..ibv_wc::zeroed() };
            soft.inject(cq_of(client.queue_pair()), wc);
            assert!(matches!(client.poll(), Err(PollError::NotInFlight { .. })), "{wr_id:#x}");
        }
        assert_eq!(service.pool.receives_in_flight(), 4);
    });
}

#[test]
fn the_pool_and_its_endpoints_can_be_on_different_threads() {
    const MESSAGES: u32 = if cfg!(miri) { 6 } else { 2000 };
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut service = Service::new(soft, &pd, mode);
        service.fill(&pd);
        let (back, buffers) = mpsc::channel::<Buffer>();
        let Service { mut pool, clients, peers } = service;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for buffer in buffers {
                    pool.receive(buffer).unwrap();
                }
            });
            for (mut client, mut peer) in clients.into_iter().zip(peers) {
                let back = back.clone();
                scope.spawn(move || {
                    for number in 0..MESSAGES {
                        peer.send_inline(&number.to_ne_bytes()).unwrap();
                        let buffer = loop {
                            if let Some(done) = client.poll().unwrap() {
                                break done.ok().unwrap().buffer.unwrap();
                            }
                            std::thread::yield_now();
                        };
                        assert_eq!(buffer[..], number.to_ne_bytes());
                        back.send(buffer).unwrap();
                        while peer.poll().unwrap().is_none() {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            drop(back);
        });
    });
}
