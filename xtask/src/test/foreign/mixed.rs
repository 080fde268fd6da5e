//! Device tests in which an example of this workspace and a C program are the two ends.

use std::env;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::packages::Root;
use crate::test::artifacts::Place;
use crate::test::libtest::Output;
use crate::test::report::Report;
use crate::test::stages::programs;
use crate::test::watch::run_all;
use crate::test::{Args, program_report};

/// The modules of these tests. They skip C programs that are not in `PATH`.
const MODULES: [&str; 3] = ["rping::", "cm_datagram::", "cmtime::"];

pub(super) fn run(root: &Root, args: &Args) -> Result<Report> {
    let programs = programs()?;
    let tests = programs.iter().find(|test| test.package == "rdma-tests" && test.place == Place::Device);
    let mut command = Command::new(&tests.context("no device tests")?.executable);
    let path = env::var_os("PATH").unwrap_or_default();
    command.env("PATH", env::join_paths([root.programs()].into_iter().chain(env::split_paths(&path)))?);
    root.set_library_path(&mut command);
    command.env("RDMA_DEVICE", "soft0").env("RDMA_REQUIRE_DEVICE", "1").env("RUST_BACKTRACE", "1");
    command.arg("--show-output").args(MODULES);
    let mut output = Output::default();
    let limit = Duration::from_secs(args.limit);
    let ending = run_all(vec![command], limit, args.is_silent(), |_, line| output.take(line))?;
    Ok(program_report(ending, output).at("with examples"))
}
