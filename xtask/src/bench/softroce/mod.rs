//! `cargo xtask bench softroce`: instructions per message of the C programs and of ours.
//!
//! The guest has one processor, whose clock advances by one nanosecond per instruction. The times that the programs print
//! are therefore instruction counts of both ends and of the kernel, which does the work of an adapter under SoftRoCE.
//!
//! The counts repeat from boot to boot, to 0.1 %. Three effects would prevent that:
//!
//! - Identifiers of kernel objects grow from launch to launch. So each side gets a fresh boot and runs the same launches
//!   in the same order.
//! - In some launches every message costs one or two per cent more. So there are several launches, and the minimum counts.
//! - Addresses are random. So address space randomization is disabled.

mod cases;
mod columns;
mod compare;
pub(crate) mod inside;
mod tables;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::builder::PossibleValuesParser;

use self::cases::{CASES, Case, Side, Test};
use self::columns::Columns;
use self::compare::Comparison;
use self::inside::{Output, Plan, Report};
use super::environment;
use super::result::{self, Benchmark, Gate};
use crate::pair::End;
use crate::softroce::{self, Collected, Ending, Options, Place};
use crate::{pingpong, process, workspace};

/// Largest ratio of our instructions to C's: 1, plus the resolution of the measurement.
const LIMIT: f64 = 1.005;
/// Default number of launches.
const LAUNCHES: u32 = 5;
/// Time limit in seconds for one launch of one case on a busy machine. On an idle one it takes a second or two.
const CASE_LIMIT: u64 = 60;

/// Compare rdma-perf and rc_pingpong with perftest and ibv_rc_pingpong, in instructions per message
///
/// Boots a guest whose clock counts instructions for the C programs and another one for ours, runs every case several
/// times in each, and compares the fewest instructions. Fails if our programs exceed the limit, or if `rdma-perf --compat
/// perftest` prints a figure that differs from perftest's. Writes a result for `cargo xtask bench report`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of times to run every case on each side
    #[arg(long, default_value_t = LAUNCHES, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    launches: u32,
    /// Run only this case; may be given several times
    #[arg(long, value_name = "CASE", value_parser = PossibleValuesParser::new(CASES.iter().map(|case| case.name)))]
    only: Vec<String>,
    /// Compare C with itself, in two boots, to measure the resolution
    #[arg(long)]
    against_itself: bool,
    /// Write the result to this file [default: a file in target/bench, if all cases ran]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Show the guest's console
    #[arg(short, long)]
    verbose: bool,
}

/// Outcome of a case.
#[derive(Debug)]
struct Outcome<'a> {
    case: &'a Case,
    /// Comparison, or why the case could not be measured.
    comparison: Result<Comparison, String>,
}

impl Outcome<'_> {
    fn met(&self) -> bool {
        self.comparison.as_ref().is_ok_and(|comparison| comparison.ratio() <= LIMIT)
    }
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let started = Instant::now();
    let cases: Vec<&Case> =
        CASES.iter().filter(|case| args.only.is_empty() || args.only.iter().any(|name| name == case.name)).collect();
    if args.other() == Side::Ours {
        build(&cases)?;
    }
    let c = Boot::run(args, &cases, Side::C)?;
    let other = Boot::run(args, &cases, args.other())?;
    let mut outcomes = Vec::new();
    for (index, case) in cases.into_iter().enumerate() {
        let columns = c.columns(index, case).and_then(|c| Ok([c, other.columns(index, case)?]));
        let comparison = columns.and_then(|[c, other]| Comparison::new([&c, &other]));
        outcomes.push(Outcome { case, comparison: comparison.map_err(|error| format!("{error:#}")) });
    }

    let name = if args.against_itself { "C again" } else { "rdma-safe" };
    let tables = tables::all(&outcomes, name, args.launches);
    let gates = tables::gates(&outcomes, name);
    for table in &tables {
        println!("{}", table.to_text());
    }
    for outcome in &outcomes {
        if let Err(reason) = &outcome.comparison {
            println!("not measured: {}: {reason}\n", outcome.case.title());
        }
    }
    let unmet: Vec<&Gate> = gates.iter().filter(|gate| !gate.met).collect();
    for gate in &unmet {
        println!("not met: {}: {}, limit {}", gate.name, gate.measured, gate.limit);
    }
    println!("{} gates, {} not met, {:.0} s", gates.len(), unmet.len(), started.elapsed().as_secs_f64());
    let status = i32::from(!unmet.is_empty());
    if let Some(file) = args.file()? {
        let mut environment = environment::collect();
        environment.extend(c.environment);
        let result = Benchmark {
            benchmark: format!("Instructions per message: C and {name}"),
            command: args.command(),
            date: environment::today()?,
            environment,
            tables,
            // The gates are for our programs, not for C.
            gates: if args.against_itself { Vec::new() } else { gates },
        };
        result.save(&file)?;
        println!("written to {}", file.display());
    }
    Ok(status)
}

impl Args {
    /// The side that is compared with C.
    fn other(&self) -> Side {
        if self.against_itself { Side::C } else { Side::Ours }
    }

