//! Reading what the test harness prints.

use std::collections::HashSet;
use std::fmt;
use std::ops::AddAssign;

/// Numbers of tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally { passed, failed, skipped } = self;
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// How a test that skips says so, at the beginning of a line.
const SKIPPED: &str = "skipped: ";

/// Counts the tests in the output of any number of test programs run with `--show-output`, fed line by line.
///
/// A test that passed and has printed a line beginning `skipped: ` was skipped, as was an ignored one. Among what tests
/// print there may be the output of other test programs, which they have run themselves; that is not counted.
#[derive(Debug, Default)]
pub(crate) struct Output {
    tally: Tally,
    /// Tests of the current program, once it has said how many they are.
    running: Option<u64>,
    /// Those of them that passed.
    passed: HashSet<String>,
    /// Those that passed and said that they skipped.
    said_skipped: HashSet<String>,
    /// Whether the output of tests is being shown, in which anything may occur.
    shows_output: bool,
    /// The passed test whose output it is.
    shown: Option<String>,
}

impl Output {
    /// Takes the next line, without its end.
    pub(crate) fn line(&mut self, line: &str) {
        if let Some(number) = running(line) {
            self.starts(number);
        } else if let Some(name) = passed(line) {
            self.passed.insert(name.to_owned());
        } else if let Some(name) = heading(line) {
            self.shows_output = true;
            self.shown = self.passed.get(name).cloned();
        } else if let Some(result) = line.strip_prefix("test result: ") {
            self.result(result);
        } else if line.starts_with(SKIPPED) {
            self.said_skipped.extend(self.shown.clone());
        }
    }

    /// What was counted.
    pub(crate) fn tally(&self) -> Tally {
        self.tally
    }

    /// A program that ended without a result, or with a bad status although no test failed.
    pub(crate) fn broken(&mut self) {
        self.tally.failed += 1;
        self.forget_program();
    }

    /// The next line is another program's.
    pub(crate) fn forget_program(&mut self) {
        *self = Self { tally: self.tally, ..Self::default() };
    }

    fn starts(&mut self, tests: u64) {
        if self.shows_output {
            return;
        }
        if self.running.is_some() {
            // The program before has crashed.
            self.broken();
        }
        self.running = Some(tests);
    }

    fn result(&mut self, result: &str) {
        let number = |what: &str| -> u64 {
            let field = result.split([';', '.']).map(str::trim).find_map(|field| field.strip_suffix(what));
            field.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
        };
        let [passed, failed, ignored] = [" passed", " failed", " ignored"].map(number);
        if self.running != Some(passed + failed + ignored) {
            return;
        }
        let skipped = passed.min(u64::try_from(self.said_skipped.len()).unwrap_or(passed));
        self.tally += Tally { passed: passed - skipped, failed, skipped: skipped + ignored };
        self.forget_program();
    }
}

/// 3 of `running 3 tests`.
fn running(line: &str) -> Option<u64> {
    let number = line.strip_prefix("running ")?;
    number.strip_suffix(" tests").or(number.strip_suffix(" test"))?.parse().ok()
}

/// `a::b` of `test a::b ... ok`.
fn passed(line: &str) -> Option<&str> {
    let name = line.strip_prefix("test ")?.strip_suffix(" ... ok")?;
    Some(name.strip_suffix(" - should panic").unwrap_or(name))
}

/// `a::b` of `---- a::b stdout ----`.
fn heading(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

/// Bytes of a stream to whole lines.
#[derive(Debug, Default)]
pub(crate) struct Lines(Vec<u8>);

impl Lines {
    /// Takes the next bytes and hands every line that they complete to `each`.
    pub(crate) fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(&str)) {
        self.0.extend_from_slice(bytes);
        while let Some(end) = self.0.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.0.drain(..=end).collect();
            each(String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(text: &str) -> Tally {
        let mut output = Output::default();
        text.lines().for_each(|line| output.line(line));
        output.tally()
    }

    #[test]
    fn results_of_all_programs_add_up() {
        let text = "\
running 3 tests
test a ... ok
test b ... ignored, needs two hosts
test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

running 1 test
test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 4 filtered out; finished in 1.25s
";
        assert_eq!(tally(text), Tally { passed: 2, failed: 1, skipped: 1 });
    }

    #[test]
    fn a_passed_test_that_says_it_skipped_was_skipped_once() {
        let text = "\
running 3 tests
test a ... ok
test b ... ok
test c ... FAILED

successes:

---- a stdout ----
no device
skipped: no RDMA device
skipped: really

---- b stdout ----
not skipped: here

successes:
    a
    b

failures:

---- c stdout ----
skipped: RDMA_REQUIRE_DEVICE is set

failures:
    c

test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        assert_eq!(tally(text), Tally { passed: 1, failed: 1, skipped: 1 });
    }

    #[test]
    fn a_program_that_a_test_runs_does_not_count() {
        let text = "\
running 2 tests
test a ... ok
test b ... FAILED

successes:

---- a stdout ----
skipped: no RDMA device

failures:

---- b stdout ----
running 1 test
test b ... FAILED

failures:

---- b stdout ----
skipped: not counted, for it failed

test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 142 filtered out; finished in 1.38s

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 141 filtered out; finished in 2.00s
";
        assert_eq!(tally(text), Tally { passed: 0, failed: 1, skipped: 1 });
    }

    #[test]
    fn a_program_that_crashes_has_failed_and_the_next_one_counts() {
        let text = "\
running 5 tests
test a ... ok
running 2 tests
test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        assert_eq!(tally(text), Tally { passed: 2, failed: 1, skipped: 0 });
    }

    #[test]
    fn what_a_program_said_is_not_counted_for_the_next() {
        let mut output = Output::default();
        for line in ["running 2 tests", "test a ... ok", "---- a stdout ----", "skipped: x"] {
            output.line(line);
        }
        output.broken();
        output.line("running 1 test");
        output.line("test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
        assert_eq!(output.tally(), Tally { passed: 1, failed: 1, skipped: 0 });
    }

    #[test]
    fn lines_are_whole_however_the_bytes_come() {
        let (mut lines, mut seen) = (Lines::default(), Vec::new());
        for bytes in [&b"te"[..], b"st\r\n\nre", b"st"] {
            lines.feed(bytes, |line| seen.push(line.to_owned()));
        }
        assert_eq!(seen, ["test", ""]);
    }
}
