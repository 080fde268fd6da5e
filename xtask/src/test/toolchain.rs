//! Rust toolchains other than the one that runs xtask.

use std::path::Path;
use std::process::Command;

use crate::{process, workspace};

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
fn is_installed(toolchain: &str) -> bool {
    process::output(cargo_of(toolchain).arg("--version")).is_ok()
}

/// Prints and runs a rustup command.
fn rustup(arguments: &[&str]) -> anyhow::Result<String> {
    println!("    rustup {}", arguments.join(" "));
    process::output(Command::new("rustup").args(arguments))
}

/// Installs a toolchain and the given components if they are missing.
///
/// # Errors
/// The reason, if the toolchain or a component is missing and rustup cannot add it.
pub(super) fn require(toolchain: &str, components: &[&str]) -> Result<(), String> {
    let _lock = workspace::lock().map_err(|error| format!("{error:#}"))?;
    if !is_installed(toolchain) {
        let installed = rustup(&["toolchain", "install", toolchain, "--profile", "minimal"]);
        if !is_installed(toolchain) {
            let why = installed.err().map(|error| format!(": {error:#}")).unwrap_or_default();
            return Err(format!(
                "no Rust {toolchain}, and it cannot be installed (rustup toolchain install {toolchain}){why}"
            ));
        }
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

/// Installs the standard library of `target` if it is missing.
///
/// # Errors
/// The reason, if rustup cannot add it.
pub(super) fn require_target(target: &str) -> Result<(), String> {
    let _lock = workspace::lock().map_err(|error| format!("{error:#}"))?;
    let mut query = Command::new("rustc");
    query.args(["--print", "target-libdir", "--target", target]);
    let is_installed = |query: &mut Command| process::output(query).is_ok_and(|dir| Path::new(dir.trim()).exists());
    if is_installed(&mut query) {
        return Ok(());
    }
    let added = rustup(&["target", "add", target]);
    if is_installed(&mut query) {
        return Ok(());
    }
    let why = added.err().map(|error| format!(": {error:#}")).unwrap_or_default();
    Err(format!("the target {target} is not installed (rustup target add {target}){why}"))
}
