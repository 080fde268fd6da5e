//! What each stage does.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::artifacts::{Place, integration_test};
use super::libtest::Output;
use super::watch::{watch, whole, whole_of};
use super::{Args, Context, Outcome, Stage, device, foreign, hosts, miri, msrv, overhead, sanitize, soft};
use crate::{bindgen, headers, process, workspace};

/// The crates that are published.
const LIBRARIES: [&str; 3] = ["rdma-sys", "rdma-soft", "rdma-safe"];

const ARM: &str = "aarch64-unknown-linux-gnu";

impl Stage {
    /// Runs the stage. An error is a failure, unless it is [`super::watch::Interrupted`].
    pub(super) fn run(self, args: &Args, context: &mut Context) -> Result<Outcome> {
        match self {
            Stage::Fmt => whole(with(Command::new(workspace::cargo()), ["fmt", "--all", "--check"])),
            Stage::Clippy => {
                let what = ["clippy", "--workspace", "--all-targets", "--all-features"];
                whole(with(cargo(context), what.into_iter().chain(["--", "-D", "warnings"])))
            }
            Stage::Build => build(context),
            Stage::Unit => unit(args, context),
            Stage::Doctest => {
                let mut command = cargo(context);
                command.args(["test", "--workspace", "--doc", "--no-fail-fast"]);
                tests(command, args)
            }
            Stage::Docs => {
                let mut command = with(cargo(context), ["doc", "--no-deps", "--workspace"]);
                command.env("RUSTDOCFLAGS", "-D warnings");
                whole(command)
            }
            Stage::Drift => drift(),
            Stage::Package => {
                let packages = LIBRARIES.iter().flat_map(|name| ["--package", name]);
                whole(with(cargo(context), ["package", "--allow-dirty"].into_iter().chain(packages)))
            }
            Stage::Aarch64 => aarch64(context),
            Stage::Msrv => msrv::run(),
            Stage::Overhead => overhead::run(),
            Stage::Miri => miri::run(args),
            Stage::Sanitize => sanitize::run(args),
            Stage::Soft => soft::run(args, context),
            Stage::Foreign => foreign::run(args),
            Stage::Device => device::run(args, context),
            Stage::Hosts => hosts::run(args, context),
        }
    }
}

/// `command` with more arguments.
fn with<'a>(mut command: Command, arguments: impl IntoIterator<Item = &'a str>) -> Command {
    command.args(arguments);
    command
}

/// Runs a `cargo test` and counts.
pub(super) fn tests(command: Command, args: &Args) -> Result<Outcome> {
    tests_with(command, args, &[])
}

/// As [`tests`], with more arguments for the test program.
pub(super) fn tests_with(mut command: Command, args: &Args, more: &[&str]) -> Result<Outcome> {
    command.args(["--", "--show-output"]).args(more).args(&args.arguments);
    let mut output = Output::default();
    let ending = watch(command, args.is_silent(), |line| output.take(line))?;
    Ok(Outcome::tests(ending, output))
}

/// A cargo that has the C headers where they can be had, so that every stage compiles the same.
fn cargo(context: &mut Context) -> Command {
    let headers = context.headers.get_or_insert_with(|| {
        let found = workspace::target_dir().and_then(|target_dir| headers::headers(&target_dir));
        found.inspect_err(|error| println!("    without the C headers of the bindings: {error:#}"))
    });
    let mut command = Command::new(workspace::cargo());
    if let Ok(include) = headers {
        command.env("RDMA_CORE_INCLUDE", include).env("RDMA_REQUIRE_HEADERS", "1");
    }
    command
}

/// Compiles every test and example once. The same selection of packages everywhere keeps their features the same, and
/// with them what is compiled.
fn build(context: &mut Context) -> Result<Outcome> {
    let mut command = cargo(context);
    command.args(["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]);
    let mut found = Vec::new();
    let outcome = whole_of(command, true, |line| found.extend(integration_test(line)))?;
    found.sort_by(|first, second| (&first.package, &first.name).cmp(&(&second.package, &second.name)));
    context.integration_tests = found;
    context.built = matches!(outcome, Outcome::Whole(Ok(())));
    Ok(outcome)
}

fn unit(args: &Args, context: &mut Context) -> Result<Outcome> {
    if !context.built {
        return Ok(Outcome::Skipped("it does not compile".to_owned()));
    }
    let mut command = cargo(context);
    command.args(["test", "--workspace", "--no-fail-fast", "--lib", "--bins", "--examples"]);
    for test in context.integration_tests.iter().filter(|test| test.place == Place::Anywhere) {
        command.args(["--test", &test.name]);
    }
    tests(command, args)
}

fn drift() -> Result<Outcome> {
    match bindgen::generator(true) {
        Ok(command) => whole(command),
        Err(error) => Ok(Outcome::Skipped(format!("{error:#}"))),
    }
}

fn aarch64(context: &mut Context) -> Result<Outcome> {
    let mut query = Command::new("rustc");
    query.args(["--print", "target-libdir", "--target", ARM]);
    let installed = process::output(&mut query).is_ok_and(|dir| Path::new(dir.trim()).exists());
    if !installed {
        return Ok(Outcome::Skipped(format!("the target {ARM} is not installed (rustup target add {ARM})")));
    }
    let packages = LIBRARIES.iter().flat_map(|name| ["--package", name]);
    whole(with(cargo(context), ["check", "--target", ARM].into_iter().chain(packages)))
}
