//! Supervises guests or local commands until they end.
//!
//! Passes on their output, enforces a time limit on each phase, and handles signals.

use std::fmt;
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGPIPE, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use super::frame::Frame;
use super::output::{to_stderr, to_stdout};

/// How a command has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It exited with this status, or a signal ended it and the status is 128 plus the signal.
    Status(i32),
    /// It exceeded its time limit.
    TimedOut,
    /// This program received this signal.
    Signal(i32),
}

impl Ending {
    /// Exit status for this program. At a time limit it is 124, as for `timeout(1)`.
    pub(crate) fn status(self) -> i32 {
        match self {
            Ending::Status(status) => status,
            Ending::TimedOut => 124,
            Ending::Signal(signal) => 128 + signal,
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ending::Status(status) => write!(f, "ended with status {status}"),
            Ending::TimedOut => f.write_str("was killed at its time limit"),
            Ending::Signal(signal) => write!(f, "was ended by signal {signal} to this program"),
        }
    }
}

/// Time limit for a guest to boot, sufficient for emulation on a busy machine.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// Maximum number of kernel log lines to print for a failed command.
const KERNEL_LINES: usize = 100;

/// An event, with the number of its runner.
#[derive(Debug)]
pub(crate) enum Event {
    Frame(usize, Frame),
    /// The runner has ended, or has sent an invalid frame.
    Closed(usize),
    /// This program has received a signal to end.
    Signal(i32),
}

/// A guest or a local process that runs the command.
pub(crate) trait Runner {
    /// Kills the runner.
    fn kill(&mut self);
    /// Kills the runner and returns information about its failure.
    fn post_mortem(&mut self) -> String;
}

/// Receives the output. By default, it goes to this program's own standard output and error.
pub(crate) trait Sink {
    fn stdout(&mut self, _runner: usize, bytes: &[u8]) -> io::Result<()> {
        to_stdout(bytes)
    }
    fn stderr(&mut self, _runner: usize, bytes: &[u8]) -> io::Result<()> {
        to_stderr(bytes)
    }
    /// Called when the device is ready and the command starts.
    fn started(&mut self, _runner: usize) {}
}

/// Event queue of a run. Catches signals from creation to drop.
#[derive(Debug)]
pub(crate) struct Events {
    sender: SyncSender<Event>,
    receiver: Receiver<Event>,
    signals: Handle,
}

impl Events {
    pub(crate) fn new() -> Result<Self> {
        // The queue is small, so a slow reader slows the command down instead of buffering its output.
        let (sender, receiver) = sync_channel(64);
        let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
        let handle = signals.handle();
        let events = sender.clone();
        std::thread::spawn(move || {
            for signal in signals.forever() {
                if events.send(Event::Signal(signal)).is_err() {
                    return;
                }
            }
        });
        Ok(Self { sender, receiver, signals: handle })
    }

    pub(crate) fn sender(&self) -> &SyncSender<Event> {
        &self.sender
    }

    /// Waits for the next event until `deadline`.
    pub(crate) fn next(&self, deadline: Instant) -> Option<Event> {
        let limit = deadline.saturating_duration_since(Instant::now());
        // The channel is never disconnected, because `self` holds a sender.
        self.receiver.recv_timeout(limit).ok()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.signals.close();
    }
}

/// Error context: a guest ended before it started the command.
#[derive(Clone, Copy, Debug)]
pub(super) struct NotBooted;

impl fmt::Display for NotBooted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the kernel of the guest did not boot")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Booting,
    Running,
    Ended(i32),
}

/// Supervises `runners` until all have ended, and returns the first nonzero status.
///
/// `limit` starts when the last runner has started its command. At the limit, all runners are killed.
///
/// # Errors
/// If a runner cannot run its command. All runners are killed then.
pub(crate) fn supervise(
    runners: &mut [&mut dyn Runner],
    events: &Events,
    limit: Duration,
    sink: &mut dyn Sink,
) -> Result<Ending> {
    let outcome = handle_events(runners, events, limit, sink);
    for runner in runners {
        runner.kill();
    }
    outcome
}

