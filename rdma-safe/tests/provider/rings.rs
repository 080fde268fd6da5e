//! Work in flight: back-pressure, unsignaled work, and buffers that come back exactly once.

use std::collections::VecDeque;

use proptest::prelude::*;
use rdma_safe::{Buffer, Operation, PostError, ProtectionDomain, WcStatus, Work, WorkId};

use crate::fake::{Config, Fake, Mode};
use crate::support::{
    CLASSIC, EXTENDED, Interfaces, builder, connect, done, endpoints, in_flight, nothing, on_each_interface,
    one_under_miri,
};

/// A buffer that is identified by its length.
fn tagged(pd: &ProtectionDomain, tag: usize) -> Buffer {
    pd.allocate(tag).unwrap()
}

#[test]
fn a_full_send_ring_gives_the_buffer_back_until_completions_are_taken() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        for tag in 1..=8 {
            a.send(tagged(&pd, tag)).unwrap();
        }
        for _ in 0..2 {
            let rejected = a.send(tagged(&pd, 99)).unwrap_err();
            assert!(matches!(rejected.error, PostError::EndpointFull { .. }));
            assert_eq!(rejected.buffer.unwrap().len(), 99);
        }
        assert!(matches!(a.send_inline(b"x"), Err(PostError::EndpointFull { send_depth: 8, pending_sends: 0, .. })));
        assert_eq!(in_flight(&a), (8, 0));

        b.receive(tagged(&pd, 100)).unwrap();
        nothing_but_full(&mut a, &pd);
        assert_eq!(done(&mut a).buffer.unwrap().len(), 1);
        a.send(tagged(&pd, 9)).unwrap();
        nothing_but_full(&mut a, &pd);
        assert_eq!(done(&mut b).byte_len, 1);
    });
}

/// A completion that was not taken keeps its place in the ring.
fn nothing_but_full(endpoint: &mut rdma_safe::Endpoint, pd: &ProtectionDomain) {
    let rejected = endpoint.send(tagged(pd, 7)).unwrap_err();
    assert!(matches!(rejected.error, PostError::EndpointFull { .. }));
    assert_eq!(rejected.buffer.unwrap().len(), 7);
}

#[test]
fn a_full_receive_ring_gives_the_buffer_back() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        for tag in 1..=8 {
            b.receive(tagged(&pd, tag)).unwrap();
        }
        let rejected = b.receive(tagged(&pd, 9)).unwrap_err();
        assert_eq!(rejected.error, PostError::QueueFull { posted: 0 });
        assert_eq!(rejected.buffer.unwrap().len(), 9);
        assert_eq!(fake.calls("ibv_post_recv"), 8, "checked before the call");

        a.send(tagged(&pd, 1)).unwrap();
        assert_eq!(done(&mut b).buffer.unwrap().capacity(), 1);
        b.receive(tagged(&pd, 9)).unwrap();
    });
}

#[test]
fn a_batch_that_fills_the_ring_says_so_and_keeps_what_it_has() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        b.receive(tagged(&pd, 10)).unwrap();
        let mut batch = a.batch().unwrap();
        for tag in 1..=8 {
            batch.add(Work::send(tagged(&pd, tag))).unwrap();
        }
        let rejected = batch.add(Work::send(tagged(&pd, 9))).unwrap_err();
        assert!(matches!(rejected.error, PostError::EndpointFull { .. }));
        assert_eq!(rejected.buffer.unwrap().len(), 9);
        assert_eq!(batch.len(), 8);
        batch.post().unwrap();
        assert_eq!(done(&mut a).buffer.unwrap().len(), 1);
        assert_eq!(done(&mut b).byte_len, 1);
    });
}

#[test]
fn unsignaled_buffers_come_back_in_order_with_later_work() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        for _ in 0..3 {
            b.receive(tagged(&pd, 10)).unwrap();
        }
        let ids: Vec<WorkId> = [1, 2].map(|tag| a.post(Work::send(tagged(&pd, tag)).unsignaled()).unwrap()).into();
        nothing(&mut a);
        assert_eq!(in_flight(&a), (2, 0));
        let last = a.send(tagged(&pd, 3)).unwrap();
        let signaled: Vec<_> = fake.take_posted().iter().map(|posted| posted.flags & 2 != 0).collect();
        assert_eq!(signaled, [false, false, true]);
        for (id, tag) in ids.into_iter().chain([last]).zip(1..) {
            let completion = done(&mut a);
            assert_eq!((completion.id, completion.operation), (id, Operation::Send));
            assert_eq!(completion.buffer.unwrap().len(), tag);
        }
        nothing(&mut a);
    });
}

