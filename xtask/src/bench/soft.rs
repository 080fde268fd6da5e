//! `cargo xtask bench soft`: the software RNIC compared with kernel sockets.

use std::process::Command;

use anyhow::{Context, Result};

use super::result::{self, Benchmark, Gate, Table};
use super::{environment, series::Series};
use crate::{pair, process, workspace};

/// Compare soft0 with kernel UDP and TCP on this machine, measured alternately in one run
///
/// Latency: half the round-trip time of messages between two polling processes, compared with UDP datagrams of the same
/// size. Sleeping: the same between two processes that sleep until a message arrives, compared with TCP. Throughput:
/// RDMA writes of 64 KiB from one process to another, compared with UDP with segmentation offload, sent and received by
/// one thread. The ratios are of medians over all rounds. soft0 is measured over shared memory, which it uses between
/// processes of one host, and over UDP (RDMA_SOFT_UDP=1), which it uses between hosts.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of rounds; each round runs every test once
    #[arg(long, default_value_t = 7, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

/// Message sizes in bytes, for the latency between polling processes.
const SIZES: [u32; 3] = [8, 64, 1024];

/// Message size in bytes, for the latency between sleeping processes.
const SLEEPING: u32 = 8;

/// Bound on the ratio of soft0 to the kernel.
#[derive(Clone, Copy)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

/// Bounds for each of [`TRANSPORTS`].
const LATENCY: [Bound; 2] = [Bound::AtMost(1.0), Bound::AtMost(2.25)];
const SLEEP: [Bound; 2] = [Bound::AtMost(2.0), Bound::AtMost(2.0)];
const THROUGHPUT: [Bound; 2] = [Bound::AtLeast(0.7), Bound::AtLeast(0.4)];

/// How soft0 carries packets.
const TRANSPORTS: [&str; 2] = ["shared memory", "UDP"];

/// One test, measured once per round for the kernel and for soft0.
#[derive(Default)]
struct Measurements {
    kernel: Series,
    /// One series for each of [`TRANSPORTS`].
    soft: [Series; 2],
}

impl Measurements {
    /// Runs the yardstick and the rdma-perf `test` once each, and prints and records the results.
    ///
    /// `pointer` selects a value in rdma-perf's row of results, and `unit` divides it.
    fn measure(&mut self, yardstick_args: &[&str], test: &[&str], pointer: &str, unit: f64) -> Result<()> {
        let kernel = yardstick(yardstick_args)?;
        let soft = [perf(test, pointer, false)? / unit, perf(test, pointer, true)? / unit];
        println!("{kernel:10.2} {:16.2} {:12.2}", soft[0], soft[1]);
        self.kernel.push(kernel);
        self.soft.iter_mut().zip(soft).for_each(|(series, figure)| series.push(figure));
        Ok(())
    }

    fn ratio(&self, transport: usize) -> f64 {
        self.soft[transport].median() / self.kernel.median()
    }

    /// A row for each transport: best and median of the kernel and of soft0, and the ratio of the medians.
    fn rows(&self, name: &str, best: fn(&Series) -> f64, digits: usize) -> Vec<Vec<String>> {
        let row = |transport: usize| {
            let both = [&self.kernel, &self.soft[transport]].into_iter();
            let figures = both.flat_map(|series| [best(series), series.median()]);
            let figures = figures.map(|figure| format!("{figure:.digits$}"));
            let name = format!("{name}, {}", TRANSPORTS[transport]);
            [name].into_iter().chain(figures).chain([format!("{:.2}", self.ratio(transport))]).collect()
        };
        (0..TRANSPORTS.len()).map(row).collect()
    }

