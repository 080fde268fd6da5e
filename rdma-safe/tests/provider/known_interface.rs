//! Handles whose interface is fixed.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rdma_safe::cq::Poller;
use rdma_safe::interface::{Classic, Extended, Known};
use rdma_safe::post::SendQueue;
use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::{
    CompletionQueue, Error, Inline, PollError, PostError, QueuePair, QueuePairState, SendOps, WcFields, WorkCompletion,
    WorkRequest,
};

use crate::fake::{Cqe, Fake};
use crate::support::{Interfaces, Raw, on_each_interface, raw_pair, raw_with, receive, seen};

fn raw(fake: &Fake, interfaces: Interfaces) -> Raw {
    raw_with(&fake.pd(), interfaces, WcFields::STANDARD, |qp| qp)
}

fn numbered(wr_id: u64) -> Cqe {
    Cqe { wr_id, byte_len: 100 + wr_id as u32, ..Cqe::default() }
}

/// Runs `$body` with a poller for the interface of the queue.
macro_rules! with_poller {
    ($cq:expr, |$poller:ident| $body:expr) => {
        match $cq.is_extended() {
            true => {
                let mut $poller = $cq.poller_with_interface::<Extended>().unwrap();
                $body
            }
            false => {
                let mut $poller = $cq.poller_with_interface::<Classic>().unwrap();
                $body
            }
        }
    };
}

fn taken<I: Known>(poller: &mut Poller<'_, I>) -> Option<u64> {
    poller.poll_one(|wc| wc.wr_id()).unwrap()
}

/// Takes up to `most` completions.
fn drained<I: Known>(poller: &mut Poller<'_, I>, most: usize) -> Vec<u64> {
    let mut all = Vec::new();
    let each = |wc: WorkCompletion<'_>| {
        assert_eq!(wc.byte_len(), Some(100 + wc.wr_id() as u32));
        all.push(wc.wr_id());
        if all.len() == most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    poller.poll_all(each).unwrap();
    all
}

fn post<I: Known>(queue: &mut SendQueue<'_, I>, wr_ids: &[u64]) -> Result<(), PostError> {
    queue.post(|batch| {
        for wr_id in wr_ids {
            // SAFETY: the call copies the bytes.
            unsafe { batch.send(WorkRequest::new(*wr_id).signaled(), Inline(b"text")) }?;
        }
        Ok(())
    })
}

/// Like [`with_poller`], for send queues.
macro_rules! with_sends {
    ($qp:expr, |$sends:ident| $body:expr) => {
        match $qp.is_extended() {
            true => {
                let mut $sends = $qp.split().0.with_interface::<Extended>().unwrap();
                $body
            }
            false => {
                let mut $sends = $qp.split().0.with_interface::<Classic>().unwrap();
                $body
            }
        }
    };
}

#[test]
fn a_fixed_handle_has_the_interface_of_its_queue() {
    on_each_interface(|fake, interfaces| {
        let Raw { mut qp, mut cq } = raw(fake, interfaces);
        assert_eq!(cq.poller_with_interface::<Extended>().is_some(), interfaces.extended_cq);
        assert_eq!(cq.poller_with_interface::<Classic>().is_none(), interfaces.extended_cq);
        assert_eq!(qp.split().0.with_interface::<Extended>().is_some(), interfaces.extended_qp);
        assert_eq!(qp.split().0.with_interface::<Classic>().is_none(), interfaces.extended_qp);
    });
}

