//! `rdma-perf`: bandwidth, message rate and latency of RDMA verbs, and a check of a host's set-up.

// The tests that `cli`, `plan` and `report` describe are not dispatched yet.
#[allow(dead_code)]
mod cli;
mod doctor;
#[allow(dead_code)]
mod plan;
#[allow(dead_code)]
mod report;
#[cfg(test)]
mod scratch;
#[allow(dead_code)]
mod units;

use std::process::ExitCode;

use clap::Parser;

use cli::Command;

fn main() -> ExitCode {
    let status = match cli::Cli::parse().command {
        Command::Plot(args) => report::plot::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        other => Err(anyhow::anyhow!("this build cannot run it: {other:?}")),
    };
    match status {
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(u8::MAX)),
        Err(error) => {
            eprintln!("rdma-perf: {error:#}");
            ExitCode::from(2)
        }
    }
}
