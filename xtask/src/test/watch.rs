//! Runs the programs of a stage and passes on their output.

use std::fmt;
use std::io;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::Outcome;
use super::libtest::{self, Line, Lines};
use super::report::{Excerpt, Failure, Report};
use super::stage_run::TICK;
use crate::softroce::{self, Ending, Sink};
use crate::{process, workspace};

/// Only a hang makes a command take this long.
const COMMAND_LIMIT: Duration = Duration::from_secs(40 * 60);

/// A signal ended the stage.
#[derive(Debug)]
pub(super) struct Interrupted(pub(super) i32);

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ended by signal {}", self.0)
    }
}

impl std::error::Error for Interrupted {}

/// Passes each line to a function, and prints either all output or only errors and failed tests.
pub(super) struct Watching<F> {
    /// Incomplete lines of the standard output of each command.
    lines: Vec<Lines>,
    errors: Vec<Lines>,
    each: F,
    silent: bool,
}

impl<F: FnMut(usize, Line<'_>)> Watching<F> {
    pub(super) fn new(commands: usize, silent: bool, each: F) -> Self {
        let lines = || (0..commands).map(|_| Lines::default()).collect();
        Watching { lines: lines(), errors: lines(), each, silent }
    }

    /// Passes on the last lines. The last line of a crashed program may have no end.
    pub(super) fn finish(&mut self) {
        for (command, lines) in self.lines.iter_mut().enumerate() {
            lines.finish(|line| (self.each)(command, Line::Output(line)));
        }
        for (command, lines) in self.errors.iter_mut().enumerate() {
            lines.finish(|line| (self.each)(command, Line::Error(line)));
        }
    }
}

impl<F: FnMut(usize, Line<'_>)> Sink for Watching<F> {
    fn stdout(&mut self, command: usize, bytes: &[u8]) -> io::Result<()> {
        self.lines[command].feed(bytes, |line| {
            if libtest::has_ended(line) {
                println!("{TICK}");
            }
            if self.silent && libtest::has_failed(line) {
                println!("    {line}");
            }
            (self.each)(command, Line::Output(line));
        });
        if self.silent { Ok(()) } else { softroce::to_stdout(bytes) }
    }

    fn stderr(&mut self, command: usize, bytes: &[u8]) -> io::Result<()> {
        self.errors[command].feed(bytes, |line| (self.each)(command, Line::Error(line)));
        softroce::to_stderr(bytes)
    }
}

/// Runs `command` as a stage without tests.
pub(super) fn whole(command: Command) -> Result<Outcome> {
    whole_of(command, false, |_| {})
}

/// Like [`whole`]. Passes each line of standard output to `each`, and prints it unless `silent`.
pub(super) fn whole_of(command: Command, silent: bool, mut each: impl FnMut(&str)) -> Result<Outcome> {
    let name = process::display(&command);
    let mut said = Excerpt::default();
    let ending = watch(command, silent, |line| match line {
        Line::Output(line) => {
            if !silent {
                said.line(line);
            }
            each(line);
        }
        Line::Error(line) => said.line(line),
    })?;
    Ok(Outcome::Whole(match ending {
        Ending::Status(0) => Ok(()),
        ending => Err(Failure { name: format!("{name} {ending}"), said }),
    }))
}

/// Runs `command`, prints its output, and passes each line to `each`. If `silent`, prints only standard error.
pub(super) fn watch(command: Command, silent: bool, mut each: impl FnMut(Line<'_>)) -> Result<Ending> {
    println!("    {}", process::display(&command));
    watch_all(vec![command], silent, |_, line| each(line))
}

/// Like [`watch`] for several commands at the same time. `each` also gets the index of the command.
pub(super) fn watch_all(commands: Vec<Command>, silent: bool, each: impl FnMut(usize, Line<'_>)) -> Result<Ending> {
    run_all(commands, COMMAND_LIMIT, silent, each)
}

/// Like [`watch_all`], with a time limit.
pub(super) fn run_all(
    mut commands: Vec<Command>,
    limit: Duration,
    silent: bool,
    each: impl FnMut(usize, Line<'_>),
) -> Result<Ending> {
    commands.iter_mut().for_each(at_root);
    let mut sink = Watching::new(commands.len(), silent, each);
    let ending = softroce::run_all_local(commands, limit, &mut sink)?;
    sink.finish();
    uninterrupted(ending)
}

fn at_root(command: &mut Command) {
    if command.get_current_dir().is_none() {
        command.current_dir(workspace::root());
    }
}

fn uninterrupted(ending: Ending) -> Result<Ending> {
    match ending {
        Ending::Signal(signal) => Err(Interrupted(signal).into()),
        ending => Ok(ending),
    }
}

/// Adds a failure to the `report` of tests in guests if a guest failed, or ended badly without a failed test.
pub(super) fn conclude(ending: Result<Ending>, mut report: Report) -> Result<Report> {
    match ending {
        Ok(ending) => {
            let ending = uninterrupted(ending)?;
            if ending != Ending::Status(0) && report.tally.failed == 0 {
                report.fail(Failure::new(format!("a guest's command {ending}"), ""));
            }
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            report.fail(Failure::new("a guest", &format!("{error:#}")));
        }
    }
    Ok(report)
}
