//! Measures all transports in alternating rounds.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::child::Ended;
use crate::{Measured, Result, Served};

#[derive(clap::Args, Debug)]
pub(crate) struct Options {
    /// Lengths of messages in bytes.
    #[arg(long, value_delimiter = ',', default_value = "64,4096,65536,1048576")]
    sizes: Vec<usize>,
    /// Numbers of connections.
    #[arg(long, value_delimiter = ',', default_value = "1,16")]
    connections: Vec<usize>,
    /// `ping-pong`, `one-way` or both.
    #[arg(long, value_delimiter = ',', default_value = "ping-pong,one-way")]
    patterns: Vec<String>,
    /// Rounds of each row, of which the median is printed.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Length of a round in seconds.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

/// The name, the transport, and the environment of both processes.
type Column = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

const UDP: &[(&str, &str)] = &[("RDMA_SOFT_UDP", "1")];

const COLUMNS: [Column; 6] = [
    ("Channel, shared memory", "channel", &[]),
    ("Channel, UDP", "channel", UDP),
    ("Stream, shared memory", "stream", &[]),
    ("Stream, UDP", "stream", UDP),
    ("TCP", "tcp", &[]),
    ("Unix socket", "unix", &[]),
];

pub(crate) fn run(options: &Options) -> Result<()> {
    println!("| pattern | connections | bytes | transport | messages/s | MiB/s | p50 µs | p99 µs | CPU µs/message |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for pattern in &options.patterns {
        for connections in &options.connections {
            for size in &options.sizes {
                row(options, pattern, *connections, *size)?;
            }
        }
    }
    Ok(())
}

fn row(options: &Options, pattern: &str, connections: usize, size: usize) -> Result<()> {
    let mut rounds = [const { Vec::new() }; COLUMNS.len()];
    for _ in 0..options.rounds {
        for ((_, transport, environment), rounds) in COLUMNS.iter().zip(&mut rounds) {
            rounds.push(measure(options, transport, environment, pattern, connections, size)?);
        }
    }
    for ((name, ..), mut rounds) in COLUMNS.iter().zip(rounds) {
        rounds.sort_by(|a, b| rate(&a.0).total_cmp(&rate(&b.0)));
        let (median, served) = &rounds[rounds.len() / 2];
        let cpu = (median.cpu_seconds + served.cpu_seconds) * 1e6 / median.messages as f64;
        let (rate, bytes) = (rate(median), size as f64 / f64::from(1 << 20));
        let latencies = match pattern {
            "ping-pong" => format!("{:.1} | {:.1}", median.p50_us, median.p99_us),
            _ => "| ".to_owned(),
        };
        println!(
            "| {pattern} | {connections} | {size} | {name} | {rate:.0} | {:.1} | {latencies} | {cpu:.2} |",
            rate * bytes
        );
    }
    Ok(())
}

fn rate(measured: &Measured) -> f64 {
    measured.messages as f64 / measured.seconds
}

fn measure(
    options: &Options,
    transport: &str,
    environment: &[(&str, &str)],
    pattern: &str,
    connections: usize,
    size: usize,
) -> Result<(Measured, Served)> {
    let command = |role: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap_or_else(|_| "rdma-message-bench".into()));
        command.args([role, "--transport", transport]).envs(environment.iter().copied()).stdout(Stdio::piped());
        command
    };
    let mut server = Ended(command("server").stdin(Stdio::piped()).spawn()?);
    let mut lines = BufReader::new(server.0.stdout.take().ok_or("the server has no output")?).lines();
    let address = lines.next().ok_or("the server has not started")??;
    let mut client = command("client");
    client.args(["--address", &address, "--pattern", pattern, "--size", &size.to_string()]);
    client.args(["--connections", &connections.to_string(), "--seconds", &options.seconds.to_string()]);
    let client = client.stderr(Stdio::inherit()).output()?;
    let measured =
        serde_json::from_slice(&client.stdout).map_err(|error| format!("the client has printed no result: {error}"))?;
    drop(server.0.stdin.take());
    let served = serde_json::from_str(&lines.next().ok_or("the server has printed nothing")??)?;
    if transport == "unix" {
        let _ = std::fs::remove_file(address);
    }
    Ok((measured, served))
}
