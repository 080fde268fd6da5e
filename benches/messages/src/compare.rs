//! Measures all transports in alternating rounds.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::child::Ended;
use crate::{Measured, Result, Served, ucx};

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

/// What exchanges the messages.
#[derive(Clone, Copy)]
enum Program {
    /// This program: a transport, and the environment of both processes.
    Own(&'static str, &'static [(&'static str, &'static str)]),
    /// `ucx_perftest` with these transports.
    Ucx(&'static str),
}

const UDP: &[(&str, &str)] = &[("RDMA_SOFT_UDP", "1")];

const COLUMNS: [(&str, Program); 8] = [
    ("Channel, shared memory", Program::Own("channel", &[])),
    ("Channel, UDP", Program::Own("channel", UDP)),
    ("Stream, shared memory", Program::Own("stream", &[])),
    ("Stream, UDP", Program::Own("stream", UDP)),
    ("TCP", Program::Own("tcp", &[])),
    ("Unix socket", Program::Own("unix", &[])),
    ("UCX, shared memory", Program::Ucx("shm,self")),
    ("UCX, TCP", Program::Ucx("tcp,self")),
];

pub(crate) fn run(options: &Options) -> Result<()> {
    let has_ucx = ucx::is_installed();
    if !has_ucx {
        eprintln!("The rows of UCX are missing, since ucx_perftest is not installed (package ucx-utils).");
    } else if options.connections.iter().any(|connections| *connections != 1) {
        eprintln!("UCX is measured with one connection only: ucx_perftest has one for each process.");
    }
    println!("| pattern | connections | bytes | transport | messages/s | MiB/s | p50 µs | p99 µs | CPU µs/message |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for pattern in &options.patterns {
        for connections in &options.connections {
            for size in &options.sizes {
                let is_measured = |program| match program {
                    Program::Own(..) => true,
                    Program::Ucx(_) => has_ucx && *connections == 1,
                };
                let columns: Vec<_> = COLUMNS.into_iter().filter(|(_, program)| is_measured(*program)).collect();
                row(options, &columns, pattern, *connections, *size)?;
            }
        }
    }
    Ok(())
}

fn row(options: &Options, columns: &[(&str, Program)], pattern: &str, connections: usize, size: usize) -> Result<()> {
    let mut rounds = vec![Vec::new(); columns.len()];
    for _ in 0..options.rounds {
        for ((_, program), rounds) in columns.iter().zip(&mut rounds) {
            rounds.push(match program {
                Program::Own(transport, environment) => {
                    measure(options, transport, environment, pattern, connections, size)?
                }
                Program::Ucx(tls) => {
                    // Its processor time is that of both ends.
                    (ucx::measure(tls, pattern, size, options.seconds)?, Served { cpu_seconds: 0.0 })
                }
            });
        }
    }
    for ((name, _), mut rounds) in columns.iter().zip(rounds) {
        rounds.sort_by(|a, b| rate(&a.0).total_cmp(&rate(&b.0)));
        let (median, served) = &rounds[rounds.len() / 2];
        let cpu = (median.cpu_seconds + served.cpu_seconds) * 1e6 / median.messages as f64;
        let cpu = if cpu.is_nan() { String::new() } else { format!("{cpu:.2}") };
        let (rate, bytes) = (rate(median), size as f64 / f64::from(1 << 20));
        let latencies = match pattern {
            // ucx_perftest prints one percentile.
            "ping-pong" if median.p99_us.is_nan() => format!("{:.1} | ", median.p50_us),
            "ping-pong" => format!("{:.1} | {:.1}", median.p50_us, median.p99_us),
            _ => "| ".to_owned(),
        };
        println!(
            "| {pattern} | {connections} | {size} | {name} | {rate:.0} | {:.1} | {latencies} | {cpu} |",
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
