//! `cargo xtask bench pool`: the cost of a block beside the allocators of C.

use std::process::Command;

use anyhow::Result;

use super::overhead;
use crate::{process, workspace};

/// Count the instructions of allocating and freeing a block, beside glibc and jemalloc
///
/// callgrind counts all instructions of a get and a drop. one_N gets a block of N bytes and drops it; hold_N gets sixteen before
/// it drops the first. The counts are the same on every run. Then one thread gets blocks and another drops them, in the same
/// process for each allocator in turns. Its medians in nanoseconds depend on the machine: compare them with each other.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Without jemalloc, whose compilation takes minutes
    #[arg(long)]
    no_jemalloc: bool,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let mut build = Command::new(workspace::cargo());
    build.args(["build", "--release", "--package", "rdma-pool-bench"]);
    if !args.no_jemalloc {
        build.args(["--features", "jemalloc"]);
    }
    process::run(build.current_dir(workspace::root()))?;
    let program = workspace::target_dir()?.join("release/rdma-pool-bench");
    let rows = overhead::of_program(&program, &["instructions".to_owned()])?;
    let names: Vec<&str> =
        rows.first().map(|(_, counts)| counts.keys().map(String::as_str).collect()).unwrap_or_default();
    println!("| instructions | {} |", names.join(" | "));
    println!("|---|{}", "---|".repeat(names.len()));
    for (row, counts) in &rows {
        let counts: Vec<String> = counts.values().map(|count| format!("{count:.0}")).collect();
        println!("| `{row}` | {} |", counts.join(" | "));
    }
    println!();
    println!("| allocator | ns per block between two threads |");
    println!("|---|---|");
    for line in process::output(Command::new(&program).arg("threads"))?.lines() {
        println!("| {} |", line.replace('\t', " | "));
    }
    Ok(0)
}
