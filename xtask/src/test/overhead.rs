//! The gates of the instruction bench, each a test.

use anyhow::Result;

use super::Outcome;
use super::report::{Failure, Report};
use crate::bench::overhead;

/// Skips without Valgrind or the C compiler that the gates are taken against, where neither can be installed.
pub(super) fn run() -> Result<Outcome> {
    let measured = match overhead::gates()? {
        Ok(measured) => measured,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let mut report = Report::default();
    for verdict in &measured.verdicts {
        println!("gate {verdict}");
        match &verdict.complaint {
            None => report.tally.passed += 1,
            Some(complaint) => report.fail(Failure::new(&verdict.gate.name, complaint)),
        }
    }
    Ok(Outcome::Tests(report))
}
