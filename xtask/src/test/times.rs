//! How long stages took, kept from run to run in the target directory.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use super::stage::Stage;
use super::stage_run::directory;

/// Seconds of each stage in the last run in which it passed.
#[derive(Debug, Default)]
pub(super) struct Times {
    seconds: BTreeMap<String, u64>,
    is_full: bool,
}

impl Times {
    /// The times of earlier runs. A file that is missing or damaged counts as no runs.
    pub(super) fn load(is_full: bool) -> Self {
        let text = path().and_then(|path| fs::read_to_string(path).ok());
        let seconds = text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        Times { seconds, is_full }
    }

    pub(super) fn expected(&self, stage: Stage) -> Duration {
        let known = self.seconds.get(&self.key(stage)).copied();
        Duration::from_secs(known.unwrap_or_else(|| stage.estimate(self.is_full)))
    }

    pub(super) fn record(&mut self, stage: Stage, took: Duration) {
        self.seconds.insert(self.key(stage), took.as_secs().max(1));
    }

    /// Writes the times for the next run, which can do without.
    pub(super) fn save(&self) {
        if let (Some(path), Ok(text)) = (path(), serde_json::to_string_pretty(&self.seconds)) {
            let _ = fs::write(path, text);
        }
    }

    /// A full stage does more than a quick one of the same name.
    fn key(&self, stage: Stage) -> String {
        if self.is_full { format!("{} (full)", stage.name()) } else { stage.name() }
    }
}

fn path() -> Option<PathBuf> {
    Some(directory().ok()?.join("times.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_is_expected_to_take_as_long_as_the_last_time() {
        let mut times = Times::default();
        assert_eq!(times.expected(Stage::Build), Duration::from_secs(Stage::Build.estimate(false)));
        times.record(Stage::Build, Duration::from_millis(7900));
        assert_eq!(times.expected(Stage::Build), Duration::from_secs(7));
        times.is_full = true;
        assert_eq!(
            times.expected(Stage::Build),
            Duration::from_secs(Stage::Build.estimate(true)),
            "not the full stage's"
        );
    }
}
