//! The tools that the benchmark needs in addition to cargo.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use super::REFERENCE;
use crate::{apt, headers, process, workspace};

#[derive(Debug)]
pub(super) struct Tools {
    pub(super) valgrind: PathBuf,
    /// [`REFERENCE`], and gcc if it is installed.
    pub(super) compilers: Vec<Compiler>,
    pub(super) headers: PathBuf,
}

#[derive(Debug)]
pub(super) struct Compiler {
    pub(super) name: &'static str,
    pub(super) path: PathBuf,
}

/// Finds the tools, or installs missing ones if this process may.
///
/// gcc may be missing, because no gate compares with it.
pub(super) fn find() -> Result<Tools> {
    let valgrind = tool("valgrind", "valgrind")?;
    let mut compilers = Vec::new();
    if let Some(path) = process::find("gcc") {
        compilers.push(Compiler { name: "gcc", path });
    }
    compilers.push(Compiler { name: REFERENCE, path: tool(REFERENCE, "clang")? });
    tool("objdump", "binutils")?;
    let headers = headers::headers(&workspace::target_dir()?)?;
    Ok(Tools { valgrind, compilers, headers })
}

/// Finds the program `name`, or installs its `package` if this process may.
pub(super) fn tool(name: &str, package: &str) -> Result<PathBuf> {
    apt::install_unless(|| process::find(name).is_some(), package).with_context(|| format!("{name} not found"))?;
    process::find(name).with_context(|| format!("{name} not found"))
}

/// The first line of the output of `program --version`.
pub(super) fn version(program: &std::path::Path) -> String {
    let output = process::output(Command::new(program).arg("--version")).unwrap_or_default();
    output.lines().next().unwrap_or_default().to_owned()
}