/// Sends `rounds` times the depth of the ring, all unsignaled, and takes completions only when the ring is full.
fn flood(fake: &Fake, interfaces: Interfaces, depth: u32, inline: bool) {
    let pd = fake.pd();
    let mut a = builder(&pd, interfaces).send_depth(depth).build().unwrap();
    let mut b = builder(&pd, interfaces).build().unwrap();
    connect(&mut a, &mut b);
    let exposed = pd.expose(rdma_safe::mr::Pages::new(8).unwrap(), rdma_safe::Access::REMOTE_WRITE).unwrap();
    let mut stock = pd.allocate(8 * depth as usize).unwrap().into_chunks(8).unwrap();
    let (mut sent, mut full) = (0, 0);
    while sent < depth * if cfg!(miri) { 3 } else { 6 } {
        let work = match stock.pop() {
            Some(buffer) if !inline => Work::write(buffer, exposed.remote()),
            _ => Work::write_inline(b"inline", exposed.remote()),
        };
        match a.post(work.unsignaled()) {
            Ok(_) => {
                sent += 1;
                full = 0;
            }
            Err(rejected) => {
                assert!(matches!(rejected.error, PostError::EndpointFull { .. }));
                stock.extend(rejected.buffer);
                full += 1;
                assert!(full <= 2, "stays full at depth {depth}");
                while let Some(completion) = a.poll().unwrap() {
                    assert_eq!(completion.status, WcStatus::SUCCESS);
                    assert!(completion.buffer.is_some(), "unsignaled inline work is not reported");
                    stock.extend(completion.buffer);
                }
            }
        }
    }
}

#[test]
fn endless_unsignaled_work_does_not_block_the_ring() {
    for &interfaces in one_under_miri(&[EXTENDED, CLASSIC]) {
        for depth in [3, 1, 2, 4, 5, 8, 13].into_iter().take(if cfg!(miri) { 1 } else { 7 }) {
            for inline in [false, true] {
                flood(&Fake::new(Config::default()), interfaces, depth, inline);
            }
        }
    }
}

#[test]
fn dropped_batches_do_not_block_the_ring() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, interfaces);
        let exposed = pd.expose(rdma_safe::mr::Pages::new(8).unwrap(), rdma_safe::Access::REMOTE_WRITE).unwrap();
        let mut full = 0;
        for _ in 0..if cfg!(miri) { 12 } else { 32 } {
            let posted = a.post(Work::write_inline(b"x", exposed.remote()).unsignaled());
            full = if posted.is_err() { full + 1 } else { 0 };
            assert!(full <= 1, "stays full");
            if posted.is_err() {
                nothing(&mut a);
            }
            // The work in this batch is signaled but never posted.
            if let Ok(mut batch) = a.batch() {
                let _ = batch.add(Work::write_inline(b"y", exposed.remote()));
            }
        }
    });
}

#[test]
fn failed_unsignaled_work_is_reported() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, interfaces);
        let forged = rdma_safe::RemoteMemory { address: 8, len: 8, rkey: 1 };
        let good = pd.expose(rdma_safe::mr::Pages::new(8).unwrap(), rdma_safe::Access::REMOTE_WRITE).unwrap();
        a.post(Work::write_inline(b"good", good.remote()).unsignaled()).unwrap();
        let bad = a.post(Work::write_inline(b"bad", forged).unsignaled()).unwrap();
        let flushed = a.post(Work::write_inline(b"late", good.remote()).unsignaled()).unwrap();
        let first = a.poll().unwrap().unwrap();
        assert_eq!((first.id, first.status), (bad, WcStatus::REM_ACCESS_ERR));
        let second = a.poll().unwrap().unwrap();
        assert_eq!((second.id, second.status), (flushed, WcStatus::WR_FLUSH_ERR));
        nothing(&mut a);
    });
}

#[test]
fn closing_returns_every_buffer_that_was_not_handed_out() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        b.receive(tagged(&pd, 20)).unwrap();
        a.receive(tagged(&pd, 30)).unwrap();
        for tag in 1..=3 {
            a.post(Work::send(tagged(&pd, tag)).unsignaled()).unwrap();
        }
        a.send_inline(b"inline").unwrap();
        fake.set_mode(Mode::Manual);
        a.send(tagged(&pd, 4)).unwrap();
        assert_eq!(done(&mut b).byte_len, 1);
        let tags: Vec<_> = a.close().unwrap().iter().map(|buffer| buffer.len()).collect();
        assert_eq!(tags, [1, 2, 3, 4, 30]);
        assert_eq!(b.close().unwrap().len(), 0);
    });
}

#[test]
fn completions_are_taken_however_they_are_split_over_polls() {
    // More completions than one poll takes from the queue.
    const COUNT: usize = if cfg!(miri) { 18 } else { 40 };
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut a = builder(&pd, interfaces).send_depth(40).build().unwrap();
        let mut b = builder(&pd, interfaces).recv_depth(40).build().unwrap();
        connect(&mut a, &mut b);
        for tag in 1..=COUNT {
            b.receive(tagged(&pd, 40)).unwrap();
            a.send(tagged(&pd, tag)).unwrap();
        }
        for tag in 1..=COUNT {
            assert_eq!(done(&mut b).buffer.unwrap().len(), tag);
            assert_eq!(done(&mut a).buffer.unwrap().len(), tag);
        }
        nothing(&mut a);
        nothing(&mut b);
    });
}

