//! The command line.

mod help;
mod options;
mod plan;
#[cfg(test)]
mod tests;
mod values;

use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use self::options::{ConnectionArgs, LoadArgs, MeansArgs, ProcessorArgs};
pub(crate) use self::options::{DeviceArgs, Format, OutputArgs};
use crate::plan::{Metric, Verb};
use crate::units;

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
    #[command(subcommand)]
    Send(Test),
    /// Writes to the peer's memory
    #[command(subcommand)]
    Write(Test),
    /// Reads of the peer's memory
    #[command(subcommand)]
    Read(Test),
    /// Atomic operations on words of the peer's memory
    #[command(subcommand)]
    Atomic(Test),
    /// Serves tests until it is ended: clients say what is to be done
    Server(ServerArgs),
    /// Draws results that were written by --output, several on one chart to compare them
    Plot(PlotArgs),
    /// Checks this host's set-up for RDMA and says what to change
    Doctor(DoctorArgs),
}

/// What to measure of a verb.
#[derive(Debug, Subcommand)]
pub(crate) enum Test {
    /// Bandwidth and message rate, with many messages in flight
    Bw(TestArgs),
    /// Latency, with one message in flight
    Lat(TestArgs),
}

#[derive(Debug, Args)]
pub(crate) struct TestArgs {
    /// Host that runs `rdma-perf server`
    #[arg(required_unless_present = "loopback", value_name = "HOST|--loopback")]
    pub(crate) host: Option<String>,
    /// Be the server, too, on the same device
    #[arg(long, conflicts_with = "host")]
    pub(crate) loopback: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) means: MeansArgs,
    #[command(flatten)]
    pub(crate) processors: ProcessorArgs,
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) out: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ServerArgs {
    /// End after one client
    #[arg(long)]
    pub(crate) once: bool,
    /// Pin the threads of tests to these processors, or to those of them that a client asks for by --server-cpu: 2,4-7
    #[arg(long, value_name = "LIST", value_parser = values::cpus)]
    pub(crate) cpu: Option<values::Cpus>,
    /// Refuse tests that would take more memory than this for their buffers: 512M, 4G [default: three quarters of what is
    /// free when a test begins, of the host or of the control group]
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    pub(crate) max_memory: Option<u64>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
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

impl Cli {
    /// Of this process; ends it when it is wrong, or asks for help.
    pub(crate) fn of_process() -> Self {
        let mut matches = help::tailored(Cli::command()).get_matches();
        Cli::from_arg_matches_mut(&mut matches).unwrap_or_else(|error| error.format(&mut Cli::command()).exit())
    }
}

impl Command {
    /// The test that is to be run, if it is one.
    pub(crate) fn test(&self) -> Option<(Verb, Metric, &TestArgs)> {
        let (verb, test) = match self {
            Command::Send(test) => (Verb::Send, test),
            Command::Write(test) => (Verb::Write, test),
            Command::Read(test) => (Verb::Read, test),
            Command::Atomic(test) => (Verb::Atomic, test),
            Command::Server(_) | Command::Plot(_) | Command::Doctor(_) => return None,
        };
        match test {
            Test::Bw(args) => Some((verb, Metric::Bw, args)),
            Test::Lat(args) => Some((verb, Metric::Lat, args)),
        }
    }
}
