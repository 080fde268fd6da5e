//! Following the programs that tests are: what they say is shown, counted and kept.

use std::fmt;
use std::io::{self, IsTerminal};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::Outcome;
use super::libtest::{self, Line, Lines};
use super::report::{Excerpt, Failure, Report};
use crate::softroce::{self, Ending, Sink};
use crate::{process, workspace};

/// No command takes this long unless something hangs.
const COMMAND_LIMIT: Duration = Duration::from_secs(40 * 60);

/// The user wants all of it to end.
#[derive(Debug)]
pub(super) struct Interrupted(pub(super) i32);

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ended by signal {}", self.0)
    }
}

impl std::error::Error for Interrupted {}

/// Hands each line to a function, and shows all output as it comes, or only errors and tests that fail.
pub(super) struct Watching<F> {
    /// Of each command.
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

    /// When all have ended: the last line may have no end, as of a test program that has crashed.
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

/// Runs `command` in the workspace as a stage without tests.
pub(super) fn whole(command: Command) -> Result<Outcome> {
    whole_of(command, false, |_| {})
}

/// As [`whole`]; each line of standard output goes to `each`, and is shown unless that is `silent`.
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

/// Runs `command` in the workspace, shows what it writes, and hands each line to `each`. `silent` shows only its standard error.
pub(super) fn watch(command: Command, silent: bool, mut each: impl FnMut(Line<'_>)) -> Result<Ending> {
    println!("    {}", process::display(&command));
    watch_all(vec![command], silent, |_, line| each(line))
}

/// As [`watch`], of several at once: `each` gets the number of the command, too.
pub(super) fn watch_all(commands: Vec<Command>, silent: bool, each: impl FnMut(usize, Line<'_>)) -> Result<Ending> {
    run_all(commands, COMMAND_LIMIT, silent, each)
}

/// As [`watch_all`], for `limit` at most.
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
    command.current_dir(workspace::root());
    if io::stderr().is_terminal() {
        command.env("CARGO_TERM_COLOR", "always");
    }
}

fn uninterrupted(ending: Ending) -> Result<Ending> {
    match ending {
        Ending::Signal(signal) => Err(Interrupted(signal).into()),
        ending => Ok(ending),
    }
}

/// What tests in guests came to, with the failure of the guests themselves, if it was that or no test says why they ended so.
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
