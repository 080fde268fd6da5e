//! The tests between two hosts: each runs in two guests at a time, joined by a wire.

use anyhow::Result;

use super::artifacts::Place;
use super::libtest::{Line, Output};
use super::report::Report;
use super::watch::{Watching, conclude};
use super::{Args, Context, Outcome};
use crate::softroce::{self, Options};
use crate::{soft, workspace};

/// Runs them; a test counts once for each host.
pub(super) fn run(args: &Args, context: &Context) -> Result<Outcome> {
    if !context.built {
        return Ok(Outcome::Skipped("it does not compile".to_owned()));
    }
    std::env::set_current_dir(workspace::root())?;
    let library = soft::library()?.to_string_lossy().into_owned();
    let mut all = Report::default();
    for test in context.integration_tests.iter().filter(|test| test.place == Place::Hosts) {
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
