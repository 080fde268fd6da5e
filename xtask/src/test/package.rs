//! Stage `package`: packages every published crate and compiles it from its package.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::Outcome;
use super::stages::{cargo, with};
use super::watch::whole;
use crate::workspace;

const PUBLISHED: [&str; 8] =
    ["rdma-verbs-sys", "rdma-soft", "rdma-safe", "rdma-pool", "rdma-async", "rdma-msg", "rdma-cat", "rdma-perf"];

/// `cargo package` compiles a crate against the packages of its dependencies, which it serves from a registry in the target
/// directory. Cargo takes a version in a registry as immutable: it neither unpacks nor compiles it twice. So this removes
/// what an earlier run unpacked and compiled.
pub(super) fn run() -> Result<Outcome> {
    let target_dir = workspace::target_dir()?.join("package-stage");
    let unpacked = unpacked_before(&cargo_home()?.join("registry/src"))?;
    for folder in unpacked.iter().chain(target_dir.exists().then_some(&target_dir)) {
        fs::remove_dir_all(folder).with_context(|| format!("removing {}", folder.display()))?;
    }
    let packages = PUBLISHED.iter().flat_map(|name| ["--package", name]);
    let mut command = with(cargo(), ["package", "--allow-dirty"].into_iter().chain(packages));
    // Nothing runs what this compiles.
    command.arg("--target-dir").arg(&target_dir).env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_INCREMENTAL", "0");
    whole(command)
}

fn cargo_home() -> Result<PathBuf> {
    if let Some(home) = std::env::var_os("CARGO_HOME") {
        return Ok(home.into());
    }
    let Some(home) = std::env::var_os("HOME") else { bail!("neither CARGO_HOME nor HOME is set") };
    Ok(PathBuf::from(home).join(".cargo"))
}

/// What an earlier `cargo package` unpacked of the published crates.
///
/// Cargo names the folder of a registry after its host and a hash. A registry in a directory has no host.
fn unpacked_before(sources: &Path) -> Result<Vec<PathBuf>> {
    let mut unpacked = Vec::new();
    for registry in folders(sources)?.into_iter().filter(|folder| starts_with(folder, "-")) {
        let crates = folders(&registry)?.into_iter();
        unpacked.extend(crates.filter(|folder| PUBLISHED.iter().any(|name| starts_with(folder, &format!("{name}-")))));
    }
    Ok(unpacked)
}

fn starts_with(folder: &Path, start: &str) -> bool {
    folder.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(start.as_bytes()))
}

/// The folders in `folder`, or none if it does not exist.
fn folders(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    Ok(paths.into_iter().filter(|path| path.is_dir()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unpacked_published_crates_of_registries_in_directories_are_removed() {
        let sources = std::env::temp_dir().join(format!("xtask-package-{}", std::process::id()));
        let removed = ["-22c3805da5a543b4/rdma-safe-0.1.0", "-22c3805da5a543b4/rdma-perf-0.2.0", "-1/rdma-soft-0.1.0"];
        let left = ["-22c3805da5a543b4/libc-0.2.1", "index.crates.io-1949cf8c6b5b557f/rdma-safe-0.1.0"];
        for folder in removed.iter().chain(&left) {
            fs::create_dir_all(sources.join(folder)).unwrap();
        }
        let mut found = unpacked_before(&sources).unwrap();
        found.sort();
        let mut expected: Vec<_> = removed.iter().map(|folder| sources.join(folder)).collect();
        expected.sort();
        assert_eq!(found, expected);
        assert!(unpacked_before(&sources.join("nothing")).unwrap().is_empty());
        fs::remove_dir_all(&sources).unwrap();
    }
}
