//! The owned API: data transfer through endpoints.

use std::time::{Duration, Instant};

use rdma_safe::mr::Pages;
use rdma_safe::{
    Access, Buffer, Completion, Endpoint, EndpointBuilder, Error, Operation, PostError, ProtectionDomain, ReceivePool,
    WcStatus, Work, WorkId,
};

use crate::support::lab::Mode;
use crate::support::link::connected;
use crate::support::{DEADLINE, device, error_of, in_flight, pattern, within_deadline};

/// Waits for the next completion, which must be a success.
#[track_caller]
pub(crate) fn wait(endpoint: &mut Endpoint) -> Completion {
    endpoint.wait(DEADLINE).unwrap().ok().unwrap()
}

fn with_mode(builder: EndpointBuilder<'_>, mode: Mode) -> EndpointBuilder<'_> {
    builder.classic_post(mode.classic_qp).classic_poll(mode.classic_cq)
}

/// Runs `body` on every combination of interfaces, with and without events.
fn on_every_interface(body: impl Fn(&ProtectionDomain, EndpointBuilder<'_>)) {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        for events in [false, true] {
            // Two of the combinations are enough under Miri.
            if cfg!(miri) && events != mode.classic_cq {
                continue;
            }
            println!("{mode}, events {events}");
            let pd = rdma.pd();
            body(&pd, with_mode(rdma.endpoint(&pd).events(events), mode));
        }
    }
}

#[test]
fn ping_pong_preserves_messages_of_every_size() {
    let Some(rdma) = device() else { return };
    for (index, len) in [1, 2, 7, 64, 1000, 4095, 4096, 4097, 65_536, 1 << 20].into_iter().enumerate() {
        let mode = Mode::ALL[index % Mode::ALL.len()];
        let pd = rdma.pd();
        let (mut a, mut b) = connected(with_mode(rdma.endpoint(&pd).events(index % 3 == 0), mode));
        let buffers = || (pd.allocate(len).unwrap(), pd.allocate(len).unwrap());
        let ((mut a_out, mut a_in), (mut b_out, mut b_in)) = (buffers(), buffers());
        let rounds = if len > 10_000 { 3 } else { 20 };
        for round in 0..rounds {
            let (ping, pong) = (pattern(round, len), pattern(round + 1000, len));
            a_in.fill(0);
            b_in.fill(0);
            a.receive(a_in).unwrap();
            b.receive(b_in).unwrap();
            a_out.fill_from(&ping).unwrap();
            let id = a.send(a_out).unwrap();
            let received = wait(&mut b);
            assert_eq!((received.operation, received.byte_len as usize), (Operation::Receive, len));
            b_in = received.buffer.unwrap();
            assert!(*b_in == *ping, "{len} bytes, round {round}, ping");
            b_out.fill_from(&pong).unwrap();
            b.send(b_out).unwrap();
            // One send and one receive, in either order.
            let (mut sent, mut received) = (None, None);
            for _ in 0..2 {
                let done = wait(&mut a);
                match done.operation {
                    Operation::Send => sent = Some(done),
                    Operation::Receive => received = Some(done),
                    other => panic!("{other:?}"),
                }
            }
            let sent = sent.expect("the send completes once");
            assert_eq!(sent.id, id);
            a_out = sent.buffer.unwrap();
            assert!(*a_out == *ping, "the sender's buffer is unchanged");
            a_in = received.expect("the answer completes once").buffer.unwrap();
            assert!(*a_in == *pong, "{len} bytes, round {round}, pong");
            b_out = wait(&mut b).buffer.unwrap();
        }
        assert_eq!((in_flight(&a), in_flight(&b)), ((0, 0), (0, 0)));
        assert!(a.poll().unwrap().is_none() && b.poll().unwrap().is_none());
    }
}

#[test]
fn a_message_sets_the_length_of_the_buffer_it_arrives_in() {
    on_every_interface(|pd, builder| {
        let (mut a, mut b) = connected(builder);
        for len in [0, 1, 100, 128] {
            let mut inbox = pd.allocate(128).unwrap();
            inbox.set_len(3).unwrap();
            b.receive(inbox).unwrap();
            let mut outbox = pd.allocate(200).unwrap();
            outbox.fill_from(&pattern(len as u64, len)).unwrap();
            a.send(outbox).unwrap();
            let received = wait(&mut b);
            assert_eq!(received.byte_len as usize, len, "the receive offers its capacity, not its length");
            assert!(*received.buffer.unwrap() == *pattern(len as u64, len));
            assert_eq!(wait(&mut a).buffer.unwrap().len(), len);
        }
    });
}

