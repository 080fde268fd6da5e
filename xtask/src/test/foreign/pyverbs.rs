//! The tests of rdma-core, which use the Python package `pyverbs`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::Tests;
use super::packages::Root;
use super::watch::Watch;
use crate::process;

/// Debian's interpreter, for which the package is compiled.
const PYTHON: &str = "/usr/bin/python3";

/// Tests of the drivers of certain RNICs, by parts of their names.
const OF_DRIVERS: [&str; 3] = ["mlx5", "efa", "cuda"];

/// Modules that need what soft0 lacks. This one passes a kernel's descriptor of the device to another process.
const REFUSED: [&str; 1] = ["test_shared_pd"];

/// The tests of rdma-core.
pub(super) struct Modules {
    directory: PathBuf,
    /// The modules with tests for all devices.
    names: Vec<String>,
}

/// Copies the tests without compression, and lists their modules.
pub(super) fn prepare(root: &Root) -> Result<Modules> {
    let directory = root.file("pyverbs/tests");
    fs::create_dir_all(&directory)?;
    for entry in fs::read_dir(root.pyverbs_tests())? {
        let file = entry?.path();
        let copy = directory.join(file.file_name().context("a file has a name")?);
        if file.extension().is_some_and(|extension| extension == "gz") {
            let output = Command::new("gzip").args(["-dc"]).arg(&file).output().context("cannot run gzip")?;
            ensure!(output.status.success(), "cannot decompress {}", file.display());
            fs::write(copy.with_extension(""), output.stdout)?;
        } else if file.is_file() {
            fs::copy(&file, copy)?;
        }
    }
    let names = names(&directory)?;
    Ok(Modules { directory, names })
}

pub(super) fn run(tests: &mut Tests, prepared: &Result<Modules>) {
    match prepared {
        Ok(Modules { directory, names }) => {
            for name in names {
                tests.count(&format!("pyverbs {name}"), |root| run_module(root, directory, name));
            }
        }
        Err(error) => tests.count("pyverbs", |_| Err(anyhow::anyhow!("{error:#}"))),
    }
}

/// The names of the modules with tests for all devices.
fn names(directory: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        let file = entry?.path();
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let is_python = file.extension().is_some_and(|extension| extension == "py");
        let is_other = OF_DRIVERS.iter().any(|driver| name.contains(driver)) || REFUSED.contains(&name.as_str());
        if is_python && name.starts_with("test_") && !is_other {
            names.push(name);
        }
    }
    names.sort();
    ensure!(!names.is_empty(), "no tests in {}", directory.display());
    Ok(names)
}

fn run_module(root: &Root, directory: &Path, module: &str) -> Result<()> {
    let watch = Watch::new(root)?;
    let mut command = root.command(PYTHON)?;
    watch.of(&mut command);
    command.env("PYTHONPATH", std::env::join_paths([&root.python_packages(), directory])?);
    command.arg(directory.join("run_tests.py")).args(["--dev", "soft0", "--gid", "0", module]);
    process::output(&mut command)?;
    watch.check_reports(&format!("pyverbs {module}"))
}
