//! Which tests take the longest.

use std::fmt;
use std::time::{Duration, Instant};

use super::libtest::result_of;

/// Durations of tests that run one after another, by the times at which their results come.
#[derive(Debug)]
pub(super) struct Durations {
    /// Time of the last result, or of the start of a program.
    last: Instant,
    tests: Vec<(Duration, String)>,
}

/// Number of tests that are shown.
const SHOWN: usize = 12;

impl Default for Durations {
    fn default() -> Self {
        Durations { last: Instant::now(), tests: Vec::new() }
    }
}

impl Durations {
    /// Takes the next line of the output.
    pub(super) fn line(&mut self, line: &str) {
        self.line_at(line, Instant::now());
    }

    fn line_at(&mut self, line: &str, now: Instant) {
        if let Some(name) = result_of(line, "ok").or_else(|| result_of(line, "FAILED")) {
            self.tests.push((now.duration_since(self.last), name.to_owned()));
        } else if !line.starts_with("running ") {
            return;
        }
        self.last = now;
    }
}

impl fmt::Display for Durations {
    /// The slowest tests with their durations in seconds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut slowest: Vec<_> = self.tests.iter().collect();
        slowest.sort_by_key(|(took, _)| std::cmp::Reverse(*took));
        let text = |(took, name): &&(Duration, String)| format!("{name} {:.0} s", took.as_secs_f64());
        f.write_str(&slowest.iter().take(SHOWN).map(text).collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_tests_come_first() {
        let mut durations = Durations::default();
        let start = durations.last;
        let over = "test b has been running for over 60 seconds";
        let lines = [
            ("running 3 tests", 5),
            ("test a ... ok", 7),
            (over, 68),
            ("test b ... FAILED", 77),
            ("test c ... ok", 78),
        ];
        for (line, second) in lines {
            durations.line_at(line, start + Duration::from_secs(second));
        }
        assert_eq!(durations.to_string(), "b 70 s, a 2 s, c 1 s");
    }
}
