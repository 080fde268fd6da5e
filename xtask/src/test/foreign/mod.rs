//! Foreign programs on soft0: programs of rdma-core, perftest, libfabric, fio, UCX, Open MPI and pyverbs, and HTTP clients.
//!
//! Each runs as usual, and once more under the checker of soft0.

mod connections;
mod explained;
mod fio;
mod http;
mod mixed;
mod packages;
mod pyverbs;
mod ucx;
mod watch;

use std::fs;

use anyhow::Result;

use self::packages::Root;
use super::report::{Failure, Report};
use super::{Args, Outcome};

/// Runs all tests `--repeat` times, or those whose names contain one of the test arguments.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    let root = match Root::get() {
        Ok(root) => root,
        Err(error) => return Ok(Outcome::Skipped(format!("{error:#}"))),
    };
    fs::create_dir_all(root.file(""))?;
    let mut tests = Tests { root, names: args.arguments.clone(), report: Report::default() };
    let ring = ucx::prepare(&mut tests);
    let python = pyverbs::prepare(&tests.root);
    for _ in 0..args.repeat {
        for is_checked in [false, true] {
            tests.root.set_checked(is_checked);
            connections::run(&mut tests);
            fio::run(&mut tests);
            http::run(&mut tests);
            ucx::run(&mut tests, &ring);
            pyverbs::run(&mut tests, &python);
        }
        if args.arguments.is_empty() {
            tests.report += mixed::run(&tests.root, args)?;
        }
    }
    Ok(Outcome::Tests(tests.report))
}

/// The packages, and the results so far.
struct Tests {
    root: Root,
    /// Parts of the names of the tests to run. Empty for all tests.
    names: Vec<String>,
    report: Report,
}

impl Tests {
    /// Runs a test on soft0, with the checker or without.
    fn count(&mut self, name: &str, test: impl FnOnce(&Root) -> Result<()>) {
        if !self.names.is_empty() && !self.names.iter().any(|part| name.contains(part)) {
            return;
        }
        match test(&self.root) {
            Ok(()) => self.report.tally.passed += 1,
            Err(error) => {
                let name = if self.root.is_checked() { format!("checked: {name}") } else { name.to_owned() };
                println!("    {name} failed");
                self.report.fail(Failure::new(&name, &format!("{error:#}")));
            }
        }
    }
}