fn handle_events(
    runners: &mut [&mut dyn Runner],
    events: &Events,
    limit: Duration,
    sink: &mut dyn Sink,
) -> Result<Ending> {
    let several = runners.len() > 1;
    let name = |runner: usize| {
        if several { format!("guest {runner}") } else { "the guest".into() }
    };
    let mut phases = vec![Phase::Booting; runners.len()];
    let mut kernel: Vec<String> = Vec::new();
    let mut deadline = Instant::now() + BOOT_LIMIT;
    loop {
        let Some(event) = events.next(deadline) else {
            if let Some(booting) = phases.iter().position(|phase| *phase == Phase::Booting) {
                let report = runners[booting].post_mortem();
                bail!("{} did not boot within {} s; {report}", name(booting), BOOT_LIMIT.as_secs());
            }
            report_kernel(&kernel);
            eprintln!("killed at its time limit of {} s", limit.as_secs());
            return Ok(Ending::TimedOut);
        };
        match event {
            Event::Frame(_, Frame::Hello) => {}
            Event::Frame(runner, Frame::Started) => {
                phases[runner] = Phase::Running;
                if !phases.contains(&Phase::Booting) {
                    deadline = Instant::now() + limit;
                }
                sink.started(runner);
            }
            Event::Frame(runner, Frame::Stdout(bytes)) => match sink.stdout(runner, &bytes) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(Ending::Signal(SIGPIPE)),
                written => written.context("cannot write to standard output")?,
            },
            Event::Frame(runner, Frame::Stderr(bytes)) => match sink.stderr(runner, &bytes) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(Ending::Signal(SIGPIPE)),
                written => written.context("cannot write to standard error")?,
            },
            // The kernel logs this for every query of a port over a dummy interface.
            Event::Frame(_, Frame::Kernel(line)) if line.contains("speed is unknown") => {}
            Event::Frame(runner, Frame::Kernel(line)) => {
                kernel.push(if several { format!("[{runner}] {line}") } else { line });
            }
            Event::Frame(runner, Frame::Exit(status)) => {
                phases[runner] = Phase::Ended(status);
                runners[runner].kill();
                let ended = |phase: &Phase| matches!(phase, Phase::Ended(_));
                if phases.iter().all(ended) {
                    let failed = phases.iter().find_map(|phase| match phase {
                        Phase::Ended(status) if *status != 0 => Some(*status),
                        _ => None,
                    });
                    if failed.is_some() {
                        report_kernel(&kernel);
                    }
                    return Ok(Ending::Status(failed.unwrap_or(0)));
                }
            }
            Event::Frame(runner, Frame::Failed(message)) => {
                let report = runners[runner].post_mortem();
                bail!("{} cannot run the command: {message}\n{report}", name(runner));
            }
            Event::Closed(runner) => {
                if !matches!(phases[runner], Phase::Ended(_)) {
                    let report = runners[runner].post_mortem();
                    let error = anyhow!("{} ended before the command did; {report}", name(runner));
                    let has_booted = phases[runner] != Phase::Booting;
                    return Err(if has_booted { error } else { error.context(NotBooted) });
                }
            }
            Event::Signal(signal) => return Ok(Ending::Signal(signal)),
        }
    }
}

