//! Random mutants of the data path and of connection management, which the quick tests must notice: `cargo mutants` with a fixed
//! selection.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::{process, workspace};

/// The code that is mutated.
const FILES: [&str; 6] = [
    "rdma-safe/src/endpoint/**",
    "rdma-safe/src/post/**",
    "rdma-safe/src/cq/**",
    "rdma-soft/src/cm/**",
    "rdma-soft/src/transport/**",
    "rdma-soft/src/net/**",
];

/// The packages whose tests must notice a mutant.
const TESTS: [&str; 3] = ["rdma-soft", "rdma-safe", "rdma-tests"];

/// One of `cargo mutants --list --json`.
#[derive(Debug, Deserialize)]
struct Mutant {
    name: String,
}

/// Tests `count` mutants, selected by `seed`; 1 if a mutant survived.
pub(super) fn run(count: usize, seed: u64) -> Result<i32> {
    if process::output(Command::new("cargo").args(["mutants", "--version"])).is_err() {
        bail!("cargo-mutants is missing (cargo install --locked cargo-mutants)");
    }
    let mut list = mutants();
    let text = process::output(list.args(["--list", "--json"]))?;
    let all: Vec<Mutant> = serde_json::from_str(&text).context("cargo mutants --list --json")?;
    let names = select(all.into_iter().map(|mutant| mutant.name).collect(), count, seed);
    println!("{} mutants:", names.len());
    let pattern: Vec<String> = names.iter().map(|name| escape(name)).collect();
    let output = workspace::target_dir()?.join("mutants");
    fs::create_dir_all(&output)?;
    let mut command = mutants();
    command.arg("--output").arg(&output).args(["--re", &format!("^({})$", pattern.join("|"))]);
    command.args(["--baseline", "run", "--timeout", "600", "--no-shuffle"]);
    TESTS.iter().for_each(|package| {
        command.args(["--test-package", package]);
    });
    let status = command.env("RDMA_DEVICE", "soft0").status().context("cannot run cargo mutants")?;
    println!("survivors are in {}", output.join("mutants.out/missed.txt").display());
    // 2: mutants survived. 3: a test hung, which notices the mutant.
    Ok(match process::shell_status(status) {
        3 => 0,
        status => status,
    })
}

/// `cargo mutants` in the workspace, restricted to the data path.
fn mutants() -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(workspace::root()).args(["mutants", "--workspace"]);
    for file in FILES {
        command.args(["--file", file]);
    }
    command
}

/// `count` of `names`, the same for each seed.
fn select(mut names: Vec<String>, count: usize, seed: u64) -> Vec<String> {
    // xorshift64*; a zero state would stay zero.
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    let mut selected = Vec::new();
    while selected.len() < count && !names.is_empty() {
        let index = usize::try_from(random() % names.len() as u64).unwrap_or(0);
        selected.push(names.swap_remove(index));
    }
    selected.sort();
    selected
}

/// `name` as a regular expression that matches nothing else.
fn escape(name: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || " _/:=!#%&,;<>@'\"-".contains(c);
    name.chars().flat_map(|c| (!is_plain(c)).then_some('\\').into_iter().chain([c])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_selects_the_same_mutants_and_each_once() {
        let names: Vec<String> = (0..100).map(|number| format!("mutant {number:02}")).collect();
        let first = select(names.clone(), 10, 1);
        assert_eq!(first, select(names.clone(), 10, 1));
        assert_ne!(first, select(names.clone(), 10, 2));
        let all = select(names.clone(), 1000, 1);
        assert_eq!(all, names);
    }

    #[test]
    fn a_name_is_matched_literally() {
        assert_eq!(
            escape("a.rs:1:5: replace f -> Vec<u8> with vec![]"),
            r"a\.rs:1:5: replace f -> Vec<u8> with vec!\[\]"
        );
        assert_eq!(escape("replace + with *"), r"replace \+ with \*");
    }
}
