//! The data path of both APIs does not allocate.

#[path = "provider/fake/mod.rs"]
#[allow(unused_imports)] // The tests in `provider` use the rest.
mod fake;
#[path = "provider/support.rs"]
#[allow(dead_code, unused_imports, unused_macros)] // As above.
mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use rdma_safe::endpoint::Armed;
use rdma_safe::mr::Pages;
use rdma_safe::post::InlineList;
use rdma_safe::{
    Access, Buffer, Endpoint, EndpointSet, InitOptions, Inline, PostError, ReceivePool, RemoteMemory, SendOps, Work,
    WorkRequest,
};

use fake::{Config, Fake};
use support::{Raw, builder, connect, on_each_interface, post, raw_pair};

/// Whether the library has the functions of rdma-core 59 and 64. rdma-safe detects the release by them.
const NEWER_LIBRARY: bool = false;

/// Allocator that counts this thread's allocations and deallocations outside the provider.
struct Counting;

thread_local! {
    /// Number of allocations and deallocations.
    static COUNT: Cell<u64> = const { Cell::new(0) };
    /// Bytes allocated minus bytes freed.
    static HELD: Cell<i64> = const { Cell::new(0) };
}

fn count(bytes: i64) {
    if !fake::is_inside() {
        COUNT.set(COUNT.get() + 1);
        HELD.set(HELD.get() + bytes);
    }
}

// SAFETY: each method forwards to the system allocator, and counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size as i64 - layout.size() as i64);
        // SAFETY: the caller's contract.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Number of allocations and deallocations in `f`.
fn allocations(f: impl FnOnce()) -> u64 {
    let before = COUNT.get();
    f();
    COUNT.get() - before
}

/// Size of the value that `f` returns, in bytes, including its heap memory.
fn size<T>(f: impl FnOnce() -> T) -> i64 {
    let before = HELD.get();
    let value = f();
    let held = HELD.get() - before;
    drop(value);
    held + size_of::<T>() as i64
}

/// Compares with the sizes in docs/benchmarks.md.
#[test]
fn objects_use_at_most_the_documented_memory() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let cq = pd.context().completion_queue(64).build().unwrap();
    let qp = |depth, batch, classic| {
        size(|| {
            pd.queue_pair(&cq, &cq)
                .send_depth(depth)
                .recv_depth(depth)
                .max_batch(batch)
                .classic(classic)
                .build()
                .map(|mut qp| qp.init(&InitOptions::default()).map(|_| qp))
                .unwrap()
        })
    };
    let endpoint =
        |sends, receives| size(|| Endpoint::builder(&pd).send_depth(sends).recv_depth(receives).build().unwrap());
    let with_keepalive = {
        let builder = Endpoint::builder(&pd);
        size(|| builder.clone().keepalive(Duration::from_secs(10)).build().unwrap()) - size(|| builder.build().unwrap())
    };
    let pending = |sends| size(|| Endpoint::builder(&pd).send_depth(64).pending_sends(sends).build().unwrap());
    let mut parts = Vec::new();
    let part = {
        let before = HELD.get();
        parts.extend(pd.allocate(64).unwrap().into_chunks(16).unwrap());
        let four = HELD.get() - before;
        drop(parts.split_off(3));
        (HELD.get() - before - four).abs() + size_of::<Buffer>() as i64
    };
    for (object, bytes, documented) in [
        ("extended QP", qp(64, 1, false), 400),
        ("extended QP: one more in a batch", qp(64, 2, false) - qp(64, 1, false), 48),
        ("classic QP: one more in a batch", qp(64, 2, true) - qp(64, 1, true), 144 + 48),
        ("extended CQ", size(|| pd.context().completion_queue(64).build().unwrap()), 168),
        ("classic CQ", size(|| pd.context().completion_queue(64).classic(true).build().unwrap()), 936),
        ("endpoint", endpoint(1, 1) - 2 * 64, 984),
        ("endpoint: keepalive", with_keepalive, 224),
        ("endpoint: 64 more sends", endpoint(128, 64) - endpoint(64, 64), 64 * 64),
        ("endpoint: 64 more receives", endpoint(64, 128) - endpoint(64, 64), 64 * 64),
        ("endpoint: 128 more pending sends", pending(192) - pending(64), 128 * (64 + 88)),
        ("part of a region", part, 56),
    ] {
        println!("{object}: {bytes} bytes");
        assert!(bytes <= documented, "{object}: {bytes} bytes, but docs/benchmarks.md says {documented}");
    }
    assert_eq!(
        endpoint(128, 128) - endpoint(64, 64),
        endpoint(128, 64) - endpoint(64, 64) + endpoint(64, 128) - endpoint(64, 64),
        "an endpoint posts receives one at a time, so it has no memory for batches of them"
    );
    assert_eq!(qp(64, 1, false), qp(16, 1, false), "a raw queue pair stores nothing per work request in flight");
}

