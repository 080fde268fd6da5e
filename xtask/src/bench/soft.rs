//! `cargo xtask bench soft`: the software RNIC beside sockets of the kernel.

use std::process::Command;

use anyhow::{Context, Result};

use super::result::{self, Benchmark, Gate, Table};
use super::{environment, series::Series};
use crate::pair;
use crate::process;
use crate::workspace;

/// soft0 beside UDP and TCP of the kernel on this machine, in turn and in one run
///
/// Latency: half of a round trip of messages between two processes that poll, beside UDP datagrams of the same size.
/// Sleeping: the same between two processes that sleep until something arrives, beside TCP. Throughput: writes of 64 KiB
/// by one process to another, beside UDP with segmentation offload both sent and received by one thread. The medians of
/// all rounds are compared. soft0 is measured by shared memory, as it goes between processes of one host, and by UDP
/// (RDMA_SOFT_UDP=1), as it goes between hosts.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Rounds of everything
    #[arg(long, default_value_t = 7, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

/// Bytes of messages that go to and fro between processes that poll.
const SIZES: [u32; 3] = [8, 64, 1024];

/// Bytes of messages between processes that sleep.
const SLEEPING: u32 = 8;

/// A bound of the ratio of soft0 to the kernel.
#[derive(Clone, Copy)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

/// Bounds for each of [`WAYS`].
const LATENCY: [Bound; 2] = [Bound::AtMost(1.0), Bound::AtMost(2.25)];
const SLEEP: [Bound; 2] = [Bound::AtMost(2.0), Bound::AtMost(2.0)];
const THROUGHPUT: [Bound; 2] = [Bound::AtLeast(0.7), Bound::AtLeast(0.4)];

/// How soft0 sends packets.
const WAYS: [&str; 2] = ["shared memory", "UDP"];

/// One thing, measured in each round.
#[derive(Default)]
struct Figures {
    kernel: Series,
    /// By each of [`WAYS`].
    soft: [Series; 2],
}

impl Figures {
    /// Takes one of each, and shows them.
    fn measure(&mut self, yard: &[&str], test: &[&str], place: &str, unit: f64) -> Result<()> {
        let kernel = yardstick(yard)?;
        let soft = [perf(test, place, false)? / unit, perf(test, place, true)? / unit];
        println!("{kernel:10.2} {:16.2} {:12.2}", soft[0], soft[1]);
        self.kernel.push(kernel);
        self.soft.iter_mut().zip(soft).for_each(|(series, figure)| series.push(figure));
        Ok(())
    }

    fn ratio(&self, way: usize) -> f64 {
        self.soft[way].median() / self.kernel.median()
    }

    /// A row for each way: of both the best and the median, and the ratio of medians.
    fn rows(&self, name: &str, best: fn(&Series) -> f64, digits: usize) -> Vec<Vec<String>> {
        let row = |way: usize| {
            let both = [&self.kernel, &self.soft[way]].into_iter();
            let figures = both.flat_map(|series| [best(series), series.median()]);
            let figures = figures.map(|figure| format!("{figure:.digits$}"));
            let name = format!("{name}, {}", WAYS[way]);
            [name].into_iter().chain(figures).chain([format!("{:.2}", self.ratio(way))]).collect()
        };
        (0..WAYS.len()).map(row).collect()
    }

