//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use rdma_safe::Mtu;

use crate::plan::{Atomic, Interface, Length, Metric, Plan, Transport, Verb, WarmUp};
use crate::units::{self, Rate};

/// Measures RDMA between two hosts: bandwidth, message rate and latency of sends, writes, reads and atomics
///
/// On one host:      rdma-perf server
/// On the other:     rdma-perf write bw HOST
/// On a single one:  rdma-perf write bw --loopback
#[derive(Debug, Parser)]
#[command(name = "rdma-perf", version, verbatim_doc_comment, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Messages that the peer posts receives for
    Send(TestArgs),
    /// Writes to the peer's memory
    Write(TestArgs),
    /// Reads of the peer's memory
    Read(TestArgs),
    /// Atomic operations on words of the peer's memory
    Atomic(TestArgs),
    /// Serves tests until it is ended: clients say what is to be done
    Server(ServerArgs),
    /// Draws results that were written by --output, several on one chart to compare them
    Plot(PlotArgs),
    /// Checks this host's set-up for RDMA and says what to change
    Doctor(DoctorArgs),
}

#[derive(Clone, Debug, Args)]
pub(crate) struct DeviceArgs {
    /// RDMA device [default: the first one with an active port]
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

#[derive(Debug, Args)]
pub(crate) struct ServerArgs {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    /// End after one client
    #[arg(long)]
    pub(crate) once: bool,
    /// Refuse tests that would take more memory than this for their buffers
    #[arg(long, default_value = "4G", value_name = "SIZE", value_parser = units::size)]
    pub(crate) max_memory: u64,
}

#[derive(Debug, Args)]
pub(crate) struct TestArgs {
    /// Bandwidth or latency
    pub(crate) metric: Metric,
    /// Host that runs `rdma-perf server`
    #[arg(required_unless_present = "loopback", value_name = "HOST|--loopback")]
    pub(crate) host: Option<String>,
    /// Be the server, too, on the same device
    #[arg(long, conflicts_with = "host")]
    pub(crate) loopback: bool,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) how: HowArgs,
    #[command(flatten)]
    pub(crate) out: OutputArgs,
}

