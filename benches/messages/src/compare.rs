//! Measures all transports in alternating rounds.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::child::Ended;
use crate::transport::Transport;
use crate::{Measured, Pattern, Result, Served, name, ucx};

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

/// What exchanges the messages.
#[derive(Clone, Copy)]
enum Program {
    /// This program: a transport, and the environment of both processes.
    Own(Transport, &'static [(&'static str, &'static str)]),
    /// `ucx_perftest` with these transports.
    Ucx(&'static str),
}

impl Program {
    /// Whether it can be measured with this pattern.
    fn has(self, pattern: Pattern) -> bool {
        match self {
            // A ping-pong has one message at a time.
            Program::Own(Transport::Many, _) => pattern == Pattern::OneWay,
            Program::Own(transport, _) => !pattern.is_grpc() || transport.has_grpc(),
            Program::Ucx(_) => !pattern.is_grpc(),
        }
    }
}

const UDP: &[(&str, &str)] = &[("RDMA_SOFT_UDP", "1")];

const COLUMNS: [(&str, Program); 12] = [
    ("Channel, shared memory", Program::Own(Transport::Channel, &[])),
    ("Channel, UDP", Program::Own(Transport::Channel, UDP)),
    ("Channel, several at once, shared memory", Program::Own(Transport::Many, &[])),
    ("Channel, several at once, UDP", Program::Own(Transport::Many, UDP)),
    ("Channel in place, shared memory", Program::Own(Transport::Owned, &[])),
    ("Channel in place, UDP", Program::Own(Transport::Owned, UDP)),
    ("Stream, shared memory", Program::Own(Transport::Stream, &[])),
    ("Stream, UDP", Program::Own(Transport::Stream, UDP)),
    ("TCP", Program::Own(Transport::Tcp, &[])),
    ("Unix socket", Program::Own(Transport::Unix, &[])),
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
                let is_measured = |program: Program| match program {
                    Program::Own(..) => program.has(*pattern),
                    Program::Ucx(_) => program.has(*pattern) && has_ucx && *connections == 1,
                };
                let columns: Vec<_> = COLUMNS.into_iter().filter(|(_, program)| is_measured(*program)).collect();
                row(options, &columns, *pattern, *connections, *size)?;
            }
        }
    }
    Ok(())
}

fn row(
    options: &Options,
    columns: &[(&str, Program)],
    pattern: Pattern,
    connections: usize,
    size: usize,
) -> Result<()> {
    let mut rounds = vec![Vec::new(); columns.len()];
    for _ in 0..options.rounds {
        for ((_, program), rounds) in columns.iter().zip(&mut rounds) {
            rounds.push(match program {
                Program::Own(transport, environment) => {
                    measure(options, *transport, environment, pattern, connections, size)?
                }
                Program::Ucx(tls) => {
                    // Its processor time is that of both ends.
                    (ucx::measure(tls, pattern, size, options.seconds)?, Served { cpu_seconds: 0.0 })
                }
            });
        }
    }
    for ((title, _), mut rounds) in columns.iter().zip(rounds) {
        rounds.sort_by(|a, b| rate(&a.0).total_cmp(&rate(&b.0)));
        let (median, served) = &rounds[rounds.len() / 2];
        let cpu = (median.cpu_seconds + served.cpu_seconds) * 1e6 / median.messages as f64;
        let cpu = if cpu.is_nan() { String::new() } else { format!("{cpu:.2}") };
        let (rate, bytes) = (rate(median), size as f64 / f64::from(1 << 20));
        let latencies = match pattern {
            Pattern::OneWay => "| ".to_owned(),
            // ucx_perftest prints one percentile.
            _ if median.p99_us.is_nan() => format!("{:.1} | ", median.p50_us),
            _ => format!("{:.1} | {:.1}", median.p50_us, median.p99_us),
        };
        println!(
            "| {} | {connections} | {size} | {title} | {rate:.0} | {:.1} | {latencies} | {cpu} |",
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
        command.args([role, "--transport", &name(transport), "--size", &size.to_string()]);
        command.envs(environment.iter().copied()).stdout(Stdio::piped());
        command
    };
    let mut server = command("server");
    server.args(pattern.is_grpc().then_some("--grpc"));
    let mut server = Ended(server.stdin(Stdio::piped()).spawn()?);
    let mut lines = BufReader::new(server.0.stdout.take().ok_or("the server has no output")?).lines();
    let address = lines.next().ok_or("the server has not started")??;
    let mut client = command("client");
    client.args(["--address", &address, "--pattern", &name(pattern)]);
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
