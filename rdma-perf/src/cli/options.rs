//! Groups of options, which are the headings of the help. `-h` leaves out rare options.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use rdma_safe::Mtu;

use super::values::{Cpus, Sizes, byte, cpus, exponent, inline_size, latency_limit, mtu, percent, size_list};
use crate::plan::{Atomic, Connection, Interface, Pinning};
use crate::report::display::Format;
use crate::report::limits::{LatencyLimit, Limits};
use crate::transport::Transport;
use crate::units::{self, Rate};

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Device")]
pub(crate) struct DeviceArgs {
    /// RDMA device; soft0 is the software RNIC, which exists on every host [default: the first one with an active port]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// Port of the device
    #[arg(short = 'i', long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub(crate) ib_port: u8,
    /// Index of the GID to connect from [default: RoCE v2 with an IPv4 address if there is one]
    #[arg(short = 'x', long, value_name = "N", value_parser = clap::value_parser!(u32).range(..256))]
    pub(crate) gid_index: Option<u32>,
    /// TCP port of the server
    #[arg(short, long, default_value_t = 18515, value_name = "N")]
    pub(crate) port: u16,
}

/// What to send and how much of it.
#[derive(Debug, Args)]
#[command(next_help_heading = "Load")]
pub(crate) struct LoadArgs {
    /// Message sizes in bytes: a list such as 64,4K,1M; 2..8M stands for the powers of two in this range
    #[arg(short, long, value_name = "SIZES", value_parser = size_list)]
    pub(crate) size: Option<Sizes>,
    /// All powers of two from 2 bytes to 8 MiB, or over UD to the path MTU: same as --size 2..8M
    #[arg(short, long, conflicts_with = "size")]
    pub(crate) all: bool,
    /// Messages of each queue pair
    #[arg(short = 'n', long, value_name = "N", conflicts_with = "duration", value_parser = clap::value_parser!(u64).range(5..))]
    pub(crate) iters: Option<u64>,
    /// Measure for this long instead of a number of messages: 500ms, 10s, 2m; without a unit, seconds
    #[arg(short = 'D', long, value_name = "TIME", value_parser = units::duration)]
    pub(crate) duration: Option<Duration>,
    /// Warm-up before measuring: a time, or without --duration a number of messages [default: a tenth of the run]
    #[arg(long, value_name = "TIME|N", hide_short_help = true)]
    pub(crate) warm_up: Option<String>,
    /// Queue pairs [default: one for each thread]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub(crate) qps: Option<u32>,
    /// Threads at each end; the queue pairs are divided evenly among them
    #[arg(short = 'T', long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) threads: u32,
    /// Both ends send
    #[arg(short, long)]
    pub(crate) bidirectional: bool,
    /// Limit the send rate of all queue pairs together: 10Gb/s, 500MiB/s or 1Mmsg/s
    #[arg(long, value_name = "RATE", value_parser = units::rate)]
    pub(crate) rate: Option<Rate>,
    /// Compare the bytes that arrive with the bytes that were sent
    #[arg(long)]
    pub(crate) validate: bool,
}