/// What to send, and how much of it.
#[derive(Debug, Args)]
#[command(next_help_heading = "Load")]
pub(crate) struct LoadArgs {
    /// Sizes of a message: a list (64,4K,1M) in which 2..8M stands for the powers of two [default: 64K for bw, 2 for
    /// lat, always 8 for atomic]
    #[arg(short, long, value_name = "SIZES", value_parser = size_list)]
    pub(crate) size: Option<Sizes>,
    /// All sizes from 2 bytes to 8 MiB: short for --size 2..8M
    #[arg(short, long, conflicts_with = "size")]
    pub(crate) all: bool,
    /// Messages of each queue pair [default: 5000 for write bw, else 1000]
    #[arg(short = 'n', long, value_name = "N", conflicts_with = "duration", value_parser = clap::value_parser!(u64).range(5..))]
    pub(crate) iters: Option<u64>,
    /// Measure for this long instead: 500ms, 10s, 2m; without a unit, seconds
    #[arg(short = 'D', long, value_name = "TIME", value_parser = units::duration)]
    pub(crate) duration: Option<Duration>,
    /// Time, or without --duration messages, before measuring [default: a tenth]
    #[arg(long, value_name = "TIME|N")]
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
pub(crate) struct HowArgs {
    /// Transport
    #[arg(short, long, default_value = "RC", ignore_case = true)]
    pub(crate) connection: Transport,
    /// Sends in flight of each queue pair [default: 128 for bw, 1 for lat]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) tx_depth: Option<u32>,
    /// Receives posted of each queue pair
    #[arg(short, long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rx_depth: u32,
    /// Completion moderation: signal every N sends, of all sizes [default: the --post-list if there is one, 1 if all sizes
    /// are above 8 KiB, else 100; at most --tx-depth]
    #[arg(short = 'Q', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) cq_mod: Option<u32>,
    /// Post N sends with one doorbell
    #[arg(short = 'l', long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) post_list: u32,
    /// Send messages up to this size inline
    #[arg(short = 'I', long, default_value = "0", value_name = "SIZE", value_parser = inline_size)]
    pub(crate) inline: u32,
    /// Sleep until there is a completion event, instead of polling
    #[arg(short, long)]
    pub(crate) events: bool,
    /// Immediate data with each send or write
    #[arg(long)]
    pub(crate) imm: bool,
    /// Atomic operation
    #[arg(short = 'A', long, default_value = "fetch-add")]
    pub(crate) atomic: Atomic,
    /// Write latency: until the acknowledgement, instead of half of a ping-pong of writes that are seen by polling memory
    #[arg(long)]
    pub(crate) ack: bool,
    /// Reads or atomics outstanding of each queue pair [default: as many as both devices can, at most 16]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub(crate) outstanding: Option<u8>,
    /// Interface to post by
    #[arg(long, default_value = "auto")]
    pub(crate) post: Interface,
    /// Interface to poll by
    #[arg(long, default_value = "auto")]
    pub(crate) poll: Interface,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 [default: the smaller one of the two ports]
    #[arg(short, long, value_name = "BYTES", value_parser = mtu)]
    pub(crate) mtu: Option<Mtu>,
    /// Back the buffers by huge pages of 2 MiB
    #[arg(long)]
    pub(crate) huge_pages: bool,
    /// Yield the processor when a poll finds nothing: for machines with fewer processors than threads
    #[arg(long = "yield")]
    pub(crate) yield_cpu: bool,
    /// Give up when nothing completes for this long
    #[arg(long, default_value = "10s", value_name = "TIME", value_parser = units::duration)]
    pub(crate) timeout: Duration,
    /// Measure and reckon as perftest does (which sends classically, without warm-up): to be compared with it
    #[arg(long, value_name = "TOOL", value_parser = ["perftest"])]
    pub(crate) compat: Option<String>,
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
    #[arg(long, value_name = "RATE", value_parser = units::rate)]
    pub(crate) min_bandwidth: Option<Rate>,
    /// Fail (exit status 3) when a percentile of the latency of a size is more than this: p99=10us, max=1ms
    #[arg(long, value_name = "pPERCENT=TIME", value_parser = latency_limit)]
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

#[derive(Debug, Args)]
pub(crate) struct PlotArgs {
    /// Results written by --output FILE.json
    #[arg(required = true, value_name = "FILE")]
    pub(crate) results: Vec<PathBuf>,
    /// The chart
    #[arg(short = 'O', long, default_value = "rdma-perf.svg", value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Heading [default: what was measured]
    #[arg(long, value_name = "TEXT")]
    pub(crate) title: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print the findings as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Only this device
    #[arg(short, long, value_name = "NAME")]
    pub(crate) device: Option<String>,
}

/// Sizes as one value of an option.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Sizes(pub(crate) Vec<u64>);

/// A limit of a percentile of the latency.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct LatencyLimit {
    pub(crate) percent: f64,
    pub(crate) limit: Duration,
}

fn size_list(text: &str) -> Result<Sizes, String> {
    /// `max_msg_sz` of every device.
    const MAX: u64 = 1 << 31;
    let sizes = units::sizes(text)?;
    match sizes.iter().find(|size| **size == 0 || **size > MAX) {
        Some(size) => Err(format!("a message has 1 byte to 2 GiB, not {size}")),
        None => Ok(Sizes(sizes)),
    }
}

fn inline_size(text: &str) -> Result<u32, String> {
    let size = units::size(text)?;
    u32::try_from(size).map_err(|_| format!("`{text}` is more than any device takes inline"))
}

fn mtu(text: &str) -> Result<Mtu, String> {
    let known = [Mtu::MTU_256, Mtu::MTU_512, Mtu::MTU_1024, Mtu::MTU_2048, Mtu::MTU_4096];
    known
        .into_iter()
        .find(|mtu| mtu.bytes().is_some_and(|bytes| bytes.to_string() == text))
        .ok_or_else(|| format!("`{text}` is none of 256, 512, 1024, 2048 and 4096"))
}

fn percent(text: &str) -> Result<f64, String> {
    match text.trim().parse() {
        Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(percent),
        _ => Err(format!("`{text}` is not a number from 0 to 100")),
    }
}

fn latency_limit(text: &str) -> Result<LatencyLimit, String> {
    let (name, limit) = text.split_once('=').ok_or_else(|| format!("`{text}` is not a limit such as p99=10us"))?;
    if limit.trim().ends_with(|last: char| last.is_ascii_digit()) {
        return Err(format!("`{limit}` has no unit: ns, us, ms or s"));
    }
    let percent = match name.trim() {
        "max" => 100.0,
        name => percent(name.strip_prefix('p').unwrap_or(name))?,
    };
    Ok(LatencyLimit { percent, limit: units::duration(limit)? })
}

impl TestArgs {
    /// The plan of a test of `verb`, with defaults filled in.
    pub(crate) fn plan(&self, verb: Verb) -> Result<Plan, String> {
        let (load, how) = (&self.load, &self.how);
        let metric = self.metric;
        let compat = how.compat.is_some();
        let sizes = match (&load.size, load.all, verb, metric) {
            (None, false, Verb::Atomic, _) => vec![8],
            (_, true, Verb::Atomic, _) => return Err("atomic operations work on 8 bytes: leave out --all".into()),
            (Some(sizes), _, Verb::Atomic, _) if sizes.0 != [8] => {
                return Err("atomic operations work on 8 bytes: leave out --size".into());
            }
            (Some(sizes), ..) => sizes.0.clone(),
            (None, true, ..) => units::sizes("2..8M")?,
            (None, false, _, Metric::Bw) => vec![65536],
            (None, false, _, Metric::Lat) => vec![2],
        };
        let length = match (load.iters, load.duration) {
            (_, Some(time)) if time.is_zero() => return Err("--duration has to be more than nothing".into()),
            (_, Some(_)) if compat => {
                return Err("--compat perftest works with --iters: perftest keeps no samples of timed runs".into());
            }
            (_, Some(time)) => Length::Time(time),
            (Some(iters), None) => Length::Iterations(iters),
            (None, None) => {
                let iterations: u64 = if verb == Verb::Write && metric == Metric::Bw { 5000 } else { 1000 };
                Length::Iterations(iterations.next_multiple_of(how.post_list.into()))
            }
        };
        let qps = load.qps.unwrap_or(load.threads);
        if qps % load.threads != 0 {
            return Err(format!("{qps} queue pairs cannot be spread evenly over {} threads", load.threads));
        }
        if metric == Metric::Lat && qps != load.threads {
            return Err("a latency test has one queue pair for each thread: give --threads instead of --qps".into());
        }
        if metric == Metric::Lat && load.bidirectional {
            return Err("latency is of both directions anyway: leave out --bidirectional".into());
        }
        let (tx_depth, cq_mod) = self.depths(&sizes, length)?;
        let plan = Plan {
            verb,
            metric,
            transport: how.connection,
            sizes,
            length,
            warm_up: self.warm_up(length, compat)?,
            tx_depth,
            rx_depth: how.rx_depth.next_multiple_of(2),
            cq_mod,
            post_list: how.post_list,
            qps: qps / load.threads,
            threads: load.threads,
            inline: how.inline,
            bidirectional: load.bidirectional,
            events: how.events,
            immediate: how.imm,
            atomic: how.atomic,
            acknowledged: how.ack,
            outstanding: how.outstanding,
            post: if compat { Interface::Classic } else { how.post },
            poll: if compat { Interface::Classic } else { how.poll },
            mtu: how.mtu,
            huge_pages: how.huge_pages,
            rate: load.rate,
            validate: load.validate,
            yield_cpu: how.yield_cpu,
            patience: how.timeout,
            compat,
        };
        self.check(&plan)?;
        plan.check()?;
        Ok(plan)
    }