#[test]
fn sends_and_writes_carry_immediate_data() {
    on_every_interface(|pd, builder| {
        let (mut a, mut b) = connected(builder.inline_data(32).peer_access(Access::REMOTE_WRITE));
        let region = pd.expose(Pages::new(256).unwrap(), Access::REMOTE_WRITE).unwrap();
        for buffer in pd.allocate(4 * 64).unwrap().into_chunks(64).unwrap() {
            b.receive(buffer).unwrap();
        }
        let mut outbox = pd.allocate(5).unwrap();
        outbox.fill_from(b"hello").unwrap();
        a.post(Work::send(outbox).imm(0x0102_0304)).unwrap();
        let received = wait(&mut b);
        assert_eq!((received.operation, received.imm()), (Operation::Receive, Some(0x0102_0304)));
        assert_eq!(*received.buffer.unwrap(), *b"hello");
        let outbox = wait(&mut a).buffer.unwrap();

        a.post(Work::write(outbox, region.remote().slice(16, 5).unwrap()).imm(7)).unwrap();
        let received = wait(&mut b);
        assert_eq!((received.operation, received.imm(), received.byte_len), (Operation::ReceiveWrite, Some(7), 5));
        assert!(received.buffer.unwrap().is_empty(), "the buffer of the receive is not written");
        assert_eq!(wait(&mut a).operation, Operation::Write);
        let mut bytes = [0; 7];
        region.read(15, &mut bytes).unwrap();
        assert_eq!(bytes, *b"\0hello\0");

        a.post(Work::send_inline(b"inline").imm(8)).unwrap();
        let received = wait(&mut b);
        assert_eq!((received.imm(), &**received.buffer.as_ref().unwrap()), (Some(8), &b"inline"[..]));
        a.post(Work::write_inline(b"again", region.remote()).imm(9)).unwrap();
        assert_eq!((wait(&mut b).imm(), region.load_u64(0).unwrap()), (Some(9), u64::from_ne_bytes(*b"again\0\0\0")));
        for operation in [Operation::Send, Operation::Write] {
            let done = wait(&mut a);
            assert_eq!(done.operation, operation);
            assert!(done.buffer.is_none());
        }
    });
}

#[test]
fn writes_reads_and_atomics_reach_an_exposed_region() {
    on_every_interface(|pd, builder| {
        let (mut a, _b) = connected(builder.peer_access(Access::REMOTE));
        let mut region = pd.expose(Pages::new(20_000).unwrap(), Access::REMOTE).unwrap();
        let mut buffer = pd.allocate(10_000).unwrap();

        buffer.fill_from(&pattern(1, 10_000)).unwrap();
        a.write(buffer, region.remote().slice(8192, 10_000).unwrap()).unwrap();
        let written = wait(&mut a);
        assert_eq!(written.operation, Operation::Write);
        let mut bytes = vec![0; 10_000];
        region.read(8192, &mut bytes).unwrap();
        assert!(bytes == pattern(1, 10_000));

        region.write(100, &pattern(2, 5000)).unwrap();
        let mut buffer = written.buffer.unwrap();
        buffer.set_len(5000).unwrap();
        a.read(buffer, region.remote().slice(100, 5000).unwrap()).unwrap();
        let read = wait(&mut a);
        assert_eq!((read.operation, read.buffer.as_ref().unwrap().len()), (Operation::Read, 5000));
        assert!(*read.buffer.unwrap() == *pattern(2, 5000));

        region.store_u64(0, 40).unwrap();
        let word = region.remote().slice(0, 8).unwrap();
        let old = |done: Completion| {
            assert_eq!(done.operation, Operation::Atomic);
            let buffer = done.buffer.unwrap();
            (u64::from_ne_bytes(buffer[..].try_into().unwrap()), buffer)
        };
        a.post(Work::fetch_add(pd.allocate(64).unwrap(), word, 2)).unwrap();
        let (value, buffer) = old(wait(&mut a));
        assert_eq!((value, region.load_u64(0).unwrap()), (40, 42));
        a.post(Work::compare_swap(buffer, word, 42, 1)).unwrap();
        let (value, buffer) = old(wait(&mut a));
        assert_eq!((value, region.load_u64(0).unwrap()), (42, 1));
        a.post(Work::compare_swap(buffer, word, 42, 99)).unwrap();
        assert_eq!((old(wait(&mut a)).0, region.load_u64(0).unwrap()), (1, 1));
    });
}

