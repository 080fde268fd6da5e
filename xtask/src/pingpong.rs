//! Runs the example rc_pingpong or its C original as server and client.

use std::process::Command;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::pair::{self, End};
use crate::{process, workspace};

/// The example of this workspace, or the compatible program of rdma-core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
pub(crate) enum Program {
    /// The example `rc_pingpong`
    Rust,
    /// rdma-core's `ibv_rc_pingpong`
    C,
}

impl Program {
    /// Command line of the program as `end`.
    pub(crate) fn command(self, end: End, options: &[String]) -> Result<Command> {
        let mut command = match self {
            Program::Rust => Command::new(example()?),
            Program::C => {
                let mut command = Command::new("ibv_rc_pingpong");
                // ibv_rc_pingpong does not choose a GID itself.
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
    // Naming xtask too keeps the features of shared dependencies as they were when xtask was compiled, which avoids
    // compiling those dependencies again.
    process::run(cargo.args(["--package", "rdma-stack", "--package", "xtask"]))
}

fn example() -> Result<std::path::PathBuf> {
    Ok(workspace::target_dir()?.join("release/examples/rc_pingpong"))
}

/// Runs `server` and `client` with `options`: [`pair::run`].
pub(crate) fn run(
    server: Program,
    client: Program,
    options: &[String],
    on_line: impl FnMut(End, &str),
) -> Result<[i32; 2]> {
    pair::run(server.command(End::Server, options)?, client.command(End::Client, options)?, on_line)
}