    fn check(&self, plan: &Plan) -> Result<(), String> {
        if plan.immediate && matches!(plan.verb, Verb::Read | Verb::Atomic) {
            return Err("only sends and writes carry immediate data: leave out --imm".into());
        }
        if plan.acknowledged && (plan.verb != Verb::Write || plan.metric != Metric::Lat || plan.immediate) {
            return Err("--ack is for `write lat` without --imm".into());
        }
        if plan.inline > 0 && matches!(plan.verb, Verb::Read | Verb::Atomic) {
            return Err("reads and atomics have nothing to send inline: leave out --inline".into());
        }
        if plan.events && plan.verb == Verb::Write && plan.is_two_sided() && !plan.immediate {
            return Err("`write lat` sees writes by polling memory: for --events add --imm or --ack".into());
        }
        if plan.metric == Metric::Lat && plan.rate.is_some() {
            return Err("a latency test has one message in flight and waits for it: leave out --rate".into());
        }
        if plan.metric == Metric::Lat && self.out.min_bandwidth.is_some() {
            return Err("a latency test has no bandwidth: leave out --min-bandwidth".into());
        }
        if plan.events && plan.rate.is_some() {
            return Err("--rate has to look at the clock all the time: leave out --events".into());
        }
        if plan.compat {
            if plan.threads > 1 {
                return Err("perftest has one thread: leave out --threads".into());
            }
            if plan.bidirectional || plan.rate.is_some() || plan.validate {
                return Err("--compat perftest works without --bidirectional, --rate and --validate".into());
            }
        }
        Ok(())
    }