fn report_kernel(lines: &[String]) {
    if lines.is_empty() {
        return;
    }
    eprintln!("softroce: warnings of the guest's kernel since the command started:");
    // The first warning often is the cause of the others.
    for line in lines.iter().take(KERNEL_LINES) {
        eprintln!("  {line}");
    }
    let omitted = lines.len().saturating_sub(KERNEL_LINES);
    if omitted > 0 {
        eprintln!("  ({omitted} later lines omitted)");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Fake {
        killed: bool,
    }

    impl Runner for Fake {
        fn kill(&mut self) {
            self.killed = true;
        }
        fn post_mortem(&mut self) -> String {
            self.killed = true;
            "Kernel panic".into()
        }
    }

    #[derive(Default)]
    struct Memory(Vec<(usize, String)>);

    impl Sink for Memory {
        fn stdout(&mut self, runner: usize, bytes: &[u8]) -> io::Result<()> {
            self.0.push((runner, format!("out {}", String::from_utf8_lossy(bytes))));
            Ok(())
        }
        fn stderr(&mut self, runner: usize, bytes: &[u8]) -> io::Result<()> {
            self.0.push((runner, format!("err {}", String::from_utf8_lossy(bytes))));
            Ok(())
        }
    }

    fn run(events: Vec<Event>, runners: usize) -> (Result<Ending>, Vec<(usize, String)>, bool) {
        run_for(Duration::from_secs(60), events, runners)
    }

    fn run_for(limit: Duration, events: Vec<Event>, runners: usize) -> (Result<Ending>, Vec<(usize, String)>, bool) {
        let queue = Events::new().unwrap();
        for event in events {
            queue.sender().send(event).unwrap();
        }
        let mut fakes: Vec<Fake> = (0..runners).map(|_| Fake::default()).collect();
        let mut sink = Memory::default();
        let mut borrowed: Vec<&mut dyn Runner> = fakes.iter_mut().map(|fake| fake as &mut dyn Runner).collect();
        let outcome = supervise(&mut borrowed, &queue, limit, &mut sink);
        (outcome, sink.0, fakes.iter().all(|fake| fake.killed))
    }

    #[test]
    fn output_goes_to_its_stream_and_the_status_is_returned() {
        let (status, output, killed) = run(
            vec![
                Event::Frame(0, Frame::Hello),
                Event::Frame(0, Frame::Started),
                Event::Frame(0, Frame::Stdout(b"a".to_vec())),
                Event::Frame(0, Frame::Stderr(b"b".to_vec())),
                Event::Frame(0, Frame::Exit(7)),
            ],
            1,
        );
        assert_eq!(status.unwrap(), Ending::Status(7));
        assert_eq!(output, [(0, "out a".to_owned()), (0, "err b".to_owned())]);
        assert!(killed);
    }

    #[test]
    fn the_first_nonzero_status_is_returned_once_both_hosts_have_ended() {
        let (status, output, _) = run(
            vec![
                Event::Frame(1, Frame::Started),
                Event::Frame(0, Frame::Started),
                Event::Frame(1, Frame::Exit(3)),
                Event::Frame(0, Frame::Stdout(b"late".to_vec())),
                Event::Frame(0, Frame::Exit(0)),
            ],
            2,
        );
        assert_eq!(status.unwrap(), Ending::Status(3));
        assert_eq!(output, [(0, "out late".to_owned())]);
    }

    #[test]
    fn a_crashed_guest_is_an_error_with_its_console_output() {
        let (status, _, killed) = run(vec![Event::Frame(0, Frame::Started), Event::Closed(0)], 2);
        let error = status.unwrap_err();
        assert!(!error.is::<NotBooted>());
        let error = error.to_string();
        assert!(error.contains("guest 0") && error.contains("Kernel panic"), "{error}");
        assert!(killed);
    }

    #[test]
    fn a_guest_that_ends_before_the_command_starts_has_not_booted() {
        let (status, ..) = run(vec![Event::Closed(0)], 1);
        let error = status.unwrap_err();
        assert!(error.is::<NotBooted>());
        assert!(format!("{error:#}").contains("Kernel panic"), "{error:#}");
    }

    #[test]
    fn a_command_is_killed_at_its_time_limit() {
        let (status, _, killed) = run_for(Duration::from_millis(10), vec![Event::Frame(0, Frame::Started)], 1);
        assert_eq!(status.unwrap(), Ending::TimedOut);
        assert!(killed);
    }

    #[test]
    fn a_signal_kills_all_runners() {
        let (status, _, killed) = run(vec![Event::Signal(SIGTERM)], 2);
        assert_eq!(status.unwrap().status(), 143);
        assert!(killed);
    }
}
