//! The programs of `tests/stress` under ThreadSanitizer and AddressSanitizer.

use std::process::Command;

use anyhow::Result;

use super::report::Report;
use super::stages::tests;
use super::toolchain::{self, NIGHTLY};
use super::{Args, Outcome};
use crate::workspace;

/// Target of the compiler. Naming it keeps the sanitizer out of build scripts and procedural macros.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Runs the programs with each sanitizer.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    if !cfg!(all(target_arch = "x86_64", target_env = "gnu")) {
        return Ok(Outcome::Skipped(format!("the sanitizers are run on {TARGET}")));
    }
    if let Err(reason) = toolchain::require(NIGHTLY, &["rust-src"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let mut all = Report::default();
    for sanitizer in ["thread", "address"] {
        all += tests(command(sanitizer)?, args)?.at(sanitizer);
    }
    Ok(Outcome::Tests(all))
}

fn command(sanitizer: &str) -> Result<Command> {
    let mut command = toolchain::cargo_of(NIGHTLY);
    command.args(["test", "--package", "rdma-stress", "--lib", "--target", TARGET, "--target-dir"]);
    command.arg(workspace::target_dir()?.join("sanitize"));
    if sanitizer == "thread" {
        // ThreadSanitizer does not see the locks of a standard library compiled without it, and would report false races.
        command.arg("-Zbuild-std");
    }
    command.env("RUSTFLAGS", format!("-Zsanitizer={sanitizer}"));
    // A program with reports runs to its end, so that all are printed, and then exits with this code.
    command.env("TSAN_OPTIONS", "halt_on_error=0 exitcode=66 history_size=7");
    Ok(command)
}
