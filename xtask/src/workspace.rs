//! Where the workspace and its target directory are.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The directory of the workspace's `Cargo.toml`.
pub(crate) fn root() -> PathBuf {
    let manifest_dir =
        env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let workspace = manifest_dir.parent().map(Path::to_path_buf);
    workspace.unwrap_or(manifest_dir)
}

/// Cargo's target directory, created if need be, as an absolute path without symbolic links.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let dir = match env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => env::current_dir()?.join(dir),
        None => root().join("target"),
    };
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    dir.canonicalize().with_context(|| format!("cannot resolve {}", dir.display()))
}

/// The `cargo` that runs this program, or the one on the `PATH`.
pub(crate) fn cargo() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}
