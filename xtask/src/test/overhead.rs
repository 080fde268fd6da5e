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
    for gate in &measured.gates {
        println!("gate {} ... {}: {}", gate.name, if gate.met { "ok" } else { "FAILED" }, gate.found);
        *(if gate.met { &mut tally.passed } else { &mut tally.failed }) += 1;
    }
    Ok(Outcome::Tests(tally))
}
