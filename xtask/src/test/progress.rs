//! The state of a run on the terminal: a line that changes, or elsewhere a line for each stage that starts or ends.

use std::fmt::Write;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::stage_run::StageRun;

/// Prints lines, above a line of state if standard error is a terminal.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    /// Stages of the run.
    stages: usize,
}

impl Progress {
    pub(super) fn new(stages: usize) -> Self {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{elapsed_precise} {wide_msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_secs(1));
        Progress { bar, stages }
    }

    /// Prints a line.
    pub(super) fn line(&self, text: &str) {
        self.bar.suspend(|| println!("{text}"));
    }

    /// Shows the stages that run.
    pub(super) fn show(&self, ended: usize, running: &[StageRun], left: Duration) {
        self.bar.set_message(message(ended, self.stages, running, left));
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

fn message(ended: usize, stages: usize, running: &[StageRun], left: Duration) -> String {
    let mut text = format!("{ended} of {stages} stages; ");
    for run in running {
        let _ = write!(text, "{}", run.stage.name());
        if run.tests > 0 {
            let _ = write!(text, " ({} tests)", run.tests);
        }
        text.push_str(", ");
    }
    text.push_str(&time_left(left));
    text
}

/// `about 3 min left`.
pub(super) fn time_left(left: Duration) -> String {
    match left.as_secs() {
        0..60 => "less than a minute left".to_owned(),
        seconds => format!("about {} min left", seconds.div_ceil(60)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_in_minutes() {
        assert_eq!(time_left(Duration::from_secs(59)), "less than a minute left");
        assert_eq!(time_left(Duration::from_secs(61)), "about 2 min left");
        assert_eq!(message(3, 9, &[], Duration::from_secs(600)), "3 of 9 stages; about 10 min left");
    }
}
