//! Results of a test, and their files, tables and charts.

mod compat;
pub(crate) mod csv;
pub(crate) mod display;
pub(crate) mod file;
pub(crate) mod limits;
pub(crate) mod output;
pub(crate) mod plot;
pub(crate) mod table;

use serde::{Deserialize, Serialize};

use crate::cpu::CpuUse;
use crate::plan::Plan;
use crate::stats::{Bandwidth, Latency, Perftest};

/// Version of the file format. It changes when older files can no longer be read.
pub(crate) const FORMAT: u32 = 1;

/// Results of one test. JSON files have the same field names.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) format: u32,
    /// Version of rdma-perf.
    pub(crate) version: String,
    /// Start of the test, in seconds since 1970.
    #[serde(default)]
    pub(crate) unix_time: u64,
    /// Name for comparisons.
    pub(crate) label: String,
    pub(crate) client: Host,
    pub(crate) server: Host,
    pub(crate) plan: Plan,
    pub(crate) rows: Vec<Row>,
}

/// Description of an end.
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
    /// Whether the device posts by `ibv_wr_*` and polls by `ibv_start_poll`.
    pub(crate) extended_post: bool,
    pub(crate) extended_poll: bool,
}

/// Results of one size.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Message size in bytes.
    pub(crate) size: u64,
    /// Measured messages.
    pub(crate) messages: u64,
    /// Messages of the warm-up.
    pub(crate) warm_up_messages: u64,
    /// Whether Ctrl-C ended the run early.
    #[serde(default)]
    pub(crate) interrupted: bool,
    /// Seconds from the first post to the last completion of the measured messages.
    pub(crate) seconds: f64,
    pub(crate) bandwidth: Option<Bandwidth>,
    pub(crate) latency: Option<Latency>,
    /// Results by perftest's formulas.
    pub(crate) perftest: Option<Perftest>,
    /// The other direction of a bidirectional test, measured by the server.
    pub(crate) reverse: Option<Bandwidth>,
    /// Compared messages; for writes and reads, compared slots of memory.
    pub(crate) validated: Option<u64>,
    /// Peak resident memory of the client so far, in bytes.
    pub(crate) peak_resident: u64,
    /// Processor time of the client while it measured; with `--loopback` it includes the server.
    #[serde(default)]
    pub(crate) client_cpu: Option<CpuUse>,
    /// Processor time of the server, from ready until the client was done, warm-up included.
    #[serde(default)]
    pub(crate) server_cpu: Option<CpuUse>,
}
