//! `cargo xtask bindgen`: generates the committed files of rdma-sys from C headers.

use std::process::Command;

use anyhow::Result;

use crate::{headers, process, workspace};

/// Generate the bindings and symbol tables of rdma-sys from the headers of rdma-core
///
/// The headers come from RDMA_CORE_INCLUDE, from an installed package, or from Debian packages that are unpacked below
/// the target directory without being installed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Write nothing; fail if a committed file is out of date
    #[arg(long)]
    check: bool,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let mut command = generator(args.check)?;
    process::run(&mut command)?;
    Ok(0)
}

/// Command that runs the generator, once its requirements are met.
///
/// # Errors
/// If this machine cannot generate, with the reason.
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