#[test]
fn a_poller_loses_no_completion() {
    on_each_interface(|fake, interfaces| {
        let mut raw = raw(fake, interfaces);
        let queue = raw.cq.as_raw();
        let inject = |range: std::ops::Range<u64>| range.for_each(|wr_id| fake.inject(queue, numbered(wr_id)));
        with_poller!(raw.cq, |poller| {
            assert_eq!(taken(&mut poller), None);
            // More than one batch of `ibv_poll_cq`.
            inject(0..20);
            assert_eq!(taken(&mut poller), Some(0));
            assert_eq!(drained(&mut poller, 3), [1, 2, 3]);
            assert_eq!(taken(&mut poller), Some(4));
            assert_eq!(drained(&mut poller, 100), (5..20).collect::<Vec<_>>());
            assert_eq!(drained(&mut poller, 100), [0; 0]);
            inject(20..24);
            assert_eq!(drained(&mut poller, 1), [20]);
        });
        assert_eq!(seen(&mut raw.cq)[0].wr_id, 21, "the cursor takes what the poller left");
        inject(24..27);
        let mut poll = raw.cq.poll();
        assert_eq!(poll.next().unwrap().unwrap().wr_id(), 24);
        drop(poll);
        with_poller!(raw.cq, |poller| assert_eq!(
            drained(&mut poller, 100),
            [25, 26],
            "the poller takes what the cursor left"
        ));
        assert_eq!(fake.calls("end_poll") > 0, interfaces.extended_cq);
    });
}

#[test]
fn a_poller_reports_an_error_of_the_provider() {
    on_each_interface(|fake, interfaces| {
        let mut raw = raw(fake, interfaces);
        fake.fail(if interfaces.extended_cq { "start_poll" } else { "ibv_poll_cq" }, libc::EIO);
        with_poller!(raw.cq, |poller| {
            assert!(matches!(poller.poll_one(|_| ()), Err(PollError::Provider(_))));
            assert!(matches!(poller.poll_all(|_| ControlFlow::Continue(())), Err(PollError::Provider(_))));
        });
    });
}

#[test]
fn a_panicking_closure_ends_the_poll() {
    on_each_interface(|fake, interfaces| {
        let mut raw = raw(fake, interfaces);
        (0..4).for_each(|wr_id| fake.inject(raw.cq.as_raw(), numbered(wr_id)));
        with_poller!(raw.cq, |poller| {
            let look = AssertUnwindSafe(|| poller.poll_one(|_| -> () { std::panic::resume_unwind(Box::new(())) }));
            assert!(catch_unwind(look).is_err());
            let drain = AssertUnwindSafe(|| poller.poll_all(|_| std::panic::resume_unwind(Box::new(()))));
            assert!(catch_unwind(drain).is_err());
            assert_eq!(drained(&mut poller, 100), [2, 3], "completions passed to closures are taken");
        });
    });
}

#[test]
fn dropping_a_queue_pair_is_deferred_until_the_poller_ends() {
    on_each_interface(|fake, interfaces| {
        let ways: [fn(CompletionQueue); 3] = [
            |mut cq| assert!(cq.poll().next().unwrap().is_none()),
            |mut cq| with_poller!(cq, |poller| assert_eq!(taken(&mut poller), None)),
            drop,
        ];
        for way in ways {
            let Raw { qp, mut cq } = raw(fake, interfaces);
            let other = raw(fake, interfaces);
            fake.inject(cq.as_raw(), numbered(1));
            // Inside the closure, the destruction would deadlock on the lock that this thread holds.
            let mut qp = Some(qp);
            with_poller!(cq, |poller| {
                poller.poll_one(|_| drop(qp.take())).unwrap();
                assert_eq!(fake.live().qps, 1 + usize::from(interfaces.extended_cq));
                std::mem::forget(poller);
            });
            way(cq);
            assert_eq!(fake.live().qps, 1);
            drop(other);
        }
        let Raw { qp, mut cq } = raw(fake, interfaces);
        with_poller!(cq, |poller| {
            assert_eq!(taken(&mut poller), None);
            assert_eq!(matches!(qp.destroy(), Err(Error::PollInProgress { .. })), interfaces.extended_cq);
        });
        assert_eq!(fake.live().qps, 0);
    });
}

