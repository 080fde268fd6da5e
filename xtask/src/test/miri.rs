//! Miri: the code that is `unsafe` and needs neither a device nor a C library.

use std::process::Command;
use std::thread::available_parallelism;

use anyhow::Result;

use super::libtest::{Line, Output};
use super::report::{Excerpt, Failure, Report, Tally};
use super::stages::tests_with;
use super::toolchain::{self, NIGHTLY};
use super::watch::{watch, watch_all};
use super::{Args, Outcome};
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

/// Tests that read the time of day, which Miri's virtual clock lacks. Their verdicts do not depend on how long they take.
const OF_THE_HOST: [(&str, &str, &str); 2] = [
    ("rdma-safe", "--lib", "clock::tests::a_timestamp_is_before_or_after_the_reading_whichever_is_nearer"),
    ("rdma-safe", "--test=provider", "clocks::a_timestamp_becomes_a_time_of_the_host"),
];

/// The clock that tests read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Clock {
    /// Miri's own, which advances with the program's steps. A deadline expires at the same step of each run, however busy the
    /// machine is.
    Virtual,
    /// The machine's.
    Host,
}

/// Runs all of them, if there is a nightly toolchain.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    if let Err(reason) = toolchain::require(NIGHTLY, &["miri", "rust-src"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let mut all = Report::default();
    for (package, target) in QUICK {
        let mut command = miri(Clock::Virtual);
        command.args(["--package", package, target]);
        let skipped: Vec<&str> = OF_THE_HOST.iter().flat_map(|(_, _, name)| ["--skip", name]).collect();
        all += tests_with(command, args, &skipped)?.into_report().at(&format!("{package} {target}"));
    }
    for (package, target, name) in OF_THE_HOST {
        if !args.arguments.is_empty() && !args.arguments.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let mut command = miri(Clock::Host);
        command.args(["--package", package, target]);
        all += tests_with(command, args, &["--exact", name])?.into_report().at(&format!("{package} {target}"));
    }
    all += long(args)?;
    Ok(Outcome::Tests(all))
}

fn long(args: &Args) -> Result<Report> {
    let mut list = miri(Clock::Virtual);
    list.args(LONG).args(["--", "--list"]).args(&args.arguments);
    let mut names = Vec::new();
    let mut said = Excerpt::default();
    let listed = watch(list, true, |line| match line {
        Line::Output(line) => {
            let is_here = |name: &&str| OF_THE_HOST.iter().all(|(_, _, other)| other != name);
            names.extend(line.strip_suffix(": test").filter(is_here).map(str::to_owned));
        }
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
        let mut command = miri(Clock::Virtual);
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
fn miri(clock: Clock) -> Command {
    let mut command = toolchain::cargo_of(NIGHTLY);
    command.args(["miri", "test", "--no-fail-fast"]);
    command.env("MIRIFLAGS", flags(clock));
    command
}

fn flags(clock: Clock) -> String {
    let isolation = match clock {
        // An isolated program gets errors for files of the host, without a warning.
        Clock::Virtual => "-Zmiri-isolation-error=hide",
        Clock::Host => "-Zmiri-disable-isolation",
    };
    // A provider accesses memory by the addresses in work requests. Emulating weak memory crashes Miri when atomic accesses of
    // different sizes meet, also in one thread: "cannot have partially overlapping store buffer".
    format!("{isolation} -Zmiri-permissive-provenance -Zmiri-disable-weak-memory-emulation")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tests_of_the_time_of_day_read_the_clock_of_the_machine() {
        assert!(!flags(Clock::Virtual).contains("disable-isolation"));
        assert!(OF_THE_HOST.iter().all(|(_, _, name)| name.contains("a_timestamp_")));
    }
}
