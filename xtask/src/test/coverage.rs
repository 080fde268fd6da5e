//! Compares the SoftRoCE column of docs/coverage.md with the device tests that passed.
//!
//! To run this alone: `cargo xtask test --device-only --release bookworm`.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result};

use super::report::{Failure, Report};
use crate::workspace;

/// A row of a table: a function of C.
struct Row<'a> {
    function: &'a str,
    tests: Vec<&'a str>,
    /// The last column.
    softroce: &'a str,
}

/// The words of the last column that a test on SoftRoCE must show.
const CLAIMS: [&str; 4] = ["works", "deviates", "refused", "fails"];

/// A test for each row with one of the [`CLAIMS`]: it fails unless one of the row's tests `passed`.
///
/// `passed` has no skipped tests.
pub(super) fn compare(passed: &BTreeSet<String>) -> Result<Report> {
    let path = workspace::root().join("docs/coverage.md");
    let document = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(compare_rows(&rows(&document), passed))
}

fn compare_rows(rows: &[Row<'_>], passed: &BTreeSet<String>) -> Report {
    let mut report = Report::default();
    for row in rows.iter().filter(|row| CLAIMS.contains(&row.softroce)) {
        if row.tests.iter().any(|test| passed.contains(*test)) {
            report.tally.passed += 1;
        } else {
            let name = format!("docs/coverage.md: {}", row.function);
            let reason =
                format!("the table says {:?}, but none of its tests ran and passed: {:?}", row.softroce, row.tests);
            report.fail(Failure::new(name, &reason));
        }
    }
    report
}

/// The rows of all tables that begin with a function.
fn rows(document: &str) -> Vec<Row<'_>> {
    let lines = document.lines().filter(|line| line.starts_with("| `"));
    lines
        .filter_map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let [functions, _, tests, softroce] = cells[..] else { return None };
            let tests = tests.split('`').skip(1).step_by(2).collect();
            Some(Row { function: functions, tests, softroce })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_needs_a_test_that_passed_on_softroce() {
        let document = "\
| function | in rdma-safe | tests | SoftRoCE |
|---|---|---|---|
| `ibv_a` | `A::a` | `one`, `two` | works |
| `ibv_b` | `A::b` | `three` | refused |
| `ibv_c` | `A::c` | `four` | deviates |
| `ibv_d` | `A::d` | `five` | absent |
| `ibv_e` | not offered | — | not tested |
";
        let passed = BTreeSet::from(["two".to_owned()]);
        let report = compare_rows(&rows(document), &passed);
        assert_eq!(report.tally.to_string(), "1 passed, 2 failed, 0 skipped");
        let failed = |index: usize, function| report.failures[index].name.contains(function);
        assert!(failed(0, "`ibv_b`") && failed(1, "`ibv_c`"));
    }
}