#[test]
fn unsignaled_buffers_are_returned_in_order_with_the_next_signaled_one() {
    on_every_interface(|pd, builder| {
        let (mut a, mut b) = connected(builder.send_depth(16).recv_depth(16));
        let mut buffers = pd.allocate(6 * 32).unwrap().into_chunks(32).unwrap();
        for buffer in pd.allocate(6 * 32).unwrap().into_chunks(32).unwrap() {
            b.receive(buffer).unwrap();
        }
        for (seed, buffer) in (0..).zip(&mut buffers) {
            buffer.copy_from_slice(&pattern(seed, 32));
        }
        let last = buffers.pop().unwrap();
        let mut ids: Vec<WorkId> =
            buffers.into_iter().map(|buffer| a.post(Work::send(buffer).unsignaled()).unwrap()).collect();
        for seed in 0..5 {
            assert!(*wait(&mut b).buffer.unwrap() == *pattern(seed, 32));
        }
        ids.push(a.send(last).unwrap());
        for (seed, id) in (0..).zip(ids) {
            let done = wait(&mut a);
            assert_eq!((done.id, done.status), (id, WcStatus::SUCCESS));
            assert!(*done.buffer.unwrap() == *pattern(seed, 32));
        }
        assert!(*wait(&mut b).buffer.unwrap() == *pattern(5, 32));
        assert!(a.poll().unwrap().is_none());
    });
}

#[test]
fn unsignaled_work_alone_does_not_block_the_ring() {
    on_every_interface(|pd, builder| {
        for depth in [1, 2, 3, 8] {
            let builder = builder.clone().send_depth(depth).inline_data(8).peer_access(Access::REMOTE_WRITE);
            let (mut a, _b) = connected(builder);
            let region = pd.expose(Pages::new(64).unwrap(), Access::REMOTE_WRITE).unwrap();
            let mut waited = 0;
            for value in 1..=100_u64 {
                let bytes = value.to_ne_bytes();
                loop {
                    match a.post(Work::write_inline(&bytes, region.remote()).unsignaled()) {
                        Ok(_) => break,
                        Err(rejected) => assert!(matches!(rejected.error, PostError::EndpointFull { .. })),
                    }
                    // Polling makes room, although it returns no completion.
                    assert!(a.poll().unwrap().is_none(), "unsignaled work is not reported");
                    waited += 1;
                    assert!(waited < 10_000_000, "depth {depth}: stuck at {value} in {a:?}");
                }
            }
            within_deadline("the last write", || (region.load_u64(0).unwrap() == 100).then_some(()));
        }
    });
}

/// An endpoint must not count signaled work of a dropped batch as in flight.
#[test]
fn dropped_batches_do_not_suppress_signals_of_later_work() {
    let Some(rdma) = device() else { return };
    for (depth, dropped) in [(2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3), (8, 3), (8, 5), (8, 7)] {
        let pd = rdma.pd();
        let builder = rdma.endpoint(&pd).send_depth(depth).inline_data(8).peer_access(Access::REMOTE_WRITE);
        let (mut a, _b) = connected(builder);
        let region = pd.expose(Pages::new(64).unwrap(), Access::REMOTE_WRITE).unwrap();
        let start = Instant::now();
        for value in 1..=50_u64 {
            let bytes = value.to_ne_bytes();
            let work = || Work::write_inline(&bytes, region.remote()).unsignaled();
            while let Err(rejected) = a.post(work()) {
                assert!(matches!(rejected.error, PostError::EndpointFull { .. }));
                assert!(a.poll().unwrap().is_none());
                let stuck = start.elapsed() >= DEADLINE;
                assert!(!stuck, "depth {depth}, {dropped} dropped each time: stuck at {value} in {a:?}");
            }
            let mut batch = a.batch().unwrap();
            for _ in 0..dropped {
                let _ = batch.add(work());
            }
            drop(batch);
        }
        within_deadline("the last write", || (region.load_u64(0).unwrap() == 50).then_some(()));
    }
}