    fn gates(&self, name: &str, bounds: [Bound; 2]) -> impl Iterator<Item = Gate> {
        bounds.into_iter().zip(WAYS).enumerate().map(move |(way, (bound, by))| {
            let ratio = self.ratio(way);
            let (limit, met) = match bound {
                Bound::AtMost(most) => (format!("≤ {most}"), ratio <= most),
                Bound::AtLeast(least) => (format!("≥ {least}"), ratio >= least),
            };
            Gate { name: format!("{name}, by {by}"), limit, measured: format!("{ratio:.2}"), met }
        })
    }
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    build()?;
    let mut latency: Vec<Figures> = SIZES.iter().map(|_| Figures::default()).collect();
    let (mut sleep, mut rates) = (Figures::default(), Figures::default());
    println!("round  test         kernel    shared memory          UDP  (µs; 64 KiB: MB/s)");
    for round in 1..=args.rounds {
        for (size, figures) in SIZES.iter().zip(&mut latency) {
            let size = size.to_string();
            print!("{round:5}  {:8} ", format!("{size} B"));
            let test = ["send", "lat", "-s", &size, "-n", "50000"];
            figures.measure(&["pingpong", &size, "50000"], &test, "latency/mean", 1e3)?;
        }
        print!("{round:5}  {:8} ", "sleeping");
        let size = SLEEPING.to_string();
        let test = ["send", "lat", "-s", &size, "-n", "10000", "--events"];
        sleep.measure(&["sleep", &size, "10000"], &test, "latency/percentiles/0/nanoseconds", 1e3)?;
        print!("{round:5}  {:8} ", "64 KiB");
        let test = ["write", "bw", "-s", "65536", "-n", "20000"];
        rates.measure(&["stream", "20000"], &test, "bandwidth/average", 1e6)?;
    }
    let benchmark = benchmark(&latency, &sleep, &rates, args.rounds)?;
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
    cargo.args(["--bins", "--example", "kernel_yardstick"]);
    process::run(&mut cargo)
}

/// The figure that the yardstick prints.
fn yardstick(arguments: &[&str]) -> Result<f64> {
    let program = workspace::target_dir()?.join("release/examples/kernel_yardstick");
    let printed = process::output(Command::new(program).args(arguments))?;
    printed.trim().parse().with_context(|| format!("kernel_yardstick {} printed {printed:?}", arguments.join(" ")))
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
    // The report for people precedes the JSON.
    let json: String = text.iter().skip_while(|line| *line != "{").take_while(|line| *line != "}").cloned().collect();
    let results: serde_json::Value = serde_json::from_str(&(json + "}")).context("rdma-perf wrote no JSON")?;
    let figure = results.pointer(&format!("/rows/0/{place}")).and_then(serde_json::Value::as_f64);
    figure.with_context(|| format!("rdma-perf {} has not measured {place}", test.join(" ")))
}

fn benchmark(latency: &[Figures], sleep: &Figures, rates: &Figures, rounds: u32) -> Result<Benchmark> {
    let (mut rows, mut gates) = (Vec::new(), Vec::new());
    for (size, figures) in SIZES.iter().zip(latency) {
        rows.extend(figures.rows(&format!("{size} bytes"), Series::min, 2));
        gates.extend(figures.gates(&format!("ping-pong of {size} bytes, soft0 / UDP"), LATENCY));
    }
    gates.extend(sleep.gates("ping-pong between processes that sleep, soft0 / TCP", SLEEP));
    gates.extend(rates.gates("writes of 64 KiB, soft0 / UDP with segmentation offload", THROUGHPUT));
    let columns = |kernel: &str, unit: &str| {
        let figures = [kernel, "soft0"].into_iter();
        let figures = figures.flat_map(|of| ["best", "median"].map(|which| format!("{of} [{unit}], {which}")));
        [String::new()].into_iter().chain(figures).chain([format!("soft0 / {kernel}")]).collect::<Vec<_>>()
    };
    let tables = vec![
        Table {
            title: "Half of a round trip between processes that poll".to_owned(),
            columns: columns("UDP", "µs"),
            rows,
            notes: vec![format!(
                "Means of 50 000 messages, {rounds} rounds. UDP: two processes that poll their sockets. soft0: sends of a \
                 reliable connection between two processes, each acknowledged (`rdma-perf send lat`), by shared memory \
                 and by UDP (RDMA_SOFT_UDP=1). Ratios are of medians."
            )],
        },
        Table {
            title: "Half of a round trip between processes that sleep".to_owned(),
            columns: columns("TCP", "µs"),
            rows: sleep.rows(&format!("{SLEEPING} bytes"), Series::min, 2),
            notes: vec![format!(
                "Medians of 10 000 messages, {rounds} rounds. TCP: two processes that wait in `recv(2)`. soft0: as above, and \
                 each process waits for completion events (`rdma-perf send lat --events`)."
            )],
        },
        Table {
            title: "Throughput".to_owned(),
            columns: columns("UDP", "MB/s"),
            // Of a rate the best is the greatest.
            rows: rates.rows("64 KiB", Series::max, 0),
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
