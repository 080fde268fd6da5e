//! Measures all transports in alternating rounds.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::child::Ended;
use crate::{Measured, Result, Served};

#[derive(clap::Args, Debug)]
pub(crate) struct Options {
    /// Clients and depth of each row, or `read` and `write` for transfers of a mebibyte.
    #[arg(long, value_delimiter = ',', default_value = "1x1,4x1,16x1,1x16,4x16,16x16,read,write")]
    rows: Vec<String>,
    /// Rounds of each row, of which the median is printed.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Length of a round in seconds.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Threads of each runtime; 0 for tokio's current_thread.
    #[arg(long, default_value_t = 1)]
    workers: usize,
}

/// A way to run the service.
struct Variant {
    name: &'static str,
    transport: &'static str,
    /// Whether soft0 uses UDP instead of shared memory.
    udp: bool,
    /// Whether a message carries one request only. Makes no difference at depth 1.
    one_by_one: bool,
}

const RDMA: Variant = Variant { name: "soft0, shared memory", transport: "rdma", udp: false, one_by_one: false };

const VARIANTS: [Variant; 5] = [
    RDMA,
    Variant { name: "soft0, UDP", udp: true, ..RDMA },
    Variant { name: "soft0, shared memory, one request per message", one_by_one: true, ..RDMA },
    Variant { name: "soft0, UDP, one request per message", udp: true, one_by_one: true, ..RDMA },
    Variant { name: "TCP", transport: "tcp", ..RDMA },
];

pub(crate) fn run(options: &Options) -> Result<()> {
    println!("| clients × depth | transport | operations/s | p50 µs | p99 µs | CPU µs/operation |");
    println!("|---|---|---|---|---|---|");
    for row in &options.rows {
        let (bulk, clients, depth) = match row.as_str() {
            "read" | "write" => (Some(row.as_str()), "1", "1 MiB"),
            row => {
                let (clients, depth) = row.split_once('x').ok_or("a row is CLIENTSxDEPTH, read or write")?;
                (None, clients, depth)
            }
        };
        let variants = VARIANTS.iter().filter(|variant| !variant.one_by_one || bulk.is_none() && depth != "1");
        let mut variants: Vec<_> = variants.map(|variant| (variant, Vec::new())).collect();
        for _ in 0..options.rounds {
            for (variant, rounds) in &mut variants {
                rounds.push(measure(options, variant, clients, depth, bulk)?);
            }
        }
        let title = bulk.map_or_else(|| format!("{clients} × {depth}"), |direction| format!("{direction} of 1 MiB"));
        for (Variant { name, .. }, mut rounds) in variants {
            rounds.sort_by(|a, b| rate(&a.0).total_cmp(&rate(&b.0)));
            let (median, served) = &rounds[rounds.len() / 2];
            let cpu = (median.cpu_seconds + served.cpu_seconds) * 1e6 / median.operations as f64;
            println!(
                "| {title} | {name} | {:.0} | {:.1} | {:.1} | {cpu:.2} |",
                rate(median),
                median.p50_us,
                median.p99_us
            );
        }
    }
    Ok(())
}

fn rate(measured: &Measured) -> f64 {
    measured.operations as f64 / measured.seconds
}

fn measure(
    options: &Options,
    variant: &Variant,
    clients: &str,
    depth: &str,
    bulk: Option<&str>,
) -> Result<(Measured, Served)> {
    let workers = options.workers.to_string();
    let command = |role: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap_or_else(|_| "rdma-service-bench".into()));
        command.args([role, "--transport", variant.transport, "--workers", &workers]).stdout(Stdio::piped());
        if variant.udp {
            command.env("RDMA_SOFT_UDP", "1");
        }
        if variant.one_by_one {
            command.arg("--one-by-one");
        }
        command
    };
    let mut server = command("server");
    server.args(bulk.map(|_| "--bulk"));
    let mut server = Ended(server.stdin(Stdio::piped()).spawn()?);
    let mut lines = BufReader::new(server.0.stdout.take().ok_or("the server has no output")?).lines();
    let address = lines.next().ok_or("the server has not started")??;
    let mut client = command("client");
    client.args(["--address", &address, "--seconds", &options.seconds.to_string()]);
    match bulk {
        Some(direction) => client.args(["--bulk", direction]),
        None => client.args(["--clients", clients, "--depth", depth]),
    };
    let client = client.stderr(Stdio::inherit()).output()?;
    let measured =
        serde_json::from_slice(&client.stdout).map_err(|error| format!("the client has printed no result: {error}"))?;
    drop(server.0.stdin.take());
    let served = serde_json::from_str(&lines.next().ok_or("the server has printed nothing")??)?;
    Ok((measured, served))
}