#[test]
fn a_batch_is_posted_as_a_whole_and_completes_in_order() {
    on_every_interface(|pd, builder| {
        let builder = builder.inline_data(16).peer_access(Access::REMOTE);
        let (mut a, mut b) = connected(builder);
        let region = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
        let mut buffers = pd.allocate(3 * 16).unwrap().into_chunks(16).unwrap();
        for buffer in pd.allocate(2 * 16).unwrap().into_chunks(16).unwrap() {
            b.receive(buffer).unwrap();
        }
        buffers[0].fill_from(b"first").unwrap();
        buffers[1].fill_from(b"second").unwrap();
        let mut buffers = buffers.into_iter();
        let mut batch = a.batch().unwrap();
        assert!(batch.is_empty());
        let ids = [
            batch.add(Work::send(buffers.next().unwrap())).unwrap(),
            batch.add(Work::write(buffers.next().unwrap(), region.remote())).unwrap(),
            batch.add(Work::send_inline(b"third")).unwrap(),
            batch.add(Work::fetch_add(buffers.next().unwrap(), region.remote().slice(16, 8).unwrap(), 3)).unwrap(),
        ];
        assert_eq!(batch.len(), 4);
        batch.post().unwrap();
        let operations = [Operation::Send, Operation::Write, Operation::Send, Operation::Atomic];
        for (id, operation) in ids.into_iter().zip(operations) {
            let done = wait(&mut a);
            assert_eq!((done.id, done.operation), (id, operation));
        }
        assert_eq!(*wait(&mut b).buffer.unwrap(), *b"first");
        assert_eq!(*wait(&mut b).buffer.unwrap(), *b"third");
        let mut bytes = [0; 6];
        region.read(0, &mut bytes).unwrap();
        assert_eq!((bytes, region.load_u64(16).unwrap()), (*b"second", 3));
        a.batch().unwrap().post().unwrap();
        assert!(a.poll().unwrap().is_none(), "an empty batch posts nothing");
    });
}

#[test]
fn a_dropped_batch_of_an_endpoint_posts_nothing() {
    on_every_interface(|pd, builder| {
        let (mut a, mut b) = connected(builder.inline_data(16));
        b.receive(pd.allocate(64).unwrap()).unwrap();
        let mut batch = a.batch().unwrap();
        batch.add(Work::send(pd.allocate(64).unwrap())).unwrap();
        batch.add(Work::send_inline(b"dropped")).unwrap();
        drop(batch);
        assert_eq!(in_flight(&a), (0, 0));
        let id = a.send_inline(b"sent").unwrap();
        assert_eq!(*wait(&mut b).buffer.unwrap(), *b"sent");
        assert_eq!(wait(&mut a).id, id);
        assert!(a.poll().unwrap().is_none() && b.poll().unwrap().is_none());
    });
}

