//! Limits that results must keep.

use std::time::Duration;

use super::Report;
use crate::units::{Nanos, Rate};

/// An upper limit of a latency percentile.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct LatencyLimit {
    pub(crate) percent: f64,
    pub(crate) limit: Duration,
}

/// Limits for each size.
#[derive(Debug)]
pub(crate) struct Limits<'a> {
    pub(crate) min_bandwidth: Option<Rate>,
    pub(crate) max_latency: &'a [LatencyLimit],
}

impl Limits<'_> {
    /// Prints each broken limit, and returns whether all were kept.
    pub(crate) fn check(&self, report: &Report) -> bool {
        let mut kept = true;
        let mut broken = |size: u64, what: String| {
            eprintln!("rdma-perf: at {} bytes {what}", size);
            kept = false;
        };
        for row in &report.rows {
            if let (Some(limit), Some(bandwidth)) = (self.min_bandwidth, row.bandwidth) {
                if bandwidth.message_rate < limit.messages(row.size) {
                    let gbits = |bytes: f64| bytes * 8.0 / 1e9;
                    let what = match limit {
                        Rate::MessagesPerSecond(least) => {
                            format!("{:.0} messages/s are less than {least:.0} messages/s", bandwidth.message_rate)
                        }
                        Rate::BytesPerSecond(least) => {
                            format!("{:.3} Gb/s are less than {:.3} Gb/s", gbits(bandwidth.average), gbits(least))
                        }
                    };
                    broken(row.size, what);
                }
            }
            for limit in self.max_latency {
                let measured = row.latency.as_ref().and_then(|latency| latency.percentile(limit.percent));
                let Some(measured) = measured else {
                    let samples = row.latency.as_ref().map_or(0, |latency| latency.samples);
                    broken(row.size, format!("{samples} samples are too few for p{}", limit.percent));
                    continue;
                };
                if measured > limit.limit.as_nanos() as f64 {
                    let (percent, limit) = (limit.percent, Nanos(limit.limit.as_nanos() as f64));
                    broken(row.size, format!("the latency of {} at p{percent} is more than {limit}", Nanos(measured)));
                }
            }
        }
        kept
    }
}
