//! `cargo xtask bindgen`: the committed files of rdma-sys that are generated from C headers.

use std::process::Command;

use anyhow::Result;

use crate::{headers, process, workspace};

/// Writes rdma-sys/src/bindings.rs and symbols.rs from the headers of rdma-core
///
/// The headers are those of RDMA_CORE_INCLUDE, an installed package, or Debian packages that are unpacked below the
/// target directory and not installed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Write nothing; fail if a committed file differs from what would be written
    #[arg(long)]
    check: bool,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let mut command = generator(args.check)?;
    process::run(&mut command)?;
    Ok(0)
}

/// The generator with everything it needs. An error is a reason why this machine cannot generate.
pub(crate) fn generator(check: bool) -> Result<Command> {
    let include = headers::headers(&workspace::target_dir()?)?;
    headers::libclang()?;
    let mut command = Command::new(workspace::cargo());
    command.current_dir(workspace::root());
    command.args(["run", "--quiet", "--package", "xtask-bindgen", "--", "--include"]).arg(include);
    if check {
        command.arg("--check");
    }
    Ok(command)
}
