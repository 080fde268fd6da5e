//! Workarounds for the faults of SoftRoCE in rdma-core 44 and of bnxt_re. The fake provider imitates the faults.

use rdma_safe::device::Quirks;
use rdma_safe::post::InlineList;
use rdma_safe::{CompletionQueue, Errno, Inline, PostError, Sge, WcFields, WcStatus, Work, WorkRequest};
use rdma_sys::{ibv_cq_ex, ibv_end_poll, ibv_next_poll, ibv_poll_cq_attr, ibv_start_poll};

use crate::fake::{Config, Cqe, Fake, Mode};
use crate::support::{
    CLASSIC, EXTENDED, builder, connect, done, endpoints, nothing, post, raw_with, receive, seen, to_rts,
};

fn inject(fake: &Fake, cq: &CompletionQueue, wr_ids: impl IntoIterator<Item = u64>) {
    wr_ids.into_iter().for_each(|wr_id| fake.inject(cq.as_raw(), Cqe { wr_id, ..Cqe::default() }));
}

/// Polls to the end of the queue as ibv_start_poll(3) describes. Returns each `wr_id`.
fn as_documented(cq: &mut CompletionQueue) -> Vec<u64> {
    let raw: *mut ibv_cq_ex = cq.as_raw().cast();
    let mut found = Vec::new();
    let mut attr = ibv_poll_cq_attr { comp_mask: 0 };
    // SAFETY: an extended queue, borrowed mutably, with no cursor on it.
    unsafe {
        if ibv_start_poll(raw, &mut attr) != 0 {
            return found;
        }
        found.push((*raw).wr_id);
        while ibv_next_poll(raw) == 0 {
            found.push((*raw).wr_id);
        }
        ibv_end_poll(raw);
    }
    found
}

#[test]
fn the_fake_repeats_stale_completions_after_next_poll() {
    let sound = Fake::new(Config::default());
    let mut cq = sound.open().completion_queue(7).build().unwrap();
    inject(&sound, &cq, [1, 2]);
    assert_eq!(as_documented(&mut cq), [1, 2]);
    assert_eq!(as_documented(&mut cq), [0; 0]);

    let rxe = Fake::new(Config::rxe());
    let mut cq = rxe.open().completion_queue(7).build().unwrap();
    inject(&rxe, &cq, [1, 2]);
    assert_eq!(as_documented(&mut cq), [1, 2]);
    let stale = as_documented(&mut cq);
    assert!(!stale.is_empty(), "the consumer index is beyond the producer index");
    assert!(stale.contains(&0), "entries that were never written: {stale:?}");
    assert!(!as_documented(&mut cq).is_empty(), "the queue has no end");
}

#[test]
fn a_wrapped_queue_loses_and_repeats_no_completion() {
    let fake = Fake::new(Config::rxe());
    let context = fake.open();
    let mut cq = context.completion_queue(7).build().unwrap();
    assert!(cq.is_extended());
    let mut next = 1;
    for round in 0..if cfg!(miri) { 5 } else { 40 } {
        let count = round % 8;
        inject(&fake, &cq, next..next + count);
        if round % 3 == 0 {
            // The cursor is dropped before the end of the queue.
            let mut poll = cq.poll();
            let first = poll.next().unwrap().map(|wc| wc.wr_id());
            assert_eq!(first, (count > 0).then_some(next));
        }
        let rest: Vec<_> = seen(&mut cq).iter().map(|wc| (wc.wr_id, wc.status)).collect();
        let skip = u64::from(round % 3 == 0 && count > 0);
        assert_eq!(rest, (next + skip..next + count).map(|wr_id| (wr_id, WcStatus::SUCCESS)).collect::<Vec<_>>());
        next += count;
    }
    assert_eq!(fake.calls("next_poll"), 0, "one completion for each start_poll and end_poll");
    assert!(fake.calls("end_poll") > 0);
}

#[test]
fn endpoints_on_a_wrapped_queue_lose_and_repeat_no_completion() {
    let fake = Fake::new(Config::rxe());
    let pd = fake.pd();
    let mut a = builder(&pd, EXTENDED).send_depth(3).recv_depth(3).build().unwrap();
    let mut b = builder(&pd, EXTENDED).send_depth(3).recv_depth(3).build().unwrap();
    connect(&mut a, &mut b);
    for round in 1..=if cfg!(miri) { 10_usize } else { 100 } {
        let batch = 1 + round % 3;
        for index in 0..batch {
            b.receive(pd.allocate(8).unwrap()).unwrap();
            a.send(pd.allocate(1 + index).unwrap()).unwrap();
        }
        for index in 0..batch {
            assert_eq!(done(&mut b).buffer.unwrap().len(), 1 + index);
            assert_eq!(done(&mut a).buffer.unwrap().len(), 1 + index);
        }
        nothing(&mut a);
        nothing(&mut b);
    }
    assert_eq!(fake.calls("next_poll"), 0);
}

