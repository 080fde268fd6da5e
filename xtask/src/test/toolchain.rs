//! Rust toolchains other than the one that runs xtask.

use std::process::Command;

use crate::process;

/// The toolchain that Miri and the sanitizers need.
pub(super) const NIGHTLY: &str = "nightly";

/// The cargo of a toolchain, started by rustup, without the variables that the running cargo has set.
pub(super) fn cargo_of(toolchain: &str) -> Command {
    let mut command = Command::new("cargo");
    command.arg(format!("+{toolchain}"));
    for variable in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(variable);
    }
    command
}

/// Whether rustup has a toolchain.
pub(super) fn is_installed(toolchain: &str) -> bool {
    process::output(cargo_of(toolchain).arg("--version")).is_ok()
}

/// Prints and runs a rustup command.
pub(super) fn rustup(arguments: &[&str]) -> anyhow::Result<String> {
    println!("    rustup {}", arguments.join(" "));
    process::output(Command::new("rustup").args(arguments))
}

/// Adds these components to a toolchain where they are missing.
///
/// # Errors
/// The reason, if the toolchain or a component is missing and cannot be added.
pub(super) fn require(toolchain: &str, components: &[&str]) -> Result<(), String> {
    if !is_installed(toolchain) {
        return Err(format!("no {toolchain} toolchain (rustup toolchain install {toolchain})"));
    }
    let list = ["component", "list", "--installed", "--toolchain", toolchain];
    let installed = process::output(Command::new("rustup").args(list)).unwrap_or_default();
    // The names of platform-dependent components end with the platform.
    let is_missing = |name: &&&str| !installed.lines().any(|line| line.starts_with(**name));
    let missing: Vec<&str> = components.iter().filter(is_missing).copied().collect();
    if missing.is_empty() {
        return Ok(());
    }
    let add = ["component", "add", "--toolchain", toolchain];
    match rustup(&[&add, missing.as_slice()].concat()) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("the {toolchain} toolchain has no {}: {error:#}", missing.join(" and no "))),
    }
}