    /// Sends in flight and completion moderation, by the rules of perftest.
    fn depths(&self, sizes: &[u64], length: Length) -> Result<(u32, u32), String> {
        let how = &self.how;
        let default_depth = if self.metric == Metric::Bw { 128 } else { 1 };
        let mut tx_depth = how.tx_depth.unwrap_or(default_depth);
        if self.metric == Metric::Lat {
            tx_depth = 1;
        }
        if let Length::Iterations(iterations) = length {
            tx_depth = tx_depth.min(u32::try_from(iterations).unwrap_or(u32::MAX));
            if iterations % u64::from(how.post_list) != 0 {
                return Err(format!("{iterations} messages cannot be posted {} at a time", how.post_list));
            }
        }
        if how.post_list > tx_depth {
            return Err(format!("--post-list {} is more than --tx-depth {tx_depth}", how.post_list));
        }
        let large = sizes.iter().all(|size| *size > 8192) && !how.events;
        let cq_mod = match how.cq_mod {
            Some(cq_mod) => cq_mod,
            None if how.post_list > 1 => how.post_list,
            None if large => 1,
            None => 100,
        };
        let cq_mod = cq_mod.min(tx_depth);
        if how.post_list > 1 && how.post_list % cq_mod != 0 && cq_mod % how.post_list != 0 {
            return Err(format!("--post-list {} and --cq-mod {cq_mod}: one has to divide the other", how.post_list));
        }
        Ok((tx_depth, cq_mod))
    }

