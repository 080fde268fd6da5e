//! What became of tests, and how that is told at the end of all of them.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::AddAssign;

/// Lines that are kept of what failed: those at its beginning, where the reason is, and those at its end.
const BEGINNING: usize = 20;
const END: usize = 40;

/// Numbers of tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

/// Numbers of tests, why some were skipped, and what the others said that failed.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) tally: Tally,
    /// How many were skipped for each reason.
    pub(crate) reasons: BTreeMap<String, u64>,
    pub(crate) failures: Vec<Failure>,
}

/// A test that failed, a program or a stage.
#[derive(Debug, Default)]
pub(crate) struct Failure {
    pub(crate) name: String,
    pub(crate) said: Excerpt,
}

/// The first and the last lines of a text.
#[derive(Clone, Debug, Default)]
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
    }
}

impl Report {
    /// One more failure.
    pub(crate) fn fail(&mut self, failure: Failure) {
        self.tally.failed += 1;
        self.failures.push(failure);
    }

    /// The same, of tests that ran `at` this place.
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

/// Each line behind a bar, so that nothing in it is taken for what this program says.
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
    fn reports_add_up_and_say_where_it_was() {
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
