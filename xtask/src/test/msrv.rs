//! The oldest compiler that the manifest promises.

use anyhow::Result;

use super::Outcome;
use super::report::Failure;
use super::toolchain::{cargo_of, is_installed, rustup};
use super::watch::whole;
use crate::workspace;

/// `rust-version` of the workspace.
const VERSION: &str = env!("CARGO_PKG_RUST_VERSION");

/// Compiles the workspace with it, with the versions in the lock file.
pub(super) fn run() -> Result<Outcome> {
    if let Err(reason) = require_toolchain() {
        let is_required = std::env::var_os("CI").is_some_and(|value| value == "true");
        return Ok(if is_required {
            Outcome::Whole(Err(Failure::new("Rust of the manifest", &reason)))
        } else {
            Outcome::Skipped(reason)
        });
    }
    let mut command = cargo_of(VERSION);
    command.current_dir(workspace::root());
    command.args(["check", "--workspace", "--all-targets", "--all-features", "--locked"]);
    // In the usual target directory, each change of the compiler would recompile everything.
    command.env("CARGO_TARGET_DIR", workspace::target_dir()?.join("msrv"));
    whole(command)
}

/// Installs it where it is missing.
fn require_toolchain() -> Result<(), String> {
    if is_installed(VERSION) {
        return Ok(());
    }
    let installed = rustup(&["toolchain", "install", VERSION, "--profile", "minimal"]);
    if is_installed(VERSION) {
        return Ok(());
    }
    let why = installed.err().map(|error| format!(": {error:#}")).unwrap_or_default();
    Err(format!("no Rust {VERSION}, and it cannot be installed (rustup toolchain install {VERSION}){why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_are_told_the_version_of_the_manifest() {
        for file in ["README.md", "CONTRIBUTING.md"] {
            let text = std::fs::read_to_string(workspace::root().join(file)).unwrap();
            assert!(text.contains(&format!("({VERSION} or newer)")), "{file}");
        }
    }
}
