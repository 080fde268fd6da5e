//! Prints the asynchronous events of an RDMA device: rdma-core's `ibv_asyncwatch`, with timestamps and limits.

#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use common::number::within;
use common::{Result, device};
use signal_hook::consts::{SIGINT, SIGTERM};

const EXAMPLES: &str = "\
Each line has the seconds since the start, the type of the event, and its object. Every program receives the events of ports and of
the device, but those of queue pairs and completion queues go only to the program that created them.

Examples:
  async_events                   watch the first device until Ctrl-C
  async_events -d mlx5_0 -n 1    wait for one event
  async_events -t 60             watch for a minute";

/// Longest time until a signal is noticed.
const TICK: Duration = Duration::from_millis(200);

/// Prints the asynchronous events of an RDMA device
#[derive(Debug, Parser)]
#[command(name = "async_events", after_help = EXAMPLES, max_term_width = 100, args_override_self = true)]
struct Options {
    /// Device, such as mlx5_0 or rxe0, or soft0, which every machine has [default: the first]
    #[arg(short = 'd', long, value_name = "DEVICE")]
    ib_dev: Option<String>,

    /// Stop after this many events
    #[arg(short = 'n', long, value_name = "EVENTS", value_parser = within(1..=u64::MAX))]
    count: Option<u64>,

    /// Stop after this many seconds
    #[arg(short, long, value_name = "SECONDS", value_parser = within(0..=1_000_000_u64))]
    timeout: Option<u64>,
}

fn main() -> ExitCode {
    common::main(run)
}

fn run(options: &Options) -> Result<()> {
    // Before the first output, because a script may send a signal as soon as it has read that output.
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let device = device::find(options.ib_dev.as_deref())?;
    let events = device.open()?.async_events()?;
    let mut out = io::stdout();
    let failed = |error: io::Error| format!("cannot print: {error}");
    writeln!(out, "watching {}", device.name()).map_err(failed)?;

    let (start, mut seen) = (Instant::now(), 0);
    let limit = options.timeout.map_or(Duration::MAX, Duration::from_secs);
    while !stop.load(Ordering::Relaxed) && options.count.is_none_or(|count| seen < count) {
        let left = limit.saturating_sub(start.elapsed());
        match events.wait(left.min(TICK))? {
            Some(event) => {
                seen += 1;
                writeln!(out, "{:10.3}  {event}", start.elapsed().as_secs_f64()).map_err(failed)?;
            }
            None if left.is_zero() => break,
            None => {}
        }
    }
    writeln!(out, "n_events={seen}").map_err(failed)?;
    Ok(())
}