#[test]
fn sends_use_post_send_if_extended_sends_are_broken() {
    let fake = Fake::new(Config { vendor_id: 0x14e4, ..Config::default() });
    let pd = fake.pd();
    assert_eq!(pd.context().quirks(), Quirks::EXTENDED_SENDS_BROKEN);
    let (mut a, mut b) = endpoints(&pd, EXTENDED);
    b.receive(pd.allocate(8).unwrap()).unwrap();
    a.send(pd.allocate(3).unwrap()).unwrap();
    assert_eq!(done(&mut b).byte_len, 3);
    assert_eq!((fake.calls("create_qp_ex"), fake.calls("wr_start"), fake.calls("ibv_post_send")), (0, 0, 1));
}

/// The doorbell of rxe is a system call, which may fail with ENOMEM after the work was added to the queue.
#[test]
fn enomem_leaves_the_work_in_doubt_if_the_doorbell_can_fail() {
    for (config, taken, expected) in [
        (Config::rxe(), true, PostError::MaybePosted { errno: Errno(libc::ENOMEM) }),
        (Config::default(), false, PostError::QueueFull { posted: 0 }),
    ] {
        let fake = Fake::new(config);
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, EXTENDED);
        fake.set_mode(Mode::Manual);
        fake.fail_wr_complete(libc::ENOMEM, taken);
        let rejected = a.send(pd.allocate(3).unwrap()).unwrap_err();
        assert_eq!((rejected.error, rejected.buffer.is_some()), (expected, !taken));
        assert_eq!(a.close().unwrap().len(), usize::from(taken));
    }
    let fake = Fake::new(Config::rxe());
    let pd = fake.pd();
    let (mut a, _b) = endpoints(&pd, EXTENDED);
    fake.fail_wr_complete(libc::ENOSPC, false);
    let rejected = a.send(pd.allocate(3).unwrap()).unwrap_err();
    assert_eq!((rejected.error, rejected.buffer.is_some()), (PostError::QueueFull { posted: 0 }, true));
}

#[test]
fn inline_lists_are_concatenated_if_the_provider_sends_them_empty() {
    for (config, setter) in [(Config::rxe(), "inline_data"), (Config::default(), "inline_data_list")] {
        let fake = Fake::new(config);
        let pd = fake.pd();
        let inbox = pd.allocate(16).unwrap();
        let make = || raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
        let (mut a, mut b) = (make(), make());
        to_rts(&mut a.qp, b.qp.number());
        to_rts(&mut b.qp, a.qp.number());
        receive!(b, 1, inbox.sge()).unwrap();
        let pieces: [&[u8]; 3] = [b"to", b"gether", b"!"];
        post!(a, send(WorkRequest::new(1).signaled(), InlineList(&pieces));).unwrap();
        assert_eq!(seen(&mut b.cq)[0].byte_len, Some(9));
        assert_eq!(&inbox[..9], b"together!");
        let posted = fake.take_posted();
        assert_eq!((posted[0].setter, posted[0].len, posted[0].verb), (setter, 9, "ibv_wr_complete"));
    }
}

#[test]
fn element_lists_use_post_send_if_the_provider_miscounts_them() {
    for (config, extended) in [(Config::rxe(), false), (Config::default(), true)] {
        let fake = Fake::new(config);
        let pd = fake.pd();
        let inbox = pd.allocate(200).unwrap();
        let cq = pd.context().completion_queue(16).build().unwrap();
        let make = |sges| pd.queue_pair(&cq, &cq).send_sges(sges).build().unwrap();
        assert!(make(1).is_extended(), "a single element is counted correctly");
        let (a, b) = (make(2), make(1));
        assert_eq!(a.is_extended(), extended);
        let (mut a, mut b) = (crate::support::Raw { qp: a, cq: other(&pd) }, crate::support::Raw { qp: b, cq });
        to_rts(&mut a.qp, b.qp.number());
        to_rts(&mut b.qp, a.qp.number());
        receive!(b, 1, inbox.sge()).unwrap();
        let mut outbox = pd.allocate(108).unwrap();
        outbox.fill(7);
        let list =
            [Sge { len: 8, ..outbox.sge() }, Sge { address: outbox.address() + 8, len: 100, lkey: outbox.lkey() }];
        post!(a, send(WorkRequest::new(1).signaled(), &list[..]);).unwrap();
        let received: Vec<_> = seen(&mut b.cq).iter().filter_map(|wc| wc.byte_len).collect();
        assert!(received.contains(&108), "8 and 100 bytes are not 16: {received:?}");
        assert_eq!(inbox[..108], [7; 108]);
    }
}

