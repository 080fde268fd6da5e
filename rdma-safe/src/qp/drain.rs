//! Draining: flushes outstanding work and takes its completions before the queue pair is destroyed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{QueuePair, QueuePairAttributes, QueuePairState};
use crate::{CompletionQueue, Error, Result, WorkCompletion};

/// Empty polls before the thread yields.
const SPINS: u32 = 64;

/// Completions taken per cursor. Ending the cursor frees their entries, which other queue pairs may need.
const BATCH: u32 = 16;

impl QueuePair {
    /// Flushes all work in flight and takes completions until `outstanding` work requests have completed.
    ///
    /// It brings the queue pair to the error state, and takes completions for at most `timeout`. Returns the number of
    /// work requests that have not completed.
    ///
    /// `cqs` are the completion queues of its sends and receives, once if they are the same. `each` is called with
    /// every completion that is taken, including those of other queue pairs, and returns whether it belongs to the
    /// outstanding work. It must decide by the identifier, because the opcode of flushed work is not valid.
    ///
    /// Outstanding work is all receives, and all signaled sends, that were posted and whose completion was not taken.
    /// An unsignaled send generates a completion only if it is flushed. Receives that were not taken from a shared
    /// receive queue stay there. In RESET nothing is in flight, and nothing will complete.
    ///
    /// The method counts completions instead of waiting for a last work request, because not every provider flushes
    /// work that is posted in the error state. It enters the error state again even if the queue pair is in it, because
    /// this makes SoftRoCE flush receives that were posted after the queue pair had failed. Work that a provider never
    /// flushes is in the returned number. It ends when the queue pair is [destroyed](QueuePair::destroy) or reset;
    /// until then the device may access its memory.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use rdma_safe::{CompletionQueue, QueuePair};
    /// # fn example(mut qp: QueuePair, cq: &mut CompletionQueue, receives: u64) -> rdma_safe::Result<()> {
    /// const RECEIVE: u64 = 1 << 63; // set in the identifier of each receive
    /// let left = qp.drain(&mut [cq], receives, Duration::from_secs(1), |completion| {
    ///     // … record its status …
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
    /// [`Error::WrongParent`] if one of its completion queues is not in `cqs`; [`Error::Modify`]; [`Error::Poll`].
    pub fn drain(
        &mut self,
        cqs: &mut [&mut CompletionQueue],
        outstanding: u64,
        timeout: Duration,
        mut each: impl FnMut(&WorkCompletion<'_>) -> bool,
    ) -> Result<u64> {
        if !self.core().completes_to(cqs) {
            return Err(Error::WrongParent { object: "completion queue" });
        }
        if self.state() == QueuePairState::RESET {
            return Ok(outstanding);
        }
        self.modify(&QueuePairAttributes::new().set_state(QueuePairState::ERR))?;
        let (start, mut left, mut idle) = (Instant::now(), outstanding, 0);
        // Limit of completions taken after the deadline, since other queue pairs may keep completing to the same
        // queues.
        let mut late_limit: u64 = cqs.iter().map(|cq| u64::from(cq.capacity())).sum();
        while left > 0 {
            let mut taken = 0;
            for cq in cqs.iter_mut() {
                let mut poll = cq.poll();
                for _ in 0..BATCH {
                    let Some(completion) = poll.next()? else { break };
                    taken += 1;
                    if each(&completion) {
                        left = left.saturating_sub(1);
                    }
                }
            }
            // Completions that were there at the deadline are taken, so a zero timeout takes all that are there.
            if left > 0 && start.elapsed() >= timeout {
                late_limit = late_limit.saturating_sub(taken);
                if taken == 0 || late_limit == 0 {
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

impl super::Core {
    /// Whether `cqs` has all queues that this queue pair completes to.
    fn completes_to(&self, cqs: &[&mut CompletionQueue]) -> bool {
        let contains = |own| cqs.iter().any(|cq| Arc::ptr_eq(cq.shared(), own));
        self.object.cqs.iter().flatten().all(contains)
    }
}
