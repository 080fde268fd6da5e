//! `cargo xtask bench messages`: instructions of a message of rdma-msg, rsockets and UCX over SoftRoCE.

pub(crate) mod inside;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use self::inside::{Case, Executor, Pattern, Plan, Program, Report, Transport};
use super::result::{Benchmark, Gate, Table};
use super::{environment, guest};
use crate::softroce;
use crate::{apt, process, workspace};

/// Time limit in seconds for one run on a busy machine. On an idle one it takes a few seconds.
const RUN_LIMIT: u64 = 60;

const CASES: [Case; 6] = [
    Case { pattern: Pattern::PingPong, bytes: 64, messages: 1000 },
    Case { pattern: Pattern::PingPong, bytes: 4096, messages: 500 },
    Case { pattern: Pattern::PingPong, bytes: 65_536, messages: 100 },
    Case { pattern: Pattern::OneWay, bytes: 64, messages: 20_000 },
    Case { pattern: Pattern::OneWay, bytes: 4096, messages: 4000 },
    Case { pattern: Pattern::OneWay, bytes: 65_536, messages: 400 },
];

const CHANNEL: Program = ours(Transport::Channel, Executor::BlockOn);
const STREAM: Program = ours(Transport::Stream, Executor::BlockOn);

/// The programs, with their names in the report.
const PROGRAMS: [(Program, &str); 7] = [
    (CHANNEL, "Channel, `Runner::block_on`"),
    (ours(Transport::Channel, Executor::Tokio), "Channel, tokio"),
    (STREAM, "Stream, `Runner::block_on`"),
    (ours(Transport::Stream, Executor::Tokio), "Stream, tokio"),
    (Program::Rstream, "rsockets, `rstream`"),
    (Program::Ucx, "UCX, `ucx_perftest`"),
    (ours(Transport::Tcp, Executor::Tokio), "TCP, tokio"),
];

const fn ours(transport: Transport, executor: Executor) -> Program {
    Program::Ours { transport, executor }
}

/// Compared programs of rdma-msg: bytes with bytes, and messages with messages.
const GATES: [[Program; 2]; 2] = [[STREAM, Program::Rstream], [CHANNEL, Program::Ucx]];

/// Count the instructions of a message of rdma-msg, beside rsockets and UCX
///
/// Boots a guest whose clock counts instructions. Two processes exchange messages over rxe0, and sleep while they wait. The fewest
/// instructions of several launches count. Fails if rdma-msg takes more than rsockets or UCX. The rows of UCX are missing if
/// ucx_perftest cannot be installed. Writes a result for `cargo xtask bench report`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of times to run every case
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    launches: u32,
    /// Write the result to this file [default: a file in target/bench]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Show the guest's console
    #[arg(short, long)]
    verbose: bool,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let mut cargo = Command::new(workspace::cargo());
    cargo.current_dir(workspace::root()).args(["build", "--release", "--package", "rdma-message-bench"]);
    process::run(&mut cargo)?;
    let ucx = apt::install_unless(|| process::find("ucx_perftest").is_some(), "ucx-utils");
    if let Err(error) = &ucx {
        eprintln!("without UCX: {error:#}");
    }
    let programs = PROGRAMS.map(|(program, _)| program);
    let programs = programs.into_iter().filter(|program| *program != Program::Ucx || ucx.is_ok());
    let plan = Plan {
        launches: args.launches,
        runs: programs.flat_map(|program| CASES.map(|case| (program, case))).collect(),
        bench: workspace::target_dir()?.join("release/rdma-message-bench"),
    };
    let results = in_guest(&plan, args.verbose)?;
    let table = results.table();
    let gates = results.gates();
    println!("{}", table.to_text());
    for gate in &gates {
        println!("{}: {}{}", gate.name, gate.measured, if gate.met { "" } else { ", not met" });
    }
    for ((program, case), reason) in &results.failures {
        println!("not measured: {program:?}, {case:?}: {reason}");
    }
    let status = i32::from(!results.failures.is_empty() || gates.iter().any(|gate| !gate.met));
    let mut environment = environment::collect();
    environment.extend(results.environment);
    if ucx.is_ok() {
        environment.extend(ucx_version().map(|version| ("UCX".to_owned(), version)));
    }
    let benchmark = Benchmark {
        benchmark: "Instructions of a message: rdma-msg, rsockets and UCX".to_owned(),
        command: "cargo xtask bench messages".to_owned(),
        date: environment::today()?,
        environment,
        tables: vec![table],
        gates,
    };
    benchmark.write(args.json.as_deref(), "messages")?;
    Ok(status)
}

/// The fewest instructions of all launches.
#[derive(Debug, Default)]
struct Results {
    environment: BTreeMap<String, String>,
    counts: BTreeMap<(Program, Case), f64>,
    /// Runs that have failed in a launch, with the reason.
    failures: BTreeMap<(Program, Case), String>,
}

