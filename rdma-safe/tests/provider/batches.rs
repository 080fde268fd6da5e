//! Batches that are dropped, empty or forgotten post nothing.

use rdma_safe::endpoint::Armed;
use rdma_safe::{
    Buffer, EndpointKey, EndpointSet, Inline, PostError, ProtectionDomain, WcOpcode, WcStatus, Work, WorkRequest,
};

use crate::fake::Fake;
use crate::support::{
    builder, connect, done, endpoints, in_flight, nothing, on_each_interface, post, raw_pair, receive, seen,
};

fn filled(pd: &ProtectionDomain, bytes: &[u8]) -> Buffer {
    let mut buffer = pd.allocate(bytes.len()).unwrap();
    buffer.copy_from_slice(bytes);
    buffer
}

/// Number of calls that post work.
fn postings(fake: &Fake) -> usize {
    ["ibv_post_send", "wr_complete", "ibv_post_recv"].iter().map(|verb| fake.calls(verb)).sum()
}

#[test]
fn dropping_a_send_batch_posts_nothing() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let inbox = pd.allocate(8).unwrap();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let buffer = filled(&pd, b"secret");
        let mut batch = a.qp.send_batch().unwrap();
        // SAFETY: nothing is posted.
        unsafe {
            batch.send(WorkRequest::new(1).signaled(), buffer.sge()).unwrap();
            batch.send(WorkRequest::new(2).signaled(), Inline(b"more")).unwrap();
        }
        drop(batch);
        assert_eq!(postings(fake), 0);
        let aborts = usize::from(interfaces.extended_qp);
        assert_eq!((fake.calls("wr_start"), fake.calls("wr_abort")), (aborts, aborts));

        receive!(b, 9, inbox.sge()).unwrap();
        assert_eq!(seen(&mut a.cq), []);
        assert_eq!(seen(&mut b.cq), []);
    });
}

#[test]
fn the_batch_after_a_dropped_one_holds_only_its_own_work() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let inbox = pd.allocate(8).unwrap();
        receive!(b, 9, inbox.sge()).unwrap();
        let mut batch = a.qp.send_batch().unwrap();
        // SAFETY: nothing is posted.
        unsafe { batch.send(WorkRequest::new(1).signaled(), Inline(b"dropped")).unwrap() };
        drop(batch);
        post!(a, send(WorkRequest::new(2).signaled(), Inline(b"posted"));).unwrap();
        let sent: Vec<_> = seen(&mut a.cq).iter().map(|wc| wc.wr_id).collect();
        assert_eq!(sent, [2]);
        assert_eq!(seen(&mut b.cq)[0].opcode, WcOpcode::RECV);
        assert_eq!(&inbox[..6], b"posted");
    });
}

#[test]
fn an_empty_batch_is_posted_without_a_call() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        a.qp.send_batch().unwrap().post().unwrap();
        b.qp.recv_batch().unwrap().post().unwrap();
        assert!(a.qp.send_batch().unwrap().is_empty());
        assert_eq!(postings(fake), 0);
        assert_eq!(fake.calls("wr_start"), fake.calls("wr_abort"));

        let (mut a, _b) = endpoints(&pd, interfaces);
        let batch = a.batch().unwrap();
        assert!(batch.is_empty());
        batch.post().unwrap();
        assert_eq!(postings(fake), 0);
    });
}

#[test]
fn dropping_a_receive_batch_posts_nothing() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (_a, mut b) = raw_pair(&pd, interfaces);
        let buffer = pd.allocate(8).unwrap();
        let mut batch = b.qp.recv_batch().unwrap();
        // SAFETY: nothing is posted.
        unsafe { batch.receive(1, &[buffer.sge()]).unwrap() };
        assert_eq!(batch.len(), 1);
        drop(batch);
        assert_eq!(postings(fake), 0);
    });
}

#[test]
fn refused_work_is_not_added_to_the_batch() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let inboxes = pd.allocate(32).unwrap().into_chunks(16).unwrap();
        for inbox in &inboxes {
            receive!(b, 9, inbox.sge()).unwrap();
        }
        let long = [0; 65];
        let mut batch = a.qp.send_batch().unwrap();
        // SAFETY: inline data needs no memory after the call.
        unsafe {
            batch.send(WorkRequest::new(1), Inline(b"first")).unwrap();
            let error = batch.send(WorkRequest::new(2), Inline(&long)).unwrap_err();
            assert_eq!(error, PostError::InlineTooLong { len: 65, max: 64 });
            assert_eq!(batch.len(), 1);
            batch.send(WorkRequest::new(3).signaled(), Inline(b"third")).unwrap();
        }
        batch.post().unwrap();
        let posted: Vec<_> = fake.take_posted().iter().map(|posted| posted.wr_id).collect();
        assert_eq!(posted, [1, 3]);
        assert_eq!((&inboxes[0][..5], &inboxes[1][..5]), (&b"first"[..], &b"third"[..]));
    });
}

