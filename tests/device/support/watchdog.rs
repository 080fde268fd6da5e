//! Aborts the process if a test hangs, and names the test.

use std::io::Write;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::program::built_at;

/// Time limit of a test, longer than any test takes on a busy emulated machine.
const LIMIT: Duration = Duration::from_secs(if cfg!(miri) { 100_000 } else { 400 });

/// Aborts the process unless it is dropped before the time limit. The time of builds does not count.
pub(crate) struct Watchdog {
    _stop: Sender<()>,
}

impl Watchdog {
    pub(crate) fn start() -> Self {
        let test = std::thread::current().name().unwrap_or("a test").to_owned();
        let (stop, stopped) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            let mut since = Instant::now();
            while stopped.recv_timeout((since + LIMIT).saturating_duration_since(Instant::now()))
                == Err(RecvTimeoutError::Timeout)
            {
                if let Some(built) = built_at().filter(|at| *at > since) {
                    since = built;
                    continue;
                }
                // Not `eprintln!`, which the test harness would capture.
                let _ = writeln!(std::io::stderr(), "\n{test} hangs: no end within {LIMIT:?}; aborting all tests");
                std::process::abort();
            }
        });
        Watchdog { _stop: stop }
    }
}
