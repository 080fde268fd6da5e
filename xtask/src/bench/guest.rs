//! Programs in a guest whose clock counts instructions.

use anyhow::{Result, bail};

use crate::softroce::{self, Collected, Ending, Options, Place};

/// Runs a command in a guest for at most `timeout` seconds. Returns its output.
pub(super) fn run(command: &[String], timeout: u64, verbose: bool) -> Result<String> {
    let options = Options { count_instructions: true, place: Place::Guest, timeout, verbose, ..Options::default() };
    let mut output = Collected::default();
    match softroce::run(command, &options, &mut output)? {
        Ending::Status(0) => Ok(String::from_utf8_lossy(&output.0).into_owned()),
        ending => bail!("nothing could be measured in the guest: {ending:?}"),
    }
}
