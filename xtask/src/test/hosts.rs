//! The tests between two hosts: each runs in two guests at a time, joined by a wire.

use anyhow::Result;

use super::artifacts::Place;
use super::libtest::{Lines, Output, Tally};
use super::{Args, Context, Outcome, Watching, uninterrupted};
use crate::softroce::{self, Ending, Options};
use crate::{soft, workspace};

/// Runs them; a test counts once for each host.
pub(super) fn run(args: &Args, context: &Context) -> Result<Outcome> {
    if !context.built {
        return Ok(Outcome::Skipped("it does not compile".to_owned()));
    }
    std::env::set_current_dir(workspace::root())?;
    let library = soft::library()?.to_string_lossy().into_owned();
    let mut tally = Tally::default();
    for test in context.integration_tests.iter().filter(|test| test.place == Place::Hosts) {
        let mut command = vec![test.executable.to_string_lossy().into_owned()];
        command.extend(["--test-threads=1", "--show-output"].map(str::to_owned));
        command.extend(args.arguments.iter().cloned());
        tally += on_both(&command, &library, args.limit)?;
    }
    Ok(Outcome::Tests(tally))
}

fn on_both(command: &[String], library: &str, limit: u64) -> Result<Tally> {
    let environment = vec![("RDMA_SOFT_LIBRARY".to_owned(), library.to_owned())];
    let options = Options { timeout: limit, environment, ..Options::default() };
    let mut outputs = [Output::default(), Output::default()];
    let mut sink = Watching {
        lines: vec![Lines::default(), Lines::default()],
        each: |host: usize, line: &str| {
            println!("[{host}] {line}");
            outputs[host].line(line);
        },
        silent: true,
    };
    let ending = softroce::run_pair(command, &options, &mut sink);
    // Without an end both were running when a guest ended.
    let failed = match ending {
        Ok(ending) => uninterrupted(ending)? != Ending::Status(0),
        Err(error) => {
            eprintln!("error: {error:#}");
            true
        }
    };
    let mut tally = Tally::default();
    for output in outputs {
        tally += output.tally();
    }
    if failed && tally.failed == 0 {
        tally.failed = 1;
    }
    Ok(tally)
}
