//! The progress and the summary of a transfer.

use std::fmt;
use std::time::{Duration, Instant};

use common::Result;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::message::Checksum;

const STYLE: &str = "{prefix} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";

/// Progress bars on standard error, if it is a terminal.
#[derive(Clone, Debug)]
pub(crate) struct Progress(MultiProgress);

impl Progress {
    pub(crate) fn new(quiet: bool) -> Self {
        let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        Progress(MultiProgress::with_draw_target(target))
    }

    /// Adds the bar of a file of `size` bytes, of which `at` are stored.
    pub(crate) fn bar(&self, name: &str, size: u64, at: u64) -> ProgressBar {
        let style = ProgressStyle::with_template(STYLE).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = self.0.add(ProgressBar::new(size).with_style(style).with_prefix(name.to_owned()).with_position(at));
        bar.reset_eta();
        bar
    }

    /// Calls `print`, which prints a line, with the bars hidden.
    pub(crate) fn print(&self, print: impl FnOnce()) {
        self.0.suspend(print);
    }
}

/// Tells the peer once a second that this end is still working.
pub(crate) struct Heartbeat(Instant);

impl Heartbeat {
    const INTERVAL: Duration = Duration::from_secs(1);

    pub(crate) fn new() -> Self {
        Heartbeat(Instant::now())
    }

    /// Calls `send` if a second has passed since the last call.
    pub(crate) fn beat(&mut self, send: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.0.elapsed() < Heartbeat::INTERVAL {
            return Ok(());
        }
        self.0 = Instant::now();
        send()
    }
}

/// The result of a transfer.
pub(crate) struct Summary {
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(crate) resumed_at: u64,
    pub(crate) elapsed: Duration,
    pub(crate) checksum: Checksum,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: f64 = (1 << 20) as f64;
        let Summary { name, size, resumed_at, elapsed, checksum } = self;
        let seconds = elapsed.as_secs_f64();
        let rate = (size - resumed_at) as f64 / MIB / seconds.max(f64::EPSILON);
        write!(f, "{name}: {size} bytes")?;
        if *resumed_at > 0 {
            write!(f, ", resumed at {resumed_at},")?;
        }
        write!(f, " in {seconds:.2} s ({rate:.1} MiB/s), SHA-256 {checksum}")
    }
}