    /// File for the result, if there is to be one.
    fn file(&self) -> Result<Option<PathBuf>> {
        let name = if self.against_itself { "softroce-itself" } else { "softroce" };
        match &self.json {
            Some(file) => Ok(Some(file.clone())),
            // The report needs the results of all cases.
            None if self.only.is_empty() => result::file(name).map(Some),
            None => Ok(None),
        }
    }

    /// Command line that repeats this run.
    fn command(&self) -> String {
        let mut command = "cargo xtask bench softroce".to_owned();
        if self.against_itself {
            command.push_str(" --against-itself");
        }
        if self.launches != LAUNCHES {
            command.push_str(&format!(" --launches {}", self.launches));
        }
        for name in &self.only {
            command.push_str(&format!(" --only {name}"));
        }
        command
    }
}

/// Compiles our programs.
fn build(cases: &[&Case]) -> Result<()> {
    let any = |wanted: fn(&Case) -> bool| cases.iter().any(|case| wanted(case));
    if any(|case| case.test == Test::Pingpong) {
        pingpong::build()?;
    }
    if any(|case| case.test != Test::Pingpong) {
        let mut cargo = Command::new(workspace::cargo());
        cargo.current_dir(workspace::root()).args(["build", "--release", "--bin", "rdma-perf"]);
        // xtask is named for the reason given in `pingpong::build`.
        process::run(cargo.args(["--package", "rdma-perf", "--package", "xtask"]))?;
    }
    Ok(())
}

/// Output of one side's programs during one boot of the guest.
#[derive(Debug, Default)]
struct Boot {
    environment: BTreeMap<String, String>,
    /// Output of each case, by launch.
    launches: Vec<Vec<Output>>,
}

impl Boot {
    /// Boots a guest and runs all cases of `side`.
    fn run(args: &Args, cases: &[&Case], side: Side) -> Result<Self> {
        let release = workspace::target_dir()?.join("release");
        let words = |case: &&Case| [End::Server, End::Client].map(|end| case.command(side, end, &release));
        let plan = Plan { launches: args.launches, cases: cases.iter().map(words).collect() };
        let command = [softroce::THIS_PROGRAM.to_owned(), inside::ARGUMENT.to_owned(), serde_json::to_string(&plan)?];
        let options = Options {
            count_instructions: true,
            place: Place::Guest,
            timeout: CASE_LIMIT * u64::try_from(cases.len())? * u64::from(args.launches),
            verbose: args.verbose,
            ..Options::default()
        };
        let mut output = Collected::default();
        match softroce::run(&command, &options, &mut output)? {
            Ending::Status(0) => Self::read(&output.0),
            ending => bail!("the programs of {side:?} could not be measured: {ending:?}"),
        }
    }

    /// Parses the output of the guest.
    fn read(output: &[u8]) -> Result<Self> {
        let mut boot = Self::default();
        for line in String::from_utf8_lossy(output).lines() {
            match serde_json::from_str(line).with_context(|| format!("unexpected output of the guest: {line:?}"))? {
                Report::Environment(facts) => boot.environment = facts,
                Report::Launch(cases) => boot.launches.push(cases),
            }
        }
        Ok(boot)
    }

    /// Parses the client's output of `case`, the case number `index`, in each launch.
    fn columns(&self, index: usize, case: &Case) -> Result<Vec<Columns>> {
        let read = |launch: &Vec<Output>| match launch.get(index) {
            Some(Ok(lines)) => case.parse(lines).with_context(|| format!("output:\n  {}", lines.join("\n  "))),
            Some(Err(reason)) => bail!("{reason}"),
            None => bail!("the guest did not report this case"),
        };
        self.launches.iter().map(read).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot(output: Output) -> Boot {
        let facts = BTreeMap::from([("guest kernel".to_owned(), "Linux 6.1".to_owned())]);
        let reports = [Report::Environment(facts), Report::Launch(vec![output])];
        let output: String = reports.iter().map(|report| serde_json::to_string(report).unwrap() + "\n").collect();
        Boot::read(output.as_bytes()).unwrap()
    }

    #[test]
    fn the_output_of_the_guest_is_parsed_by_line() {
        let boot = boot(Ok(vec!["1000 iters in 0.13 seconds = 127.62 usec/iter".to_owned()]));
        assert_eq!(boot.environment["guest kernel"], "Linux 6.1");
        let columns = boot.columns(0, &CASES[0]).unwrap();
        assert_eq!(columns[0].nanoseconds().unwrap().round(), 63_810.0);
        assert!(Boot::read(b"Segmentation fault\n").is_err());
    }

    #[test]
    fn a_case_without_figures_has_a_reason() {
        let reason = |output| format!("{:#}", boot(output).columns(0, &CASES[0]).unwrap_err());
        assert_eq!(reason(Err("status 139".to_owned())), "status 139");
        assert!(reason(Ok(vec!["Failed status".to_owned()])).contains("Failed status"));
        assert!(boot(Ok(Vec::new())).columns(1, &CASES[0]).is_err());
    }
}