/// How to use verbs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Verbs")]
pub(crate) struct VerbsArgs {
    /// Queue pair type: RC, UC for sends and writes, or UD for sends up to the path MTU
    #[arg(short, long, default_value = "RC", value_name = "TYPE", ignore_case = true)]
    pub(crate) connection: Transport,
    /// Sends in flight per queue pair [default: 128]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) tx_depth: Option<u32>,
    /// Receives posted per queue pair
    #[arg(short, long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rx_depth: u32,
    /// Share the --rx-depth receives among the queue pairs of a thread: a shared receive queue
    #[arg(long)]
    pub(crate) use_srq: bool,
    /// Completion moderation: signal every Nth send, for all sizes [default: the --post-list if it is set, 1 if all
    /// sizes are above 8 KiB, else 100; at most --tx-depth]
    #[arg(short = 'Q', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) cq_mod: Option<u32>,
    /// Post N sends with one doorbell
    #[arg(short = 'l', long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) post_list: u32,
    /// Send messages up to this size inline, in bytes
    #[arg(short = 'I', long, default_value = "0", value_name = "SIZE", value_parser = inline_size)]
    pub(crate) inline: u32,
    /// Sleep until a completion event instead of polling
    #[arg(short, long)]
    pub(crate) events: bool,
    /// Send immediate data with each message
    #[arg(long)]
    pub(crate) imm: bool,
    /// Atomic operation [default: fetch-add]
    #[arg(short = 'A', long)]
    pub(crate) atomic: Option<Atomic>,
    /// Measure until the acknowledgement, instead of half a ping-pong of writes detected by polling memory
    #[arg(long)]
    pub(crate) ack: bool,
    /// Reads or atomics outstanding per queue pair [default: the maximum of both devices, at most 16]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub(crate) outstanding: Option<u8>,
    /// Interface for posting
    #[arg(long, default_value = "auto", hide_short_help = true)]
    pub(crate) post: Interface,
    /// Interface for polling
    #[arg(long, default_value = "auto", hide_short_help = true)]
    pub(crate) poll: Interface,
    /// Back the buffers with huge pages of 2 MiB
    #[arg(long, hide_short_help = true)]
    pub(crate) huge_pages: bool,
    /// Give up if nothing completes for this long
    #[arg(long, default_value = "10s", value_name = "TIME", value_parser = units::duration, hide_short_help = true)]
    pub(crate) timeout: Duration,
    /// Measure and calculate as perftest does, for comparison: classic interfaces, one thread, no warm-up
    #[arg(long, value_name = "TOOL", value_parser = ["perftest"], hide_short_help = true)]
    pub(crate) compat: Option<String>,
}

/// Where threads run.
#[derive(Debug, Args)]
#[command(next_help_heading = "Processors")]
pub(crate) struct ProcessorArgs {
    /// Pin the threads of this end to these processors, in this order: 2,4-7
    #[arg(long, value_name = "LIST", value_parser = cpus)]
    pub(crate) cpu: Option<Cpus>,
    /// Pin the threads of the server [default: the server's own --cpu, if set]
    #[arg(long, value_name = "LIST", value_parser = cpus)]
    pub(crate) server_cpu: Option<Cpus>,
    /// Yield the processor after an empty poll: for machines with fewer processors than threads
    #[arg(long = "yield")]
    pub(crate) yield_cpu: bool,
}

/// How the queue pairs of both ends are connected.
#[derive(Debug, Args)]
#[command(next_help_heading = "Connection")]
pub(crate) struct ConnectionArgs {
    /// Connect the queue pairs with librdmacm, to the IP address of the server's GID if it has one, otherwise to HOST;
    /// RC only; both ends must be rdma-perf, as perftest's -R uses another protocol
    #[arg(short = 'R', long)]
    pub(crate) rdma_cm: bool,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 bytes; over UD also the longest message [default: the smaller MTU of the
    /// two ports]
    #[arg(short, long, value_name = "BYTES", value_parser = mtu)]
    pub(crate) mtu: Option<Mtu>,
    /// Service level: 0 to 15; on RoCE 0 to 7, the priority (PCP) of a tagged VLAN
    #[arg(
        short = 'S', long, default_value_t = Connection::DEFAULT.service_level, value_name = "N",
        value_parser = clap::value_parser!(u8).range(..=15)
    )]
    pub(crate) sl: u8,
    /// Traffic class of the global route: 0 to 255, or 0x68; on RoCE v2 the IP type of service, which is DSCP times 4
    #[arg(long, default_value_t = Connection::DEFAULT.traffic_class, value_name = "N", value_parser = byte)]
    pub(crate) tclass: u8,
    /// ACK timeout, after which packets are retransmitted: 4.096 µs times 2 to the N (14: 67 ms, 18: 1.07 s), or a
    /// time, which is rounded up to such a value
    ///
    /// 1 is 8.2 µs, 8 is 1.05 ms, 10 is 4.19 ms, 12 is 16.8 ms, 14 is 67.1 ms, 16 is 268 ms, 18 is 1.07 s, 20 is 4.29
    /// s; 0 is no timeout. A device may wait up to four times as long, and may have a minimum of its own.
    #[arg(short = 'u', long, default_value_t = Connection::DEFAULT.timeout, value_name = "N|TIME", value_parser = exponent)]
    pub(crate) qp_timeout: u8,
    /// Retries after an ACK timeout before the connection fails: 0 to 7
    #[arg(
        long, default_value_t = Connection::DEFAULT.retries, value_name = "N",
        value_parser = clap::value_parser!(u8).range(..=7), hide_short_help = true
    )]
    pub(crate) retry_count: u8,
    /// Retries after an RNR NAK, when the peer has no receive posted: 0 to 6, or 7 without limit
    #[arg(
        long, default_value_t = Connection::DEFAULT.rnr_retries, value_name = "N",
        value_parser = clap::value_parser!(u8).range(..=7), hide_short_help = true
    )]
    pub(crate) rnr_retry: u8,
}

