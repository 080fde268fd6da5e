//! A test as the user sees it: from the command line to the results.

use std::io::{IsTerminal, stderr};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::Result;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::TestArgs;
use crate::clock::Clock;
use crate::control::Control;
use crate::plan::Verb;
use crate::report::{Report, Row};
use crate::run::Interrupted;
use crate::session::Opened;
use crate::session::client::{Client, Observer};
use crate::session::server::Server;
use crate::units::Bytes;

/// The exit status when a limit was not kept.
const LIMIT_BROKEN: i32 = 3;
/// That of a program which Ctrl-C has ended, by the convention of shells.
const INTERRUPTED: i32 = 130;

const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Runs the test and shows what came of it; the exit status.
pub(crate) fn main(args: &TestArgs, verb: Verb) -> Result<i32> {
    let plan = match args.plan(verb) {
        Ok(plan) => plan,
        Err(reason) => {
            eprintln!("error: {reason}\n\nFor more information, try '--help'.");
            return Ok(2);
        }
    };
    let opened = Opened::open(&args.device)?;
    let clock = Clock::calibrate();
    let control = match &args.host {
        Some(host) => Control::connect(host, args.device.port, CONNECT_LIMIT)?,
        None => loopback(&opened, clock)?,
    };
    // perftest's loop does not look for it: there the signal ends the process at once.
    let interrupt = (!plan.compat).then(interrupt).transpose()?;
    let client = Client {
        opened: &opened,
        clock,
        label: args.out.label.clone().unwrap_or_else(|| plan.title()),
        percents: args.out.percentiles.clone(),
        interrupt: interrupt.as_ref(),
    };
    let mut display = Display::new(args);
    let (report, ending) = client.run(control, &plan, &mut display)?;
    display.finish(&report);
    match ending {
        Ok(()) => Ok(0),
        Err(error) if error.is::<Interrupted>() => Ok(INTERRUPTED),
        Err(error) => Err(error),
    }
}

/// A server within this process, and the connection to it.
fn loopback(opened: &Opened, clock: Clock) -> Result<Control> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let server = Server { opened: opened.clone(), clock, max_memory: u64::MAX, quiet: true };
    // Its failures reach the client over the connection.
    std::thread::spawn(move || server.serve(&listener, true));
    Control::connect("127.0.0.1", port, CONNECT_LIMIT)
}

/// Becomes readable at Ctrl-C. A second one ends the process at once.
fn interrupt() -> Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    let again = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    signal_hook::flag::register_conditional_shutdown(signal_hook::consts::SIGINT, INTERRUPTED, again.clone())?;
    signal_hook::flag::register(signal_hook::consts::SIGINT, again)?;
    signal_hook::low_level::pipe::register(signal_hook::consts::SIGINT, write)?;
    Ok(read)
}

/// Shows rows and progress.
struct Display {
    bar: Option<ProgressBar>,
}

impl Display {
    fn new(args: &TestArgs) -> Self {
        let bar = (!args.out.quiet && args.how.compat.is_none() && stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{prefix:>6} [{bar:40}] {percent:>3} % {msg}");
            let bar = ProgressBar::with_draw_target(Some(1000), ProgressDrawTarget::stderr());
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Display { bar }
    }

    fn finish(&self, _report: &Report) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Observer for Display {
    fn connected(&mut self, _report: &Report) {}

    fn progress(&mut self, size: u64, share: f64, messages: u64) {
        if let Some(bar) = &self.bar {
            bar.set_prefix(Bytes(size).to_string());
            bar.set_message(format!("{messages} messages"));
            bar.set_position((share * 1000.0) as u64);
        }
    }

    fn row(&mut self, _report: &Report, row: &Row) {
        println!(" #bytes\n{:?}", row.perftest);
    }

    fn wants_progress(&self) -> bool {
        self.bar.is_some()
    }
}
