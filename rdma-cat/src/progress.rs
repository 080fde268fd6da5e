//! The progress of a transfer.

use std::time::Instant;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

const WITH_LENGTH: &str = "{prefix} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
const WITHOUT_LENGTH: &str = "{prefix} {spinner} {bytes} {bytes_per_sec} {elapsed}";

/// Progress bars and summaries on standard error, if they are wanted.
#[derive(Debug)]
pub(crate) struct Progress(Option<MultiProgress>);

/// The progress of one direction.
#[derive(Debug)]
pub(crate) struct Direction {
    bar: ProgressBar,
    bars: Option<MultiProgress>,
    verb: &'static str,
    start: Instant,
}

impl Progress {
    pub(crate) fn new(is_shown: bool) -> Self {
        Progress(is_shown.then(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr())))
    }

    /// Adds the bar of a direction, whose length may be known.
    pub(crate) fn direction(&self, verb: &'static str, len: Option<u64>) -> Direction {
        let bar = self.0.as_ref().map_or_else(ProgressBar::hidden, |bars| {
            let (template, bar) = match len {
                Some(len) => (WITH_LENGTH, ProgressBar::new(len)),
                None => (WITHOUT_LENGTH, ProgressBar::no_length()),
            };
            let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
            bars.add(bar.with_style(style).with_prefix(verb))
        });
        Direction { bar, bars: self.0.clone(), verb, start: Instant::now() }
    }
}

impl Direction {
    /// Counts bytes.
    pub(crate) fn add(&self, bytes: usize) {
        self.bar.inc(bytes as u64);
    }

    /// Replaces the bar by a summary. Without it, dropping removes the bar.
    pub(crate) fn finish(self) {
        const MIB: f64 = (1 << 20) as f64;
        let Direction { bar, bars, verb, start } = &self;
        bar.finish_and_clear();
        if let Some(bars) = bars.as_ref().filter(|_| bar.position() != 0) {
            let (bytes, seconds) = (bar.position(), start.elapsed().as_secs_f64());
            let rate = bytes as f64 / MIB / seconds.max(f64::EPSILON);
            bars.suspend(|| eprintln!("{verb} {bytes} bytes in {seconds:.2} s ({rate:.1} MiB/s)"));
        }
    }
}

impl Drop for Direction {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
