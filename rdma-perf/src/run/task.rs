//! Input and output of one thread for one size.

use std::sync::atomic::AtomicU64;

use super::pattern::Pattern;
use super::wait::Shared;
use crate::cpu::Usage;
use crate::plan::Plan;
use crate::stats::Latencies;
use crate::stats::perftest::Timestamps;

/// One size of the plan, for one thread.
pub(crate) struct Task<'t> {
    pub(crate) plan: &'t Plan,
    /// Index of the size in the plan.
    pub(crate) index: usize,
    pub(crate) shared: &'t Shared,
    /// Messages that the peer sends to this worker; [`u64::MAX`] until known.
    pub(crate) expected: &'t AtomicU64,
    /// Called once all messages of this worker have completed, with their number per queue pair.
    pub(crate) sent: &'t dyn Fn(&[u64]),
}

impl Task<'_> {
    pub(super) fn size(&self) -> u64 {
        self.plan.sizes[self.index]
    }

    pub(super) fn pattern(&self) -> Option<Pattern> {
        self.plan.validate.then(|| Pattern::of(self.plan, self.index))
    }
}

/// Results of one thread for one size.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Measured messages.
    pub(crate) messages: u64,
    pub(crate) warm_up: u64,
    /// Times of the first post and of the last completion, in ticks.
    pub(crate) window: (u64, u64),
    /// Processor time of the process just before and after the window.
    pub(crate) usage: Option<(Usage, Usage)>,
    pub(crate) latencies: Latencies,
    /// Peak rate, in messages per tick.
    pub(crate) peak: Option<f64>,
    /// All post and completion times, for perftest's formulas.
    pub(crate) timestamps: Option<Timestamps>,
    /// Messages per queue pair, warm-up included.
    pub(crate) sent: Vec<u64>,
    /// Messages whose bytes were compared on arrival.
    pub(crate) validated: u64,
}

impl Outcome {
    pub(super) fn new(lanes: usize) -> Self {
        Outcome {
            messages: 0,
            warm_up: 0,
            window: (0, 0),
            usage: None,
            latencies: Latencies::new(),
            peak: None,
            timestamps: None,
            sent: vec![0; lanes],
            validated: 0,
        }
    }
}
