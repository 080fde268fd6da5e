//! `cargo xtask test`: everything that can be checked, stage by stage, with one line at the end.

mod artifacts;
mod device;
mod foreign;
mod hosts;
pub(crate) mod inside;
mod libtest;
mod miri;
mod msrv;
mod overhead;
mod report;
mod sanitize;
mod soft;
mod stages;
mod toolchain;
mod watch;

use std::fmt;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use clap::ValueEnum;

use self::artifacts::IntegrationTest;
use self::libtest::Output;
use self::report::{Failure, Report};
use self::watch::Interrupted;
use crate::softroce::{Ending, Release};

/// Runs every check and test of the workspace, those on a device over the software RNIC soft0 and over SoftRoCE
///
/// Every stage runs, whatever failed before it. The last line is `N passed, N failed, N skipped`: tests, and one for
/// each stage that has none. A test that prints a line beginning `skipped: ` and passes counts as skipped. On a terminal,
/// and with `--verbose`, what tests print is shown as it comes. What failed, and its output, is repeated before the last line.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Leave a stage out; may be given several times
    #[arg(long, value_name = "STAGE")]
    skip: Vec<Stage>,
    /// Run only this stage and what it needs; may be given several times
    #[arg(long, value_name = "STAGE")]
    only: Vec<Stage>,
    /// Run only the tests on a device, on SoftRoCE
    #[arg(long)]
    device_only: bool,
    /// Run the tests on a device in a guest of this release; may be given several times [default: on what this machine has,
    /// and in guests of releases newer than its own]
    #[arg(long, value_name = "RELEASE")]
    release: Vec<Release>,
    /// Run the tests on a device this many times in a row
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Run the tests on soft0 this many times over a network that loses, repeats and reorders packets, each with a seed of its own
    #[arg(long, default_value_t = 3, value_name = "N")]
    seeds: u64,
    /// The first of these seeds, to run one again that has failed
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    first_seed: u64,
    /// Seconds that one program of tests on a device may take
    #[arg(long, default_value_t = 1800, value_name = "SECONDS")]
    limit: u64,
    /// Show all that tests print, as on a terminal
    #[arg(long)]
    verbose: bool,
    /// Arguments for the test programs, such as a part of a test's name
    #[arg(last = true, value_name = "TEST ARGS")]
    arguments: Vec<String>,
}

/// A part of the whole; they run in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Stage {
    /// cargo fmt --check
    Fmt,
    /// cargo clippy with warnings denied
    Clippy,
    /// Compile all tests and examples
    Build,
    /// Tests that need no device: unit, property, parity, compile-fail
    Unit,
    /// Examples in the documentation
    Doctest,
    /// The documentation, with warnings denied
    Docs,
    /// The committed bindings are what the generator writes
    Drift,
    /// The published crates can be packaged and compile from their packages
    Package,
    /// The libraries compile for 64-bit Arm
    Aarch64,
    /// Everything compiles with the oldest Rust that the manifest promises
    Msrv,
    /// Instructions of the data path keep their limits
    Overhead,
    /// What Miri can run
    Miri,
    /// Safe programs over soft0 under ThreadSanitizer and AddressSanitizer
    Sanitize,
    /// Tests on an RDMA device, on the software RNIC of this workspace
    Soft,
    /// UCX and Open MPI of Debian's packages on soft0; downloads them
    Foreign,
    /// Tests on an RDMA device, on SoftRoCE
    Device,
    /// Tests between two hosts, each a guest
    Hosts,
}

/// How a stage went.
#[derive(Debug)]
enum Outcome {
    /// A stage without tests.
    Whole(Result<(), Failure>),
    Tests(Report),
    Skipped(String),
}

/// What stages leave for later stages.
#[derive(Debug, Default)]
struct Context {
    /// The C headers of the bindings, or why there are none.
    headers: Option<Result<PathBuf>>,
    integration_tests: Vec<IntegrationTest>,
    built: bool,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let started = Instant::now();
    let mut context = Context::default();
    let mut all = Report::default();
    let mut failed = Vec::new();
    let mut status = None;
    for stage in Stage::value_variants().iter().filter(|stage| args.wants(**stage)) {
        let name = stage.name();
        println!("==> {name}");
        let stage_started = Instant::now();
        let outcome = match stage.run(args, &mut context) {
            Ok(outcome) => outcome,
            Err(error) => {
                if let Some(Interrupted(signal)) = error.downcast_ref() {
                    eprintln!("ended by signal {signal}");
                    status = Some(128 + signal);
                    break;
                }
                eprintln!("error: {error:#}");
                Outcome::Whole(Err(Failure::new("the stage", &format!("{error:#}"))))
            }
        };
        println!("    {name}: {outcome} ({:.1} s)", stage_started.elapsed().as_secs_f64());
        let report = outcome.into_report();
        for (reason, count) in &report.reasons {
            println!("    {count} skipped: {reason}");
        }
        if report.tally.failed > 0 {
            failed.push(name.clone());
        }
        all += report.at(&name);
    }
    println!("\nall stages: {:.0} s", started.elapsed().as_secs_f64());
    for failure in &all.failures {
        println!("{failure}");
    }
    if !failed.is_empty() {
        println!("failed stages: {}", failed.join(", "));
    }
    println!("{}", all.tally);
    Ok(status.unwrap_or(i32::from(all.tally.failed > 0)))
}

