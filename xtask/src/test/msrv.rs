//! The oldest compiler that the manifest promises.

use anyhow::Result;

use super::Outcome;
use super::toolchain::{cargo_of, require};
use super::watch::whole;
use crate::workspace;

/// `rust-version` of the workspace.
const VERSION: &str = env!("CARGO_PKG_RUST_VERSION");

/// Compiles the workspace with this version of Rust and the dependencies in the lock file.
pub(super) fn run() -> Result<Outcome> {
    if let Err(reason) = require(VERSION, &[]) {
        return Ok(Outcome::Skipped(reason));
    }
    let mut command = cargo_of(VERSION);
    command.current_dir(workspace::root());
    command.args(["check", "--workspace", "--all-targets", "--all-features", "--locked"]);
    // A shared target directory would be recompiled at each change of the compiler.
    command.env("CARGO_TARGET_DIR", workspace::target_dir()?.join("msrv"));
    whole(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_state_the_rust_version_of_the_manifest() {
        for file in ["README.md", "CONTRIBUTING.md"] {
            let text = std::fs::read_to_string(workspace::root().join(file)).unwrap();
            assert!(text.contains(&format!("({VERSION} or newer)")), "{file}");
        }
    }
}
