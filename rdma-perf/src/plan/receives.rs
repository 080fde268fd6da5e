//! Reposting of receives, and the credit window that follows from it.

use super::Plan;

/// Most receives per doorbell.
pub(crate) const RECEIVE_BATCH: u32 = 32;

/// When receives are reposted; the same for all queue pairs.
#[derive(Clone, Copy)]
pub(crate) struct RepostRules {
    pub(crate) depth: u64,
    /// Receives per doorbell.
    pub(crate) batch: u64,
}

impl RepostRules {
    pub(crate) fn of(plan: &Plan) -> Self {
        let depth = u64::from(plan.rx_depth);
        // perftest reposts receives one by one.
        let batch = if plan.compat { 1 } else { (depth / 2).clamp(1, RECEIVE_BATCH.into()) };
        RepostRules { depth, batch }
    }

    /// Receives of a queue that are posted at any time, unless the run needs fewer.
    fn always_posted(self) -> u64 {
        self.depth - self.batch + 1
    }
}

/// Messages that a queue pair may have in flight: the receives that are always posted, or its share of a shared receive
/// queue.
pub(crate) fn credit_window(plan: &Plan) -> u64 {
    let sharers = if plan.shared_receives { plan.qps.max(1) } else { 1 };
    RepostRules::of(plan).always_posted() / u64::from(sharers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_credit_window_is_the_receives_that_are_always_posted() {
        let window = |arguments: &str| credit_window(&crate::testing::sample::plan(arguments));
        // Receives are reposted in batches of half the queue, at most 32.
        assert_eq!(window("send bw h"), 512 - 31);
        assert_eq!(window("send bw h -r 2"), 2);
        assert_eq!(window("send bw h -r 16"), 9);
        assert_eq!((window("send bw h -q 8 -r 16"), window("send bw h -q 8 -r 16 --use-srq")), (9, 1));
        assert_eq!(window("send bw h -q 8 -T 2 -r 16 --use-srq"), 2);
    }
}
