//! Runs each stage in a separate process, so that stages overlap and one signal ends them all.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

use super::Outcome;
use super::report::{Failure, Report};
use super::stage::Stage;
use super::watch::Interrupted;
use crate::{Cli, process, softroce, workspace};

/// The argument that makes this program run one stage: its name and the command line of `test` follow.
pub(crate) const ARGUMENT: &str = "run-test-stage";

/// A line that a stage prints for each test that ended.
pub(super) const TICK: &str = "\u{1}test ended";

/// An event of a stage's process, or a signal.
#[derive(Debug)]
pub(super) enum Event {
    /// A line of its standard output.
    Output(Stage, String),
    /// A line of its standard error.
    Error(Stage, String),
    Ended(Stage, i32),
    /// A signal to this program.
    Signal(i32),
}

/// The directory of logs, reports and times, created if need be.
pub(super) fn directory() -> Result<PathBuf> {
    let directory = workspace::target_dir()?.join("test-logs");
    fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
    Ok(directory)
}

fn file(stage: Stage, extension: &str) -> Result<PathBuf> {
    Ok(directory()?.join(format!("{}.{extension}", stage.name())))
}

/// A stage's process.
#[derive(Debug)]
pub(super) struct StageRun {
    pub(super) stage: Stage,
    pub(super) started: Instant,
    /// Tests that ended.
    pub(super) tests: u64,
    process: u32,
    log: File,
}

impl StageRun {
    /// Starts `stage` with the command line `words` of `test`. Its output and its end go to `events`. Cargo prepares for later
    /// changes only if the run is not `full`.
    pub(super) fn start(stage: Stage, words: &[String], full: bool, events: &Sender<Event>) -> Result<Self> {
        let log = File::create(file(stage, "log")?)?;
        // If the stage crashed, a report of an earlier run would be mistaken for its report.
        match fs::remove_file(file(stage, "json")?) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => bail!("an old report stays: {error}"),
            _ => {}
        }
        let mut command = Command::new(softroce::THIS_PROGRAM);
        command.arg(ARGUMENT).arg(stage.name()).args(words);
        if full && std::env::var_os("CARGO_INCREMENTAL").is_none() {
            // Compiling everything once takes 20 % less processor time and half of the disk.
            command.env("CARGO_INCREMENTAL", "0");
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start a stage")?;
        let process = child.id();
        let output = forward(child.stdout.take().context("no pipe")?, events, move |line| Event::Output(stage, line));
        let error = forward(child.stderr.take().context("no pipe")?, events, move |line| Event::Error(stage, line));
        let events = events.clone();
        std::thread::spawn(move || {
            let status = wait(&mut child);
            // Lines of a process that outlives its stage are lost.
            let deadline = Instant::now() + Duration::from_secs(5);
            while !(output.is_finished() && error.is_finished()) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = events.send(Event::Ended(stage, status));
        });
        Ok(StageRun { stage, started: Instant::now(), tests: 0, process, log })
    }

    /// Adds a line to the stage's log.
    pub(super) fn log(&mut self, line: &str) {
        let _ = writeln!(self.log, "{line}");
    }

    /// Asks the stage to end.
    pub(super) fn terminate(&self) {
        if let Some(pid) = i32::try_from(self.process).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::TERM);
        }
    }

    /// The report that the stage wrote, or a failure if its process ended without one.
    pub(super) fn report(&self, status: i32) -> Report {
        let text = file(self.stage, "json").and_then(|path| Ok(fs::read_to_string(path)?));
        let report = text.and_then(|text| Ok(serde_json::from_str(&text)?));
        report.unwrap_or_else(|error| {
            let mut report = Report::default();
            report.fail(Failure::new("the stage", &format!("it ended with status {status} and no report: {error:#}")));
            report
        })
    }
}

/// Sends each line of `from`, in another thread.
fn forward(
    from: impl Read + Send + 'static,
    events: &Sender<Event>,
    event: impl Fn(String) -> Event + Send + 'static,
) -> std::thread::JoinHandle<()> {
    let events = events.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
            if events.send(event(String::from_utf8_lossy(&line).into_owned())).is_err() {
                return;
            }
        }
    })
}

fn wait(child: &mut Child) -> i32 {
    child.wait().map_or(1, process::shell_status)
}

/// Runs the stage that `words` name, in this process, and writes its report.
pub(crate) fn main(words: &[String]) -> Result<i32> {
    set_parent_process_death_signal(Some(Signal::TERM)).context("prctl")?;
    let (stage, rest) = words.split_first().context("no stage")?;
    let stage = Stage::from_str(stage, false).map_err(anyhow::Error::msg)?;
    let cli = Cli::try_parse_from(["xtask", "test"].into_iter().chain(rest.iter().map(String::as_str)))?;
    let crate::Command::Test(args) = cli.command else { bail!("not the command line of `test`") };
    let outcome = match stage.run(&args) {
        Ok(outcome) => outcome,
        Err(error) => match error.downcast_ref() {
            Some(Interrupted(signal)) => return Ok(128 + signal),
            None => Outcome::Whole(Err(Failure::new("the stage", &format!("{error:#}")))),
        },
    };
    let is_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    let report = outcome.into_report(is_ci);
    let status = i32::from(report.tally.failed > 0);
    let path = file(stage, "json")?;
    fs::write(&path, serde_json::to_string(&report)?).with_context(|| path.display().to_string())?;
    Ok(status)
}
