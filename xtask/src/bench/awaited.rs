//! `cargo xtask bench awaited`: instructions of a ping-pong with `await`, beside the same ping-pong without.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use super::result::{Benchmark, Gate, Table};
use super::{environment, guest};
use crate::{process, workspace};

/// Largest ratio of a ping-pong under `Runner::block_on` to the one of `EndpointSet::wait`.
const LIMIT: f64 = 1.02;

/// Time limit in seconds, on a busy machine.
const TIMEOUT: u64 = 600;

/// The kinds of the program, with their names in the report.
const KINDS: [(&str, &str); 4] = [
    ("Endpoint", "rdma-safe, `Endpoint::wait`"),
    ("Set", "rdma-safe, `EndpointSet::wait`"),
    ("BlockOn", "rdma-async, `Runner::block_on`"),
    ("Tokio", "rdma-async, tokio's `LocalSet`"),
];

/// Count the instructions of a ping-pong of rdma-async, beside one of rdma-safe
///
/// Boots a guest whose clock counts instructions. Two threads exchange messages and sleep while they wait: with rdma-safe, and with
/// rdma-async under `Runner::block_on` and under tokio. The fewest instructions of several runs count. Fails if `block_on` exceeds
/// its limit. Writes a result for `cargo xtask bench report`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Runs of each kind
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Write the result to this file [default: a file in target/bench]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Show the guest's console
    #[arg(short, long)]
    verbose: bool,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let mut cargo = Command::new(workspace::cargo());
    cargo.current_dir(workspace::root()).args(["build", "--release", "--package", "rdma-awaited-bench"]);
    process::run(&mut cargo)?;
    let program = workspace::target_dir()?.join("release/rdma-awaited-bench");
    let command = [program.to_string_lossy().into_owned(), "--runs".to_owned(), args.runs.to_string()];
    let fewest = fewest(&guest::run(&command, TIMEOUT, args.verbose)?)?;
    let (table, gate) = evaluate(&fewest)?;
    println!("{}", table.to_text());
    println!("{}: {}, limit {}", gate.name, gate.measured, gate.limit);
    let status = i32::from(!gate.met);
    let result = Benchmark {
        benchmark: "Instructions of a ping-pong with and without `await`".to_owned(),
        command: "cargo xtask bench awaited".to_owned(),
        date: environment::today()?,
        environment: environment::collect(),
        tables: vec![table],
        gates: vec![gate],
    };
    result.write(args.json.as_deref(), "awaited")?;
    Ok(status)
}

/// The fewest instructions of each kind, from lines such as `BlockOn 50442`.
fn fewest(output: &str) -> Result<BTreeMap<String, u32>> {
    let mut fewest = BTreeMap::new();
    for line in output.lines() {
        let parsed = line.split_once('\t').and_then(|(kind, count)| Some((kind, count.parse().ok()?)));
        let (kind, count): (_, u32) = parsed.with_context(|| format!("unexpected output of the guest: {line:?}"))?;
        fewest.entry(kind.to_owned()).and_modify(|least: &mut u32| *least = count.min(*least)).or_insert(count);
    }
    Ok(fewest)
}

fn evaluate(fewest: &BTreeMap<String, u32>) -> Result<(Table, Gate)> {
    let count = |kind: &str| fewest.get(kind).copied().map(f64::from).with_context(|| format!("no count of {kind}"));
    let (endpoint, set) = (count("Endpoint")?, count("Set")?);
    let row = |(kind, name): (&str, &str)| {
        let count = count(kind)?;
        Ok(vec![
            name.to_owned(),
            format!("{count:.0}"),
            format!("{:.3}", count / endpoint),
            format!("{:.3}", count / set),
        ])
    };
    let table = Table {
        title: "Instructions of a round trip".to_owned(),
        columns: ["ping-pong", "instructions", "to `Endpoint`", "to `EndpointSet`"].map(str::to_owned).to_vec(),
        rows: KINDS.into_iter().map(row).collect::<Result<_>>()?,
        notes: vec![
            "Instructions of the guest, with its kernel, at both ends: 64 bytes each way over SoftRoCE, the fewest of several \
             runs. Each end sleeps as soon as it has nothing to do. It takes the completion of each send. An `Endpoint` has a \
             completion queue of its own. A driver of rdma-async keeps its connections in an `EndpointSet`."
                .to_owned(),
        ],
    };
    let ratio = count("BlockOn")? / set;
    let gate = Gate {
        name: "ping-pong under `block_on` / `EndpointSet::wait`".to_owned(),
        limit: format!("≤ {LIMIT}"),
        measured: format!("{ratio:.3}"),
        met: ratio <= LIMIT,
    };
    Ok((table, gate))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(block_on: u32) -> Gate {
        let output = format!("Endpoint\t990\nSet\t1005\nSet\t1000\nBlockOn\t{block_on}\nTokio\t1200\n");
        evaluate(&fewest(&output).unwrap()).unwrap().1
    }

    #[test]
    fn the_fewest_instructions_are_compared() {
        assert!(gate(1020).met && !gate(1021).met);
    }

    #[test]
    fn incomplete_output_is_refused() {
        assert!(fewest("Endpoint\tmany").is_err());
        assert!(evaluate(&fewest("Set\t1\nBlockOn\t1").unwrap()).is_err());
    }
}
