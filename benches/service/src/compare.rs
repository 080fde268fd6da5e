//! Measures all transports in alternating rounds.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use crate::{Measured, Result, Served};

#[derive(clap::Args, Debug)]
pub(crate) struct Options {
    /// Clients and depth of each row.
    #[arg(long, value_delimiter = ',', default_value = "1x1,4x1,16x1,1x16,4x16,16x16")]
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

/// The name, the transport, and the environment of both processes.
type Column = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

const COLUMNS: [Column; 3] =
    [("soft0, shared memory", "rdma", &[]), ("soft0, UDP", "rdma", &[("RDMA_SOFT_UDP", "1")]), ("TCP", "tcp", &[])];

pub(crate) fn run(options: &Options) -> Result<()> {
    println!("| clients × depth | transport | operations/s | p50 µs | p99 µs | CPU µs/operation |");
    println!("|---|---|---|---|---|---|");
    for row in &options.rows {
        let (clients, depth) = row.split_once('x').ok_or("a row is CLIENTSxDEPTH")?;
        let mut rounds = [const { Vec::new() }; COLUMNS.len()];
        for _ in 0..options.rounds {
            for ((_, transport, environment), rounds) in COLUMNS.iter().zip(&mut rounds) {
                rounds.push(measure(options, transport, environment, clients, depth)?);
            }
        }
        for ((name, ..), mut rounds) in COLUMNS.iter().zip(rounds) {
            rounds.sort_by(|a, b| rate(&a.0).total_cmp(&rate(&b.0)));
            let (median, served) = &rounds[rounds.len() / 2];
            let cpu = (median.cpu_seconds + served.cpu_seconds) * 1e6 / median.operations as f64;
            println!(
                "| {clients} × {depth} | {name} | {:.0} | {:.1} | {:.1} | {cpu:.2} |",
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

/// Ends the process if it is still running.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn measure(
    options: &Options,
    transport: &str,
    environment: &[(&str, &str)],
    clients: &str,
    depth: &str,
) -> Result<(Measured, Served)> {
    let workers = options.workers.to_string();
    let command = |role: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap_or_else(|_| "rdma-service-bench".into()));
        command.args([role, "--transport", transport, "--workers", &workers]).envs(environment.iter().copied());
        command.stdout(Stdio::piped());
        command
    };
    let mut server = Ended(command("server").stdin(Stdio::piped()).spawn()?);
    let mut lines = BufReader::new(server.0.stdout.take().ok_or("the server has no output")?).lines();
    let address = lines.next().ok_or("the server has not started")??;
    let client = command("client")
        .args([
            "--address",
            &address,
            "--clients",
            clients,
            "--depth",
            depth,
            "--seconds",
            &options.seconds.to_string(),
        ])
        .stderr(Stdio::inherit())
        .output()?;
    let measured = serde_json::from_slice(&client.stdout)
        .map_err(|error| format!("{error}: {}", String::from_utf8_lossy(&client.stderr)))?;
    drop(server.0.stdin.take());
    let served = serde_json::from_str(&lines.next().ok_or("the server has printed nothing")??)?;
    Ok((measured, served))
}