#[test]
fn a_full_ring_refuses_work_and_returns_the_buffer() {
    on_every_interface(|pd, builder| {
        let (mut a, mut b) = connected(builder.send_depth(4).recv_depth(3));
        let (qp_num, send_depth) = (a.queue_pair().number(), 4);
        let full = PostError::EndpointFull { qp_num, send_depth, pending_sends: 0 };
        // No receive is posted yet, so nothing completes.
        for seed in 0..4 {
            let mut buffer = pd.allocate(16).unwrap();
            buffer.copy_from_slice(&pattern(seed, 16));
            a.send(buffer).unwrap();
        }
        let mut fifth = pd.allocate(16).unwrap();
        fifth.copy_from_slice(&pattern(4, 16));
        let rejected = error_of(a.send(fifth));
        assert_eq!(rejected.error, full);
        let fifth = rejected.buffer.expect("the buffer is returned");
        assert!(*fifth == *pattern(4, 16));
        assert_eq!(in_flight(&a), (4, 0));

        for _ in 0..3 {
            b.receive(pd.allocate(16).unwrap()).unwrap();
        }
        let rejected = error_of(b.receive(pd.allocate(16).unwrap()));
        assert_eq!(rejected.error, PostError::QueueFull { posted: 0 });
        assert_eq!(rejected.buffer.map(|buffer| buffer.capacity()), Some(16));

        // Completions make room.
        assert!(*wait(&mut b).buffer.unwrap() == *pattern(0, 16));
        let done = wait(&mut a);
        assert!(*done.buffer.unwrap() == *pattern(0, 16));
        a.send(fifth).unwrap();
        b.receive(pd.allocate(16).unwrap()).unwrap();
        b.receive(pd.allocate(16).unwrap()).map(drop).unwrap_err();
        for seed in 1..4 {
            assert!(*wait(&mut b).buffer.unwrap() == *pattern(seed, 16));
        }
        b.receive(pd.allocate(16).unwrap()).unwrap();
        assert!(*wait(&mut b).buffer.unwrap() == *pattern(4, 16));
        for seed in 1..5 {
            assert!(*wait(&mut a).buffer.unwrap() == *pattern(seed, 16));
        }
    });
}

#[test]
fn full_rings_in_both_directions_fit_the_completion_queue() {
    on_every_interface(|pd, builder| {
        const DEPTH: u64 = 7;
        let (mut a, mut b) = connected(builder.send_depth(DEPTH as u32).recv_depth(DEPTH as u32));
        for round in 0..5 {
            for endpoint in [&mut a, &mut b] {
                for buffer in pd.allocate(DEPTH as usize * 8).unwrap().into_chunks(8).unwrap() {
                    endpoint.receive(buffer).unwrap();
                }
            }
            for endpoint in [&mut a, &mut b] {
                for seed in 0..DEPTH {
                    let mut buffer = pd.allocate(8).unwrap();
                    buffer.copy_from_slice(&(round * DEPTH + seed).to_ne_bytes());
                    endpoint.send(buffer).unwrap();
                }
            }
            // When all completions of the first end were taken, the queue of the second holds the maximum number.
            for endpoint in [&mut b, &mut a] {
                let (mut sent, mut received) = (0, 0);
                while (sent, received) != (DEPTH, DEPTH) {
                    let done = wait(endpoint);
                    let count = if done.operation == Operation::Send { &mut sent } else { &mut received };
                    let value = u64::from_ne_bytes(done.buffer.unwrap()[..].try_into().unwrap());
                    assert_eq!(value, round * DEPTH + *count);
                    *count += 1;
                }
            }
        }
    });
}

#[test]
fn an_endpoint_has_room_for_every_receive_of_its_pool() {
    const MESSAGES: u64 = 32;
    on_every_interface(|pd, builder| {
        let mut pool = ReceivePool::new(pd, 64).unwrap();
        for buffer in pd.allocate(64 * 64).unwrap().into_chunks(64).unwrap() {
            pool.receive(buffer).unwrap();
        }
        let mut client = builder.clone().send_depth(2).recv_depth(2).receive_pool(&pool).build().unwrap();
        let mut peer = builder.build().unwrap();
        client.connect(&peer.address()).unwrap();
        peer.connect(&client.address()).unwrap();
        for number in 0..MESSAGES {
            let mut message = pd.allocate(64).unwrap();
            message.copy_from_slice(&pattern(number, 64));
            peer.send(message).unwrap();
        }
        // All messages are acknowledged, so each has consumed a receive before the client is polled.
        for _ in 0..MESSAGES {
            assert_eq!(wait(&mut peer).operation, Operation::Send);
        }
        for number in 0..MESSAGES {
            let message = wait(&mut client).buffer.unwrap();
            assert!(*message == *pattern(number, 64), "message {number}");
            pool.receive(message).unwrap();
        }
        assert_eq!(pool.receives_in_flight(), 64);
    });
}

