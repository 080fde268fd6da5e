//! Miri: the code that is `unsafe` and needs neither a device nor a C library.

use std::process::Command;

use anyhow::Result;

use super::libtest::Tally;
use super::stages::tests;
use super::{Args, Outcome};
use crate::process;

/// Packages and those of their test targets that Miri can run.
const TARGETS: &[(&str, &[&str])] = &[("rdma-sys", &["--lib"]), ("rdma-safe", &["--lib", "--test", "provider"])];

/// Runs every target of [`TARGETS`], if there is a nightly toolchain.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    if let Err(reason) = require_miri() {
        return Ok(Outcome::Skipped(reason));
    }
    let mut tally = Tally::default();
    for (package, targets) in TARGETS {
        let mut command = nightly();
        command.args(["miri", "test", "--no-fail-fast", "--package", package]).args(*targets);
        // A test may read the clock and the environment; a provider reaches memory by the addresses in work requests.
        command.env("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-permissive-provenance");
        tally += tests(command, args)?.tally();
    }
    Ok(Outcome::Tests(tally))
}

/// The nightly cargo, by way of rustup and without what the stable one that runs this has set.
fn nightly() -> Command {
    let mut command = Command::new("cargo");
    command.arg("+nightly");
    for variable in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(variable);
    }
    command
}

fn require_miri() -> Result<(), String> {
    if process::output(nightly().arg("--version")).is_err() {
        return Err("no nightly toolchain (rustup toolchain install nightly)".to_owned());
    }
    let present = || process::output(nightly().args(["miri", "--version"])).is_ok();
    if present() {
        return Ok(());
    }
    let add = ["component", "add", "--toolchain", "nightly", "miri", "rust-src"];
    println!("    rustup {}", add.join(" "));
    let added = process::output(Command::new("rustup").args(add));
    if present() {
        return Ok(());
    }
    Err(match added {
        Ok(_) => "the nightly toolchain has no Miri".to_owned(),
        Err(error) => format!("the nightly toolchain has no Miri, and it cannot be added: {error:#}"),
    })
}
