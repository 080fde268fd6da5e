//! Results of tests, and their summary.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

/// Lines kept of the output of a failure: the first ones, which name the reason, and the last ones.
const BEGINNING: usize = 20;
const END: usize = 40;

/// Numbers of tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

/// Numbers of tests, reasons of skips, and failures with their output.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) tally: Tally,
    /// Number of tests skipped for each reason.
    pub(crate) reasons: BTreeMap<String, u64>,
    pub(crate) failures: Vec<Failure>,
    /// Names of the tests that passed, without their modules.
    #[serde(skip)]
    pub(crate) passed: BTreeSet<String>,
}

/// A failed test, program or stage.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) name: String,
    pub(crate) said: Excerpt,
}

/// The first and the last lines of a text.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Excerpt {
    first: Vec<String>,
    last: VecDeque<String>,
    omitted: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl AddAssign for Report {
    fn add_assign(&mut self, other: Self) {
        self.tally += other.tally;
        for (reason, count) in other.reasons {
            *self.reasons.entry(reason).or_default() += count;
        }
        self.failures.extend(other.failures);
        self.passed.extend(other.passed);
    }
}

impl Report {
    /// Adds a failure.
    pub(crate) fn fail(&mut self, failure: Failure) {
        self.tally.failed += 1;
        self.failures.push(failure);
    }

    /// Prefixes the names of failures with the `place` where they ran.
    pub(crate) fn at(mut self, place: &str) -> Self {
        for failure in &mut self.failures {
            failure.name = format!("{place}: {}", failure.name);
        }
        self
    }
}

impl Failure {
    pub(crate) fn new(name: impl Into<String>, said: &str) -> Self {
        let mut excerpt = Excerpt::default();
        said.lines().for_each(|line| excerpt.line(line));
        Failure { name: name.into(), said: excerpt }
    }
}

impl Excerpt {
    /// Takes the next line.
    pub(crate) fn line(&mut self, line: &str) {
        if self.first.len() < BEGINNING {
            self.first.push(line.to_owned());
            return;
        }
        self.last.push_back(line.to_owned());
        if self.last.len() > END {
            self.last.pop_front();
            self.omitted += 1;
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { passed, failed, skipped } = self;
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "failed: {}{}", self.name, self.said)
    }
}

/// Prefixes each line with a bar, so that none looks like output of this program.
impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.first {
            write!(f, "\n  | {line}")?;
        }
        if self.omitted > 0 {
            write!(f, "\n  | ... {} lines ...", self.omitted)?;
        }
        for line in &self.last {
            write!(f, "\n  | {line}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_keeps_its_beginning_and_its_end() {
        let text: String = (0..100).map(|number| format!("line {number}\n")).collect();
        let shown = Failure::new("a", &text).to_string();
        assert!(shown.starts_with("failed: a\n  | line 0\n"), "{shown}");
        assert!(shown.contains("\n  | line 19\n  | ... 40 lines ...\n  | line 60\n"), "{shown}");
        assert!(shown.ends_with("\n  | line 99"), "{shown}");
        assert!(!Failure::new("a", "b").to_string().contains("..."));
    }

    #[test]
    fn reports_are_summed_and_failures_name_their_place() {
        let mut both = Report::default();
        for place in ["here", "there"] {
            let mut report = Report { reasons: [("no device".to_owned(), 2)].into(), ..Report::default() };
            report.fail(Failure::new("a::b", "why"));
            both += report.at(place);
        }
        assert_eq!(both.tally, Tally { passed: 0, failed: 2, skipped: 0 });
        assert_eq!(both.reasons["no device"], 4);
        let names: Vec<&str> = both.failures.iter().map(|failure| failure.name.as_str()).collect();
        assert_eq!(names, ["here: a::b", "there: a::b"]);
    }
}
