//! Parses the output of the test harness.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::report::{Excerpt, Failure, Report, Tally};

/// Prefix of the line that a test prints when it skips.
const SKIPPED: &str = "skipped: ";

/// Counts the tests in the output of test programs that run with `--show-output`.
///
/// A test counts as skipped if it is ignored, or passed and printed a line beginning `skipped: `. Tests may run other test
/// programs and print their output; tests in such output do not count.
#[derive(Debug, Default)]
pub(crate) struct Output {
    report: Report,
    /// Number of tests of the current program, once known.
    running: Option<u64>,
    /// Names of the passed tests.
    passed: HashSet<String>,
    /// Names of the failed tests whose output has not come yet.
    failed: HashSet<String>,
    /// Names of the passed tests that printed a reason to skip, with the first reason.
    said_skipped: HashMap<String, String>,
    /// Whether the current lines are output of tests. Such lines may look like lines of the harness.
    shows_output: bool,
    /// The passed test that printed the current lines.
    shown: Option<String>,
    /// Output of the failed tests.
    failures: Vec<Failure>,
    /// Output of the current program.
    said: Excerpt,
}

/// A line of a test program, without its end.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Line<'a> {
    Output(&'a str),
    /// A line of standard error: the reason of a crash, which the harness cannot print.
    Error(&'a str),
}

impl Output {
    /// Takes the next line.
    pub(crate) fn take(&mut self, line: Line<'_>) {
        match line {
            Line::Output(line) => self.line(line),
            Line::Error(line) => self.said.line(line),
        }
    }

    /// Takes the next line of standard output, without its end.
    pub(crate) fn line(&mut self, line: &str) {
        if let Some(number) = running(line) {
            self.starts(number);
        }
        self.said.line(line);
        if let Some(name) = result_of(line, "ok") {
            self.passed.insert(name.to_owned());
        } else if let Some(name) = result_of(line, "FAILED") {
            self.failed.insert(name.to_owned());
        } else if let Some(name) = heading(line) {
            self.shows(name);
            return;
        } else if let Some(result) = line.strip_prefix("test result: ") {
            self.result(result);
            return;
        } else if let (Some(reason), Some(shown)) = (line.strip_prefix(SKIPPED), &self.shown) {
            self.said_skipped.entry(shown.clone()).or_insert_with(|| reason.to_owned());
        }
        if let Some(failure) = self.failures.last_mut() {
            failure.said.line(line);
        }
    }

    /// The counts so far.
    pub(crate) fn report(&self) -> &Report {
        &self.report
    }

    /// The counts at the end of the output.
    pub(crate) fn into_report(self) -> Report {
        self.report
    }

    /// Whether a program started its tests and printed no result.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.running.is_some()
    }

    /// Counts a failure for a program that ended without a result, or badly although no test failed; `so` describes the end.
    pub(crate) fn broken(&mut self, so: &str) {
        let said = std::mem::take(&mut self.said);
        for name in std::mem::take(&mut self.failed) {
            self.report.fail(Failure { name, said: Excerpt::default() });
        }
        self.report.fail(Failure { name: format!("a test program {so}"), said });
        self.forget_program();
    }

    /// Resets the state for the next program.
    fn forget_program(&mut self) {
        *self = Self { report: std::mem::take(&mut self.report), ..Self::default() };
    }

    fn starts(&mut self, tests: u64) {
        if self.shows_output {
            return;
        }
        if self.running.is_some() {
            self.broken("has crashed");
        }
        self.running = Some(tests);
    }

    /// The next lines are output of this test.
    fn shows(&mut self, name: &str) {
        self.shows_output = true;
        self.shown = self.passed.get(name).cloned();
        if self.failed.remove(name) {
            self.failures.push(Failure { name: name.to_owned(), said: Excerpt::default() });
        }
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
        let passed_names = self.passed.iter().filter(|name| !self.said_skipped.contains_key(*name));
        let passed_names = passed_names.map(|name| name.rsplit("::").next().unwrap_or(name).to_owned()).collect();
        let mut reasons = BTreeMap::new();
        for reason in std::mem::take(&mut self.said_skipped).into_values() {
            *reasons.entry(reason).or_default() += 1;
        }
        // Failed tests without output.
        self.failures.extend(self.failed.drain().map(|name| Failure { name, said: Excerpt::default() }));
        let skipped = passed.min(reasons.values().sum());
        let tally = Tally { passed: passed - skipped, failed, skipped: skipped + ignored };
        self.report += Report { tally, reasons, failures: std::mem::take(&mut self.failures), passed: passed_names };
        self.forget_program();
    }
}

/// 3 of `running 3 tests`.
fn running(line: &str) -> Option<u64> {
    let number = line.strip_prefix("running ")?;
    number.strip_suffix(" tests").or(number.strip_suffix(" test"))?.parse().ok()
}

