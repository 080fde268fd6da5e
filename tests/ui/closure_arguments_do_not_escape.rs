//! A completion or batch that is passed to a closure cannot leave the closure or its thread, and cannot be swapped with another.

use std::ops::ControlFlow;
use std::time::Duration;

use rdma_safe::interface::Extended;
use rdma_safe::post::SendQueue;
use rdma_safe::{CompletionQueue, QueuePair, SendBatch};

fn main() {}

fn a_returned_completion(cq: &mut CompletionQueue) {
    let mut poller = cq.poller_with_interface::<Extended>().unwrap();
    let kept = poller.poll_one(|completion| completion); //~ error lifetime
    drop(kept);
}

fn a_poller_in_another_thread(cq: &mut CompletionQueue) {
    let mut poller = cq.poller_with_interface::<Extended>().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || poller.poll_one(|_| ()).is_ok()); //~ E0277 sent
    });
}

fn a_batch_in_another_thread(sends: &mut SendQueue<'_, Extended>) {
    let _ = sends.post(|batch| {
        std::thread::scope(|scope| {
            scope.spawn(move || batch.len()); //~ E0277 sent
        });
        Ok(())
    });
}

fn a_batch_swapped_with_a_guard(sends: &mut SendQueue<'_, Extended>, other: &mut SendQueue<'_>) {
    let _ = sends.post(|batch| {
        std::mem::swap(batch, &mut other.batch()?); //~ E0308
        Ok(())
    });
}

fn a_batch_swapped_with_another(sends: &mut SendQueue<'_, Extended>, other: &mut SendQueue<'_, Extended>) {
    let _ = sends.post(|batch| {
        other.post(|inner| {
            std::mem::swap(batch, inner); //~ E0521
            Ok(())
        })
    });
}

fn a_batch_posted_in_the_closure(sends: &mut SendQueue<'_, Extended>) {
    let _ = sends.post(|batch| batch.post()); //~ E0599 post
}

fn a_batch_kept<'q>(sends: &mut SendQueue<'q, Extended>, kept: &mut Option<&'q mut SendBatch<'q, Extended>>) {
    let _ = sends.post(|batch| {
        *kept = Some(batch); //~ E0521 //~ E0521 //~ error lifetime
        Ok(())
    });
}

fn a_batch_with_a_destination_swapped(one: &mut SendQueue<'_, Extended>, other: &mut SendQueue<'_, Extended>) {
    let _ = one.post(|batch| {
        other.post(|inner| {
            std::mem::swap(&mut batch.to_srq(1), &mut inner.to_srq(2)); //~ E0521
            Ok(())
        })
    });
}

fn completions_collected(cq: &mut CompletionQueue) {
    let mut poller = cq.poller_with_interface::<Extended>().unwrap();
    let mut all = Vec::new();
    let _ = poller.poll_all(|completion| {
        all.push(completion); //~ E0521
        ControlFlow::Continue(())
    });
}

fn fields_returned(cq: &mut CompletionQueue) {
    let mut poller = cq.poller_with_interface::<Extended>().unwrap();
    let _ = poller.poll_one(|completion| completion.standard()); //~ E0515 //~ error lifetime
}

fn a_drained_completion(qp: &mut QueuePair, cq: &mut CompletionQueue) {
    let mut kept = None;
    let _ = qp.drain(&mut [cq], 1, Duration::ZERO, |completion| {
        kept = Some(completion); //~ E0521
        true
    });
}
