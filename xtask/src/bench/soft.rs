//! `cargo xtask bench soft`: the software RNIC beside kernel UDP.

use std::process::Command;

use anyhow::{Context, Result};

use super::result::{self, Benchmark, Gate, Table};
use super::{environment, series::Series};
use crate::pair;
use crate::process;
use crate::workspace;

/// soft0 beside kernel UDP on this machine, in turn and in one run
///
/// Latency: half of a round trip of messages (rdma-perf, two processes that poll), beside datagrams of the same size
/// between two threads that never wait. Throughput: writes of 64 KiB by one process to another, beside UDP with
/// segmentation offload both sent and received by one thread. The medians of all rounds are compared. soft0 is measured
/// as it is, where processes of one host share memory, and by UDP (RDMA_SOFT_UDP=1), as between hosts.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Rounds of everything
    #[arg(long, default_value_t = 7, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

/// Bytes of messages that go to and fro.
const SIZES: [u32; 3] = [8, 64, 1024];

/// Of these the gate is held.
const MOST: f64 = 1.5;
const LEAST: f64 = 0.5;

/// One thing, measured in each round.
#[derive(Default)]
struct Figures {
    udp: Series,
    soft: Series,
    /// With `RDMA_SOFT_UDP=1`.
    soft_by_udp: Series,
}

impl Figures {
    /// Takes one of each, and shows them.
    fn measure(&mut self, yard: &[&str], test: &[&str], place: &str, unit: f64) -> Result<()> {
        let of_udp = yardstick(yard)?;
        let (of_soft, by_udp) = (perf(test, place, false)? / unit, perf(test, place, true)? / unit);
        println!("{of_udp:10.2} {of_soft:10.2} {by_udp:14.2}");
        self.udp.push(of_udp);
        self.soft.push(of_soft);
        self.soft_by_udp.push(by_udp);
        Ok(())
    }

    fn ratio(&self) -> f64 {
        self.soft.median() / self.udp.median()
    }

    /// Of each the best and the median, and the ratios to UDP.
    fn row(&self, name: String, best: fn(&Series) -> f64, digits: usize) -> Vec<String> {
        let all = [&self.udp, &self.soft, &self.soft_by_udp];
        let figures = all.into_iter().flat_map(|series| [best(series), series.median()]);
        let by_udp = self.soft_by_udp.median() / self.udp.median();
        let ratios = [self.ratio(), by_udp].map(|ratio| format!("{ratio:.2}"));
        [name].into_iter().chain(figures.map(|figure| format!("{figure:.digits$}"))).chain(ratios).collect()
    }
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    build()?;
    let mut latency: Vec<Figures> = SIZES.iter().map(|_| Figures::default()).collect();
    let mut rates = Figures::default();
    println!("round  bytes         UDP      soft0   soft0 by UDP  (µs; 64 KiB: MB/s)");
    for round in 1..=args.rounds {
        for (size, figures) in SIZES.iter().zip(&mut latency) {
            print!("{round:5} {size:6}  ");
            let size = size.to_string();
            let test = ["send", "lat", "-s", &size, "-n", "50000"];
            figures.measure(&["pingpong", &size, "50000"], &test, "latency/mean", 1e3)?;
        }
        print!("{round:5} {:6}  ", 65536);
        let test = ["write", "bw", "-s", "65536", "-n", "20000"];
        rates.measure(&["stream", "20000"], &test, "bandwidth/average", 1e6)?;
    }
    let benchmark = benchmark(&latency, &rates, args.rounds)?;
    benchmark.tables.iter().for_each(|table| print!("\n{}", table.to_text()));
    benchmark.save(&result::file("soft")?)?;
    let broken: Vec<_> = benchmark.gates.iter().filter(|gate| !gate.met).collect();
    for gate in &broken {
        println!("not met: {}: {}, limit {}", gate.name, gate.measured, gate.limit);
    }
    Ok(i32::from(!broken.is_empty()))
}

fn build() -> Result<()> {
    let mut cargo = Command::new(workspace::cargo());
    cargo.current_dir(workspace::root()).args(["build", "--quiet", "--release", "-p", "rdma-perf", "-p", "rdma-soft"]);
    cargo.args(["--bins", "--example", "udp_yardstick"]);
    process::run(&mut cargo)
}

