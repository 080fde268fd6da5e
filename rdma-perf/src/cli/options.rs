//! Options in groups, which are the headings of the help. `-h` leaves out what is rarely asked for.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use rdma_safe::Mtu;

use super::values::{
    Cpus, LatencyLimit, Sizes, byte, cpus, exponent, inline_size, latency_limit, mtu, percent, size_list,
};
use crate::plan::{Atomic, Connection, Interface, Pinning};
use crate::transport::Transport;
use crate::units::{self, Rate};

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Device")]
pub(crate) struct DeviceArgs {
    /// RDMA device; soft0 is a software RNIC, and everywhere [default: the first one with an active port]
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

/// What to send, and how much of it.
#[derive(Debug, Args)]
#[command(next_help_heading = "Load")]
pub(crate) struct LoadArgs {
    /// Sizes of a message in bytes: a list (64,4K,1M) in which 2..8M stands for the powers of two
    #[arg(short, long, value_name = "SIZES", value_parser = size_list)]
    pub(crate) size: Option<Sizes>,
    /// All sizes from 2 bytes to 8 MiB, or over UD to the path MTU: short for --size 2..8M
    #[arg(short, long, conflicts_with = "size")]
    pub(crate) all: bool,
    /// Messages of each queue pair
    #[arg(short = 'n', long, value_name = "N", conflicts_with = "duration", value_parser = clap::value_parser!(u64).range(5..))]
    pub(crate) iters: Option<u64>,
    /// Measure for this long instead: 500ms, 10s, 2m; without a unit, seconds
    #[arg(short = 'D', long, value_name = "TIME", value_parser = units::duration)]
    pub(crate) duration: Option<Duration>,
    /// Time, or without --duration messages, before measuring [default: a tenth]
    #[arg(long, value_name = "TIME|N", hide_short_help = true)]
    pub(crate) warm_up: Option<String>,
    /// Queue pairs [default: one for each thread]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub(crate) qps: Option<u32>,
    /// Threads at each end; the queue pairs are spread over them
    #[arg(short = 'T', long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) threads: u32,
    /// Both ends send
    #[arg(short, long)]
    pub(crate) bidirectional: bool,
    /// Send no faster than this: 10Gb/s, 500MiB/s or 1Mmsg/s, over all queue pairs
    #[arg(long, value_name = "RATE", value_parser = units::rate)]
    pub(crate) rate: Option<Rate>,
    /// Compare the bytes that arrive with those that were sent
    #[arg(long)]
    pub(crate) validate: bool,
}

/// Which means of verbs to use.
#[derive(Debug, Args)]
#[command(next_help_heading = "Means")]
pub(crate) struct MeansArgs {
    /// Type of the queue pairs: RC, UC for sends and writes, or UD for sends up to the path MTU
    #[arg(short, long, default_value = "RC", value_name = "TYPE", ignore_case = true)]
    pub(crate) connection: Transport,
    /// Sends in flight of each queue pair [default: 128]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) tx_depth: Option<u32>,
    /// Receives posted of each queue pair
    #[arg(short, long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rx_depth: u32,
    /// The queue pairs of a thread share --rx-depth receives: a shared receive queue
    #[arg(long)]
    pub(crate) use_srq: bool,
    /// Completion moderation: signal every N sends, of all sizes [default: the --post-list if there is one, 1 if all sizes
    /// are above 8 KiB, else 100; at most --tx-depth]
    #[arg(short = 'Q', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) cq_mod: Option<u32>,
    /// Post N sends with one doorbell
    #[arg(short = 'l', long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) post_list: u32,
    /// Send messages up to this size inline, in bytes
    #[arg(short = 'I', long, default_value = "0", value_name = "SIZE", value_parser = inline_size)]
    pub(crate) inline: u32,
    /// Sleep until there is a completion event, instead of polling
    #[arg(short, long)]
    pub(crate) events: bool,
    /// Immediate data with each message
    #[arg(long)]
    pub(crate) imm: bool,
    /// Atomic operation [default: fetch-add]
    #[arg(short = 'A', long)]
    pub(crate) atomic: Option<Atomic>,
    /// Until the acknowledgement, instead of half of a ping-pong of writes that are seen by polling memory
    #[arg(long)]
    pub(crate) ack: bool,
    /// Reads or atomics outstanding of each queue pair [default: as many as both devices can, at most 16]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub(crate) outstanding: Option<u8>,
    /// Interface to post by
    #[arg(long, default_value = "auto", hide_short_help = true)]
    pub(crate) post: Interface,
    /// Interface to poll by
    #[arg(long, default_value = "auto", hide_short_help = true)]
    pub(crate) poll: Interface,
    /// Back the buffers by huge pages of 2 MiB
    #[arg(long, hide_short_help = true)]
    pub(crate) huge_pages: bool,
    /// Give up when nothing completes for this long
    #[arg(long, default_value = "10s", value_name = "TIME", value_parser = units::duration, hide_short_help = true)]
    pub(crate) timeout: Duration,
    /// Measure and reckon as perftest does (which sends classically, without warm-up): to be compared with it
    #[arg(long, value_name = "TOOL", value_parser = ["perftest"], hide_short_help = true)]
    pub(crate) compat: Option<String>,
}

/// Where threads run.
#[derive(Debug, Args)]
#[command(next_help_heading = "Processors")]
pub(crate) struct ProcessorArgs {
    /// Pin this end's threads to these processors, one after the other: 2,4-7
    #[arg(long, value_name = "LIST", value_parser = cpus)]
    pub(crate) cpu: Option<Cpus>,
    /// Pin the server's threads [default: to its own --cpu, if it has one]
    #[arg(long, value_name = "LIST", value_parser = cpus)]
    pub(crate) server_cpu: Option<Cpus>,
    /// Yield the processor when a poll finds nothing: for machines with fewer processors than threads
    #[arg(long = "yield")]
    pub(crate) yield_cpu: bool,
}

/// How the queue pairs of both ends are connected.
#[derive(Debug, Args)]
#[command(next_help_heading = "Connection")]
pub(crate) struct ConnectionArgs {
    /// Connect the queue pairs by librdmacm: at the address of the server's GID where that is one of IP, otherwise at HOST; RC
    /// only, and both ends are rdma-perf: perftest's -R says other things to its peer
    #[arg(short = 'R', long)]
    pub(crate) rdma_cm: bool,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 bytes; over UD, the longest message [default: the smaller one of the two ports]
    #[arg(short, long, value_name = "BYTES", value_parser = mtu)]
    pub(crate) mtu: Option<Mtu>,
    /// Service level, on RoCE the priority (PCP) of a tagged VLAN: 0 to 15, on RoCE to 7
    #[arg(
        short = 'S', long, default_value_t = Connection::DEFAULT.service_level, value_name = "N",
        value_parser = clap::value_parser!(u8).range(..=15)
    )]
    pub(crate) sl: u8,
    /// Traffic class of the global route: 0 to 255, or 0x68; on RoCE v2 the IP type of service, that is DSCP times 4
    #[arg(long, default_value_t = Connection::DEFAULT.traffic_class, value_name = "N", value_parser = byte)]
    pub(crate) tclass: u8,
    /// Acknowledgement timeout, after which packets are sent again: 4.096 µs times 2 to the N (14: 67 ms, 18: 1.07 s), or a
    /// time, which is rounded up to one of these
    ///
    /// 1 is 8.2 µs, 8 is 1.05 ms, 10 is 4.19 ms, 12 is 16.8 ms, 14 is 67.1 ms, 16 is 268 ms, 18 is 1.07 s, 20 is 4.29 s; 0
    /// waits for ever. Devices may take up to four times as long, and have a least timeout of their own.
    #[arg(short = 'u', long, default_value_t = Connection::DEFAULT.timeout, value_name = "N|TIME", value_parser = exponent)]
    pub(crate) qp_timeout: u8,
    /// Retries after a timeout, before the connection is given up: 0 to 7
    #[arg(
        long, default_value_t = Connection::DEFAULT.retries, value_name = "N",
        value_parser = clap::value_parser!(u8).range(..=7), hide_short_help = true
    )]
    pub(crate) retry_count: u8,
    /// Retries when the peer has no receive posted: 0 to 6, or 7 for ever
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
    /// Print the results in this form
    #[arg(long, default_value = "text", value_name = "FORM")]
    pub(crate) format: Format,
    /// Also write the results to a file; its name ends in .json (which `rdma-perf plot` reads) or .csv
    #[arg(short = 'O', long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Also draw the results to an SVG file
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// A name of this run in files and charts [default: verb and metric]
    #[arg(long, value_name = "TEXT")]
    pub(crate) label: Option<String>,
    /// Report bandwidth in Gb/s (10^9 bits) instead of MiB/s
    #[arg(long)]
    pub(crate) report_gbits: bool,
    /// Percentiles of the latency
    #[arg(long, default_value = "50,90,99,99.9,99.99", value_name = "LIST", value_delimiter = ',', value_parser = percent)]
    pub(crate) percentiles: Vec<f64>,
    /// Fail (exit status 3) when the average of a size is less than this: 90Gb/s, 10GiB/s, 1Mmsg/s
    #[arg(long, value_name = "RATE", value_parser = units::rate, hide_short_help = true)]
    pub(crate) min_bandwidth: Option<Rate>,
    /// Fail (exit status 3) when a percentile of the latency of a size is more than this: p99=10us, max=1ms
    #[arg(long, value_name = "pPERCENT=TIME", value_parser = latency_limit, hide_short_help = true)]
    pub(crate) max_latency: Vec<LatencyLimit>,
    /// No progress bar, and no remarks
    #[arg(long)]
    pub(crate) quiet: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Format {
    /// A table with the columns of perftest
    Text,
    Json,
    Csv,
}

impl LoadArgs {
    /// Whether the user has asked for no size in particular.
    pub(crate) fn is_any_size(&self) -> bool {
        self.size.is_none()
    }
}

impl ProcessorArgs {
    pub(super) fn pinning(&self) -> Pinning {
        let list = |cpus: &Option<Cpus>| cpus.as_ref().map_or_else(Vec::new, |cpus| cpus.0.clone());
        Pinning { client: list(&self.cpu), server: list(&self.server_cpu) }
    }
}
