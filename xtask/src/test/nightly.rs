//! The nightly toolchain, which Miri and the sanitizers need.

use std::process::Command;

use crate::process;

/// The nightly cargo, started by rustup, without the variables that the stable cargo has set.
pub(super) fn cargo() -> Command {
    let mut command = Command::new("cargo");
    command.arg("+nightly");
    for variable in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(variable);
    }
    command
}

/// Adds these components of rustup where they are missing.
///
/// # Errors
/// What is missing and cannot be added.
pub(super) fn require(components: &[&str]) -> Result<(), String> {
    if process::output(cargo().arg("--version")).is_err() {
        return Err("no nightly toolchain (rustup toolchain install nightly)".to_owned());
    }
    let list = ["component", "list", "--installed", "--toolchain", "nightly"];
    let installed = process::output(Command::new("rustup").args(list)).unwrap_or_default();
    // A component that depends on the platform has its name at the end.
    let is_missing = |name: &&&str| !installed.lines().any(|line| line.starts_with(**name));
    let missing: Vec<&str> = components.iter().filter(is_missing).copied().collect();
    if missing.is_empty() {
        return Ok(());
    }
    let add = ["component", "add", "--toolchain", "nightly"];
    println!("    rustup {} {}", add.join(" "), missing.join(" "));
    match process::output(Command::new("rustup").args(add).args(&missing)) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("the nightly toolchain has no {}: {error:#}", missing.join(" and no "))),
    }
}
