//! `cargo xtask bench pool`: the cost of a block beside the allocators of C.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use super::overhead;
use super::overhead::gates::Verdict;
use super::result::Gate;
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

/// Instructions of each loop, by allocator.
type Rows = Vec<(String, BTreeMap<String, f64>)>;

pub(crate) fn main(args: &Args) -> Result<i32> {
    let program = build(!args.no_jemalloc)?;
    let rows = count(&program)?;
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

/// Compares the pool with glibc's allocator, for the test command.
pub(crate) fn gates() -> Result<Vec<Verdict>> {
    let rows = count(&build(false)?)?;
    Ok(rows.iter().map(|(name, counts)| gate(name, counts)).collect())
}

fn build(jemalloc: bool) -> Result<PathBuf> {
    let mut build = Command::new(workspace::cargo());
    build.args(["build", "--release", "--package", "rdma-pool-bench"]);
    if jemalloc {
        build.args(["--features", "jemalloc"]);
    }
    process::run(build.current_dir(workspace::root()))?;
    Ok(workspace::target_dir()?.join("release/rdma-pool-bench"))
}

fn count(program: &Path) -> Result<Rows> {
    overhead::of_program(program, &["instructions".to_owned()])
}

/// A get and a drop must cost at most what glibc's cost.
fn gate(row: &str, counts: &BTreeMap<String, f64>) -> Verdict {
    let figure = |name: &str| counts.get(name).copied();
    let text = |figure: Option<f64>| figure.map_or_else(|| "not measured".to_owned(), |figure| format!("{figure:.2}"));
    let (limit, measured) = (figure("glibc"), figure("rdma-pool"));
    let met = limit.zip(measured).is_some_and(|(limit, measured)| measured <= limit);
    let limit = format!("≤ {} (glibc)", text(limit));
    let gate = Gate { name: format!("{row} of rdma-pool"), limit, measured: text(measured), met };
    Verdict { gate, complaint: (!met).then(|| "exceeds its limit".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_that_costs_more_than_glibc_fails() {
        let met =
            |pool: f64| gate("one_64", &[("glibc".to_owned(), 9.0), ("rdma-pool".to_owned(), pool)].into()).gate.met;
        assert!(met(9.0) && !met(9.1));
        assert!(!gate("one_64", &[("glibc".to_owned(), 9.0)].into()).gate.met);
    }
}
