//! `cargo xtask bench connections`: connections by address, over the kernel's connection manager and over soft0.

pub(crate) mod inside;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use self::inside::{Manager, Plan, Report, Round};
use super::result::{self, Benchmark, Table};
use super::{environment, guest, series::Series};
use crate::{process, soft, softroce, workspace};

/// Connections of the runs that the memory of the others is compared with.
const FEW: u32 = 100;

/// Time limit of the guest, which takes two minutes for a round.
const LIMIT: Duration = Duration::from_secs(3600);

/// Steps of `cmtime` after which a connection is established. The others end it.
const CONNECTS: [&str; 5] = ["create id", "resolve addr", "resolve route", "create qp", "connect"];

/// Measure rdma-core's cmtime over the kernel's connection manager and on soft0, in one guest
///
/// The guest has one processor, whose clock counts instructions. cmtime makes all connections at the same time, step by
/// step, and then ends them. Its server and its client run in the same guest: first over rxe0, then on soft0 in a network
/// namespace of their own. The memory of a connection is the difference between many connections and few. soft0 is also
/// measured on this machine. Writes a result for `cargo xtask bench report`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of rounds
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Connections of a run; the kernel's backlog has room for 1024
    #[arg(long, default_value_t = 500, value_name = "N", value_parser = clap::value_parser!(u32).range(i64::from(FEW) + 1..=1000))]
    connections: u32,
    /// Show the guest's console
    #[arg(short, long)]
    verbose: bool,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let library = soft::library()?;
    let plan = |managers: &[Manager]| Plan {
        managers: managers.to_vec(),
        connections: args.connections,
        few: FEW,
        rounds: args.rounds,
        library: library.clone(),
    };
    let native = on_this_machine(&plan(&[Manager::Soft]))?;
    let guest = in_guest(&plan(&[Manager::Kernel, Manager::Soft]), args.verbose)?;
    let [kernel, soft] = [Manager::Kernel, Manager::Soft].map(|manager| guest.rounds(manager));
    let tables = tables(&[kernel?, soft?, native.rounds(Manager::Soft)?], args)?;
    tables.iter().for_each(|table| print!("\n{}", table.to_text()));
    let mut environment = environment::collect();
    environment.extend(guest.environment);
    let benchmark = Benchmark {
        benchmark: "Connections by address: soft0 and the kernel".to_owned(),
        command: "cargo xtask bench connections".to_owned(),
        date: environment::today()?,
        environment,
        tables,
        gates: Vec::new(),
    };
    benchmark.save(&result::file("connections")?)?;
    Ok(0)
}

/// Results of all rounds in one place.
#[derive(Debug, Default)]
struct Results {
    environment: BTreeMap<String, String>,
    rounds: Vec<(Manager, Round)>,
}

impl Results {
    fn read(output: &str) -> Result<Results> {
        let mut results = Results::default();
        for line in output.lines() {
            match serde_json::from_str(line).with_context(|| format!("unexpected output: {line:?}"))? {
                Report::Environment(facts) => results.environment.extend(facts),
                Report::Round(manager, round) => results.rounds.push((manager, round)),
            }
        }
        Ok(results)
    }

    fn rounds(&self, manager: Manager) -> Result<Summary> {
        Summary::new(self.rounds.iter().filter(|(of, _)| *of == manager).map(|(_, round)| round))
    }
}

fn in_guest(plan: &Plan, verbose: bool) -> Result<Results> {
    let command = [softroce::THIS_PROGRAM.to_owned(), inside::ARGUMENT.to_owned(), serde_json::to_string(plan)?];
    Results::read(&guest::run(&command, LIMIT.as_secs(), verbose)?)
}

/// Runs the plan with the programs of the guest.
fn on_this_machine(plan: &Plan) -> Result<Results> {
    let programs = workspace::target_dir()?.join("softroce/layers/userland/usr");
    let libraries = programs.join(format!("lib/{}-linux-gnu", std::env::consts::ARCH));
    let before = |first: &Path, name| {
        let mut paths = vec![first.to_owned()];
        paths.extend(std::env::var_os(name).iter().flat_map(std::env::split_paths));
        std::env::join_paths(paths)
    };
    let mut command = Command::new(softroce::THIS_PROGRAM);
    command.args([inside::ARGUMENT, &serde_json::to_string(plan)?]);
    command.env("PATH", before(&programs.join("bin"), "PATH")?);
    command.env("LD_LIBRARY_PATH", before(&libraries, "LD_LIBRARY_PATH")?);
    Results::read(&process::output(&mut command)?)
}