fn other(pd: &rdma_safe::ProtectionDomain) -> CompletionQueue {
    pd.context().completion_queue(4).build().unwrap()
}

#[test]
fn inline_data_always_has_the_inline_flag() {
    for config in [Config::rxe(), Config::default()] {
        for interfaces in [EXTENDED, CLASSIC] {
            let fake = Fake::new(config.clone());
            let pd = fake.pd();
            let (mut a, mut b) = endpoints(&pd, interfaces);
            b.receive(pd.allocate(8).unwrap()).unwrap();
            b.receive(pd.allocate(8).unwrap()).unwrap();
            a.send_inline(b"inline").unwrap();
            a.send(pd.allocate(2).unwrap()).unwrap();
            let flags: Vec<_> = fake.take_posted().iter().map(|posted| posted.flags).collect();
            assert_eq!(flags, [2 | 8, 2], "the flag is cleared for the next work request");
            assert_eq!(done(&mut a).status, WcStatus::SUCCESS);
            assert_eq!(&done(&mut b).buffer.unwrap()[..], b"inline");
        }
    }
}

#[test]
fn close_returns_a_receive_that_is_never_flushed() {
    let fake = Fake::new(Config::rxe());
    let pd = fake.pd();
    let (_a, mut b) = endpoints(&pd, EXTENDED);
    fake.break_qp(b.queue_pair().number());
    b.receive(pd.allocate(8).unwrap()).unwrap();
    nothing(&mut b);
    assert_eq!(b.close().unwrap().len(), 1);
}

#[test]
fn a_send_before_the_connection_does_not_reach_a_provider_that_would_keep_it() {
    let fake = Fake::new(Config::rxe());
    let pd = fake.pd();
    let mut a = builder(&pd, CLASSIC).build().unwrap();
    let mut b = builder(&pd, CLASSIC).build().unwrap();
    b.receive(pd.allocate(8).unwrap()).unwrap();
    a.post(Work::send_inline(b"early")).unwrap_err();
    connect(&mut a, &mut b);
    fake.set_mode(Mode::AtPost);
    fake.progress();
    nothing(&mut b);
    assert_eq!(fake.calls("ibv_post_send"), 0);
    let mut batch = a.batch().unwrap();
    batch.add(Work::send_inline(b"late")).unwrap();
    batch.post().unwrap();
    assert_eq!(&done(&mut b).buffer.unwrap()[..], b"late");
}

#[test]
fn each_inline_list_of_a_batch_keeps_its_bytes() {
    for config in [Config::rxe(), Config::default()] {
        let fake = Fake::new(config);
        let pd = fake.pd();
        let inboxes = pd.allocate(64).unwrap().into_chunks(8).unwrap();
        let make = || raw_with(&pd, EXTENDED, WcFields::STANDARD, |qp| qp);
        let (mut a, mut b) = (make(), make());
        to_rts(&mut a.qp, b.qp.number());
        to_rts(&mut b.qp, a.qp.number());
        for (wr_id, inbox) in inboxes.iter().enumerate() {
            receive!(b, wr_id as u64, inbox.sge()).unwrap();
        }
        let first: [&[u8]; 2] = [b"on", b"e"];
        let third: [&[u8]; 2] = [b"thr", b"ee"];
        post!(a,
            send(WorkRequest::new(1), InlineList(&first));
            send(WorkRequest::new(2), Inline(b"two"));
            send(WorkRequest::new(3).signaled(), InlineList(&third));
        )
        .unwrap();
        assert_eq!(seen(&mut a.cq).len(), 1);
        assert_eq!((&inboxes[0][..3], &inboxes[1][..3], &inboxes[2][..5]), (&b"one"[..], &b"two"[..], &b"three"[..]));
    }
}
