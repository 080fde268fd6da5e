//! `cargo xtask soak`: tests that take hours, repeated with other seeds, and mutants of the code.

mod mutants;

use std::process::Command;
use std::time::Instant;

use anyhow::Result;
use clap::ValueEnum;

use crate::test::{ALL_MODES, SCALE};
use crate::{process, softroce, workspace};

/// Schedules of [`Part::Schedules`]. The tests run 100.
const SCHEDULES: &str = "10000";

/// Schedules of dropped operations, which take a sixth of a second each.
const ASYNC_SCHEDULES: &str = "1000";

/// Packets that the decoders of rdma-msg are given. The tests give 300 000.
const PACKETS: &str = "100000000";

/// Connections of rdma-async that come and go. The tests open 200.
const CONNECTIONS: &str = "10000";

/// Operations of [`Part::Pool`]. The tests run 100 000.
const POOL_OPERATIONS: &str = "10000000";

/// Repeats tests for hours: seeds of packet loss, floods, states of connections, programs from Debian's packages, guests, Miri; and
/// tests the tests with mutants
///
/// `cargo xtask test --full` runs fewer rounds of these, Miri with one interface for each test, and no mutants. Every part
/// runs, even after a failure. The exit status is the status of the first failed part.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run only this part; may be given several times
    #[arg(long, value_name = "PART")]
    only: Vec<Part>,
    /// Seeds of packet loss, duplication and reordering
    #[arg(long, default_value_t = 100, value_name = "N")]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    first_seed: u64,
    /// Rounds of the parts that repeat tests
    #[arg(long, default_value_t = 20, value_name = "N")]
    repeat: u32,
    /// Mutants to test
    #[arg(long, default_value_t = 60, value_name = "N")]
    mutants: usize,
    /// Select the mutants by this seed
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    mutants_seed: u64,
}

/// A part of the soak tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The device tests on soft0, with each seed
    Seeds,
    /// Clients that send more than their share, on soft0
    Floods,
    /// More states and random runs of soft0's connection manager, and more hostile messages
    Explore,
    /// Regions, pages and slices that come and go in random order, under the checker of soft0; operations of rdma-async that are
    /// dropped, and connections that come and go
    Schedules,
    /// Ten million random operations of a memory pool
    Pool,
    /// Programs from Debian's packages on soft0
    Foreign,
    /// The device tests in a SoftRoCE guest
    Guests,
    /// The tests under Miri, each with all interfaces for posting and polling
    Miri,
    /// Random changes of the code, each of which a quick test must notice; needs cargo-mutants
    Mutants,
}

impl Part {
    /// The command line of `cargo xtask test` for this part.
    fn words(self, args: &Args) -> Vec<String> {
        let (seeds, first, repeat) = (args.seeds.to_string(), args.first_seed.to_string(), args.repeat.to_string());
        let words: &[&str] = match self {
            Part::Seeds => &["--only", "soft", "--seeds", &seeds, "--first-seed", &first],
            Part::Floods => &["--only", "soft", "--seeds", "0", "--repeat", &repeat, "--", "floods"],
            Part::Explore => &["--only", "explore"],
            Part::Foreign => &["--only", "foreign", "--repeat", &repeat],
            Part::Guests => &["--only", "device", "--repeat", &repeat],
            Part::Miri => &["--only", "miri"],
            Part::Schedules | Part::Pool | Part::Mutants => &[],
        };
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    fn run(self, args: &Args) -> Result<i32> {
        if self == Part::Mutants {
            return mutants::run(args.mutants, args.mutants_seed);
        }
        if self == Part::Schedules {
            let words = ["--package", "rdma-soft", "--test", "check", "no_byte"];
            let keys = cargo_test(&words, &[("RDMA_SOFT_SCHEDULES", SCHEDULES)])?;
            let words = ["--package", "rdma-tests", "--test", "device", "memory_schedules"];
            let checked = [("RDMA_MEMORY_SCHEDULES", SCHEDULES), ("RDMA_DEVICE", "soft0"), ("RDMA_SOFT_CHECK", "1")];
            let memory = cargo_test(&words, &checked)?;
            let words = ["--package", "rdma-async", "--test", "cancellation"];
            let dropped = cargo_test(&words, &[("RDMA_ASYNC_SCHEDULES", ASYNC_SCHEDULES)])?;
            let words = ["--package", "rdma-async", "--test", "churn"];
            let ended = cargo_test(&words, &[("RDMA_ASYNC_CONNECTIONS", CONNECTIONS)])?;
            let words = ["--package", "rdma-msg", "--test", "schedules"];
            let messages = cargo_test(&words, &[("RDMA_MSG_SCHEDULES", ASYNC_SCHEDULES)])?;
            let words = ["--package", "rdma-msg", "--lib", "no_bytes_of_a_peer"];
            let decoded = cargo_test(&words, &[("RDMA_MSG_PACKETS", PACKETS)])?;
            return Ok([keys, memory, dropped, ended, messages, decoded]
                .into_iter()
                .find(|status| *status != 0)
                .unwrap_or(0));
        }
        if self == Part::Pool {
            let words = ["--release", "--package", "rdma-pool", "--lib", "random_operations"];
            return cargo_test(&words, &[("RDMA_POOL_OPERATIONS", POOL_OPERATIONS)]);
        }
        let mut command = Command::new(softroce::THIS_PROGRAM);
        command.arg("test").args(self.words(args));
        if self == Part::Explore {
            command.env(SCALE, "soak");
        }
        if self == Part::Miri {
            command.env(ALL_MODES, "1");
        }
        let status = command.status()?;
        Ok(process::shell_status(status))
    }
}

/// Runs `cargo test` with `words` and variables that set its scale.
fn cargo_test(words: &[&str], variables: &[(&str, &str)]) -> Result<i32> {
    let mut command = Command::new(workspace::cargo());
    command.current_dir(workspace::root()).arg("test").args(words).envs(variables.iter().copied());
    Ok(process::shell_status(command.status()?))
}

/// Runs the parts of `args`; the first status other than 0.
pub(crate) fn main(args: &Args) -> Result<i32> {
    let mut results = Vec::new();
    for part in Part::value_variants().iter().filter(|part| args.only.is_empty() || args.only.contains(part)) {
        println!("==> soak: {part:?}");
        let started = Instant::now();
        let status = part.run(args).unwrap_or_else(|error| {
            eprintln!("error: {error:#}");
            1
        });
        results.push((part, status, started.elapsed()));
        if status > 128 {
            // A signal ends all parts.
            break;
        }
    }
    for (part, status, took) in &results {
        let outcome = if *status == 0 { "passed" } else { "failed" };
        println!("soak: {part:?}: {outcome} ({:.0} min)", took.as_secs_f64() / 60.0);
    }
    Ok(results.iter().map(|(_, status, _)| *status).find(|status| *status != 0).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::Cli;

    #[test]
    fn the_parts_are_command_lines_of_the_tests() {
        let cli = Cli::try_parse_from(["xtask", "soak", "--seeds", "7", "--first-seed", "3"]).unwrap();
        let crate::Command::Soak(args) = cli.command else { panic!("not soak") };
        assert_eq!(Part::Seeds.words(&args), ["--only", "soft", "--seeds", "7", "--first-seed", "3"]);
        for part in Part::value_variants() {
            let words = part.words(&args);
            let test = Cli::try_parse_from(["xtask", "test"].into_iter().chain(words.iter().map(String::as_str)));
            assert!(test.is_ok(), "{part:?}: {words:?}");
        }
    }
}