#[test]
fn an_extended_queue_pair_in_reset_allocates_nothing() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let cq = pd.context().completion_queue(64).build().unwrap();
    let create_and_destroy = || {
        let qp = pd.queue_pair(&cq, &cq).operations(SendOps::RC).build().unwrap();
        assert!(qp.is_extended());
        qp.destroy().unwrap();
    };
    assert_eq!(allocations(create_and_destroy), 0);
}

#[test]
fn allocations_of_the_provider_are_not_counted() {
    assert_eq!(allocations(|| drop(Box::new(1))), 2);
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    assert_eq!(allocations(|| assert_eq!(fake.live().pds, 1)), 0);
    assert!(allocations(|| drop(pd.allocate(8))) > 0, "the control path allocates");
}

#[test]
fn endpoints_do_not_allocate() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let exposed = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
        let remote = exposed.remote();
        for events in [false, true] {
            let mut a = builder(&pd, interfaces).events(events).build().unwrap();
            let mut b = builder(&pd, interfaces).events(events).build().unwrap();
            connect(&mut a, &mut b);
            let mut stock: [Option<Buffer>; 10] = std::array::from_fn(|_| Some(pd.allocate(64).unwrap()));
            let mut inbox = Some(pd.allocate(64).unwrap());
            let foreign = pd.context().alloc_pd().unwrap().allocate(8).unwrap();
            let wait = support::DEADLINE;

            let round = |stock: &mut [Option<Buffer>; 10], inbox: &mut Option<Buffer>| {
                let mut take = |index: usize| stock[index].take().unwrap();
                // Receive, send, write, read, atomics, inline data, unsignaled work, one at a time and in a batch.
                b.receive(inbox.take().unwrap()).unwrap();
                a.send(take(0)).unwrap();
                a.write(take(1), remote).unwrap();
                let mut batch = a.batch().unwrap();
                batch.add(Work::read(take(2), remote)).unwrap();
                batch.add(Work::fetch_add(take(3), remote, 1)).unwrap();
                batch.add(Work::compare_swap(take(4), remote, 1, 2).unsignaled()).unwrap();
                batch.add(Work::write_inline(b"inline", remote)).unwrap();
                batch.post().unwrap();
                a.post(Work::write_inline(b"silent", remote).unsignaled()).unwrap();
                a.write(take(5), remote).unwrap();
                // Refused work: a full endpoint, and inline data that is too long.
                let rejected = a.send(take(6)).unwrap_err();
                assert!(matches!(rejected.error, PostError::EndpointFull { .. }));
                stock[6] = rejected.buffer;
                assert!(a.send_inline(&[0; 65]).is_err());
                // A wait for an available completion, a poll of an empty queue, and polls of completions.
                *inbox = b.wait(wait).unwrap().buffer;
                assert!(b.poll().unwrap().is_none());
                let mut done = 0;
                stock[0] = a.wait(wait).unwrap().buffer;
                while let Some(completion) = a.poll().unwrap() {
                    let completion = completion.ok().unwrap();
                    if let Some(mut buffer) = completion.buffer {
                        buffer.set_len(64).unwrap();
                        done += 1;
                        stock[done] = Some(buffer);
                    }
                }
                assert_eq!(done, 5);
                // A dropped batch.
                let mut batch = a.batch().unwrap();
                batch.add(Work::write_inline(b"dropped", remote)).unwrap();
                drop(batch);
                if events {
                    assert_eq!(b.arm().unwrap(), Armed::Wait);
                    assert!(b.channel().unwrap().try_event().unwrap().is_none());
                }
            };
            let mut round = round;
            round(&mut stock, &mut inbox);
            let counted = allocations(|| (0..20).for_each(|_| round(&mut stock, &mut inbox)));
            assert_eq!(counted, 0);
            let mut foreign = Some(foreign);
            assert_eq!(allocations(|| foreign = b.receive(foreign.take().unwrap()).unwrap_err().buffer), 0);
        }
    });
}

