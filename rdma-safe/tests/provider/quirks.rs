//! Workarounds for faults of SoftRoCE in rdma-core 44, which the fake provider imitates.

use std::time::Duration;

use rdma_safe::device::Quirks;
use rdma_safe::endpoint::KeepaliveError;
use rdma_safe::{CompletionQueue, EndpointSet, Error, WcStatus, Work};
use rdma_sys::{ibv_cq_ex, ibv_end_poll, ibv_next_poll, ibv_poll_cq_attr, ibv_start_poll};

use crate::fake::{Config, Cqe, Fake, Mode};
use crate::support::{CLASSIC, EXTENDED, builder, connect, done, endpoints, nothing, seen};

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
fn devices_without_writes_of_zero_bytes_are_refused_by_name_with_a_keepalive() {
    let within = Duration::from_secs(10);
    for (vendor_id, vendor_part_id, driver) in [(0x1ded, 0x107f, "erdma"), (0x02c9, 0x6282, "mthca")] {
        let fake = Fake::new(Config { vendor_id, vendor_part_id, ..Config::default() });
        let pd = fake.pd();
        assert!(pd.context().quirks().contains(Quirks::EMPTY_WRITES_FAIL));
        let refused = builder(&pd, EXTENDED).keepalive(within);
        let mut set = EndpointSet::builder(pd.context(), 32).build().unwrap();
        for error in [refused.clone().build().unwrap_err(), refused.build_in(&mut set).unwrap_err()] {
            let text = error.to_string();
            let Error::Keepalive(KeepaliveError::Unsupported { device, driver: named, .. }) = error else {
                panic!("{text}")
            };
            assert_eq!((device.as_str(), named), (pd.context().device_name(), driver));
            assert!([&device, driver, "10s", "keepalive(None)"].iter().all(|part| text.contains(*part)), "{text}");
        }
        drop(builder(&pd, EXTENDED).keepalive(None).build().unwrap());
    }
    // Newer devices of the same vendor.
    let fake = Fake::new(Config { vendor_part_id: 0x1017, ..Config::default() });
    let endpoint = builder(&fake.pd(), EXTENDED).keepalive(within).build().unwrap();
    assert_eq!(endpoint.keepalive(), Some(within));
}
