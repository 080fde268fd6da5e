//! Taking what is left on a queue pair before it goes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{QueuePair, QueuePairAttributes, QueuePairState};
use crate::{CompletionQueue, Error, Result, WorkCompletion};

/// Empty looks before other threads get the processor.
const SPINS: u32 = 64;

/// Completions that are taken before their places in a queue are given back: others need room, too.
const AT_ONCE: u32 = 16;

impl QueuePair {
    /// Brings it to the error state, in which all work in flight is flushed, and takes completions until `outstanding` work
    /// requests have completed, at most for `timeout`. Returns how many have not.
    ///
    /// `cqs` are the completion queues of its sends and receives, once if they are the same. Every completion that is taken is
    /// shown to `each`, also those of other queue pairs; it says whether it is one of those outstanding. It knows them by their
    /// identifier: the opcode of work that was flushed is not valid.
    ///
    /// It counts, and does not post a last work request to wait for: not every provider flushes what is posted in the error state.
    /// To go there anew, which this does, makes SoftRoCE flush receives that were posted after the queue pair had failed. What a
    /// provider flushes never is among those that are returned as left, and ends when the queue pair is
    /// [destroyed](QueuePair::destroy) or reset. Until then the memory of what is left is the device's.
    ///
    /// Outstanding are receives, and sends whose completion was asked for, which have been posted and not seen to complete. A send
    /// without has a completion only if it is flushed. Receives of a shared receive queue that were not taken stay there. In RESET
    /// nothing is in flight, and nothing will complete.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use rdma_safe::{CompletionQueue, QueuePair};
    /// # fn example(mut qp: QueuePair, cq: &mut CompletionQueue, receives: u64) -> rdma_safe::Result<()> {
    /// const RECEIVE: u64 = 1 << 63; // set in the identifier of each receive
    /// let left = qp.drain(&mut [cq], receives, Duration::from_secs(1), |completion| {
    ///     // … take note of what has become of it …
    ///     completion.wr_id() & RECEIVE != 0
    /// })?;
    /// if left > 0 {
    ///     eprintln!("{left} receives were not flushed");
    /// }
    /// qp.destroy()?; // now all memory is free
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::WrongParent`] when one of its completion queues is not among `cqs`; [`Error::Modify`]; [`Error::Poll`].
    pub fn drain(
        &mut self,
        cqs: &mut [&mut CompletionQueue],
        outstanding: u64,
        timeout: Duration,
        mut each: impl FnMut(&WorkCompletion<'_>) -> bool,
    ) -> Result<u64> {
        if !self.shared.completes_to(cqs) {
            return Err(Error::WrongParent { object: "completion queue" });
        }
        if self.state() == QueuePairState::RESET {
            return Ok(outstanding);
        }
        self.modify(&QueuePairAttributes::new().set_state(QueuePairState::ERR))?;
        let (start, mut left, mut idle) = (Instant::now(), outstanding, 0);
        // What can have come by the deadline: others may go on and on completing to the same queues.
        let mut late: u64 = cqs.iter().map(|cq| u64::from(cq.capacity())).sum();
        while left > 0 {
            let mut taken = 0;
            for cq in cqs.iter_mut() {
                let mut poll = cq.poll();
                for _ in 0..AT_ONCE {
                    let Some(completion) = poll.next()? else { break };
                    taken += 1;
                    if each(&completion) {
                        left = left.saturating_sub(1);
                    }
                }
            }
            // What had come by then is taken: so a timeout of nothing takes what is there.
            if left > 0 && start.elapsed() >= timeout {
                late = late.saturating_sub(taken);
                if taken == 0 || late == 0 {
                    break;
                }
            }
            idle = if taken > 0 { 0 } else { idle + 1 };
            match idle % SPINS {
                0 => std::thread::yield_now(),
                _ => std::hint::spin_loop(),
            }
        }
        Ok(left)
    }
}

impl super::Shared {
    /// Whether all queues that it completes to are among `cqs`.
    fn completes_to(&self, cqs: &[&mut CompletionQueue]) -> bool {
        let is_there = |own| cqs.iter().any(|cq| Arc::ptr_eq(cq.shared(), own));
        self.object.cqs.iter().flatten().all(is_there)
    }
}
