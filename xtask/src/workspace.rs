//! Paths of the workspace, its target directory, and cargo.

use std::env;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};

/// The directory of the workspace's `Cargo.toml`.
pub(crate) fn root() -> PathBuf {
    let manifest_dir =
        env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let workspace = manifest_dir.parent().map(Path::to_path_buf);
    workspace.unwrap_or(manifest_dir)
}

/// Cargo's target directory as an absolute path without symbolic links. Creates it if necessary.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let dir = match env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => env::current_dir()?.join(dir),
        None => root().join("target"),
    };
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    dir.canonicalize().with_context(|| format!("cannot resolve {}", dir.display()))
}

/// The `cargo` that started this program, or else the one on the `PATH`.
pub(crate) fn cargo() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// Locks out other processes of this program until the file is closed. Stages that run at the same time take turns to
/// download and to install.
pub(crate) fn lock() -> Result<File> {
    let path = target_dir()?.join("xtask.lock");
    let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    flock(&file, FlockOperation::LockExclusive).with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(file)
}