#[test]
fn keepalives_do_not_allocate() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let builder = || builder(&pd, interfaces).keepalive(Duration::from_millis(100));
        let mut set = EndpointSet::builder(pd.context(), 32).classic_poll(!interfaces.extended_cq).build().unwrap();
        let key = builder().build_in(&mut set).unwrap();
        let mut ends = [(); 3].map(|()| builder().build().unwrap());
        let [a, b, peer] = &mut ends;
        connect(a, b);
        let mut member = set.endpoint(key).unwrap();
        member.connect(&peer.address()).unwrap();
        peer.connect(&member.address()).unwrap();
        // All four ends send probes.
        let posts = || fake.calls(if interfaces.extended_qp { "wr_start" } else { "ibv_post_send" });
        let start = Instant::now();
        let counted = allocations(|| {
            while posts() < 12 {
                for end in &mut ends {
                    assert!(end.poll().unwrap().is_none());
                }
                assert!(set.poll().unwrap().is_none());
                assert!(start.elapsed() < support::DEADLINE);
            }
        });
        assert_eq!(counted, 0);
    });
}

#[test]
fn endpoints_of_a_set_do_not_allocate() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut pool = ReceivePool::new(&pd, 4).unwrap();
        let set = EndpointSet::builder(pd.context(), 64).classic_poll(!interfaces.extended_cq).events(true);
        let mut set = set.build().unwrap();
        let keys = [(); 2].map(|()| builder(&pd, interfaces).receive_pool(&pool).build_in(&mut set).unwrap());
        let mut peers = [(); 2].map(|()| builder(&pd, interfaces).build().unwrap());
        for (key, peer) in keys.iter().zip(&mut peers) {
            let mut endpoint = set.endpoint(*key).unwrap();
            endpoint.connect(&peer.address()).unwrap();
            peer.connect(&endpoint.address()).unwrap();
        }
        for buffer in pd.allocate(4 * 16).unwrap().into_chunks(16).unwrap() {
            pool.receive(buffer).unwrap();
        }
        let mut inboxes = [(); 2].map(|()| Some(pd.allocate(16).unwrap()));
        let mut round = || {
            for (peer, inbox) in peers.iter_mut().zip(&mut inboxes) {
                peer.receive(inbox.take().unwrap()).unwrap();
                peer.send_inline(b"plain").unwrap();
                peer.post(Work::send_inline(b"immediate").imm(1)).unwrap();
            }
            for _ in 0..4 {
                let (key, request) = set.wait(support::DEADLINE).unwrap();
                let mut endpoint = set.endpoint(key).unwrap();
                if request.imm().is_some() {
                    // One completion that releases two work requests.
                    endpoint.post(Work::send(request.buffer.unwrap())).unwrap();
                } else {
                    pool.receive(request.buffer.unwrap()).unwrap();
                    endpoint
                        .post(Work::write_inline(b"", RemoteMemory { address: 0, len: 0, rkey: 0 }).unsignaled())
                        .unwrap();
                }
            }
            for _ in 0..2 {
                let (key, sent) = set.poll().unwrap().unwrap();
                assert!(set.endpoint(key).is_some());
                pool.receive(sent.ok().unwrap().buffer.unwrap()).unwrap();
            }
            assert!(set.poll().unwrap().is_none());
            assert_eq!(set.arm().unwrap(), Armed::Wait);
            for (peer, inbox) in peers.iter_mut().zip(&mut inboxes) {
                while let Some(done) = peer.poll().unwrap() {
                    *inbox = done.buffer.or(inbox.take());
                }
            }
        };
        round();
        assert_eq!(allocations(|| (0..20).for_each(|_| round())), 0);
    });
}

