//! The long tests of soft0's connection manager, which have no device, clock or network, and of HTTP/2 over streams.

use std::env;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::libtest::Output;
use super::report::Report;
use super::stages::cargo;
use super::watch::run_all;
use super::{Args, Outcome, program_report};
use crate::workspace;

/// How much the tests do: `quick`, `full` or `soak`.
pub(crate) const SCALE: &str = "RDMA_TEST_SCALE";

/// Only a hang makes the soak tests take this long.
const LIMIT: Duration = Duration::from_secs(12 * 3600);

/// The test of many HTTP/2 streams on one connection.
const BUSY: &str = "http2_streams_stay_busy_in_both_directions";

/// Runs the tests in a release build, in full unless the environment says otherwise.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    let mut report = Report::default();
    let mut command = release("rdma-soft")?;
    command.args(["--test", "cm_explorer", "--test", "cm_hostile", "--", "--show-output"]).args(&args.arguments);
    set_default(&mut command, SCALE, "full");
    report += run_one(command, args)?;
    if args.arguments.is_empty() || args.arguments.iter().any(|part| BUSY.contains(part)) {
        let mut command = release("rdma-msg")?;
        command.args(["--features", "hyper,tonic", "--test", "http", "--", "--show-output", "--exact", BUSY]);
        set_default(&mut command, "RDMA_MSG_HTTP_STREAMS", "10000");
        set_default(&mut command, "RDMA_MSG_HTTP_SECONDS", "60");
        report += run_one(command, args)?;
    }
    Ok(Outcome::Tests(report))
}

/// `cargo test` for a package. Stages that run at the same time do not wait for its target directory.
fn release(package: &str) -> Result<Command> {
    let mut command = cargo();
    command.args(["test", "--release", "--no-fail-fast", "--package", package, "--target-dir"]);
    command.arg(workspace::target_dir()?.join("explore"));
    Ok(command)
}

fn set_default(command: &mut Command, variable: &str, value: &str) {
    if env::var_os(variable).is_none() {
        command.env(variable, value);
    }
}

fn run_one(command: Command, args: &Args) -> Result<Report> {
    println!("    {}", crate::process::display(&command));
    let mut output = Output::default();
    let ending = run_all(vec![command], LIMIT, args.is_silent(), |_, line| output.take(line))?;
    Ok(program_report(ending, output))
}