#[test]
fn dropping_a_batch_of_an_endpoint_drops_its_buffers_and_nothing_else() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let inbox = pd.allocate(16).unwrap();
        b.receive(inbox).unwrap();
        let posted = postings(fake);
        let before = fake.live().mrs;
        let mut batch = a.batch().unwrap();
        batch.add(Work::send(filled(&pd, b"one"))).unwrap();
        batch.add(Work::send_inline(b"two")).unwrap();
        batch.add(Work::send(filled(&pd, b"three"))).unwrap();
        assert_eq!(fake.live().mrs, before + 2);
        drop(batch);
        assert_eq!(fake.live().mrs, before);
        assert_eq!(postings(fake), posted);
        assert_eq!(in_flight(&a), (0, 0));
        nothing(&mut a);
        nothing(&mut b);

        let id = a.send(filled(&pd, b"four")).unwrap();
        assert_eq!(done(&mut a).id, id);
        assert_eq!(&done(&mut b).buffer.unwrap()[..], b"four");
    });
}

#[test]
fn forgetting_a_send_batch_posts_nothing_and_the_next_one_works() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let inbox = pd.allocate(8).unwrap();
        receive!(b, 9, inbox.sge()).unwrap();
        for _ in 0..3 {
            let mut batch = a.qp.send_batch().unwrap();
            // SAFETY: nothing is posted.
            unsafe { batch.send(WorkRequest::new(1).signaled(), Inline(b"forget")).unwrap() };
            std::mem::forget(batch);
        }
        post!(a, send(WorkRequest::new(2).signaled(), Inline(b"use"));).unwrap();
        let sent: Vec<_> = seen(&mut a.cq).iter().map(|wc| wc.wr_id).collect();
        assert_eq!(sent, [2]);
        assert_eq!(seen(&mut b.cq)[0].byte_len, Some(3));

        // The queue pair is dropped while a forgotten batch is open. Destroying it under the provider's lock would deadlock.
        std::mem::forget(a.qp.send_batch().unwrap());
        drop(a);
        assert_eq!(fake.calls("wr_start"), fake.calls("wr_complete") + fake.calls("wr_abort"));
    });
}

#[test]
fn forgetting_a_receive_batch_posts_nothing() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (_a, mut b) = raw_pair(&pd, interfaces);
        let buffer = pd.allocate(8).unwrap();
        let mut batch = b.qp.recv_batch().unwrap();
        // SAFETY: nothing is posted.
        unsafe { batch.receive(1, &[buffer.sge()]).unwrap() };
        std::mem::forget(batch);
        assert!(b.qp.recv_batch().unwrap().is_empty());
        assert_eq!(postings(fake), 0);
    });
}

#[test]
fn a_forgotten_batch_is_not_counted_as_completed_work() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        b.receive(pd.allocate(16).unwrap()).unwrap();
        let mut batch = a.batch().unwrap();
        batch.add(Work::send(filled(&pd, b"never sent"))).unwrap();
        std::mem::forget(batch);
        let id = a.send(filled(&pd, b"sent")).unwrap();
        let completion = done(&mut a);
        assert_eq!(completion.id, id);
        assert_eq!(&completion.buffer.unwrap()[..], b"sent");
        nothing(&mut a);
        assert_eq!(&done(&mut b).buffer.unwrap()[..], b"sent");
    });
}

#[test]
fn forgetting_a_full_batch_does_not_block_the_endpoint() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let mut batch = a.batch().unwrap();
        while batch.add(Work::send_inline(b"x")).is_ok() {}
        assert_eq!(batch.len(), 8);
        std::mem::forget(batch);
        b.receive(pd.allocate(16).unwrap()).unwrap();
        a.send(filled(&pd, b"sent")).unwrap();
        assert_eq!(&done(&mut b).buffer.unwrap()[..], b"sent");
    });
}

/// The provider deadlocks if it is polled or armed while a batch is open.
#[test]
fn a_forgotten_batch_of_an_endpoint_ends_before_completions_are_taken() {
    on_each_interface(|fake, interfaces| {
        for work in 0..2 {
            for arm in [false, true] {
                let pd = fake.pd();
                let mut a = builder(&pd, interfaces).events(arm).build().unwrap();
                let mut b = builder(&pd, interfaces).build().unwrap();
                connect(&mut a, &mut b);
                a.receive(filled(&pd, b"inbox")).unwrap();
                let before = fake.live().mrs;
                let mut batch = a.batch().unwrap();
                for _ in 0..work {
                    batch.add(Work::send(filled(&pd, b"never sent"))).unwrap();
                }
                std::mem::forget(batch);
                fake.break_qp(a.queue_pair().number());
                if arm {
                    assert_eq!(a.arm().unwrap(), Armed::Poll);
                }
                assert_eq!(a.poll().unwrap().unwrap().status, WcStatus::WR_FLUSH_ERR);
                assert_eq!(fake.take_violations(), [""; 0]);
                assert_eq!(fake.live().mrs, before - 1, "the forgotten work is dropped, too");
            }
        }
    });
}

