//! The gates of the instruction benches, each a test.

use anyhow::Result;

use super::Outcome;
use super::report::{Failure, Report};
use crate::bench::{overhead, pool};

/// Compares instruction counts with their gates. Needs Valgrind and a C compiler.
pub(super) fn run() -> Result<Outcome> {
    let measured = match overhead::gates()? {
        Ok(measured) => measured,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let mut report = Report::default();
    for verdict in measured.verdicts.iter().chain(&pool::gates()?) {
        println!("gate {verdict}");
        match &verdict.complaint {
            None => report.tally.passed += 1,
            Some(complaint) => report.fail(Failure::new(&verdict.gate.name, complaint)),
        }
    }
    Ok(Outcome::Tests(report))
}
