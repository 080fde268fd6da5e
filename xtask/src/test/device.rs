//! The device tests on SoftRoCE, in one guest of each release.

use anyhow::Result;

use super::artifacts::{Place, TestProgram};
use super::durations::Durations;
use super::inside::{self, Plan, Program};
use super::libtest::{Line, Output};
use super::report::Report;
use super::stages::programs;
use super::watch::{Watching, conclude};
use super::{Args, Outcome, coverage};
use crate::softroce::{self, Options, Release};
use crate::workspace;

/// The package whose tests show how a device behaves. Device tests of other packages run on one release only.
const OF_THE_DEVICE: &str = "rdma-tests";

/// Modules of rdma-perf's tests whose results do not depend on the device. Stage `soft` runs them: an emulated guest takes ten
/// times as long.
const OF_THE_TOOL: [&str; 6] = ["clients::", "connection::", "failures::", "limits::", "processors::", "results::"];

/// Modules of [`OF_THE_DEVICE`] that run on one release only: examples, programs in C, long loads, and faults that are injected
/// between the library and the device.
const ON_ONE_RELEASE: [&str; 19] = [
    "allocation::",
    "cm_many::",
    "cmtime::",
    "endpoint_set_faults::",
    "explanations::",
    "failing_destruction::",
    "failing_posts::",
    "false_completions::",
    "file_transfer::",
    "floods::",
    "hello::",
    "hello_service::",
    "keepalive_faults::",
    "key_value::",
    "pingpong::",
    "random_faults::",
    "refused_work::",
    "rping::",
    "shared_channel::",
];

/// The release that the SoftRoCE column of docs/coverage.md is about.
const COVERAGE_RELEASE: Release = Release::Bookworm;

/// Runs the device test programs on this machine's own release, and in full on newer releases, too.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    let programs = programs()?;
    let tests: Vec<&TestProgram> = programs.iter().filter(|test| test.place == Place::Device).collect();
    let mut arguments = vec!["--test-threads=1".to_owned(), "--show-output".to_owned()];
    arguments.extend(args.arguments.iter().cloned());
    std::env::set_current_dir(workspace::root())?;
    let places = args.places();
    let mut all = Report::default();
    for (index, place) in places.iter().enumerate() {
        let is_wanted = |test: &&&TestProgram| test.package == OF_THE_DEVICE || args.is_full() && index == 0;
        let wanted = tests.iter().filter(is_wanted);
        let programs: Vec<_> = wanted.map(|test| in_guest(test, index == 0 || !args.arguments.is_empty())).collect();
        let count = u64::try_from(programs.len())? * u64::from(args.repeat);
        let plan = Plan { rounds: args.repeat, limit: args.limit, programs, arguments: arguments.clone() };
        let report = run_in(*place, &plan, args.limit * count + 60, args.is_silent())?;
        let name = place.map_or("this machine's own", Release::codename);
        if places.len() > 1 {
            println!("    {name}: {}", report.tally);
        }
        if args.is_full() && args.arguments.is_empty() && release_of(*place) == Some(COVERAGE_RELEASE) {
            all += coverage::compare(&report.passed)?;
        }
        all += report.at(name);
    }
    Ok(Outcome::Tests(all))
}

fn in_guest(test: &TestProgram, is_whole: bool) -> Program {
    let skipped: &[&str] = match test.package == OF_THE_DEVICE {
        false => &OF_THE_TOOL,
        true if is_whole => &[],
        true => &ON_ONE_RELEASE,
    };
    Program {
        name: test.package.clone(),
        executable: test.executable.to_string_lossy().into_owned(),
        arguments: skipped.iter().flat_map(|module| ["--skip", module]).map(str::to_owned).collect(),
    }
}

/// The release of a place of [`Args::places`].
fn release_of(place: Option<Release>) -> Option<Release> {
    place.or_else(Release::of_this_machine)
}

fn run_in(release: Option<Release>, plan: &Plan, timeout: u64, is_silent: bool) -> Result<Report> {
    let mut options = Options { timeout, release, ..Options::default() };
    let variables = [("RDMA_REQUIRE_DEVICE", "1".to_owned()), ("RUST_BACKTRACE", "1".to_owned())];
    options.environment.extend(variables.map(|(name, value)| (name.to_owned(), value)));
    let command = [softroce::THIS_PROGRAM.to_owned(), inside::ARGUMENT.to_owned(), serde_json::to_string(plan)?];

    let mut progress = Progress::default();
    let mut sink = Watching::new(1, is_silent, |_, line: Line<'_>| match line {
        Line::Output(line) => {
            if is_silent && (inside::begun(line).is_some() || inside::ended(line).is_some()) {
                println!("    {line}");
            }
            progress.line(line);
        }
        Line::Error(_) => progress.output.take(line),
    });
    let ending = softroce::run(&command, &options, &mut sink);
    sink.finish();
    println!("    slowest: {}", progress.durations);
    let report = progress.finish();
    conclude(ending, report)
}

/// Counts tests, and programs that ended badly although none of their tests failed.
#[derive(Default)]
struct Progress {
    report: Report,
    /// Of the program that runs.
    output: Output,
    program: String,
    durations: Durations,
}

impl Progress {
    fn line(&mut self, line: &str) {
        if let Some(program) = inside::begun(line) {
            self.program = program.to_owned();
        }
        self.durations.line(line);
        self.output.line(line);
        if let Some(status) = inside::ended(line) {
            if status != 0 && (self.output.is_unfinished() || self.output.report().tally.failed == 0) {
                self.output.broken(&format!("ended with status {status}"));
            }
            self.end_program();
        }
    }

    fn end_program(&mut self) {
        self.report += std::mem::take(&mut self.output).into_report().at(&self.program);
    }

    /// When nothing comes any more.
    fn finish(mut self) -> Report {
        if self.output.is_unfinished() {
            self.output.broken("was running when the guest ended");
        }
        self.end_program();
        self.report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_that_guests_skip_exist() {
        let of_the_tool = (include_str!("../../../rdma-perf/tests/device/main.rs"), &OF_THE_TOOL[..]);
        let on_one_release = (include_str!("../../../tests/device/main.rs"), &ON_ONE_RELEASE[..]);
        for (declarations, modules) in [of_the_tool, on_one_release] {
            for module in modules {
                let declaration = format!("\nmod {};\n", module.trim_end_matches("::"));
                assert!(declarations.contains(&declaration), "{declaration}");
            }
        }
    }

    #[test]
    fn a_crash_counts_once_and_a_failed_test_not_twice() {
        let mut progress = Progress::default();
        for line in [
            "--> first",
            "running 2 tests",
            "test a ... FAILED",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out",
            "xtask: ended with status 101 after 0.1 s",
            "--> second",
            "running 1 test",
            "xtask: ended with status 139 after 0.1 s",
            "--> third",
            "running 3 tests",
            "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out",
            "xtask: ended with status 0 after 0.1 s",
            "--> third, round 2",
            "running 3 tests",
        ] {
            progress.line(line);
        }
        let report = progress.finish();
        assert_eq!(report.tally.to_string(), "4 passed, 3 failed, 0 skipped");
        let names: Vec<&str> = report.failures.iter().map(|failure| failure.name.as_str()).collect();
        let broken = "second: a test program ended with status 139";
        assert_eq!(names, ["first: a", broken, "third, round 2: a test program was running when the guest ended"]);
    }
}