/// The figure that the yardstick prints.
fn yardstick(arguments: &[&str]) -> Result<f64> {
    let program = workspace::target_dir()?.join("release/examples/udp_yardstick");
    let printed = process::output(Command::new(program).args(arguments))?;
    printed.trim().parse().with_context(|| format!("udp_yardstick {} printed {printed:?}", arguments.join(" ")))
}

/// A figure of a test between two processes, by its place in a row of the results.
fn perf(test: &[&str], place: &str, is_by_udp: bool) -> Result<f64> {
    let program = workspace::target_dir()?.join("release/rdma-perf");
    let mut server = Command::new(&program);
    server.args(["server", "--once", "-d", "soft0"]);
    let mut client = Command::new(&program);
    client.args(test).args(["-d", "soft0", "--format", "json", "127.0.0.1"]);
    for command in [&mut server, &mut client] {
        command.env("RDMA_SOFT_UDP", u8::from(is_by_udp).to_string());
    }
    let text = pair::client_output(server, client)?;
    // What is written for people comes before.
    let json: String = text.iter().skip_while(|line| *line != "{").take_while(|line| *line != "}").cloned().collect();
    let results: serde_json::Value = serde_json::from_str(&(json + "}")).context("rdma-perf wrote no JSON")?;
    let figure = results.pointer(&format!("/rows/0/{place}")).and_then(serde_json::Value::as_f64);
    figure.with_context(|| format!("rdma-perf {} has not measured {place}", test.join(" ")))
}

fn benchmark(latency: &[Figures], rates: &Figures, rounds: u32) -> Result<Benchmark> {
    let (mut rows, mut gates) = (Vec::new(), Vec::new());
    for (size, figures) in SIZES.iter().zip(latency) {
        let ratio = figures.ratio();
        rows.push(figures.row(format!("{size} bytes"), Series::min, 2));
        gates.push(Gate {
            name: format!("ping-pong of {size} bytes, soft0 / UDP"),
            limit: format!("≤ {MOST}"),
            measured: format!("{ratio:.2}"),
            met: ratio <= MOST,
        });
    }
    let ratio = rates.ratio();
    gates.push(Gate {
        name: "writes of 64 KiB, soft0 / UDP with segmentation offload".to_owned(),
        limit: format!("≥ {LEAST}"),
        measured: format!("{ratio:.2}"),
        met: ratio >= LEAST,
    });
    let columns = |unit: &str| {
        let of = ["UDP", "soft0", "soft0 by UDP"];
        let figures = of.into_iter().flat_map(|of| ["best", "median"].map(|which| format!("{of} [{unit}], {which}")));
        let ratios = ["soft0 / UDP", "soft0 by UDP / UDP"].map(str::to_owned);
        [String::new()].into_iter().chain(figures).chain(ratios).collect::<Vec<_>>()
    };
    let tables = vec![
        Table {
            title: "Half of a round trip".to_owned(),
            columns: columns("µs"),
            rows,
            notes: vec![format!(
                "Means of 50 000 messages, {rounds} rounds. UDP: two threads that poll their sockets without waiting. \
                 soft0: sends of a reliable connection between two processes, each acknowledged (`rdma-perf send lat`); \
                 by UDP: the same with RDMA_SOFT_UDP=1. Ratios are of medians."
            )],
        },
        Table {
            title: "Throughput".to_owned(),
            columns: columns("MB/s"),
            // Of a rate the best is the greatest.
            rows: vec![rates.row("64 KiB".to_owned(), Series::max, 0)],
            notes: vec![format!(
                "20 000 messages, {rounds} rounds. UDP: one thread sends 64 KiB in segments of 4096 bytes (UDP_SEGMENT), \
                 receives them (UDP_GRO), and copies them to where they belong. soft0: RDMA writes from one process to \
                 another, two processors (`rdma-perf write bw`)."
            )],
        },
    ];
    Ok(Benchmark {
        benchmark: "soft0 beside kernel UDP".to_owned(),
        command: "cargo xtask bench soft".to_owned(),
        date: environment::today()?,
        environment: environment::here(),
        tables,
        gates,
    })
}
