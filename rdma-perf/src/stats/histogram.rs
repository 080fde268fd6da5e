//! A latency histogram in constant memory.

use hdrhistogram::Histogram;

use crate::clock::Clock;
use crate::stats::values::{Latency, Percentile};

/// Upper bound of the histogram, one hour. Longer latencies are recorded as this.
const MAX_NANOS: u64 = 3_600_000_000_000;

/// A histogram of latencies with three significant digits, of constant size.
#[derive(Clone, Debug)]
pub(crate) struct Latencies(Histogram<u64>);

impl Latencies {
    pub(crate) fn new() -> Self {
        let histogram =
            Histogram::new_with_bounds(1, MAX_NANOS, 3).expect("bounds and digits are in the range of the crate");
        Latencies(histogram)
    }

    #[inline]
    pub(crate) fn record(&mut self, nanos: u64) {
        self.0.saturating_record(nanos);
    }

    pub(crate) fn add(&mut self, other: &Latencies) {
        // Histograms of the same bounds can always be added.
        let _ = self.0.add(&other.0);
    }

    /// Latencies from the differences of successive timestamps, each divided by `divisor`.
    pub(crate) fn of_timestamps(timestamps: &[u64], clock: Clock, divisor: f64) -> Self {
        let mut latencies = Latencies::new();
        for pair in timestamps.windows(2) {
            latencies.record((clock.nanos(pair[1] - pair[0]) / divisor) as u64);
        }
        latencies
    }

    /// Summarizes the samples. `None` if there are none.
    pub(crate) fn summary(&self, definition: &str, percents: &[f64]) -> Option<Latency> {
        if self.0.is_empty() {
            return None;
        }
        let count = self.0.len() as f64;
        // At least one sample must lie beyond a percentile. Otherwise it would be the maximum under another name.
        let is_supported = |percent: f64| percent >= 100.0 || (1.0 - percent / 100.0) * count > 1.0 - 1e-6;
        let percentile = |percent: &f64| {
            // By rank, rounded up. The subtraction keeps the rank of 99.9 % of 1000 samples at 999 despite rounding
            // errors.
            let rank = (percent / 100.0 * count - 1e-6).ceil().max(1.0);
            Percentile { percent: *percent, nanoseconds: self.0.value_at_quantile((rank - 0.5) / count) as f64 }
        };
        Some(Latency {
            definition: definition.to_owned(),
            samples: self.0.len(),
            min: self.0.min() as f64,
            mean: self.0.mean(),
            standard_deviation: self.0.stdev(),
            max: self.0.max() as f64,
            percentiles: percents.iter().filter(|percent| is_supported(**percent)).map(percentile).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_computed_by_rank() {
        let mut latencies = Latencies::new();
        (1..=1000).for_each(|nanos| latencies.record(nanos));
        let summary = latencies.summary("x", &[50.0, 99.0, 99.9, 100.0]).unwrap();
        assert_eq!((summary.samples, summary.min, summary.max), (1000, 1.0, 1000.0));
        let values: Vec<f64> = summary.percentiles.iter().map(|each| each.nanoseconds).collect();
        assert_eq!(values, [500.0, 990.0, 999.0, 1000.0]);
        assert!((summary.mean - 500.5).abs() < 1.0);
    }

    #[test]
    fn few_samples_support_no_high_percentiles() {
        let mut latencies = Latencies::new();
        (1..=50).for_each(|nanos| latencies.record(nanos));
        let summary = latencies.summary("x", &[50.0, 98.0, 99.0, 100.0]).unwrap();
        let percents: Vec<f64> = summary.percentiles.iter().map(|each| each.percent).collect();
        assert_eq!(percents, [50.0, 98.0, 100.0]);
    }

    #[test]
    fn latencies_beyond_the_bound_are_counted() {
        let mut latencies = Latencies::new();
        latencies.record(u64::MAX);
        latencies.record(0);
        assert_eq!(latencies.summary("x", &[]).unwrap().samples, 2);
        assert!(Latencies::new().summary("x", &[50.0]).is_none());
    }
}
