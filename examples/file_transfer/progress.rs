//! What is to be seen of a transfer.

use std::fmt;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::Result;
use crate::message::Checksum;

const STYLE: &str = "{prefix} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";

/// Bars on the terminal; where standard error is none, nothing.
#[derive(Clone, Debug)]
pub(crate) struct Progress(MultiProgress);

impl Progress {
    pub(crate) fn new(quiet: bool) -> Self {
        let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        Progress(MultiProgress::with_draw_target(target))
    }

    /// For a file of that size, of which that much is there already.
    pub(crate) fn bar(&self, name: &str, size: u64, at: u64) -> ProgressBar {
        let style = ProgressStyle::with_template(STYLE).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = self.0.add(ProgressBar::new(size).with_style(style).with_prefix(name.to_owned()).with_position(at));
        bar.reset_eta();
        bar
    }

    /// Writes a line of output, with no bar in its way.
    pub(crate) fn say(&self, line: impl FnOnce()) {
        self.0.suspend(line);
    }
}

/// Tells the peer once a second that this end still works at something.
pub(crate) struct Heartbeat(Instant);

impl Heartbeat {
    const PACE: Duration = Duration::from_secs(1);

    pub(crate) fn new() -> Self {
        Heartbeat(Instant::now())
    }

    /// Calls `tell` if it is time.
    pub(crate) fn beat(&mut self, tell: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.0.elapsed() < Heartbeat::PACE {
            return Ok(());
        }
        self.0 = Instant::now();
        tell()
    }
}

/// A file that was transferred.
pub(crate) struct Summary {
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(crate) resumed_at: u64,
    pub(crate) took: Duration,
    pub(crate) checksum: Checksum,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: f64 = (1 << 20) as f64;
        let Summary { name, size, resumed_at, took, checksum } = self;
        let seconds = took.as_secs_f64();
        let rate = (size - resumed_at) as f64 / MIB / seconds.max(f64::EPSILON);
        write!(f, "{name}: {size} bytes")?;
        if *resumed_at > 0 {
            write!(f, ", {resumed_at} of which were there,")?;
        }
        write!(f, " in {seconds:.2} s ({rate:.1} MiB/s), SHA-256 {checksum}")
    }
}