/// Medians of all rounds.
#[derive(Debug)]
struct Summary {
    /// Microseconds per connection.
    steps: Vec<(String, f64)>,
    /// Bytes per connection.
    processes: f64,
    system: f64,
}

impl Summary {
    fn new<'a>(rounds: impl Iterator<Item = &'a Round> + Clone) -> Result<Summary> {
        let names = rounds.clone().next().context("no rounds")?.steps.iter().map(|(name, _)| name);
        let steps = names.map(|name| {
            let of = |round: &'a Round| round.steps.iter().find(|(of, _)| of == name).map(|(_, figure)| *figure);
            (name.clone(), median(rounds.clone().filter_map(of)))
        });
        let steps: Vec<_> = steps.collect();
        ensure!(CONNECTS.iter().all(|name| steps.iter().any(|(of, _)| of == name)), "unknown steps: {steps:?}");
        Ok(Summary {
            steps,
            processes: median(rounds.clone().map(|round| round.memory.processes)),
            system: median(rounds.map(|round| round.memory.system)),
        })
    }

    fn step(&self, name: &str) -> f64 {
        self.steps.iter().find(|(of, _)| of == name).map_or(f64::NAN, |(_, figure)| *figure)
    }

    /// Connections per second, with and without their ends.
    fn rate(&self, with_ends: bool) -> f64 {
        let steps = self.steps.iter().filter(|(name, _)| with_ends || CONNECTS.contains(&name.as_str()));
        1e6 / steps.map(|(_, figure)| figure).sum::<f64>()
    }
}

fn median(figures: impl Iterator<Item = f64>) -> f64 {
    let mut series = Series::default();
    figures.for_each(|figure| series.push(figure));
    series.median()
}

/// Tables of the kernel and soft0 in the guest, and soft0 on this machine.
fn tables(all: &[Summary; 3], args: &Args) -> Result<Vec<Table>> {
    let columns = |first: &str| {
        [first, "kernel, in the guest", "soft0, in the guest", "soft0 / kernel", "soft0, on this machine"]
            .map(str::to_owned)
            .to_vec()
    };
    let row = |name: &str, digits: usize, figure: &dyn Fn(&Summary) -> f64| {
        let [kernel, soft, native] = [0, 1, 2].map(|index| figure(&all[index]));
        let text = |figure: f64| format!("{figure:.digits$}");
        vec![name.to_owned(), text(kernel), text(soft), format!("{:.2}", soft / kernel), text(native)]
    };
    let rates = vec![row("connect", 0, &|of| of.rate(false)), row("connect and disconnect", 0, &|of| of.rate(true))];
    let steps = all[0].steps.iter().map(|(name, _)| row(name, 1, &|of| of.step(name))).collect();
    let mut system = row("of the processes and the kernel", 0, &|of| of.system);
    // Other programs of this machine allocate and free memory, too.
    *system.last_mut().context("no columns")? = String::new();
    let memory = vec![row("of the processes", 0, &|of| of.processes), system];
    let (count, rounds) = (args.connections, args.rounds);
    Ok(vec![
        Table {
            title: "Connections per second".to_owned(),
            columns: columns("cmtime"),
            rows: rates,
            notes: vec![format!(
                "`cmtime -c {count}` of rdma-core, both ends on one host, each connection with a queue pair and two completion \
                 queues at each end. Medians of {rounds} rounds. The first row adds up the steps until all connections are \
                 established, the second one all steps. In the guest one emulated processor executes both programs and the \
                 kernel, 1000 instructions to the microsecond. These figures show ratios, not the speed of a machine. The last \
                 column is the time of two processors, and varies with the load of the machine."
            )],
        },
        Table {
            title: "Microseconds per connection of each step".to_owned(),
            columns: columns("step"),
            rows: steps,
            notes: vec![
                "As `cmtime` prints them. On soft0, `resolve route` finds the process that listens. The kernel finds the \
                 listener when the request arrives. A step begins when the step before it has ended for all connections."
                    .to_owned(),
            ],
        },
        Table {
            title: "Bytes of memory per connection".to_owned(),
            columns: columns("memory"),
            rows: memory,
            notes: vec![format!(
                "Both ends together: the memory of {count} connections minus that of {FEW}, for each connection between. Of the \
                 processes: the largest resident memory (VmHWM) of server and client. Of the processes and the kernel: the \
                 largest decrease of MemAvailable and the free pages reserved for the processor, sampled every 2 ms of \
                 the guest's clock. It contains the queues that \
                 rdma_rxe allocates, and the descriptors of completion channels."
            )],
        },
    ])
}
