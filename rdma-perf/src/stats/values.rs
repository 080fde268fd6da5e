//! The results of one run.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Bandwidth {
    /// Bytes per second.
    pub(crate) average: f64,
    /// Messages per second.
    pub(crate) message_rate: f64,
    /// Bytes per second in the fastest millisecond, or in a longer interval if completions are rarer.
    pub(crate) peak: Option<f64>,
}

/// Latencies in nanoseconds.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Latency {
    /// Start and end of the timed interval.
    pub(crate) definition: String,
    pub(crate) samples: u64,
    pub(crate) min: f64,
    pub(crate) mean: f64,
    pub(crate) standard_deviation: f64,
    pub(crate) max: f64,
    pub(crate) percentiles: Vec<Percentile>,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Percentile {
    /// Percent; 50 is the median.
    pub(crate) percent: f64,
    pub(crate) nanoseconds: f64,
}

impl Latency {
    /// The value of a percentile, if it was recorded.
    pub(crate) fn percentile(&self, percent: f64) -> Option<f64> {
        self.percentiles.iter().find(|each| each.percent == percent).map(|each| each.nanoseconds)
    }
}

/// Columns of perftest's tables.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Perftest {
    Bandwidth {
        iterations: u64,
        /// MiB per second; 0 if not computed.
        peak: f64,
        average: f64,
        /// Million messages per second.
        message_rate: f64,
    },
    /// All times in microseconds.
    Latency {
        iterations: u64,
        min: f64,
        max: f64,
        typical: f64,
        average: f64,
        standard_deviation: f64,
        percentile_99: f64,
        percentile_99_9: f64,
    },
}
