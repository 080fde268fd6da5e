//! What was measured, as it is kept in files and shown.

mod compat;
pub(crate) mod csv;
pub(crate) mod file;
pub(crate) mod plot;
#[cfg(test)]
pub(crate) mod sample;
pub(crate) mod table;

use serde::{Deserialize, Serialize};

use crate::plan::Plan;

/// Changes when files of an earlier version can no longer be read.
pub(crate) const FORMAT: u32 = 1;

/// Everything of one run of the tool.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) format: u32,
    /// Version of the tool.
    pub(crate) version: String,
    /// When it began, in seconds since 1970.
    #[serde(default)]
    pub(crate) unix_time: u64,
    /// A name for comparisons.
    pub(crate) label: String,
    pub(crate) client: Host,
    pub(crate) server: Host,
    pub(crate) plan: Plan,
    pub(crate) rows: Vec<Row>,
}

/// An end of the test.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Host {
    pub(crate) name: String,
    pub(crate) kernel: String,
    pub(crate) cpu: String,
    pub(crate) device: String,
    pub(crate) port: u8,
    pub(crate) link_layer: String,
    pub(crate) gid: String,
    pub(crate) mtu: u32,
    /// Whether it posts by `ibv_wr_*`, and polls by `ibv_start_poll`.
    pub(crate) extended_post: bool,
    pub(crate) extended_poll: bool,
}

/// One size.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Bytes of a message.
    pub(crate) size: u64,
    /// Messages that were measured.
    pub(crate) messages: u64,
    /// Messages before those.
    pub(crate) warm_up_messages: u64,
    /// The user ended it before its time.
    #[serde(default)]
    pub(crate) interrupted: bool,
    /// Seconds that the measured messages took, from the first post to the last completion.
    pub(crate) seconds: f64,
    pub(crate) bandwidth: Option<Bandwidth>,
    pub(crate) latency: Option<Latency>,
    /// What perftest's formulas make of the same messages.
    pub(crate) perftest: Option<Perftest>,
    /// The other direction of a bidirectional test, as the server saw it.
    pub(crate) reverse: Option<Bandwidth>,
    /// Messages, or for writes and reads slots of memory, whose bytes were compared.
    pub(crate) validated: Option<u64>,
    /// Most memory that the client has had resident so far, in bytes.
    pub(crate) peak_resident: u64,
    /// Processor time of the client while it measured; with `--loopback` the server is within it.
    #[serde(default)]
    pub(crate) client_cpu: Option<CpuUse>,
    /// Processor time of the server from when it was ready until the client was done, with the warm-up.
    #[serde(default)]
    pub(crate) server_cpu: Option<CpuUse>,
}

/// Processor time of a process, in seconds: getrusage(2).
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct CpuUse {
    pub(crate) user: f64,
    pub(crate) system: f64,
    /// That passed meanwhile.
    pub(crate) seconds: f64,
    /// 100 for one processor that was kept busy.
    pub(crate) percent: f64,
}

impl CpuUse {
    pub(crate) fn new(user: f64, system: f64, seconds: f64) -> Self {
        let percent = if seconds > 0.0 { (user + system) / seconds * 100.0 } else { 0.0 };
        CpuUse { user, system, seconds, percent }
    }
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Bandwidth {
    /// Bytes a second.
    pub(crate) average: f64,
    /// Messages a second.
    pub(crate) message_rate: f64,
    /// Bytes a second of the fastest millisecond (or longer, where completions are rarer).
    pub(crate) peak: Option<f64>,
}

/// Nanoseconds.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Latency {
    /// What was timed.
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
    /// 50 for the median.
    pub(crate) percent: f64,
    pub(crate) nanoseconds: f64,
}

impl Latency {
    /// The percentile that was asked for, if it was recorded.
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
        /// MiB a second; 0 when it was not looked for.
        peak: f64,
        average: f64,
        /// Million messages a second.
        message_rate: f64,
    },
    /// Microseconds.
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
