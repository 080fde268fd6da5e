//! The work of each stage.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::artifacts::{Place, TestProgram, test_program};
use super::libtest::Output;
use super::report::Report;
use super::stage::Stage;
use super::stage_run::directory;
use super::watch::{run_all, watch, whole, whole_of};
use super::{
    Args, Outcome, device, explore, foreign, hosts, miri, msrv, overhead, package, program_report, sanitize, soft,
    toolchain,
};
use crate::{bindgen, headers, workspace};

/// The libraries that are published.
const LIBRARIES: [&str; 6] = ["rdma-verbs-sys", "rdma-soft", "rdma-safe", "rdma-pool", "rdma-async", "rdma-msg"];

const ARM: &str = "aarch64-unknown-linux-gnu";

/// Only a hang makes one program of unit tests take this long.
const UNIT_LIMIT: Duration = Duration::from_secs(900);

impl Stage {
    /// Runs the stage. An error is a failure, unless it is [`super::watch::Interrupted`].
    pub(super) fn run(self, args: &Args) -> Result<Outcome> {
        match self {
            Stage::Fmt => whole(with(Command::new(workspace::cargo()), ["fmt", "--all", "--check"])),
            Stage::Clippy => {
                let what = ["clippy", "--workspace", "--all-targets", "--all-features"];
                whole(with(cargo(), what.into_iter().chain(["--", "-D", "warnings"])))
            }
            Stage::Build => build(),
            Stage::Unit => unit(args),
            Stage::Doctest => {
                let mut command = cargo();
                command.args(["test", "--workspace", "--doc", "--no-fail-fast"]);
                tests(command, args).map(Outcome::Tests)
            }
            Stage::Docs => {
                let mut command = with(cargo(), ["doc", "--no-deps", "--workspace"]);
                command.env("RUSTDOCFLAGS", "-D warnings");
                whole(command)
            }
            Stage::Drift => drift(),
            Stage::Package => package::run(),
            Stage::Aarch64 => aarch64(),
            Stage::Msrv => msrv::run(),
            Stage::Overhead => overhead::run(),
            Stage::Miri => miri::run(args),
            Stage::Sanitize => sanitize::run(args),
            Stage::Soft => soft::run(args),
            Stage::Explore => explore::run(args),
            Stage::Foreign => foreign::run(args),
            Stage::Device => device::run(args),
            Stage::Hosts => hosts::run(args),
        }
    }
}

/// `command` with more arguments.
pub(super) fn with<'a>(mut command: Command, arguments: impl IntoIterator<Item = &'a str>) -> Command {
    command.args(arguments);
    command
}

/// Runs a `cargo test` and counts its tests.
pub(super) fn tests(command: Command, args: &Args) -> Result<Report> {
    tests_with(command, args, &[])
}

/// As [`tests`], with more arguments for the test program.
pub(super) fn tests_with(mut command: Command, args: &Args, more: &[&str]) -> Result<Report> {
    command.args(["--", "--show-output"]).args(more).args(&args.arguments);
    let mut output = Output::default();
    let ending = watch(command, args.is_silent(), |line| output.take(line))?;
    Ok(program_report(ending, output))
}

/// A cargo command with the C headers of the bindings. Every stage uses it, so that all stages compile the same artifacts.
pub(super) fn cargo() -> Command {
    with_headers(Command::new(workspace::cargo()))
}

/// `command` with the C headers of the bindings in its environment, if this machine can get them.
fn with_headers(mut command: Command) -> Command {
    match workspace::target_dir().and_then(|target_dir| headers::headers(&target_dir)) {
        Ok(include) => {
            command.env("RDMA_CORE_INCLUDE", include).env("RDMA_REQUIRE_HEADERS", "1");
        }
        Err(error) => println!("without the C headers of the bindings: {error:#}"),
    }
    command
}

fn programs_file() -> Result<PathBuf> {
    Ok(directory()?.join("programs.json"))
}

/// Compiles every test and example. All stages select the same packages, so that features and artifacts are the same.
fn build() -> Result<Outcome> {
    // Stages must not run programs of an earlier build.
    let _ = fs::remove_file(programs_file()?);
    let mut command = cargo();
    command.args(["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]);
    let mut programs = Vec::new();
    let outcome = whole_of(command, true, |line| programs.extend(test_program(line)))?;
    if matches!(outcome, Outcome::Whole(Ok(()))) {
        programs.sort_by(|first, second| (&first.package, &first.name).cmp(&(&second.package, &second.name)));
        fs::write(programs_file()?, serde_json::to_string(&programs)?)?;
        // Tests of other packages preload this shared object into C programs. Cargo does not build it for them.
        return whole(with(cargo(), ["build", "--quiet", "--package", "rdma-soft-preload"]));
    }
    Ok(outcome)
}

/// The test programs that [`build`] compiled.
///
/// # Errors
/// If it failed.
pub(super) fn programs() -> Result<Vec<TestProgram>> {
    let text = fs::read_to_string(programs_file()?).context("the tests do not compile; see stage `build`")?;
    Ok(serde_json::from_str(&text)?)
}

/// Runs the test programs without cargo, because `cargo test` would wait for the cargo of another stage.
fn unit(args: &Args) -> Result<Outcome> {
    let mut all = Report::default();
    for program in programs()?.iter().filter(|program| program.place == Place::Anywhere) {
        let mut command = with_headers(Command::new(&program.executable));
        command.current_dir(&program.folder).arg("--show-output").args(&args.arguments);
        command.env("CARGO_MANIFEST_DIR", &program.folder).env("CARGO_PKG_NAME", &program.package);
        let mut output = Output::default();
        let ending = run_all(vec![command], UNIT_LIMIT, args.is_silent(), |_, line| output.take(line))?;
        all += program_report(ending, output).at(&format!("{} {}", program.package, program.name));
    }
    Ok(Outcome::Tests(all))
}

fn drift() -> Result<Outcome> {
    match bindgen::generator(true) {
        Ok(command) => whole(command),
        Err(error) => Ok(Outcome::Skipped(format!("{error:#}"))),
    }
}

fn aarch64() -> Result<Outcome> {
    if let Err(reason) = toolchain::require_target(ARM) {
        return Ok(Outcome::Skipped(reason));
    }
    let packages = LIBRARIES.iter().flat_map(|name| ["--package", name]);
    whole(with(cargo(), ["check", "--target", ARM].into_iter().chain(packages)))
}
