//! `cargo xtask test`: the stages of the tests, two at a time, and a summary at the end.
//!
//! [`args`] chooses the stages, [`schedule`] their order, and [`stage_run`] runs each in a process of its own, where
//! [`stages`] and the modules named after stages do the work. A stage's result is a [`report::Report`].

mod args;
mod artifacts;
mod coverage;
mod device;
mod durations;
mod explore;
mod foreign;
mod hosts;
pub(crate) mod inside;
mod libtest;
mod miri;
mod msrv;
mod overhead;
mod package;
mod progress;
mod report;
mod sanitize;
mod schedule;
mod soft;
mod stage;
pub(crate) mod stage_run;
mod stages;
mod times;
mod toolchain;
mod watch;

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::Result;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

pub(crate) use self::args::Args;
pub(crate) use self::explore::SCALE;
use self::libtest::Output;
pub(crate) use self::miri::ALL_MODES;
use self::progress::{Progress, time_left};
use self::report::{Failure, Report};
use self::schedule::Schedule;
use self::stage_run::{Event, StageRun, TICK};
use self::times::Times;
use crate::softroce::Ending;

/// How a stage went.
#[derive(Debug)]
enum Outcome {
    /// A stage without tests.
    Whole(Result<(), Failure>),
    Tests(Report),
    /// The stage cannot run, for this reason.
    Skipped(String),
}

/// Runs the stages of `args`, which was parsed from `words`.
pub(crate) fn main(args: &Args, words: &[String]) -> Result<i32> {
    let mut run = Run::new(args);
    let (sender, events) = channel();
    forward_signals(sender.clone())?;
    while run.start_stages(words, &sender)? {
        // A stage has a time limit on each of its commands; this wait only refreshes the time left.
        match events.recv_timeout(Duration::from_secs(1)) {
            Ok(event) => run.handle(event),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
        run.show();
    }
    Ok(run.finish())
}

/// A run of the tests.
struct Run<'a> {
    args: &'a Args,
    schedule: Schedule,
    running: Vec<StageRun>,
    progress: Progress,
    times: Times,
    started: Instant,
    /// Stages that ended.
    ended: usize,
    /// Results of the stages that ended.
    report: Report,
    /// Names of the stages that failed.
    failed: Vec<String>,
    /// The signal that ended the run.
    signal: Option<i32>,
}

impl<'a> Run<'a> {
    fn new(args: &'a Args) -> Self {
        let stages = args.stages();
        let times = Times::load(args.is_full());
        let progress = Progress::new(stages.len());
        let expected = stages.iter().map(|stage| (*stage, times.expected(*stage))).collect();
        Run {
            args,
            schedule: Schedule::new(expected, args.jobs()),
            running: Vec::new(),
            progress,
            times,
            started: Instant::now(),
            ended: 0,
            report: Report::default(),
            failed: Vec::new(),
            signal: None,
        }
    }