fn in_guest(plan: &Plan, verbose: bool) -> Result<Results> {
    let command = [softroce::THIS_PROGRAM.to_owned(), inside::ARGUMENT.to_owned(), serde_json::to_string(plan)?];
    let timeout = RUN_LIMIT * u64::from(plan.launches) * u64::try_from(plan.runs.len())?;
    Results::read(&guest::run(&command, timeout, verbose)?)
}

/// Version in the line `# Library version: 1.13.1` of `ucx_info`.
fn ucx_version() -> Option<String> {
    let output = process::output(Command::new("ucx_info").arg("-v")).ok()?;
    let version = output.lines().find_map(|line| line.split_once("ersion")).map(|(_, version)| version.to_owned())?;
    Some(version.trim_start_matches([':', '=', ' ']).split_whitespace().next()?.to_owned())
}

impl Results {
    fn read(output: &str) -> Result<Self> {
        let mut results = Results::default();
        for line in output.lines() {
            match serde_json::from_str(line).with_context(|| format!("unexpected output of the guest: {line:?}"))? {
                Report::Environment(facts) => results.environment = facts,
                Report::Run(program, case, Ok(count)) => {
                    let fewest = results.counts.entry((program, case)).or_insert(count);
                    *fewest = fewest.min(count);
                }
                Report::Run(program, case, Err(reason)) => {
                    results.failures.insert((program, case), reason);
                }
            }
        }
        Ok(results)
    }

    fn table(&self) -> Table {
        let row = |(program, name): (Program, &str)| {
            let count =
                |case| self.counts.get(&(program, case)).map_or_else(String::new, |count| format!("{count:.0}"));
            std::iter::once(name.to_owned()).chain(CASES.map(count)).collect()
        };
        let columns = CASES.map(|case| title(&case));
        Table {
            title: "Guest instructions of a message".to_owned(),
            columns: std::iter::once("transport".to_owned()).chain(columns).collect(),
            rows: PROGRAMS.into_iter().map(row).filter(|row: &Vec<String>| row[1..].iter().any(|cell| !cell.is_empty())).collect(),
            notes: vec![
                "Instructions of both ends and the kernel over SoftRoCE, on one processor: the fewest of several launches. A round \
                 trip is two messages. Each end sleeps as soon as it has nothing to do: rdma-msg by `Idle::Sleep`, `rstream -T b` \
                 with a `polling_time` of 0, and `ucx_perftest -E sleep` with tagged messages over rc_verbs. Over a stream and \
                 over rsockets, all messages have the same length, which both ends know. One-way, rdma-msg collects short \
                 messages in packets, `rstream` sends as many messages back afterwards, and TCP collects messages, with their \
                 lengths, in a buffer of 64 KiB. TCP does not use the RDMA device."
                    .to_owned(),
            ],
        }
    }

    fn gates(&self) -> Vec<Gate> {
        let pairs = GATES.into_iter().flat_map(|pair| CASES.map(|case| (pair, case)));
        let gate = |(pair, case): ([Program; 2], Case)| {
            let [Some(ours), Some(rival)] = pair.map(|program| self.counts.get(&(program, case))) else { return None };
            let [our_name, rival_name] = pair.map(|program| {
                let (_, name) = PROGRAMS.into_iter().find(|(other, _)| *other == program).unwrap_or((program, ""));
                name.split(',').next().unwrap_or(name)
            });
            Some(Gate {
                name: format!("{}: {our_name} / {rival_name}", title(&case)),
                limit: "≤ 1".to_owned(),
                measured: format!("{:.3}", ours / rival),
                met: ours <= rival,
            })
        };
        pairs.filter_map(gate).collect()
    }
}

fn title(case: &Case) -> String {
    let pattern = if case.pattern == Pattern::PingPong { "ping-pong" } else { "one-way" };
    let bytes = if case.bytes < 1024 { format!("{} B", case.bytes) } else { format!("{} KiB", case.bytes / 1024) };
    format!("{pattern}, {bytes}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(counts: &[(Program, f64)]) -> Results {
        let line = |(program, count): &(Program, f64)| {
            serde_json::to_string(&Report::Run(*program, CASES[0], Ok(*count))).unwrap()
        };
        Results::read(&counts.iter().map(line).collect::<Vec<_>>().join("\n")).unwrap()
    }

    #[test]
    fn the_fewest_instructions_are_compared() {
        let results = results(&[(CHANNEL, 31_000.0), (CHANNEL, 30_000.0), (Program::Ucx, 30_000.0)]);
        let gates = results.gates();
        assert_eq!(gates.len(), 1);
        assert_eq!(gates[0].name, "ping-pong, 64 B: Channel / UCX");
        assert!(gates[0].met, "{gates:?}");
    }

    #[test]
    fn a_program_without_counts_has_neither_row_nor_gate() {
        let results = results(&[(STREAM, 31_000.0), (Program::Rstream, 24_000.0)]);
        assert_eq!(results.table().rows.len(), 2);
        assert_eq!(results.gates().len(), 1);
        assert!(!results.gates()[0].met);
    }

    #[test]
    fn incomplete_output_is_refused() {
        assert!(Results::read("{\"Run\":").is_err());
    }
}
