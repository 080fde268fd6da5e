//! Miri: the code that is `unsafe` and needs neither a device nor a C library.

use std::process::Command;
use std::thread::available_parallelism;

use anyhow::Result;

use super::libtest::{Line, Output};
use super::report::{Excerpt, Failure, Report, Tally};
use super::stages::tests;
use super::watch::{watch, watch_all};
use super::{Args, Outcome, nightly};
use crate::softroce::Ending;

/// Packages and those of their test targets that Miri can run in one go.
const QUICK: &[(&str, &str)] = &[
    ("rdma-sys", "--lib"),
    ("rdma-soft", "--lib"),
    ("rdma-soft", "--test=wire"),
    ("rdma-soft", "--test=unreliable"),
    ("rdma-soft", "--test=reliable"),
    ("rdma-soft", "--test=responder"),
    ("rdma-safe", "--lib"),
    ("rdma-safe", "--test=newer"),
    ("rdma-safe", "--test=cm_turns"),
    ("rdma-safe", "--test=cm_names"),
];
/// What takes long. Miri has one thread run at a time, so that the tests are dealt out to as many programs as there are processors.
const LONG: [&str; 4] = ["--package", "rdma-safe", "--test", "provider"];

/// Runs all of them, if there is a nightly toolchain.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    if let Err(reason) = nightly::require(&["miri", "rust-src"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let mut all = Report::default();
    for (package, target) in QUICK {
        let mut command = miri();
        command.args(["--package", package, target]);
        all += tests(command, args)?.into_report().at(&format!("{package} {target}"));
    }
    all += long(args)?;
    Ok(Outcome::Tests(all))
}

fn long(args: &Args) -> Result<Report> {
    let mut list = miri();
    list.args(LONG).args(["--", "--list"]).args(&args.arguments);
    let mut names = Vec::new();
    let mut said = Excerpt::default();
    let listed = watch(list, true, |line| match line {
        Line::Output(line) => names.extend(line.strip_suffix(": test").map(str::to_owned)),
        Line::Error(line) => said.line(line),
    })?;
    let mut report = Report::default();
    if names.is_empty() {
        // A failure, unless a filter has left none.
        if listed != Ending::Status(0) {
            report.fail(Failure { name: format!("the list of {} {listed}", LONG.join(" ")), said });
        }
        return Ok(report);
    }
    let programs = available_parallelism().map_or(1, |count| count.get()).min(names.len());
    println!("    {} tests in {programs} programs", names.len());
    let commands = (0..programs).map(|program| {
        let mut command = miri();
        command.args(LONG).args(["--", "--show-output", "--exact"]);
        command.args(names.iter().skip(program).step_by(programs));
        command
    });
    let mut outputs: Vec<Output> = (0..programs).map(|_| Output::default()).collect();
    let ending = watch_all(commands.collect(), args.is_silent(), |program, line| outputs[program].take(line))?;
    for (program, mut output) in outputs.into_iter().enumerate() {
        // Each of its tests has said how it went, or it has crashed.
        let Tally { passed, failed, skipped } = output.report().tally;
        let expected = names.iter().skip(program).step_by(programs).count();
        if passed + failed + skipped < expected as u64 {
            output.broken(&format!("has not said how all of its tests went; the last {ending}"));
        }
        report += output.into_report().at(&LONG.join(" "));
    }
    if ending != Ending::Status(0) && report.tally.failed == 0 {
        report.fail(Failure::new(format!("a program of {} {ending}", LONG.join(" ")), ""));
    }
    Ok(report)
}

/// `cargo miri test` with what all of them need.
fn miri() -> Command {
    let mut command = nightly::cargo();
    command.args(["miri", "test", "--no-fail-fast"]);
    // A test may read the clock and the environment; a provider reaches memory by the addresses in work requests.
    command.env("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-permissive-provenance");
    command
}
