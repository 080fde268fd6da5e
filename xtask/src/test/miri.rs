//! Miri: the code that is `unsafe` and needs neither a device nor a C library.

use std::process::Command;
use std::thread::available_parallelism;

use anyhow::Result;

use super::durations::Durations;
use super::libtest::{Line, Output};
use super::report::{Excerpt, Failure, Report, Tally};
use super::stages::tests_with;
use super::toolchain::{self, NIGHTLY};
use super::watch::{watch, watch_all};
use super::{Args, Outcome};
use crate::softroce::Ending;

/// If this variable is set, tests that run with each interface do so under Miri, too. Otherwise the name of the test selects one.
pub(crate) const ALL_MODES: &str = "RDMA_TEST_ALL_MODES";

/// Packages and targets whose tests run in one program each.
const QUICK: &[(&str, &str)] = &[
    ("rdma-verbs-sys", "--lib"),
    ("rdma-soft", "--lib"),
    ("rdma-soft", "--test=wire"),
    ("rdma-soft", "--test=unreliable"),
    ("rdma-soft", "--test=reliable"),
    ("rdma-soft", "--test=responder"),
    ("rdma-safe", "--lib"),
    ("rdma-safe", "--test=newer"),
    ("rdma-safe", "--test=cm_turns"),
    ("rdma-safe", "--test=cm_names"),
    ("rdma-pool", "--lib"),
    ("rdma-async", "--lib"),
];
/// A target that takes long. Miri runs one thread at a time, so its tests are split into one program per processor.
struct Long {
    target: [&'static str; 4],
    /// Modules to run, or none for all.
    modules: &'static [&'static str],
    /// One of this many tests runs in `--full`, in the order of the list. `--only miri` and a filter run all of them.
    one_of: usize,
}

/// The tests over the fake provider, and the device tests of behaviour that only soft0 or the interposer shows.
const LONG: [Long; 2] = [
    Long { target: ["--package", "rdma-safe", "--test", "provider"], modules: &[], one_of: 1 },
    Long {
        target: ["--package", "rdma-tests", "--test", "device"],
        modules: &[
            "async_events::",
            "attributes::",
            "changes::",
            "connect::",
            "creation::",
            "datagrams::",
            "device_memory::",
            "drain::",
            "endpoint_set_faults::",
            "endpoint_sets::",
            "failing_destruction::",
            "failing_posts::",
            "false_completions::",
            "imports::",
            "keepalive_faults::",
            "keepalive_sets::",
            "memory::",
            "memory_windows::",
            "multicast::",
            "newer_operations::",
            "polling::",
            "quirk_workarounds::",
            "random_faults::",
            "raw_handles::",
            "raw_packets::",
            "receive_pool::",
            "refused_work::",
            "registration_cache::",
            "shared_payloads::",
            "shared_receives::",
            "unreliable::",
            "user_memory::",
            "window_regions::",
        ],
        // Most topics have tests over the fake provider as well, and all tests would take half of the time of the full tests.
        one_of: 3,
    },
];

impl Long {
    /// Whether the test `name` runs: it is in one of the modules, and matches one of the `filters` if there are any.
    fn runs(&self, name: &str, filters: &[String]) -> bool {
        let is_of_module = self.modules.is_empty() || self.modules.iter().any(|module| name.starts_with(module));
        is_of_module && (filters.is_empty() || filters.iter().any(|part| name.contains(part.as_str())))
    }
}

/// Tests that read the time of day, which Miri's virtual clock lacks. Their verdicts do not depend on their duration.
const OF_THE_HOST: [(&str, &str, &str); 2] = [
    ("rdma-safe", "--lib", "clock::tests::a_timestamp_is_taken_as_the_nearer_one_before_or_after_the_reading"),
    ("rdma-safe", "--test=provider", "clocks::a_timestamp_becomes_a_time_of_the_host"),
];

/// The clock that tests read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Clock {
    /// Miri's own clock, which advances with the program's steps: a deadline expires at the same step in each run, independent of
    /// the machine's load.
    Virtual,
    /// The clock of the machine.
    Host,
}