#[test]
fn work_added_in_a_closure_is_posted_at_once() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let inbox = pd.allocate(8).unwrap();
        for wr_id in 0..3 {
            receive!(b, wr_id, inbox.sge()).unwrap();
        }
        with_sends!(a.qp, |sends| {
            post(&mut sends, &[1]).unwrap();
            post(&mut sends, &[2, 3]).unwrap();
            post(&mut sends, &[]).unwrap();
        });
        assert_eq!(seen(&mut a.cq).iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(fake.calls("wr_complete") + fake.calls("ibv_post_send"), 2);
        assert_eq!(fake.calls("wr_abort"), usize::from(interfaces.extended_qp), "the empty batch");
        assert_eq!(seen(&mut b.cq).len(), 3);
    });
}

#[test]
fn a_closure_that_fails_or_panics_posts_nothing() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = raw_pair(&pd, interfaces);
        let inbox = pd.allocate(8).unwrap();
        receive!(b, 9, inbox.sge()).unwrap();
        // A batch that was forgotten before.
        std::mem::forget(a.qp.send_batch().unwrap());
        with_sends!(a.qp, |sends| {
            let failed = sends.post(|batch| {
                // SAFETY: the call copies the bytes.
                unsafe { batch.send(WorkRequest::new(1).signaled(), Inline(b"fail")) }?;
                // SAFETY: as above.
                unsafe { batch.send(WorkRequest::new(2).signaled(), Inline(&[0; 1000])) }
            });
            assert!(matches!(failed, Err(PostError::InlineTooLong { .. })));
            let panics = AssertUnwindSafe(|| {
                sends.post(|batch| {
                    // SAFETY: as above.
                    unsafe { batch.send(WorkRequest::new(3).signaled(), Inline(b"panic")) }?;
                    std::panic::resume_unwind(Box::new(()))
                })
            });
            assert!(catch_unwind(panics).is_err());
            assert_eq!(fake.calls("wr_complete") + fake.calls("ibv_post_send"), 0);
            post(&mut sends, &[4]).unwrap();
        });
        assert_eq!(fake.calls("wr_start"), fake.calls("wr_complete") + fake.calls("wr_abort"));
        assert_eq!(seen(&mut a.cq).iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [4]);
        assert_eq!(seen(&mut b.cq)[0].byte_len, Some(4));
    });
}

#[test]
fn a_handle_posts_only_enabled_operations_in_a_ready_state() {
    fn refusal(qp: &mut QueuePair) -> PostError {
        with_sends!(qp, |sends| post(&mut sends, &[1])).unwrap_err()
    }
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut early = raw(fake, interfaces);
        assert_eq!(refusal(&mut early.qp), PostError::NotReady { state: QueuePairState::RESET });

        let mut writes = raw_with(&pd, interfaces, WcFields::STANDARD, |qp| qp.operations(SendOps::RDMA_WRITE));
        crate::support::to_rts(&mut writes.qp, early.qp.number());
        assert_eq!(refusal(&mut writes.qp), PostError::NotEnabled { op: SendOps::SEND });

        let (mut a, _b) = raw_pair(&pd, interfaces);
        with_sends!(a.qp, |sends| post(&mut sends, &[1])).unwrap();
        a.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::RESET)).unwrap();
        assert_eq!(refusal(&mut a.qp), PostError::NotReady { state: QueuePairState::RESET });
        assert_eq!(fake.calls("wr_complete") + fake.calls("ibv_post_send"), 1);
    });
}

#[test]
fn a_failed_doorbell_is_reported_and_the_handle_stays_usable() {
    let fake = Fake::new(crate::fake::Config::default());
    let (mut a, _b) = raw_pair(&fake.pd(), crate::support::EXTENDED);
    let (queue, _) = a.qp.split();
    let mut queue = queue.with_interface::<Extended>().unwrap();
    fake.fail_wr_complete(libc::ENOSPC, false);
    assert_eq!(post(&mut queue, &[1]), Err(PostError::QueueFull { posted: 0 }));
    fake.fail_wr_complete(libc::EIO, true);
    assert_eq!(post(&mut queue, &[2]), Err(PostError::MaybePosted { errno: rdma_safe::Errno(libc::EIO) }));
    // The provider reports a batch that is started or aborted in the wrong state.
    assert_eq!(post(&mut queue, &[3]), Ok(()));
}