    fn gates(&self, name: &str, bounds: [Bound; 2]) -> impl Iterator<Item = Gate> {
        bounds.into_iter().zip(TRANSPORTS).enumerate().map(move |(index, (bound, transport))| {
            let ratio = self.ratio(index);
            let (limit, met) = match bound {
                Bound::AtMost(most) => (format!("≤ {most}"), ratio <= most),
                Bound::AtLeast(least) => (format!("≥ {least}"), ratio >= least),
            };
            Gate { name: format!("{name}, over {transport}"), limit, measured: format!("{ratio:.3}"), met }
        })
    }
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    build()?;
    let mut latency: Vec<Measurements> = SIZES.iter().map(|_| Measurements::default()).collect();
    let (mut sleep, mut rates) = (Measurements::default(), Measurements::default());
    println!("round  test         kernel    shared memory          UDP  (µs; 64 KiB: MB/s)");
    for round in 1..=args.rounds {
        for (size, measurements) in SIZES.iter().zip(&mut latency) {
            let size = size.to_string();
            print!("{round:5}  {:8} ", format!("{size} B"));
            let test = ["send", "lat", "-s", &size, "-n", "50000"];
            measurements.measure(&["pingpong", &size, "50000"], &test, "latency/mean", 1e3)?;
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
    let unmet: Vec<_> = benchmark.gates.iter().filter(|gate| !gate.met).collect();
    for gate in &unmet {
        println!("not met: {}: {}, limit {}", gate.name, gate.measured, gate.limit);
    }
    Ok(i32::from(!unmet.is_empty()))
}

fn build() -> Result<()> {
    let mut cargo = Command::new(workspace::cargo());
    cargo.current_dir(workspace::root()).args(["build", "--quiet", "--release", "-p", "rdma-perf", "-p", "rdma-soft"]);
    cargo.args(["--bins", "--example", "kernel_yardstick"]);
    process::run(&mut cargo)
}

/// Runs the example kernel_yardstick, which measures kernel sockets, and returns the value that it prints.
fn yardstick(arguments: &[&str]) -> Result<f64> {
    let program = workspace::target_dir()?.join("release/examples/kernel_yardstick");
    let printed = process::output(Command::new(program).args(arguments))?;
    printed.trim().parse().with_context(|| format!("kernel_yardstick {} printed {printed:?}", arguments.join(" ")))
}

/// Runs an rdma-perf test between two processes and returns the value at `pointer` in its row of results.
fn perf(test: &[&str], pointer: &str, over_udp: bool) -> Result<f64> {
    let program = workspace::target_dir()?.join("release/rdma-perf");
    let mut server = Command::new(&program);
    server.args(["server", "--once", "-d", "soft0"]);
    let mut client = Command::new(&program);
    client.args(test).args(["-d", "soft0", "--format", "json", "127.0.0.1"]);
    for command in [&mut server, &mut client] {
        command.env("RDMA_SOFT_UDP", u8::from(over_udp).to_string());
    }
    let text = pair::client_output(server, client)?;
    // The human-readable report precedes the JSON.
    let json: String = text.iter().skip_while(|line| *line != "{").take_while(|line| *line != "}").cloned().collect();
    let results: serde_json::Value = serde_json::from_str(&(json + "}")).context("rdma-perf wrote no JSON")?;
    let figure = results.pointer(&format!("/rows/0/{pointer}")).and_then(serde_json::Value::as_f64);
    figure.with_context(|| format!("the results of rdma-perf {} lack {pointer}", test.join(" ")))
}

fn benchmark(latency: &[Measurements], sleep: &Measurements, rates: &Measurements, rounds: u32) -> Result<Benchmark> {
    let (mut rows, mut gates) = (Vec::new(), Vec::new());
    for (size, measurements) in SIZES.iter().zip(latency) {
        rows.extend(measurements.rows(&format!("{size} bytes"), Series::min, 2));
        gates.extend(measurements.gates(&format!("ping-pong of {size} bytes, soft0 / UDP"), LATENCY));
    }
    gates.extend(sleep.gates("ping-pong between sleeping processes, soft0 / TCP", SLEEP));
    gates.extend(rates.gates("writes of 64 KiB, soft0 / UDP with segmentation offload", THROUGHPUT));
    let columns = |kernel: &str, unit: &str| {
        let figures = [kernel, "soft0"].into_iter();
        let figures = figures.flat_map(|of| ["best", "median"].map(|which| format!("{of} [{unit}], {which}")));
        [String::new()].into_iter().chain(figures).chain([format!("soft0 / {kernel}")]).collect::<Vec<_>>()
    };
    let tables = vec![
        Table {
            title: "Half the round-trip time between polling processes".to_owned(),
            columns: columns("UDP", "µs"),
            rows,
            notes: vec![format!(
                "Means of 50 000 messages, {rounds} rounds. UDP: two processes poll their sockets. soft0: two processes \
                 exchange sends over a reliable connection, each send acknowledged (`rdma-perf send lat`), over shared \
                 memory and over UDP (RDMA_SOFT_UDP=1). Ratios are of medians."
            )],
        },
        Table {
            title: "Half the round-trip time between sleeping processes".to_owned(),
            columns: columns("TCP", "µs"),
            rows: sleep.rows(&format!("{SLEEPING} bytes"), Series::min, 2),
            notes: vec![format!(
                "Medians of 10 000 messages, {rounds} rounds. TCP: two processes wait in `recv(2)`. soft0: as above, but each \
                 process waits for completion events (`rdma-perf send lat --events`)."
            )],
        },
        Table {
            title: "Throughput".to_owned(),
            columns: columns("UDP", "MB/s"),
            // The best rate is the highest.
            rows: rates.rows("64 KiB", Series::max, 0),
            notes: vec![format!(
                "20 000 messages, {rounds} rounds. UDP: one thread sends 64 KiB in segments of 4096 bytes (UDP_SEGMENT), \
                 receives them (UDP_GRO), and copies them to their destination. soft0: RDMA writes from one process to \
                 another, on two processors (`rdma-perf write bw`)."
            )],
        },
    ];
    Ok(Benchmark {
        benchmark: "soft0 compared with kernel UDP".to_owned(),
        command: "cargo xtask bench soft".to_owned(),
        date: environment::today()?,
        environment: environment::collect(),
        tables,
        gates,
    })
}
