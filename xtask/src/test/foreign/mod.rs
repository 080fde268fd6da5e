//! Foreign programs on soft0: programs of rdma-core, perftest, libfabric, fio, UCX and Open MPI.

mod connections;
mod fio;
mod mixed;
mod packages;
mod traffic;
mod ucx;

use std::fs;

use anyhow::Result;

use self::packages::Root;
use super::report::{Failure, Report};
use super::{Args, Outcome};

/// Runs all tests `--repeat` times.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    let root = match Root::get() {
        Ok(root) => root,
        Err(error) => return Ok(Outcome::Skipped(format!("{error:#}"))),
    };
    fs::create_dir_all(root.file(""))?;
    let mut tests = Tests { root: &root, report: Report::default() };
    let ring = ucx::prepare(&mut tests);
    for _ in 0..args.repeat {
        connections::run(&mut tests);
        fio::run(&mut tests);
        ucx::run(&mut tests, &ring);
        tests.report += mixed::run(&root, args)?;
    }
    Ok(Outcome::Tests(tests.report))
}

/// The packages, and the results so far.
struct Tests<'a> {
    root: &'a Root,
    report: Report,
}

impl Tests<'_> {
    fn count(&mut self, name: &str, result: Result<()>) {
        match result {
            Ok(()) => self.report.tally.passed += 1,
            Err(error) => {
                println!("    {name} failed");
                self.report.fail(Failure::new(name, &format!("{error:#}")));
            }
        }
    }
}