/// A step of a random run.
#[derive(Clone, Debug)]
enum Step {
    Send { signaled: bool, inline: bool },
    Batch { work: Vec<bool>, post: bool },
    Receive,
    Poll,
    PollPeer,
    Progress,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (any::<bool>(), any::<bool>()).prop_map(|(signaled, inline)| Step::Send { signaled, inline }),
        2 => (prop::collection::vec(any::<bool>(), 0..4), any::<bool>()).prop_map(|(work, post)| Step::Batch { work, post }),
        3 => Just(Step::Receive),
        3 => Just(Step::Poll),
        3 => Just(Step::PollPeer),
        2 => Just(Step::Progress),
    ]
}

/// Runs random steps in any order. Buffers come back once and in order, and messages arrive once and in order.
fn run(steps: &[Step], interfaces: Interfaces, depth: u32, mode: Mode) {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut a = builder(&pd, interfaces).send_depth(depth).build().unwrap();
    let mut b = builder(&pd, interfaces).recv_depth(depth).build().unwrap();
    connect(&mut a, &mut b);
    fake.set_mode(mode);
    let mut next = 1;
    let (mut expected, mut messages, mut receives) = (VecDeque::new(), VecDeque::new(), 0);
    let take = |endpoint: &mut rdma_safe::Endpoint, expected: &mut VecDeque<(WorkId, usize)>| {
        let Some(completion) = endpoint.poll().unwrap() else { return };
        assert_eq!(completion.status, WcStatus::SUCCESS);
        let tag = completion.buffer.as_ref().map_or(0, |buffer| buffer.len());
        // Unsignaled inline work is not handed out.
        while expected.front().is_some_and(|(id, tag)| *tag == usize::MAX && *id != completion.id) {
            expected.pop_front();
        }
        assert_eq!(expected.pop_front(), Some((completion.id, tag)));
    };
    for step in steps {
        match step {
            Step::Send { signaled, inline } => {
                let bytes = vec![0; next];
                let mut work =
                    if *inline && next <= 64 { Work::send_inline(&bytes) } else { Work::send(tagged(&pd, next)) };
                let is_inline = *inline && next <= 64;
                if !signaled {
                    work = work.unsignaled();
                }
                match a.post(work) {
                    Ok(id) => {
                        let tag = match (is_inline, signaled) {
                            (true, true) => 0,
                            (true, false) => usize::MAX,
                            (false, _) => next,
                        };
                        expected.push_back((id, tag));
                        messages.push_back(next);
                        next += 1;
                    }
                    Err(rejected) => assert!(matches!(rejected.error, PostError::EndpointFull { .. })),
                }
            }
            Step::Batch { work, post } => {
                let mut batch = a.batch().unwrap();
                let mut added = Vec::new();
                for signaled in work {
                    let tag = next + added.len();
                    let work = Work::send(tagged(&pd, tag));
                    match batch.add(if *signaled { work } else { work.unsignaled() }) {
                        Ok(id) => added.push((id, tag)),
                        Err(rejected) => assert_eq!(rejected.buffer.unwrap().len(), tag),
                    }
                }
                if *post {
                    batch.post().unwrap();
                    next += added.len();
                    messages.extend(added.iter().map(|(_, tag)| *tag));
                    expected.extend(added);
                }
            }
            Step::Receive => receives += usize::from(b.receive(tagged(&pd, 500)).is_ok()),
            Step::Poll => take(&mut a, &mut expected),
            Step::PollPeer => {
                if let Some(received) = b.poll().unwrap() {
                    assert_eq!(Some(received.buffer.unwrap().len()), messages.pop_front());
                    receives -= 1;
                }
            }
            Step::Progress => fake.progress(),
        }
        assert!(in_flight(&a).0 <= u64::from(depth));
    }
    let left: Vec<_> = a.close().unwrap().iter().map(|buffer| buffer.len()).collect();
    let expected: Vec<_> =
        expected.into_iter().map(|(_, tag)| tag).filter(|tag| *tag != 0 && *tag != usize::MAX).collect();
    assert_eq!(left, expected);
    assert_eq!(b.close().unwrap().len(), receives);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 200 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_buffer_comes_back_once_and_in_order(
        steps in prop::collection::vec(step(), 1..if cfg!(miri) { 20 } else { 120 }),
        extended_cq in any::<bool>(),
        extended_qp in any::<bool>(),
        depth in 1_u32..9,
        mode in prop_oneof![Just(Mode::AtPost), Just(Mode::AtPoll), Just(Mode::Manual)],
    ) {
        run(&steps, Interfaces { extended_cq, extended_qp }, depth, mode);
    }
}
