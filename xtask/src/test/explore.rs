//! The long tests of soft0's connection manager, which have no device, clock or network.

use std::env;
use std::time::Duration;

use anyhow::Result;

use super::libtest::Output;
use super::stages::cargo;
use super::watch::run_all;
use super::{Args, Outcome, program_report};
use crate::workspace;

/// How much the tests do: `quick`, `full` or `soak`.
pub(crate) const SCALE: &str = "RDMA_TEST_SCALE";

/// Only a hang makes the soak tests take this long.
const LIMIT: Duration = Duration::from_secs(12 * 3600);

/// Runs the tests in a release build, in full unless the environment says otherwise.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    let mut command = cargo();
    command.args(["test", "--release", "--no-fail-fast", "--package", "rdma-soft"]);
    command.args(["--test", "cm_explorer", "--test", "cm_hostile", "--target-dir"]);
    command.arg(workspace::target_dir()?.join("explore"));
    command.args(["--", "--show-output"]).args(&args.arguments);
    if env::var_os(SCALE).is_none() {
        command.env(SCALE, "full");
    }
    println!("    {}", crate::process::display(&command));
    let mut output = Output::default();
    let ending = run_all(vec![command], LIMIT, args.is_silent(), |_, line| output.take(line))?;
    Ok(Outcome::Tests(program_report(ending, output)))
}