/// `a::b` of `test a::b ... ok`, if that is the result.
pub(super) fn result_of<'a>(line: &'a str, result: &str) -> Option<&'a str> {
    let name = line.strip_prefix("test ")?.strip_suffix(result)?.strip_suffix(" ... ")?;
    let kinds = [" - should panic", " - compile", " - compile fail"];
    Some(kinds.iter().find_map(|kind| name.strip_suffix(kind)).unwrap_or(name))
}

/// Whether the line is the result of a failed test.
pub(crate) fn has_failed(line: &str) -> bool {
    result_of(line, "FAILED").is_some()
}

/// Whether the line is the result of a test.
pub(crate) fn has_ended(line: &str) -> bool {
    result_of(line, "ok").is_some() || has_failed(line)
}

/// `a::b` of `---- a::b stdout ----`.
fn heading(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

/// Splits a byte stream into lines.
#[derive(Debug, Default)]
pub(crate) struct Lines(Vec<u8>);

impl Lines {
    /// Takes the next bytes and passes each complete line to `each`.
    pub(crate) fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(&str)) {
        self.0.extend_from_slice(bytes);
        while let Some(end) = self.0.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.0.drain(..=end).collect();
            each(String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']));
        }
    }

    /// Passes on the last line if it has no end.
    pub(crate) fn finish(&mut self, mut each: impl FnMut(&str)) {
        if !self.0.is_empty() {
            self.feed(b"\n", &mut each);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(text: &str) -> Tally {
        let mut output = Output::default();
        text.lines().for_each(|line| output.line(line));
        output.into_report().tally
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
    fn doctests_and_failures_without_output_are_reported() {
        let text = "\
running 2 tests
test src/lib.rs - a (line 3) - compile fail ... FAILED
test b - should panic ... FAILED

failures:

---- src/lib.rs - a (line 3) stdout ----
Test compiled successfully, but it's marked `compile_fail`.

failures:
    b
    src/lib.rs - a (line 3)

test result: FAILED. 0 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        let mut output = Output::default();
        text.lines().for_each(|line| output.line(line));
        let report = output.into_report();
        assert_eq!((report.tally.failed, report.failures.len()), (2, 2));
        assert_eq!(report.failures[0].name, "src/lib.rs - a (line 3)");
        assert_eq!(report.failures[1].to_string(), "failed: b");
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
    fn a_skipped_test_is_not_among_the_names_of_passed_tests() {
        let text = "\
running 2 tests
test a::one ... ok
test a::two ... ok

successes:

---- a::one stdout ----
skipped: no RDMA device

successes:
    a::one
    a::two

test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        let mut output = Output::default();
        text.lines().for_each(|line| output.line(line));
        assert_eq!(output.into_report().passed.into_iter().collect::<Vec<_>>(), ["two"]);
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
    fn output_before_a_crash_does_not_count_for_the_next_program() {
        let mut output = Output::default();
        for line in ["running 2 tests", "test a ... ok", "---- a stdout ----", "skipped: x"] {
            output.line(line);
        }
        output.broken("was killed");
        output.line("running 1 test");
        output.line("test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
        assert_eq!(output.report().tally, Tally { passed: 1, failed: 1, skipped: 0 });
    }

    #[test]
    fn failures_keep_their_output_and_skipped_tests_their_reason() {
        let text = "\
running 3 tests
test a ... ok
test b ... FAILED
test c ... FAILED

successes:

---- a stdout ----
skipped: no device
skipped: and more

failures:

---- b stdout ----
thread 'b' panicked

---- c stdout ----
running 1 test
---- b stdout ----
---- c stdout ----
hm

failures:
    b
    c

test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
running 3 tests
test d ... FAILED
test e ... Segmentation fault
";
        let mut output = Output::default();
        text.lines().for_each(|line| output.line(line));
        output.broken("ended by a signal");
        let report = output.into_report();
        assert_eq!(report.tally, Tally { passed: 0, failed: 4, skipped: 1 });
        assert_eq!(report.reasons.into_iter().collect::<Vec<_>>(), [("no device".to_owned(), 1)]);
        let said: Vec<String> = report.failures.iter().map(ToString::to_string).collect();
        assert!(said[0].starts_with("failed: b\n") && said[0].contains("panicked"), "{said:?}");
        assert!(said[1].starts_with("failed: c\n") && !said[1].contains("panicked"), "{said:?}");
        let last = said.last().unwrap();
        assert!(last.starts_with("failed: a test program ended by a signal\n"), "{last}");
        assert!(last.ends_with("| test e ... Segmentation fault"), "{last}");
        assert_eq!(said[2], "failed: d");
    }

    #[test]
    fn lines_are_whole_however_the_bytes_come() {
        let (mut lines, mut seen) = (Lines::default(), Vec::new());
        for bytes in [&b"te"[..], b"st\r\n\nre", b"st"] {
            lines.feed(bytes, |line| seen.push(line.to_owned()));
        }
        assert_eq!(seen, ["test", ""]);
        lines.finish(|line| seen.push(line.to_owned()));
        lines.finish(|line| panic!("{line}"));
        assert_eq!(seen, ["test", "", "rest"]);
    }
}