impl Args {
    /// Where the tests on a device run, one place after the other.
    fn places(&self) -> Vec<Option<Release>> {
        if self.release.is_empty() {
            return std::iter::once(None).chain(Release::newer().into_iter().map(Some)).collect();
        }
        self.release.iter().copied().map(Some).collect()
    }

    /// Whether not to show what tests print as it comes.
    fn is_silent(&self) -> bool {
        !self.verbose && !io::stdout().is_terminal()
    }

    fn wants(&self, stage: Stage) -> bool {
        let chosen =
            if self.device_only { stage == Stage::Device } else { self.only.is_empty() || self.only.contains(&stage) };
        let users = [Stage::Unit, Stage::Soft, Stage::Device, Stage::Hosts];
        let needed = stage == Stage::Build && users.iter().any(|user| self.wants(*user));
        (chosen || needed) && !self.skip.contains(&stage)
    }
}

impl Stage {
    fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(|| format!("{self:?}"), |value| value.get_name().to_owned())
    }
}

impl Outcome {
    /// Counts of the tests, with at least one failure if the program that ran them failed.
    fn tests(ending: Ending, output: Output) -> Self {
        Outcome::Tests(ended(ending, output))
    }

    fn into_report(self) -> Report {
        let mut report = Report::default();
        match self {
            Outcome::Whole(Ok(())) => report.tally.passed = 1,
            Outcome::Whole(Err(failure)) => report.fail(failure),
            Outcome::Tests(report) => return report,
            Outcome::Skipped(_) => report.tally.skipped = 1,
        }
        report
    }
}

/// What the tests of a program came to that `ending` ended, which is a failure of its own if none of them failed or not all
/// have run.
fn ended(ending: Ending, mut output: Output) -> Report {
    if ending != Ending::Status(0) && (output.report().tally.failed == 0 || output.is_unfinished()) {
        output.broken(&ending.to_string());
    }
    output.into_report()
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Whole(Ok(())) => f.write_str("passed"),
            Outcome::Whole(Err(_)) => f.write_str("failed"),
            Outcome::Tests(report) => report.tally.fmt(f),
            Outcome::Skipped(reason) => write!(f, "skipped: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::Cli;

    fn parse(words: &[&str]) -> Args {
        match Cli::try_parse_from(["xtask", "test"].iter().chain(words)).unwrap() {
            Cli { command: crate::Command::Test(args) } => args,
            other => panic!("{other:?}"),
        }
    }

    fn wanted(words: &[&str]) -> Vec<Stage> {
        let args = parse(words);
        Stage::value_variants().iter().copied().filter(|stage| args.wants(*stage)).collect()
    }

    #[test]
    fn everything_runs_unless_told_otherwise() {
        assert_eq!(wanted(&[]), Stage::value_variants());
        let without = wanted(&["--skip", "miri", "--skip", "fmt"]);
        assert_eq!(without.len(), Stage::value_variants().len() - 2);
        assert!(!without.contains(&Stage::Miri));
    }

    #[test]
    fn a_chosen_stage_brings_the_build_it_needs() {
        assert_eq!(wanted(&["--only", "fmt"]), [Stage::Fmt]);
        assert_eq!(wanted(&["--only", "unit"]), [Stage::Build, Stage::Unit]);
        assert_eq!(wanted(&["--only", "soft"]), [Stage::Build, Stage::Soft]);
        assert_eq!(wanted(&["--device-only", "--repeat", "5"]), [Stage::Build, Stage::Device]);
    }

    #[test]
    fn the_tests_on_a_device_run_where_they_are_told_to() {
        assert_eq!(parse(&["--release", "trixie"]).places(), [Some(Release::Trixie)]);
        let places = parse(&[]).places();
        assert_eq!(places[0], None, "what this machine has comes first");
        assert!(places.len() <= 2);
    }

    #[test]
    fn a_failure_outside_the_tests_is_a_failure() {
        let Outcome::Tests(report) = Outcome::tests(Ending::Status(101), Output::default()) else {
            panic!("not tests");
        };
        assert_eq!(report.tally.to_string(), "0 passed, 1 failed, 0 skipped");
        assert_eq!(report.failures[0].name, "a test program ended with status 101");
    }
}
