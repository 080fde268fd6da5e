//! The tests that need a device, on the software RNIC of this workspace: in processes of this machine as it is.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::artifacts::{IntegrationTest, Place};
use super::libtest::Output;
use super::report::Report;
use super::watch::run_all;
use super::{Args, Context, Outcome, ended};
use crate::{process, workspace};

/// The device, which programs take by this name wherever they run.
const DEVICE: &str = "soft0";

/// What happens to packets of a bad network.
const FAULTS: &str = "drop=0.05,reorder=0.05,dup=0.01";

/// Whose tests run over a bad network, too. Others measure, or end within limits that are for good ones.
const ROBUST: &str = "rdma-stack";

/// What the tests run over.
#[derive(Clone, Copy, Default)]
struct Network {
    /// With those [`FAULTS`].
    seed: Option<u64>,
    /// Processes talk by UDP, as those of other hosts do, and not through memory that they share.
    is_by_udp: bool,
}

impl Network {
    /// A bad one. Seeds take turns with both ways.
    fn bad(seed: u64) -> Network {
        Network { seed: Some(seed), is_by_udp: seed % 2 == 0 }
    }

    fn variables(self) -> Vec<(&'static str, String)> {
        let faults = self.seed.map(|seed| ("RDMA_SOFT_FAULTS", format!("seed={seed},{FAULTS}")));
        let way = self.is_by_udp.then(|| ("RDMA_SOFT_UDP", "1".to_owned()));
        faults.into_iter().chain(way).collect()
    }
}

/// Runs every test program that needs a device, the tests of each in threads at the same time: once over a good network by either
/// way, and with each seed over a bad one.
pub(super) fn run(args: &Args, context: &Context) -> Result<Outcome> {
    if !context.built {
        return Ok(Outcome::Skipped("it does not compile".to_owned()));
    }
    // Programs in C are given it, and cargo builds no shared object for the tests of others.
    let mut cargo = Command::new(workspace::cargo());
    process::run(cargo.current_dir(workspace::root()).args(["build", "--quiet", "--package", "rdma-soft-preload"]))?;
    let mut all = Report::default();
    let tests = || context.integration_tests.iter().filter(|test| test.place == Place::Device);
    for _ in 0..args.repeat {
        for test in tests() {
            all += run_one(test, Network::default(), args)?;
            if test.package == ROBUST {
                all += run_one(test, Network { is_by_udp: true, ..Network::default() }, args)?;
            }
        }
    }
    let seeds = args.first_seed..args.first_seed.saturating_add(args.seeds);
    let mut failed = Vec::new();
    for (seed, test) in
        seeds.flat_map(|seed| tests().filter(|test| test.package == ROBUST).map(move |test| (seed, test)))
    {
        let of_seed = run_one(test, Network::bad(seed), args)?;
        if of_seed.tally.failed > 0 {
            failed.push(seed);
        }
        all += of_seed;
    }
    for seed in failed {
        println!("    to have the failures of seed {seed} again: --only soft --seeds 1 --first-seed {seed}");
    }
    Ok(Outcome::Tests(all))
}

fn run_one(test: &IntegrationTest, network: Network, args: &Args) -> Result<Report> {
    let mut command = Command::new(&test.executable);
    command.arg("--show-output").args(&args.arguments);
    command.env("RDMA_DEVICE", DEVICE).env("RDMA_REQUIRE_DEVICE", "1").env("RUST_BACKTRACE", "1");
    command.env_remove("RDMA_SOFT_FAULTS").env_remove("RDMA_SOFT_UDP");
    let variables = network.variables();
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    let shown: String = variables.iter().map(|(name, value)| format!(" {name}={value}")).collect();
    let place = format!("{}: RDMA_DEVICE={DEVICE}{shown}", test.package);
    println!("    {place} {}", process::display(&command));
    let started = Instant::now();
    let mut output = Output::default();
    let ending =
        run_all(vec![command], Duration::from_secs(args.limit), args.is_silent(), |_, line| output.take(line))?;
    let report = ended(ending, output).at(&place);
    println!("    {} ({:.1} s)", report.tally, started.elapsed().as_secs_f64());
    Ok(report)
}