#[test]
fn pending_sends_and_receive_shares_do_not_allocate() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut pool = ReceivePool::new(&pd, 4).unwrap();
        let set = EndpointSet::builder(pd.context(), 64).classic_poll(!interfaces.extended_cq);
        let mut set = set.build().unwrap();
        let endpoint = builder(&pd, interfaces).send_depth(1).pending_sends(4).receive_pool(&pool).receive_share(4);
        let key = endpoint.build_in(&mut set).unwrap();
        let mut peer = builder(&pd, interfaces).build().unwrap();
        let mut endpoint = set.endpoint(key).unwrap();
        endpoint.connect(&peer.address()).unwrap();
        peer.connect(&endpoint.address()).unwrap();
        for buffer in pd.allocate(4 * 16).unwrap().into_chunks(16).unwrap() {
            pool.receive(buffer).unwrap();
        }
        let mut inboxes: [Option<Buffer>; 5] = std::array::from_fn(|_| Some(pd.allocate(16).unwrap()));
        let mut round = || {
            inboxes.iter_mut().for_each(|inbox| _ = peer.receive(inbox.take().unwrap()).unwrap());
            (0..4).for_each(|_| _ = peer.send_inline(b"request").unwrap());
            set.endpoint(key).unwrap().send_inline(b"beside").unwrap();
            let mut sent = 0;
            while let Some((_, done)) = set.poll().unwrap() {
                let done = done.ok().unwrap();
                match done.buffer {
                    Some(buffer) if done.id.is_receive() => _ = set.endpoint(key).unwrap().send(buffer).unwrap(),
                    Some(buffer) => _ = pool.receive(buffer).unwrap(),
                    None => {}
                }
                sent += u32::from(!done.id.is_receive());
            }
            assert_eq!(sent, 5);
            let mut answered = 0;
            while let Some(done) = peer.poll().unwrap() {
                if done.id.is_receive() {
                    inboxes[answered] = done.buffer;
                    answered += 1;
                }
            }
            assert_eq!(answered, 5);
        };
        round();
        assert_eq!(allocations(|| (0..20).for_each(|_| round())), 0);
    });
}

#[test]
fn raw_queues_do_not_allocate() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let buffer = pd.allocate(64).unwrap();
        let exposed = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let (sge, remote) = (buffer.sge(), exposed.remote());
        let word = rdma_safe::Sge { len: 8, ..sge };
        let pieces: Vec<&[u8]> = b"twenty-four pieces, or so".chunks(1).collect();
        let mut round = || {
            let mut batch = b.qp.recv_batch().unwrap();
            // SAFETY: the memory outlives the queue pairs, and the program does not access it.
            unsafe {
                batch.receive(1, &[word, word]).unwrap();
                batch.receive(2, &[sge]).unwrap();
            }
            batch.post().unwrap();
            // SAFETY: as above.
            unsafe { b.qp.receive(3, sge).unwrap() };
            post!(a,
                send(WorkRequest::new(1), word);
                send_imm(WorkRequest::new(2).signaled(), 7, &[word, word][..]);
                write_imm(WorkRequest::new(3), remote, 8, Inline(b"inline"));
                write(WorkRequest::new(4), remote, InlineList(&pieces));
                write(WorkRequest::new(5), remote, InlineList(&pieces[..3]));
                read(WorkRequest::new(6), remote, sge);
                fetch_add(WorkRequest::new(7), remote, 1, word);
                compare_swap(WorkRequest::new(8).signaled(), remote, 1, 2, word);
            )
            .unwrap();
            let (mut send, mut recv) = a.qp.split();
            drop((send.batch().unwrap(), recv.batch().unwrap()));
            let drain = |raw: &mut Raw, expected: u32| {
                let mut poll = raw.cq.poll();
                let mut found = 0;
                while let Some(wc) = poll.next().unwrap() {
                    assert_eq!(wc.ok(), Ok(()));
                    let _ = (wc.byte_len(), wc.imm(), wc.qp_num(), wc.opcode(), wc.flags());
                    found += 1;
                }
                assert_eq!(found, expected);
            };
            drain(&mut a, 2);
            drain(&mut b, 3);
            drain(&mut b, 0);
        };
        round();
        assert_eq!(allocations(|| (0..20).for_each(|_| round())), 0);
    });
}

#[test]
fn errors_of_the_data_path_do_not_allocate() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = support::endpoints(&pd, interfaces);
        let mut refused = Some(pd.allocate(64).unwrap());
        fake.fail("start_poll", libc::EIO);
        fake.fail("ibv_poll_cq", libc::EIO);
        let counted = allocations(|| {
            for _ in 0..10 {
                a.poll().unwrap_err();
                let beyond = rdma_safe::RemoteMemory { address: 0, len: 1, rkey: 0 };
                refused = a.write(refused.take().unwrap(), beyond).unwrap_err().buffer;
            }
        });
        assert_eq!(counted, 0);
    });
}
