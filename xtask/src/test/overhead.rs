//! The gates of the instruction bench, each a test.

use anyhow::Result;

use super::Outcome;
use super::libtest::Tally;
use crate::bench::overhead;

/// Skips without Valgrind or the C compiler that the gates are taken against, where neither can be installed.
pub(super) fn run() -> Result<Outcome> {
    let measured = match overhead::gates()? {
        Ok(measured) => measured,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let mut tally = Tally::default();
    for verdict in &measured.verdicts {
        println!("gate {verdict}");
        *(if verdict.complaint.is_none() { &mut tally.passed } else { &mut tally.failed }) += 1;
    }
    Ok(Outcome::Tests(tally))
}
