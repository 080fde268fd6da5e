//! The command line.

mod help;
mod options;
mod plan;
#[cfg(test)]
mod tests;
mod values;

use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use self::options::{ConnectionArgs, LoadArgs, ProcessorArgs, VerbsArgs};
use self::options::{DeviceArgs, OutputArgs};
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
    /// Serves tests until Ctrl-C: clients send what to measure
    Server(ServerArgs),
    /// Draws results that --output wrote, several on one chart for comparison
    Plot(PlotArgs),
    /// Checks this host's set-up for RDMA and says what to change
    Doctor(DoctorArgs),
}

/// What to measure with a verb.
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
    /// Run the server in this process as well, on the same device
    #[arg(long, conflicts_with = "host")]
    pub(crate) loopback: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) verbs: VerbsArgs,
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
    /// Exit after one client
    #[arg(long)]
    pub(crate) once: bool,
    /// Pin the threads of tests to these processors: 2,4-7; a client's --server-cpu may choose among them
    #[arg(long, value_name = "LIST", value_parser = values::cpus)]
    pub(crate) cpu: Option<values::Cpus>,
    /// Refuse tests whose buffers need more memory than this: 512M, 4G [default: three quarters of the memory that is
    /// free on the host or in the control group when a test begins]
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
    /// File of the chart
    #[arg(short = 'O', long, default_value = "rdma-perf.svg", value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Heading [default: a description of the test]
    #[arg(long, value_name = "TEXT")]
    pub(crate) title: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print the findings as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Check only this device
    #[arg(short, long, value_name = "NAME")]
    pub(crate) device: Option<String>,
}

impl Cli {
    /// Parses the command line of this process. Exits on an error or a request for help.
    pub(crate) fn parse_process() -> Self {
        let mut matches = help::hide_inapplicable(Cli::command()).get_matches();
        Cli::from_arg_matches_mut(&mut matches).unwrap_or_else(|error| error.format(&mut Cli::command()).exit())
    }
}

impl Command {
    /// The test that this command runs, if it is one.
    pub(crate) fn as_test(&self) -> Option<(Verb, Metric, &TestArgs)> {
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
