//! The example rc_pingpong and its C original as the two ends of one run.

use std::process::Command;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::pair::{self, End};
use crate::{process, workspace};

/// The example of this workspace, and the program of rdma-core that it can talk to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(crate) enum Program {
    /// The example `rc_pingpong`
    Rust,
    /// rdma-core's `ibv_rc_pingpong`
    C,
}

impl Program {
    /// The program with `options`, as this end.
    pub(crate) fn command(self, end: End, options: &[String]) -> Result<Command> {
        let mut command = match self {
            Program::Rust => Command::new(example()?),
            Program::C => {
                let mut command = Command::new("ibv_rc_pingpong");
                // It cannot choose a GID by itself.
                let device = std::env::var("RDMA_DEVICE").unwrap_or_else(|_| "rxe0".to_owned());
                command.args(["-d", &device, "-g", "1"]);
                command
            }
        };
        command.args(options);
        if end == End::Client {
            command.arg("localhost");
        }
        Ok(command)
    }
}

/// Compiles the example.
pub(crate) fn build() -> Result<()> {
    let mut cargo = Command::new(workspace::cargo());
    cargo.current_dir(workspace::root()).args(["build", "--release", "--example", "rc_pingpong"]);
    // With xtask named too the features of common dependencies are those that it was compiled with, and they are not
    // compiled again.
    process::run(cargo.args(["--package", "rdma-stack", "--package", "xtask"]))
}

fn example() -> Result<std::path::PathBuf> {
    Ok(workspace::target_dir()?.join("release/examples/rc_pingpong"))
}

/// [`pair::run`] of `server` and `client` with `options`.
pub(crate) fn run(
    server: Program,
    client: Program,
    options: &[String],
    line: impl FnMut(End, &str),
) -> Result<[i32; 2]> {
    pair::run(server.command(End::Server, options)?, client.command(End::Client, options)?, line)
}
