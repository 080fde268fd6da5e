//! UCX, measured by its own `ucx_perftest` with tagged messages.

use std::io::Error;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::child::Ended;
use crate::usage::children_seconds;
use crate::{Measured, Pattern, Result};

const PROGRAM: &str = "ucx_perftest";

/// Messages of the first run, from which the number of messages of the next one follows.
const FEW: u64 = 200;

/// A run has at most this many times the messages of the one before, since short runs are slower.
const GROWTH: u64 = 100;

/// Attempts of a client to connect, and the pause between them.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(50);

/// A run of `ucx_perftest`.
#[derive(Clone, Copy)]
struct Run {
    /// The median and the average over the run in microseconds.
    times: [f64; 2],
    /// Processor time of both ends, from their start.
    cpu_seconds: f64,
}

/// Whether `ucx_perftest` is installed.
pub(crate) fn is_installed() -> bool {
    // It prints its options to the standard error.
    Command::new(PROGRAM).arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Measures one connection for about `seconds`, with the transports `tls` and what else UCX picks by default. Both ends poll.
pub(crate) fn measure(tls: &str, pattern: Pattern, size: usize, seconds: f64) -> Result<Measured> {
    let is_ping_pong = pattern == Pattern::PingPong;
    let test = if is_ping_pong { "tag_lat" } else { "tag_bw" };
    let few = run(tls, test, size, FEW)?;
    // A latency is half of a round trip.
    let trips = if is_ping_pong { 2.0 } else { 1.0 };
    let length = |run: &Run, messages| run.times[1] * trips * messages as f64 / 1e6;
    let (mut messages, mut many) = (FEW, few);
    while messages == FEW || length(&many, messages) < seconds / 2.0 {
        let wanted = messages as f64 * seconds / length(&many, messages);
        messages = (wanted as u64).clamp(2 * FEW, messages * GROWTH);
        many = run(tls, test, size, messages)?;
    }
    // The start of both programs takes longer than many messages. On a busy machine, the first run can take longer than the last.
    let more = many.cpu_seconds - few.cpu_seconds;
    let cpu_seconds = if more > 0.0 { more * messages as f64 / (messages - FEW) as f64 } else { f64::NAN };
    Ok(Measured {
        messages,
        seconds: length(&many, messages),
        p50_us: many.times[0] * trips,
        p99_us: f64::NAN,
        cpu_seconds,
    })
}

fn run(tls: &str, test: &str, size: usize, messages: u64) -> Result<Run> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let command = || {
        let mut command = Command::new(PROGRAM);
        command.args(["-p", &port]).envs([
            ("UCX_TLS", tls),
            ("UCX_NET_DEVICES", "lo"),
            ("UCX_WARN_UNUSED_ENV_VARS", "n"),
        ]);
        command
    };
    let before = children_seconds();
    let mut server = Ended(command().stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
    let (messages, warmup) = (messages.to_string(), (messages / 10).to_string());
    for _ in 0..ATTEMPTS {
        let mut client = command();
        client.args(["127.0.0.1", "-f", "-v", "-t", test, "-s", &size.to_string(), "-n", &messages, "-w", &warmup]);
        let output = client.output()?;
        if output.status.success() {
            server.0.wait()?;
            let times = times(&String::from_utf8_lossy(&output.stdout))
                .ok_or_else(|| Error::other(format!("unexpected output of {PROGRAM} {test}: {output:?}")))?;
            return Ok(Run { times, cpu_seconds: children_seconds() - before });
        }
        // The server does not listen yet.
        sleep(PAUSE);
        if server.0.try_wait()?.is_some() {
            return Err(format!("{PROGRAM} with UCX_TLS={tls} has failed: {output:?}").into());
        }
    }
    Err(format!("{PROGRAM} does not listen").into())
}

/// The median and the overall average of the last line: iterations, median, average, overall average, bandwidths, rates.
fn times(output: &str) -> Option<[f64; 2]> {
    let fields: Vec<f64> =
        output.lines().last()?.split(',').map(|field| field.trim().parse().ok()).collect::<Option<_>>()?;
    Some([*fields.get(1)?, *fields.get(3)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_from_the_last_line() {
        let header = "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n";
        let line = "      1000,0.060,267.663,267.664,0.23,0.23,3736,3736\n";
        assert_eq!(times(&format!("{header}{line}")), Some([0.060, 267.664]));
        assert_eq!(times(header), None);
        assert_eq!(times(""), None);
    }
}
