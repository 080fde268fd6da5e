//! Measures all transports in alternating rounds.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::child::Ended;
use crate::transport::Transport;
use crate::{Measured, Pattern, Result, Served, name};

#[derive(clap::Args, Debug)]
pub(crate) struct Options {
    /// Lengths of messages in bytes.
    #[arg(long, value_delimiter = ',', default_value = "64,4096,65536,1048576")]
    sizes: Vec<usize>,
    /// Numbers of connections; of concurrent calls for gRPC.
    #[arg(long, value_delimiter = ',', default_value = "1,16")]
    connections: Vec<usize>,
    /// `ping-pong` and `one-way`; for gRPC `unary` and `stream`.
    #[arg(long, value_delimiter = ',', default_value = "ping-pong,one-way")]
    patterns: Vec<Pattern>,
    /// Rounds of each row, of which the median is printed.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Length of a round in seconds.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

/// The name, the transport, and the environment of both processes.
type Column = (&'static str, Transport, &'static [(&'static str, &'static str)]);

const UDP: &[(&str, &str)] = &[("RDMA_SOFT_UDP", "1")];

const COLUMNS: [Column; 6] = [
    ("Channel, shared memory", Transport::Channel, &[]),
    ("Channel, UDP", Transport::Channel, UDP),
    ("Stream, shared memory", Transport::Stream, &[]),
    ("Stream, UDP", Transport::Stream, UDP),
    ("TCP", Transport::Tcp, &[]),
    ("Unix socket", Transport::Unix, &[]),
];

pub(crate) fn run(options: &Options) -> Result<()> {
    println!("| pattern | connections | bytes | transport | messages/s | MiB/s | p50 µs | p99 µs | CPU µs/message |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for pattern in &options.patterns {
        for connections in &options.connections {
            for size in &options.sizes {
                row(options, *pattern, *connections, *size)?;
            }
        }
    }
    Ok(())
}

fn row(options: &Options, pattern: Pattern, connections: usize, size: usize) -> Result<()> {
    let columns = COLUMNS.iter().filter(|(_, transport, _)| !pattern.is_grpc() || transport.has_grpc());
    let mut columns: Vec<_> = columns.map(|column| (column, Vec::new())).collect();
    for _ in 0..options.rounds {
        for ((_, transport, environment), rounds) in &mut columns {
            rounds.push(measure(options, *transport, environment, pattern, connections, size)?);
        }
    }
    for ((title, ..), mut rounds) in columns {
        rounds.sort_by(|a, b| rate(&a.0).total_cmp(&rate(&b.0)));
        let (median, served) = &rounds[rounds.len() / 2];
        let cpu = (median.cpu_seconds + served.cpu_seconds) * 1e6 / median.messages as f64;
        let (rate, bytes) = (rate(median), size as f64 / f64::from(1 << 20));
        let latencies = match pattern {
            Pattern::OneWay => "| ".to_owned(),
            _ => format!("{:.1} | {:.1}", median.p50_us, median.p99_us),
        };
        println!(
            "| {} | {connections} | {size} | {title} | {rate:.0} | {:.1} | {latencies} | {cpu:.2} |",
            name(pattern),
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
    transport: Transport,
    environment: &[(&str, &str)],
    pattern: Pattern,
    connections: usize,
    size: usize,
) -> Result<(Measured, Served)> {
    let command = |role: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap_or_else(|_| "rdma-message-bench".into()));
        command.args([role, "--transport", &name(transport)]).envs(environment.iter().copied()).stdout(Stdio::piped());
        command
    };
    let mut server = command("server");
    server.args(pattern.is_grpc().then_some("--grpc"));
    let mut server = Ended(server.stdin(Stdio::piped()).spawn()?);
    let mut lines = BufReader::new(server.0.stdout.take().ok_or("the server has no output")?).lines();
    let address = lines.next().ok_or("the server has not started")??;
    let mut client = command("client");
    client.args(["--address", &address, "--pattern", &name(pattern), "--size", &size.to_string()]);
    client.args(["--connections", &connections.to_string(), "--seconds", &options.seconds.to_string()]);
    let client = client.stderr(Stdio::inherit()).output()?;
    let measured =
        serde_json::from_slice(&client.stdout).map_err(|error| format!("the client has printed no result: {error}"))?;
    drop(server.0.stdin.take());
    let served = serde_json::from_str(&lines.next().ok_or("the server has printed nothing")??)?;
    if transport == Transport::Unix {
        let _ = std::fs::remove_file(address);
    }
    Ok((measured, served))
}
