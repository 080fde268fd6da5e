//! Reading what the test harness prints.

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
/// A test that passed and has printed a line beginning `skipped: ` was skipped, as was an ignored one.
#[derive(Debug, Default)]
pub(crate) struct Output {
    tally: Tally,
    /// Passed tests of the current program that said they skipped.
    said_skipped: u64,
    /// Whether the sections that follow are of tests that failed.
    failures: bool,
    /// Whether the current section is of a passed test and has not said yet that it skipped.
    counting: bool,
}

impl Output {
    /// Takes the next line, without its end.
    pub(crate) fn line(&mut self, line: &str) {
        if line == "successes:" || line == "failures:" {
            self.failures = line == "failures:";
            self.counting = false;
        } else if line.starts_with("---- ") && line.ends_with(" stdout ----") {
            self.counting = !self.failures;
        } else if self.counting && line.starts_with(SKIPPED) {
            self.said_skipped += 1;
            self.counting = false;
        } else if let Some(result) = line.strip_prefix("test result: ") {
            self.result(result);
        }
    }

    /// What was counted.
    pub(crate) fn tally(&self) -> Tally {
        self.tally
    }

    /// A program that ended without a result, or with a bad status although no test failed.
    pub(crate) fn broken(&mut self) {
        self.tally.failed += 1;
        self.reset();
    }

    fn result(&mut self, result: &str) {
        let number = |what: &str| -> u64 {
            let field = result.split([';', '.']).map(str::trim).find_map(|field| field.strip_suffix(what));
            field.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
        };
        let passed = number(" passed");
        let skipped = self.said_skipped.min(passed);
        self.tally +=
            Tally { passed: passed - skipped, failed: number(" failed"), skipped: skipped + number(" ignored") };
        self.reset();
    }

    fn reset(&mut self) {
        self.said_skipped = 0;
        self.failures = false;
        self.counting = false;
    }
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
    fn what_a_program_said_is_not_counted_for_the_next() {
        let mut output = Output::default();
        for line in ["successes:", "---- a stdout ----", "skipped: x"] {
            output.line(line);
        }
        output.broken();
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
