//! The part that runs in the guest: all launches of all programs.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::bench::softroce::inside::{command, environment};
use crate::pair::{self, End, Ends, Ready};

/// First argument of this program that selects this part. The second argument is the [`Plan`].
pub(crate) const ARGUMENT: &str = "run-bench-messages";

/// Address of the guest, and GID 1 of its device.
const HOST: &str = "10.9.9.1";
/// Port of all servers, which is the default of `rstream`.
const PORT: u16 = 7471;
/// Attempts to run a program.
///
/// The first run reads the program from the host, and the clock jumps meanwhile. `ucx_perftest -E sleep` may hang on rxe: both
/// ends then sleep in poll(2).
const ATTEMPTS: u32 = 4;
/// Limit of a run of UCX in seconds on the guest's clock.
const UCX_LIMIT: &str = "30";
/// Pause on the guest's clock before each run, so that the kernel finishes deferred work of the previous program.
const SETTLE: Duration = Duration::from_millis(200);

/// What exchanges messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Program {
    /// `rdma-message-bench`.
    Ours { transport: Transport, executor: Executor },
    /// `rstream` of rdma-core, over rsockets.
    Rstream,
    /// `ucx_perftest` with tagged messages.
    Ucx,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Transport {
    Channel,
    Stream,
    Tcp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Executor {
    BlockOn,
    Tokio,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Pattern {
    PingPong,
    OneWay,
}

/// Messages of one length, in one pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Case {
    pub(super) pattern: Pattern,
    pub(super) bytes: u32,
    /// Messages of the client.
    pub(super) messages: u32,
}

/// What to measure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) launches: u32,
    pub(super) runs: Vec<(Program, Case)>,
    /// `rdma-message-bench`.
    pub(super) bench: PathBuf,
}

/// One line of output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Report {
    /// Kernel and program versions of the guest.
    Environment(BTreeMap<String, String>),
    /// Instructions of a message, or why they could not be counted.
    Run(Program, Case, Result<f64, String>),
}

/// Runs the plan in `words`.
pub(crate) fn main(words: &[String]) -> Result<i32> {
    let plan: Plan = serde_json::from_str(words.first().context("no plan")?)?;
    // With random addresses, launches would not repeat.
    fs::write("/proc/sys/kernel/randomize_va_space", "0").context("cannot disable address space randomization")?;
    // A blocking call of rsockets polls for 10 µs before it sleeps. Here, the peer has no processor meanwhile.
    fs::create_dir_all("/etc/rdma/rsocket")?;
    fs::write("/etc/rdma/rsocket/polling_time", "0")?;
    report(&Report::Environment(environment()))?;
    for _ in 0..plan.launches {
        for (program, case) in &plan.runs {
            let count = (1..ATTEMPTS).find_map(|_| program.count(*case, &plan.bench).ok());
            let count = count.map_or_else(|| program.count(*case, &plan.bench), Ok);
            report(&Report::Run(*program, *case, count.map_err(|error| format!("{error:#}"))))?;
        }
    }
    Ok(0)
}

impl Program {
    /// Nanoseconds of a message on the guest's clock.
    fn count(self, case: Case, bench: &Path) -> Result<f64> {
        std::thread::sleep(SETTLE);
        let [server, client] = [End::Server, End::Client].map(|end| {
            let mut command = command(&self.words(case, end, bench))?;
            if self == Program::Ucx {
                command.envs(ucx_environment());
            }
            anyhow::Ok(command)
        });
        let ready = match self {
            Program::Ours { transport: Transport::Tcp, .. } | Program::Ucx => Ready::Tcp(PORT),
            Program::Ours { .. } | Program::Rstream => Ready::Kernel(PORT),
        };
        let (server, client): (Command, Command) = (server?, client?);
        let [_, lines] = pair::output(ready, Ends::Itself, server, client)?;
        match self.nanoseconds(&lines) {
            Some(nanoseconds) => Ok(nanoseconds),
            None => bail!("unexpected output: {lines:?}"),
        }
    }

