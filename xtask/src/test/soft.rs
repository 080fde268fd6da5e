//! The device tests on soft0, the software RNIC of this workspace, in processes of this machine.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::artifacts::{Place, TestProgram};
use super::libtest::Output;
use super::report::Report;
use super::stages::programs;
use super::watch::run_all;
use super::{Args, Outcome, program_report};
use crate::process;

/// The device's name, the same on every machine.
const DEVICE: &str = "soft0";

/// Faults of a bad network.
const FAULTS: &str = "drop=0.05,reorder=0.05,dup=0.01";

/// The package whose tests also run over a bad network. Other tests measure times, or have time limits that need a good network.
const ROBUST: &str = "rdma-tests";

/// A part of the names of the tests that connect by address. They also run with faults of control messages only: where data may be
/// lost, they skip the exchange of datagrams.
const CONNECTIONS: &str = "cm";

/// Kinds of reports of the checker that tests cause on purpose. A report of any other kind fails the tests.
const EXPECTED: &str = "suppress=overlap,stale-key,unknown-key,key-range,key-domain,key-access,cq-can-overrun,cq-overrun,\
                        unsignaled-full,unacked-events,receiver-not-ready,receive-too-small,leaked";

/// The network between the tests' processes.
#[derive(Clone, Copy, Default)]
struct Network {
    /// The seed of the [`FAULTS`], if there are any.
    seed: Option<u64>,
    /// Whether only messages of the connection manager have faults.
    only_cm: bool,
    /// Whether processes exchange UDP packets, as hosts do, instead of using shared memory.
    is_by_udp: bool,
    /// Whether the checker of soft0 checks the tests.
    is_checked: bool,
}

impl Network {
    /// A bad network: shared memory for odd seeds, UDP for even ones.
    fn bad(seed: u64) -> Network {
        Network { seed: Some(seed), is_by_udp: seed % 2 == 0, ..Network::default() }
    }

    fn variables(self) -> Vec<(&'static str, String)> {
        let only = if self.only_cm { ",only=cm" } else { "" };
        let faults = self.seed.map(|seed| ("RDMA_SOFT_FAULTS", format!("seed={seed},{FAULTS}{only}")));
        let udp = self.is_by_udp.then(|| ("RDMA_SOFT_UDP", "1".to_owned()));
        let check = self.is_checked.then(|| ("RDMA_SOFT_CHECK", EXPECTED.to_owned()));
        faults.into_iter().chain(udp).chain(check).collect()
    }
}

/// Runs every device test program over shared memory, and in full also by UDP and over a bad network with each seed. The
/// tests of a program run in threads at the same time. The checker checks the runs with the first seed, or all with `--check`.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    let programs = programs()?;
    let mut all = Report::default();
    let tests = || programs.iter().filter(|test| test.place == Place::Device);
    for _ in 0..args.repeat {
        for test in tests() {
            all += run_one(test, Network { is_checked: args.check, ..Network::default() }, args)?;
            if test.package == ROBUST && args.is_full() {
                all += run_one(test, Network { is_by_udp: true, is_checked: args.check, ..Network::default() }, args)?;
            }
        }
    }
    let seeds = args.first_seed..args.first_seed.saturating_add(args.seeds());
    let mut failed = Vec::new();
    for (seed, test) in
        seeds.flat_map(|seed| tests().filter(|test| test.package == ROBUST).map(move |test| (seed, test)))
    {
        let is_checked = args.check || seed == args.first_seed;
        let network = Network { is_checked, ..Network::bad(seed) };
        let mut of_seed = run_one(test, network, args)?;
        if args.arguments.is_empty() {
            let args = Args { arguments: vec![CONNECTIONS.to_owned()], ..args.clone() };
            of_seed += run_one(test, Network { only_cm: true, ..network }, &args)?;
        }
        if of_seed.tally.failed > 0 {
            failed.push(seed);
        }
        all += of_seed;
    }
    for seed in failed {
        println!("    replay seed {seed} with: --only soft --seeds 1 --first-seed {seed}");
    }
    Ok(Outcome::Tests(all))
}

fn run_one(test: &TestProgram, network: Network, args: &Args) -> Result<Report> {
    let mut command = Command::new(&test.executable);
    command.arg("--show-output").args(&args.arguments);
    command.env("RDMA_DEVICE", DEVICE).env("RDMA_REQUIRE_DEVICE", "1").env("RUST_BACKTRACE", "1");
    for variable in ["RDMA_SOFT_FAULTS", "RDMA_SOFT_UDP", "RDMA_SOFT_CHECK"] {
        command.env_remove(variable);
    }
    if network.only_cm {
        // These tests mostly wait for retransmissions.
        let threads = 2 * std::thread::available_parallelism().map_or(1, usize::from);
        command.env("RUST_TEST_THREADS", threads.to_string());
    }
    let variables = network.variables();
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    let shown: String = variables.iter().map(|(name, value)| format!(" {name}={value}")).collect();
    let place = format!("{}: RDMA_DEVICE={DEVICE}{shown}", test.package);
    println!("    {place} {}", process::display(&command));
    let started = Instant::now();
    let mut output = Output::default();
    let ending =
        run_all(vec![command], Duration::from_secs(args.limit), args.is_silent(), |_, line| output.take(line))?;
    let report = program_report(ending, output).at(&place);
    println!("    {} ({:.1} s)", report.tally, started.elapsed().as_secs_f64());
    Ok(report)
}