    /// Starts the stages that can run now. Returns whether any stage runs.
    fn start_stages(&mut self, words: &[String], events: &Sender<Event>) -> Result<bool> {
        while let Some(stage) = self.schedule.start_next() {
            self.progress.line(&format!("==> {}", stage.name()));
            self.running.push(StageRun::start(stage, words, self.args.full, events)?);
        }
        Ok(!self.schedule.is_idle())
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Output(stage, line) => {
                let Some(run) = self.running.iter_mut().find(|run| run.stage == stage) else { return };
                if line == TICK {
                    run.tests += 1;
                    return;
                }
                run.log(&line);
                self.progress.line(&format!("{:>8} | {line}", stage.name()));
            }
            Event::Error(stage, line) => {
                let Some(run) = self.running.iter_mut().find(|run| run.stage == stage) else { return };
                run.log(&line);
                if self.args.verbose {
                    self.progress.line(&format!("{:>8} | {line}", stage.name()));
                }
            }
            Event::Ended(stage, status) => {
                let Some(index) = self.running.iter().position(|run| run.stage == stage) else { return };
                let run = self.running.remove(index);
                self.schedule.end(stage);
                self.stage_ended(&run, status);
            }
            Event::Signal(signal) => {
                self.signal = Some(signal);
                self.schedule.cancel();
                self.running.iter().for_each(StageRun::terminate);
            }
        }
    }

    fn stage_ended(&mut self, run: &StageRun, status: i32) {
        self.ended += 1;
        if self.signal.is_some() {
            return;
        }
        let (name, took) = (run.stage.name(), run.started.elapsed());
        let report = run.report(status);
        let left = time_left(self.time_left());
        self.progress.line(&format!("    {name}: {} ({:.1} s); {left}", report.tally, took.as_secs_f64()));
        for (reason, count) in &report.reasons {
            self.progress.line(&format!("    {count} skipped: {reason}"));
        }
        if report.tally.failed > 0 {
            self.failed.push(name.clone());
        } else {
            self.times.record(run.stage, took);
        }
        self.report += report.at(&name);
    }

    fn time_left(&self) -> Duration {
        let started = |stage| self.running.iter().find(|run| run.stage == stage).map(|run| run.started);
        self.schedule.time_left(|stage| started(stage).map_or(Duration::ZERO, |started| started.elapsed()))
    }

    fn show(&self) {
        self.progress.show(self.ended, &self.running, self.time_left());
    }

    /// Prints the summary; returns the exit status.
    fn finish(self) -> i32 {
        self.progress.finish();
        self.times.save();
        println!("\nall stages: {:.0} s", self.started.elapsed().as_secs_f64());
        for failure in &self.report.failures {
            println!("{failure}");
        }
        if !self.failed.is_empty() {
            println!("failed stages: {}", self.failed.join(", "));
            if let Ok(directory) = stage_run::directory() {
                println!("their output: {}/STAGE.log", directory.display());
            }
        }
        println!("{}", self.report.tally);
        match self.signal {
            Some(signal) => {
                println!("ended by signal {signal}");
                128 + signal
            }
            None => i32::from(self.report.tally.failed > 0),
        }
    }
}

/// Turns SIGHUP, SIGINT and SIGTERM into events, so that this program can end its stages before it exits.
fn forward_signals(events: Sender<Event>) -> Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    });
    Ok(())
}

impl Outcome {
    /// `is_ci` makes a stage that cannot run a failure.
    fn into_report(self, is_ci: bool) -> Report {
        let mut report = Report::default();
        match self {
            Outcome::Whole(Ok(())) => report.tally.passed = 1,
            Outcome::Whole(Err(failure)) => report.fail(failure),
            Outcome::Tests(report) => return report,
            Outcome::Skipped(reason) if is_ci => {
                report.fail(Failure::new(
                    "the stage",
                    &format!("it cannot run, and CI=true forbids to skip it: {reason}"),
                ));
            }
            Outcome::Skipped(reason) => {
                report.tally.skipped = 1;
                report.reasons.insert(reason, 1);
            }
        }
        report
    }
}

/// The report of a test program that ended with `ending`. A bad end is a failure unless a failed test explains it.
fn program_report(ending: Ending, mut output: Output) -> Report {
    if ending != Ending::Status(0) && (output.report().tally.failed == 0 || output.is_unfinished()) {
        output.broken(&ending.to_string());
    }
    output.into_report()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_outside_the_tests_is_a_failure() {
        let report = program_report(Ending::Status(101), Output::default());
        assert_eq!(report.tally.to_string(), "0 passed, 1 failed, 0 skipped");
        assert_eq!(report.failures[0].name, "a test program ended with status 101");
    }

    #[test]
    fn a_stage_that_cannot_run_fails_in_ci() {
        let skipped = || Outcome::Skipped("no nightly toolchain".to_owned());
        let report = skipped().into_report(false);
        assert_eq!(report.tally.to_string(), "0 passed, 0 failed, 1 skipped");
        assert_eq!(report.reasons["no nightly toolchain"], 1);
        let report = skipped().into_report(true);
        assert_eq!(report.tally.to_string(), "0 passed, 1 failed, 0 skipped");
        assert!(report.failures[0].to_string().contains("no nightly toolchain"));
    }
}