    fn words(self, Case { pattern, bytes, messages }: Case, end: End, bench: &Path) -> Vec<String> {
        let is_client = end == End::Client;
        let line = match self {
            Program::Ours { transport, executor } => {
                let transport = match transport {
                    Transport::Channel => "channel",
                    Transport::Stream => "fixed-length",
                    Transport::Tcp => "tcp",
                };
                let executor = if executor == Executor::Tokio { "tokio" } else { "block-on" };
                let pattern = if pattern == Pattern::PingPong { "ping-pong" } else { "one-way" };
                let both =
                    format!("--transport {transport} --executor {executor} --address {HOST}:{PORT} --size {bytes}");
                if is_client {
                    format!("count-client {both} --pattern {pattern} --messages {messages}")
                } else {
                    format!("count-server {both}")
                }
            }
            Program::Rstream => {
                // After the client's messages, the server sends the same number back.
                let (iterations, transfers) = if pattern == Pattern::PingPong { (messages, 1) } else { (1, messages) };
                let address = if is_client { "-s" } else { "-b" };
                format!("rstream -T b {address} {HOST} -S {bytes} -I {iterations} -C {transfers}")
            }
            Program::Ucx => {
                let server = format!("timeout {UCX_LIMIT} ucx_perftest -p {PORT} -E sleep");
                let test = if pattern == Pattern::PingPong { "tag_lat" } else { "tag_bw" };
                let warmup = messages.div_ceil(10);
                if is_client {
                    format!("{server} {HOST} -f -t {test} -s {bytes} -n {messages} -w {warmup}")
                } else {
                    server
                }
            }
        };
        let ours = matches!(self, Program::Ours { .. }).then(|| bench.to_string_lossy().into_owned());
        ours.into_iter().chain(line.split_whitespace().map(str::to_owned)).collect()
    }

    fn nanoseconds(self, lines: &[String]) -> Option<f64> {
        let fields: Vec<&str> = lines.last()?.split_whitespace().collect();
        let (field, unit) = match self {
            Program::Ours { .. } => (fields.first()?, 1.0),
            // Its columns end with the microseconds of a transfer.
            Program::Rstream => (fields.last()?, 1e3),
            // Iterations, then the median, the average and the overall average of a message in microseconds.
            Program::Ucx => (fields.get(3)?, 1e3),
        };
        field.parse().ok().map(|time: f64| time * unit)
    }
}

/// Messages over rc_verbs. Connections are made over ud_verbs.
///
/// UCX does not recognize the GIDs of datagrams on rxe, and would drop them.
fn ucx_environment() -> [(&'static str, &'static str); 4] {
    [
        ("UCX_TLS", "rc_verbs,ud_verbs"),
        ("UCX_NET_DEVICES", "rxe0:1"),
        ("UCX_IB_GID_INDEX", "1"),
        ("UCX_UD_VERBS_ETH_DGID_CHECK", "n"),
    ]
}

fn report(report: &Report) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(report)?)?;
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(program: Program, pattern: Pattern, end: End) -> String {
        program.words(Case { pattern, bytes: 64, messages: 1000 }, end, Path::new("/t/bench")).join(" ")
    }

    #[test]
    fn both_ends_agree_on_the_transport() {
        let ours = Program::Ours { transport: Transport::Stream, executor: Executor::BlockOn };
        let both = "--transport fixed-length --executor block-on --address 10.9.9.1:7471 --size 64";
        assert_eq!(line(ours, Pattern::OneWay, End::Server), format!("/t/bench count-server {both}"));
        let exchange = "--pattern one-way --messages 1000";
        assert_eq!(line(ours, Pattern::OneWay, End::Client), format!("/t/bench count-client {both} {exchange}"));
    }

    #[test]
    fn a_one_way_run_of_rstream_is_one_iteration_of_many_transfers() {
        let client = |pattern| line(Program::Rstream, pattern, End::Client);
        assert_eq!(client(Pattern::PingPong), "rstream -T b -s 10.9.9.1 -S 64 -I 1000 -C 1");
        assert_eq!(client(Pattern::OneWay), "rstream -T b -s 10.9.9.1 -S 64 -I 1 -C 1000");
    }

    #[test]
    fn the_time_of_a_message_is_read_from_the_last_line() {
        let read = |program: Program, line: &str| program.nanoseconds(&["header".to_owned(), line.to_owned()]);
        let rstream = "custom    64      1       2k      250k        0.10s      0.02      23.85";
        assert_eq!(read(Program::Rstream, rstream), Some(23_850.0));
        let ucx = "                        1000     28.500    31.862    31.861        1.92       1.92       31386       31386";
        assert_eq!(read(Program::Ucx, ucx), Some(31_861.0));
        assert_eq!(read(Program::Ucx, "+-------+"), None);
        assert_eq!(Program::Ucx.nanoseconds(&[]), None);
    }
}