    fn warm_up(&self, length: Length, compat: bool) -> Result<WarmUp, String> {
        match (&self.load.warm_up, length) {
            (Some(_), _) if compat => Err("perftest does not warm up: leave out --warm-up".into()),
            _ if compat => Ok(WarmUp::Iterations(0)),
            (Some(text), Length::Time(_)) => units::duration(text).map(WarmUp::Time),
            (Some(text), Length::Iterations(_)) => text
                .parse()
                .map(WarmUp::Iterations)
                .map_err(|_| format!("--warm-up `{text}` is not a number of messages")),
            (None, Length::Time(time)) => Ok(WarmUp::Time(time / 10)),
            (None, Length::Iterations(iterations)) => {
                let list = u64::from(self.how.post_list);
                Ok(WarmUp::Iterations((iterations / 10).next_multiple_of(list)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn plan(arguments: &str) -> Result<Plan, String> {
        let words = std::iter::once("rdma-perf").chain(arguments.split_whitespace());
        match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
            Command::Send(args) => args.plan(Verb::Send),
            Command::Write(args) => args.plan(Verb::Write),
            Command::Read(args) => args.plan(Verb::Read),
            Command::Atomic(args) => args.plan(Verb::Atomic),
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn the_defaults_are_those_of_perftest() {
        Cli::command().debug_assert();
        let write = plan("write bw host").unwrap();
        assert_eq!((write.sizes.as_slice(), write.length), (&[65536][..], Length::Iterations(5000)));
        assert_eq!((write.tx_depth, write.cq_mod, write.post_list, write.queue_pairs()), (128, 1, 1, 1));
        let small = plan("write bw host -s 64").unwrap();
        assert_eq!((small.cq_mod, small.warm_up), (100, WarmUp::Iterations(500)));
        let send = plan("send lat host").unwrap();
        assert_eq!((send.sizes.as_slice(), send.length, send.tx_depth), (&[2][..], Length::Iterations(1000), 1));
        assert_eq!((send.cq_mod, send.rx_depth), (1, 512));
        assert_eq!(plan("write bw host -s 64 -l 16").unwrap().cq_mod, 16);
        assert_eq!(plan("write bw host -s 64 -n 50").unwrap().tx_depth, 50);
        assert_eq!(plan("write bw host -a").unwrap().cq_mod, 100);
        assert_eq!(plan("atomic lat host").unwrap().sizes, [8]);
    }

    #[test]
    fn compat_is_classic_and_without_warm_up() {
        let plan = plan("send lat host --compat perftest -e").unwrap();
        assert!(plan.compat && plan.events);
        assert_eq!(
            (plan.post, plan.poll, plan.warm_up),
            (Interface::Classic, Interface::Classic, WarmUp::Iterations(0))
        );
    }

    #[test]
    fn timed_runs_warm_up_for_a_tenth() {
        let plan = plan("read bw --loopback -D 2s").unwrap();
        assert_eq!(plan.length, Length::Time(Duration::from_secs(2)));
        assert_eq!(plan.warm_up, WarmUp::Time(Duration::from_millis(200)));
    }

    #[test]
    fn queue_pairs_are_spread_over_threads() {
        let plan = plan("write bw host -q 8 -T 2").unwrap();
        assert_eq!((plan.qps, plan.threads, plan.queue_pairs()), (4, 2, 8));
    }

    #[test]
    fn limits_name_a_percentile() {
        assert_eq!(latency_limit("p99.9=10us"), Ok(LatencyLimit { percent: 99.9, limit: Duration::from_micros(10) }));
        assert_eq!(latency_limit("max=1ms"), Ok(LatencyLimit { percent: 100.0, limit: Duration::from_millis(1) }));
        assert!(latency_limit("p101=1s").is_err() && latency_limit("p99").is_err());
    }

    #[test]
    fn what_makes_no_sense_is_a_usage_error() {
        for arguments in [
            "write bw",
            "write bw host --loopback",
            "write lat host -b",
            "send lat host -q 2",
            "write bw host -q 3 -T 2",
            "atomic bw host -s 16",
            "atomic bw host -a",
            "read bw host --imm",
            "read bw host -I 8",
            "send lat host --ack",
            "write lat host -e",
            "write bw host -n 4",
            "write bw host -n 100 -D 1",
            "write bw host -n 100 -l 3",
            "write bw host -t 8 -l 16",
            "write bw host --compat perftest -T 2",
            "write bw host --compat perftest -D 1",
            "write bw host --compat perftest --warm-up 3",
            "write bw host --compat other",
            "write bw host -c DC",
            "write bw host -s 0",
            "write bw host -m 1500",
            "write bw host --rate 5",
            "send lat host --rate 5msg/s",
            "send lat host --min-bandwidth 5Gb/s",
            "send lat host --max-latency p99=10",
            "write bw host --percentiles 101",
        ] {
            assert!(plan(arguments).is_err(), "{arguments}");
        }
    }
}
