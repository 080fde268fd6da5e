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
/// segmentation offload both sent and received by one thread. The medians of all rounds are compared.
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

pub(crate) fn main(args: &Args) -> Result<i32> {
    build()?;
    let mut latency: Vec<[Series; 2]> = SIZES.iter().map(|_| Default::default()).collect();
    let mut rates: [Series; 2] = Default::default();
    println!("round   bytes    UDP µs  soft0 µs");
    for round in 1..=args.rounds {
        for (size, [udp, soft]) in SIZES.iter().zip(&mut latency) {
            let of_udp = yardstick(&["pingpong", &size.to_string(), "50000"])?;
            let of_soft = perf(&["send", "lat", "-s", &size.to_string(), "-n", "50000"], "latency/mean")? / 1e3;
            println!("{round:5} {size:7} {of_udp:9.2} {of_soft:9.2}");
            udp.push(of_udp);
            soft.push(of_soft);
        }
        let of_udp = yardstick(&["stream", "20000"])?;
        let of_soft = perf(&["write", "bw", "-s", "65536", "-n", "20000"], "bandwidth/average")? / 1e6;
        println!("{round:5}   64 KiB  {of_udp:8.0} {of_soft:9.0}  MB/s");
        rates[0].push(of_udp);
        rates[1].push(of_soft);
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
fn perf(test: &[&str], place: &str) -> Result<f64> {
    let program = workspace::target_dir()?.join("release/rdma-perf");
    let mut server = Command::new(&program);
    server.args(["server", "--once", "-d", "soft0"]);
    let mut client = Command::new(&program);
    client.args(test).args(["-d", "soft0", "--format", "json", "127.0.0.1"]);
    let text = pair::client_output(server, client)?;
    // What is written for people comes before.
    let json: String = text.iter().skip_while(|line| *line != "{").take_while(|line| *line != "}").cloned().collect();
    let results: serde_json::Value = serde_json::from_str(&(json + "}")).context("rdma-perf wrote no JSON")?;
    let figure = results.pointer(&format!("/rows/0/{place}")).and_then(serde_json::Value::as_f64);
    figure.with_context(|| format!("rdma-perf {} has not measured {place}", test.join(" ")))
}

fn benchmark(latency: &[[Series; 2]], rates: &[Series; 2], rounds: u32) -> Result<Benchmark> {
    let figures = |series: &Series| vec![format!("{:.2}", series.min()), format!("{:.2}", series.median())];
    let (mut rows, mut gates) = (Vec::new(), Vec::new());
    for (size, [udp, soft]) in SIZES.iter().zip(latency) {
        let ratio = soft.median() / udp.median();
        rows.push([vec![format!("{size} bytes")], figures(udp), figures(soft), vec![format!("{ratio:.2}")]].concat());
        gates.push(Gate {
            name: format!("ping-pong of {size} bytes, soft0 / UDP"),
            limit: format!("≤ {MOST}"),
            measured: format!("{ratio:.2}"),
            met: ratio <= MOST,
        });
    }
    let ratio = rates[1].median() / rates[0].median();
    gates.push(Gate {
        name: "writes of 64 KiB, soft0 / UDP with segmentation offload".to_owned(),
        limit: format!("≥ {LEAST}"),
        measured: format!("{ratio:.2}"),
        met: ratio >= LEAST,
    });
    let columns = |unit: &str| {
        let names = ["", "UDP, best", "UDP, median", "soft0, best", "soft0, median"];
        let mut columns: Vec<String> = names.map(|name| name.replace(',', &format!(" [{unit}],"))).to_vec();
        columns.push("ratio of medians".to_owned());
        columns
    };
    // Of a rate the best is the greatest.
    let best = |series: &Series| vec![format!("{:.0}", series.max()), format!("{:.0}", series.median())];
    let row = [vec!["64 KiB".to_owned()], best(&rates[0]), best(&rates[1]), vec![format!("{ratio:.2}")]].concat();
    let tables = vec![
        Table {
            title: "Half of a round trip".to_owned(),
            columns: columns("µs"),
            rows,
            notes: vec![format!(
                "Means of 50 000 messages, {rounds} rounds. UDP: two threads that poll their sockets without waiting. \
                 soft0: sends of a reliable connection between two processes, each acknowledged (`rdma-perf send lat`)."
            )],
        },
        Table {
            title: "Throughput".to_owned(),
            columns: columns("MB/s"),
            rows: vec![row],
            notes: vec![format!(
                "20 000 messages, {rounds} rounds. UDP: one thread sends 64 KiB in segments of 4096 bytes (UDP_SEGMENT), \
                 receives them (UDP_GRO), and copies them to where they belong. soft0: RDMA writes from one process to \
                 another, two processors."
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