/// Runs all tests that Miri supports.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    if let Err(reason) = toolchain::require(NIGHTLY, &["miri", "rust-src"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let mut all = Report::default();
    for (package, target) in QUICK {
        let mut command = miri(Clock::Virtual);
        command.args(["--package", package, target]);
        let skipped: Vec<&str> = OF_THE_HOST.iter().flat_map(|(_, _, name)| ["--skip", name]).collect();
        all += tests_with(command, args, &skipped)?.at(&format!("{package} {target}"));
    }
    for (package, target, name) in OF_THE_HOST {
        if !args.arguments.is_empty() && !args.arguments.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let mut command = miri(Clock::Host);
        command.args(["--package", package, target]);
        all += tests_with(command, args, &["--exact", name])?.at(&format!("{package} {target}"));
    }
    for target in &LONG {
        all += long(target, args)?;
    }
    Ok(Outcome::Tests(all))
}

fn long(of: &Long, args: &Args) -> Result<Report> {
    let target = of.target.join(" ");
    let mut list = miri(Clock::Virtual);
    list.args(of.target).args(["--", "--list"]);
    let mut names = Vec::new();
    let mut said = Excerpt::default();
    let listed = watch(list, true, |line| match line {
        Line::Output(line) => {
            let is_here =
                |name: &&str| of.runs(name, &args.arguments) && OF_THE_HOST.iter().all(|(_, _, other)| other != name);
            names.extend(line.strip_suffix(": test").filter(is_here).map(str::to_owned));
        }
        Line::Error(line) => said.line(line),
    })?;
    let mut report = Report::default();
    if names.is_empty() {
        // A failure, unless a filter has left none.
        if listed != Ending::Status(0) {
            report.fail(Failure { name: format!("the list of {target} {listed}"), said });
        }
        return Ok(report);
    }
    if args.full && args.arguments.is_empty() {
        let all = names.len();
        names = names.into_iter().step_by(of.one_of).collect();
        if names.len() < all {
            println!("    {} of {all} tests of {target}; `--only miri` runs all", names.len());
        }
    }
    let programs = available_parallelism().map_or(1, |count| count.get()).min(names.len());
    println!("    {} tests in {programs} programs", names.len());
    let commands = (0..programs).map(|program| {
        let mut command = miri(Clock::Virtual);
        command.args(of.target).args(["--", "--show-output", "--exact"]);
        command.args(names.iter().skip(program).step_by(programs));
        command
    });
    let mut outputs: Vec<Output> = (0..programs).map(|_| Output::default()).collect();
    let mut durations: Vec<Durations> = (0..programs).map(|_| Durations::default()).collect();
    let ending = watch_all(commands.collect(), args.is_silent(), |program, line| {
        if let Line::Output(line) = line {
            durations[program].line(line);
        }
        outputs[program].take(line);
    })?;
    for durations in durations {
        println!("    slowest: {durations}");
    }
    for (program, mut output) in outputs.into_iter().enumerate() {
        // A program that printed fewer results than it has tests crashed.
        let Tally { passed, failed, skipped } = output.report().tally;
        let expected = names.iter().skip(program).step_by(programs).count();
        if passed + failed + skipped < expected as u64 {
            output.broken(&format!("has not said how all of its tests went; the last {ending}"));
        }
        report += output.into_report().at(&target);
    }
    if ending != Ending::Status(0) && report.tally.failed == 0 {
        report.fail(Failure::new(format!("a program of {target} {ending}"), ""));
    }
    Ok(report)
}

/// `cargo miri test` with the flags that every target needs.
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
    let emulation = "-Zmiri-permissive-provenance -Zmiri-disable-weak-memory-emulation";
    // Miri looks for unused tags every 10 000 basic blocks. Less often is a tenth faster.
    format!("{isolation} {emulation} -Zmiri-provenance-gc=100000 -Zmiri-env-forward={ALL_MODES}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_runs_if_its_module_and_the_filters_have_it() {
        let [provider, device] = &LONG;
        let filters = |filters: &[&str]| filters.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>();
        assert!(provider.runs("rings::any", &[]) && device.runs("drain::any", &[]));
        assert!(!device.runs("cm::drain", &[]), "no module of the list");
        assert!(device.runs("drain::any", &filters(&["other", "any"])));
        assert!(!device.runs("drain::any", &filters(&["other"])));
    }

    #[test]
    fn only_tests_of_the_time_of_day_read_the_clock_of_the_machine() {
        assert!(!flags(Clock::Virtual).contains("disable-isolation"));
        assert!(OF_THE_HOST.iter().all(|(_, _, name)| name.contains("a_timestamp_")));
    }
}
