//! The command line of `cargo xtask test`.

use clap::ValueEnum;

use super::stage::Stage;
use crate::softroce::Release;

/// Tests the workspace: lints, unit tests, documentation, and device tests on soft0 and in one SoftRoCE guest
///
/// `--full` runs all stages, as CI does. Every stage runs, even after a failure; stages that do not need each other
/// run at the same time. The last line is `N passed, N failed, N skipped`: tests, and one for each stage without tests.
/// A test that passes and prints a line beginning `skipped: ` counts as skipped. A stage that cannot run counts as
/// skipped, too, or as failed if the environment has CI=true. Failures are repeated before the last line; the whole
/// output of each stage is in target/test-logs.
///
/// Stages `device` and `hosts` need QEMU, which root on Debian gets by apt, unless this machine has an rxe device.
/// `miri` and `sanitize` need a nightly toolchain, `msrv` Rust 1.85; rustup installs them.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Run every stage, with all releases of guests and all seeds
    #[arg(long)]
    pub(super) full: bool,
    /// Leave a stage out; may be given several times
    #[arg(long, value_name = "STAGE")]
    pub(super) skip: Vec<Stage>,
    /// Run only this stage, in full, and what it needs; may be given several times
    #[arg(long, value_name = "STAGE")]
    pub(super) only: Vec<Stage>,
    /// Run only the stage `device`
    #[arg(long)]
    pub(super) device_only: bool,
    /// Run the device tests in a guest of this release; may be given several times [default: on this machine's own
    /// release, and with --full in guests of newer releases, too]
    #[arg(long, value_name = "RELEASE")]
    pub(super) release: Vec<Release>,
    /// Run the device tests this many times in a row
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) repeat: u32,
    /// Run the device tests on soft0 with this many seeds of packet loss, duplication and reordering [default: 2 with
    /// --full or --only, else 0]
    #[arg(long, value_name = "N")]
    pub(super) seeds: Option<u64>,
    /// The first seed, to replay one that failed
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    pub(super) first_seed: u64,
    /// Let soft0 check all its device tests for misuse, and not only those with the first seed
    #[arg(long)]
    pub(super) check: bool,
    /// Time limit of one program of device tests, in seconds
    #[arg(long, default_value_t = 1800, value_name = "SECONDS")]
    pub(super) limit: u64,
    /// Stages that run at the same time [default: 2, or 1 with one processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=8))]
    pub(super) jobs: Option<u64>,
    /// Show the output of all tests
    #[arg(long)]
    pub(super) verbose: bool,
    /// Arguments for the test programs, such as a part of a test's name
    #[arg(last = true, value_name = "TEST ARGS")]
    pub(super) arguments: Vec<String>,
}

/// Seeds of the full tests: one over shared memory and one over UDP.
const SEEDS: u64 = 2;

impl Args {
    /// Whether the stages run with everything that they can do.
    pub(super) fn is_full(&self) -> bool {
        self.full || self.device_only || !self.only.is_empty()
    }

    /// Whether tests' output is not shown as it comes.
    pub(super) fn is_silent(&self) -> bool {
        !self.verbose
    }

    pub(super) fn seeds(&self) -> u64 {
        self.seeds.unwrap_or(if self.is_full() { SEEDS } else { 0 })
    }

    /// Where the device tests run; `None` is this machine's own release.
    pub(super) fn places(&self) -> Vec<Option<Release>> {
        if !self.release.is_empty() {
            return self.release.iter().copied().map(Some).collect();
        }
        let newer = if self.is_full() { Release::newer() } else { Vec::new() };
        std::iter::once(None).chain(newer.into_iter().map(Some)).collect()
    }

    /// The stages to run.
    pub(super) fn stages(&self) -> Vec<Stage> {
        let is_chosen = |stage: Stage| {
            if self.device_only {
                stage == Stage::Device
            } else if self.only.is_empty() {
                self.full || stage.is_quick()
            } else {
                self.only.contains(&stage)
            }
        };
        let is_wanted = |stage: Stage| is_chosen(stage) && !self.skip.contains(&stage);
        let all = Stage::value_variants().iter().copied();
        let needs_build = all.clone().any(|stage| stage.needs_build() && is_wanted(stage));
        let is_needed = |stage: Stage| stage == Stage::Build && needs_build && !self.skip.contains(&stage);
        all.filter(|stage| is_wanted(*stage) || is_needed(*stage)).collect()
    }

    pub(super) fn jobs(&self) -> usize {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        self.jobs.map_or(processors.min(2), |jobs| usize::try_from(jobs).unwrap_or(1))
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

    fn stages(words: &[&str]) -> Vec<Stage> {
        parse(words).stages()
    }

    #[test]
    fn the_full_tests_run_every_stage_that_is_not_left_out() {
        assert_eq!(stages(&["--full"]), Stage::value_variants());
        let without = stages(&["--full", "--skip", "miri", "--skip", "fmt"]);
        assert_eq!(without.len(), Stage::value_variants().len() - 2);
        assert!(!without.contains(&Stage::Miri));
    }

    #[test]
    fn the_quick_tests_run_no_stage_that_takes_long_beside_one_guest() {
        let quick = stages(&[]);
        assert!(quick.contains(&Stage::Device) && quick.contains(&Stage::Soft));
        assert!(!quick.contains(&Stage::Miri) && !quick.contains(&Stage::Hosts));
        assert_eq!(parse(&[]).places(), [None]);
        assert_eq!((parse(&[]).seeds(), parse(&["--full"]).seeds()), (0, SEEDS));
    }

    #[test]
    fn a_chosen_stage_runs_in_full_after_the_build_that_it_needs() {
        assert_eq!(stages(&["--only", "fmt"]), [Stage::Fmt]);
        assert_eq!(stages(&["--only", "unit"]), [Stage::Build, Stage::Unit]);
        assert_eq!(stages(&["--only", "soft"]), [Stage::Build, Stage::Soft]);
        assert_eq!(stages(&["--device-only", "--repeat", "5"]), [Stage::Build, Stage::Device]);
        assert!(parse(&["--only", "soft"]).is_full());
    }

    #[test]
    fn the_device_tests_run_on_the_releases_of_the_command_line() {
        assert_eq!(parse(&["--release", "trixie"]).places(), [Some(Release::Trixie)]);
        let places = parse(&["--full"]).places();
        assert_eq!(places[0], None, "this machine's own release comes first");
        assert!(places.len() <= 2);
    }
}
