//! The tests between two hosts, in two guests joined by a wire.

use anyhow::Result;

use super::artifacts::Place;
use super::libtest::{Line, Output};
use super::report::Report;
use super::stages::programs;
use super::watch::{Watching, conclude};
use super::{Args, Outcome};
use crate::softroce::{self, Options};
use crate::{soft, workspace};

/// Runs the tests. Each counts once for each host.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    let programs = programs()?;
    std::env::set_current_dir(workspace::root())?;
    let library = soft::library()?.to_string_lossy().into_owned();
    let mut all = Report::default();
    for test in programs.iter().filter(|test| test.place == Place::Hosts) {
        let mut command = vec![test.executable.to_string_lossy().into_owned()];
        command.extend(["--test-threads=1", "--show-output"].map(str::to_owned));
        command.extend(args.arguments.iter().cloned());
        all += on_both(&command, &library, args)?;
    }
    Ok(Outcome::Tests(all))
}

fn on_both(command: &[String], library: &str, args: &Args) -> Result<Report> {
    let environment = vec![("RDMA_SOFT_LIBRARY".to_owned(), library.to_owned())];
    let options = Options { timeout: args.limit, environment, ..Options::default() };
    let mut outputs = [Output::default(), Output::default()];
    let is_silent = args.is_silent();
    let each = |host: usize, line: Line<'_>| {
        if let (Line::Output(line), false) = (line, is_silent) {
            println!("[{host}] {line}");
        }
        outputs[host].take(line);
    };
    let mut sink = Watching::new(2, true, each);
    let ending = softroce::run_pair(command, &options, &mut sink);
    sink.finish();
    let mut report = Report::default();
    for (host, mut output) in outputs.into_iter().enumerate() {
        if output.is_unfinished() {
            output.broken("was running when the guests ended");
        }
        report += output.into_report().at(&format!("host {host}"));
    }
    conclude(ending, report)
}
