//! The completion and the batch that a closure is lent end with it, in its thread, and are not exchanged for others.

use rdma_safe::{CompletionQueue, Extended, SendQueue};

fn main() {}

fn a_completion_that_stays(cq: &mut CompletionQueue) {
    let mut poller = cq.extended_poller().unwrap();
    let kept = poller.take(|completion| completion);
    drop(kept);
}

fn a_poller_in_another_thread(cq: &mut CompletionQueue) {
    let mut poller = cq.extended_poller().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || poller.take(|_| ()).is_ok());
    });
}

fn a_batch_in_another_thread(sends: &mut SendQueue<'_, Extended>) {
    let _ = sends.post(|batch| {
        std::thread::scope(|scope| {
            scope.spawn(move || batch.len());
        });
        Ok(())
    });
}

fn a_batch_for_a_guard(sends: &mut SendQueue<'_, Extended>, other: &mut SendQueue<'_>) {
    let _ = sends.post(|batch| {
        std::mem::swap(batch, &mut other.batch()?);
        Ok(())
    });
}

fn a_batch_for_that_of_another_queue(sends: &mut SendQueue<'_, Extended>, other: &mut SendQueue<'_, Extended>) {
    let _ = sends.post(|batch| {
        other.post(|inner| {
            std::mem::swap(batch, inner);
            Ok(())
        })
    });
}

fn a_batch_posted_early(sends: &mut SendQueue<'_, Extended>) {
    let _ = sends.post(|batch| batch.post());
}