#[test]
fn invalid_work_is_refused_and_its_buffer_returned() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd).inline_data(8).peer_access(Access::REMOTE));
    let region = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
    let buffer = |len: usize| pd.allocate(len).unwrap();
    let max = a.queue_pair().capacity().max_inline_data;
    let long = vec![0; max as usize + 1];
    let short = region.remote().slice(0, 8).unwrap();
    let foreign = rdma.pd().allocate(16).unwrap();
    let cases: [(Work<'_>, PostError); 6] = [
        (Work::write(buffer(9), short), PostError::RemoteTooShort { len: 9, remote: 8 }),
        (Work::read(buffer(9), short), PostError::RemoteTooShort { len: 9, remote: 8 }),
        (Work::fetch_add(buffer(4), short, 1), PostError::AtomicOperand),
        (Work::compare_swap(buffer(8), region.remote().slice(4, 8).unwrap(), 0, 1), PostError::AtomicOperand),
        (Work::send(foreign), PostError::ForeignBuffer),
        (Work::send_inline(&long), PostError::InlineTooLong { len: long.len(), max }),
    ];
    for (work, expected) in cases {
        let has_buffer = expected != PostError::InlineTooLong { len: long.len(), max };
        let text = format!("{work:?}");
        let rejected = error_of(a.post(work));
        assert_eq!((rejected.error, rejected.buffer.is_some()), (expected, has_buffer), "{text}");
    }
    let foreign = rdma.pd().allocate(16).unwrap();
    let rejected = error_of(b.receive(foreign));
    assert_eq!((rejected.error, rejected.buffer.is_some()), (PostError::ForeignBuffer, true));
    // None of it was posted, and the endpoint still works.
    assert_eq!((in_flight(&a), in_flight(&b)), ((0, 0), (0, 0)));
    b.receive(buffer(8)).unwrap();
    a.send_inline(b"fine").unwrap();
    assert_eq!(*wait(&mut b).buffer.unwrap(), *b"fine");
    assert_eq!(region.load_u64(0).unwrap(), 0);
}

#[test]
fn an_unconnected_endpoint_refuses_sends_and_accepts_receives() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let mut endpoint = rdma.endpoint(&pd).build().unwrap();
    let rejected = error_of(endpoint.send(pd.allocate(8).unwrap()));
    assert_eq!(rejected.error, PostError::NotReady { state: rdma_safe::QueuePairState::INIT });
    assert!(rejected.buffer.is_some());
    assert!(matches!(error_of(endpoint.batch()), PostError::NotReady { .. }));
    endpoint.receive(pd.allocate(8).unwrap()).unwrap();
    assert_eq!(in_flight(&endpoint), (0, 1));
    assert_eq!(endpoint.close().unwrap().len(), 1);
}

#[test]
fn a_wait_without_completions_times_out() {
    on_every_interface(|_, builder| {
        let (mut a, _b) = connected(builder);
        for limit in [Duration::ZERO, Duration::from_millis(10)] {
            let start = Instant::now();
            let error = error_of(a.wait(limit));
            assert!(start.elapsed() >= limit && start.elapsed() < limit + DEADLINE);
            assert!(matches!(error, Error::Timeout { waited } if waited == limit), "{error:?}");
            assert!(error.to_string().contains("the peer may be gone"), "{error}");
        }
    });
}

#[test]
fn an_address_survives_serialisation_and_connects() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = (rdma.endpoint(&pd).build().unwrap(), rdma.endpoint(&pd).psn(0xab_cdef).build().unwrap());
    assert_eq!((b.address().psn, b.address().qp_num), (0xab_cdef, b.queue_pair().number()));
    assert_eq!((a.address().gid, a.address().lid), (rdma.gid.gid, rdma.query_port(rdma.port).unwrap().lid()));
    assert_ne!(a.address().qp_num, b.address().qp_num);
    let through_json = |address| serde_json::from_str(&serde_json::to_string(&address).unwrap()).unwrap();
    let (first, second) = (through_json(a.address()), through_json(b.address()));
    assert_eq!((first, second), (a.address(), b.address()));
    a.connect(&second).unwrap();
    b.connect(&first).unwrap();
    let inbox: Buffer = pd.allocate(16).unwrap();
    a.receive(inbox).unwrap();
    let mut outbox = pd.allocate(16).unwrap();
    outbox.fill_from(b"over the wire").unwrap();
    b.send(outbox).unwrap();
    assert_eq!(*wait(&mut a).buffer.unwrap(), *b"over the wire");
}