/// What to do with the results.
#[derive(Debug, Args)]
#[command(next_help_heading = "Results")]
pub(crate) struct OutputArgs {
    /// Format of the results on standard output
    #[arg(long, default_value = "text", value_name = "FORM")]
    pub(crate) format: Format,
    /// Also write the results to a file named .json (which `rdma-perf plot` reads) or .csv
    #[arg(short = 'O', long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Also draw the results as an SVG chart
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Name of this run in files and charts [default: verb and metric]
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// Report bandwidth in Gb/s (10^9 bits) instead of MiB/s
    #[arg(long)]
    pub(crate) report_gbits: bool,
    /// Latency percentiles to show
    #[arg(long, default_value = "50,90,99,99.9,99.99", value_name = "LIST", value_delimiter = ',', value_parser = percent)]
    pub(crate) percentiles: Vec<f64>,
    /// Exit with status 3 if the average of any size is below this: 90Gb/s, 10GiB/s, 1Mmsg/s
    #[arg(long, value_name = "RATE", value_parser = units::rate, hide_short_help = true)]
    pub(crate) min_bandwidth: Option<Rate>,
    /// Exit with status 3 if a latency percentile of any size is above this: p99=10us, max=1ms
    #[arg(long, value_name = "pPERCENT=TIME", value_parser = latency_limit, hide_short_help = true)]
    pub(crate) max_latency: Vec<LatencyLimit>,
    /// Print no progress bar and no notes
    #[arg(long)]
    pub(crate) quiet: bool,
}

impl LoadArgs {
    /// Whether the user gave no `--size`.
    pub(crate) fn has_default_sizes(&self) -> bool {
        self.size.is_none()
    }
}

impl OutputArgs {
    /// Percentiles to record: those to show, those with a limit, and those that charts draw.
    pub(crate) fn recorded_percentiles(&self) -> Vec<f64> {
        let limits = self.max_latency.iter().map(|limit| limit.percent);
        let mut percents: Vec<f64> = self.percentiles.iter().copied().chain(limits).chain([50.0, 99.0, 99.9]).collect();
        percents.sort_by(f64::total_cmp);
        percents.dedup();
        percents
    }

    pub(crate) fn limits(&self) -> Limits<'_> {
        Limits { min_bandwidth: self.min_bandwidth, max_latency: &self.max_latency }
    }
}

impl ProcessorArgs {
    pub(super) fn pinning(&self) -> Pinning {
        let list = |cpus: &Option<Cpus>| cpus.as_ref().map_or_else(Vec::new, |cpus| cpus.0.clone());
        Pinning { client: list(&self.cpu), server: list(&self.server_cpu) }
    }
}