/// The same rule when a receive is posted while a batch is open.
#[test]
fn a_forgotten_batch_of_an_endpoint_ends_before_a_receive_is_posted() {
    on_each_interface(|fake, interfaces| {
        for work in 0..2 {
            let pd = fake.pd();
            let (mut a, _b) = endpoints(&pd, interfaces);
            let before = fake.live().mrs;
            let mut batch = a.batch().unwrap();
            for _ in 0..work {
                batch.add(Work::send(filled(&pd, b"never sent"))).unwrap();
            }
            std::mem::forget(batch);
            fake.break_qp(a.queue_pair().number());
            a.receive(filled(&pd, b"inbox")).unwrap();
            assert_eq!(fake.take_violations(), [""; 0]);
            assert_eq!(fake.live().mrs, before + 1, "the forgotten work is dropped, too");
            assert_eq!(a.poll().unwrap().unwrap().status, WcStatus::WR_FLUSH_ERR);
        }
    });
}

/// Each call of a set ends it, also if the batch belongs to another endpoint than the call.
#[test]
fn a_forgotten_batch_of_an_endpoint_in_a_set_ends_with_the_next_call() {
    let calls: [fn(&mut EndpointSet, [EndpointKey; 2], &ProtectionDomain); 7] = [
        |set, _, _| assert!(set.poll().unwrap().is_none()),
        |set, _, _| assert_eq!(set.poll_each(4, |_, _| ()).unwrap(), 0),
        |set, _, _| assert_eq!(set.arm().unwrap(), Armed::Wait),
        |set, [_, other], _| assert!(set.endpoint(other).is_some()),
        |set, [own, _], pd| _ = set.endpoint(own).unwrap().receive(filled(pd, b"inbox")).unwrap(),
        |set, [own, _], pd| _ = set.endpoint(own).unwrap().send(filled(pd, b"sent")).unwrap(),
        |set, [own, _], _| assert_eq!(set.remove(own).unwrap().len(), 0),
    ];
    on_each_interface(|fake, interfaces| {
        for (number, call) in calls.into_iter().enumerate() {
            let pd = fake.pd();
            let set = EndpointSet::builder(pd.context(), 64).classic_poll(!interfaces.extended_cq).events(true);
            let mut set = set.build().unwrap();
            let mut peers = Vec::new();
            let keys = [(); 2].map(|()| {
                let key = builder(&pd, interfaces).build_in(&mut set).unwrap();
                let mut peer = builder(&pd, interfaces).build().unwrap();
                let mut endpoint = set.endpoint(key).unwrap();
                endpoint.connect(&peer.address()).unwrap();
                peer.connect(&endpoint.address()).unwrap();
                peer.receive(filled(&pd, b"inbox")).unwrap();
                peers.push(peer);
                key
            });
            let before = fake.live().mrs;
            let mut endpoint = set.endpoint(keys[0]).unwrap();
            let mut batch = endpoint.batch().unwrap();
            batch.add(Work::send(filled(&pd, b"never sent"))).unwrap();
            std::mem::forget(batch);
            call(&mut set, keys, &pd);
            let added = usize::from([4, 5].contains(&number));
            assert_eq!(fake.live().mrs, before + added, "call {number}: the forgotten work is dropped");
            assert_eq!(fake.take_violations(), [""; 0], "call {number}");
            // The set works as before.
            let mut other = set.endpoint(keys[1]).unwrap();
            other.send(filled(&pd, b"hello")).unwrap();
            assert_eq!(&done(&mut peers[1]).buffer.unwrap()[..], b"hello");
        }
    });
}

#[test]
fn an_endpoint_closes_with_a_forgotten_batch() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, interfaces);
        let mut batch = a.batch().unwrap();
        batch.add(Work::send(filled(&pd, b"never sent"))).unwrap();
        std::mem::forget(batch);
        a.close().unwrap();
        assert_eq!(fake.calls("ibv_destroy_qp"), 1);
        assert_eq!(postings(fake), 0);
    });
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn forgetting_an_endpoint_or_a_buffer_only_leaks_memory() {
    on_each_interface(|fake, interfaces| {
        fake.may_leak();
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        let (mut forgotten, peer) = endpoints(&pd, interfaces);
        forgotten.receive(pd.allocate(8).unwrap()).unwrap();
        std::mem::forget(forgotten);
        drop(peer);
        std::mem::forget(pd.allocate(8).unwrap());
        b.receive(pd.allocate(8).unwrap()).unwrap();
        a.send(filled(&pd, b"go on")).unwrap();
        assert_eq!(&done(&mut b).buffer.unwrap()[..], b"go on");
        drop((a, b, pd));
        let live = fake.live();
        assert_eq!((live.contexts, live.pds, live.mrs, live.qps, live.cqs), (1, 1, 2, 1, 1));
    });
}
