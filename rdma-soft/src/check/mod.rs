//! The checker: finds programs that misuse the device.
//!
//! soft0 sees every access to memory and every completion, which no RNIC can report. `RDMA_SOFT_CHECK=1` checks a whole process,
//! and [`Session`] a part of one. docs/soft.md lists the [kinds](Kind) of reports.
//!
//! The device calls the checker through `with`, which costs one load and one branch while no checker is active. The
//! checker has a separate lock. A thread that holds it never takes the lock of the device.

mod exit;
mod flight;
mod kind;
mod leaks;
mod memory;
mod options;
mod output;
mod queues;
mod regions;
mod report;
mod threads;

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) use exit::used_after_fork;
pub(crate) use flight::{Element, Owner, Posted, TooLong};
pub use kind::Kind;
pub(crate) use leaks::{Left, Object, created, destroyed};
pub(crate) use memory::is_readable;
pub use options::{Options, OptionsError};
pub(crate) use regions::{Attempt, Registered};
pub use report::{LeakedObject, Region, Report};

use crate::transport::Time;
use flight::Flights;
use leaks::Origins;
use output::Output;
use queues::Queues;
use regions::Regions;

/// Whether a checker is active.
static ACTIVE: AtomicBool = AtomicBool::new(false);

static CHECKER: Mutex<Option<Checker>> = Mutex::new(None);

thread_local! {
    /// Whether this thread has locked the checker. Its allocations may call functions that the checker observes.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The state of the checker.
pub(crate) struct Checker {
    options: Options,
    output: Output,
    /// Whether a [`Session`] gets the reports.
    is_session: bool,
    reports: Vec<Report>,
    counts: HashMap<Kind, usize>,
    /// Reports that are made only once for an object.
    reported: HashSet<(Kind, u64)>,
    flights: Flights,
    regions: Regions,
    queues: Queues,
    origins: Origins,
}

fn lock() -> MutexGuard<'static, Option<Checker>> {
    CHECKER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a checker is active.
#[inline]
pub(crate) fn is_active() -> bool {
    ACTIVE.load(Ordering::Relaxed)
}

/// Calls `run` with the checker if one is active.
#[inline]
pub(crate) fn with<R>(run: impl FnOnce(&mut Checker) -> R) -> Option<R> {
    if is_active() { with_active(run) } else { None }
}

#[cold]
fn with_active<R>(run: impl FnOnce(&mut Checker) -> R) -> Option<R> {
    let _inside = Inside::enter()?;
    lock().as_mut().map(run)
}

/// Marks this thread as inside the checker, also until a panic has left it.
struct Inside;

impl Inside {
    /// `None` if the thread is inside already: an allocation of the checker has called a function that it observes.
    fn enter() -> Option<Inside> {
        (!IS_INSIDE.replace(true)).then_some(Inside)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        IS_INSIDE.set(false);
    }
}

/// Time after which the checker reports a wait, although it may still end.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// Notes that the program is about to unmap or remap memory.
///
/// `librdma_soft.so` calls it from the functions that it interposes.
#[doc(hidden)]
pub fn unmapping(address: usize, len: usize, function: &str) {
    // A thread of the parent may have held the lock at the fork, and the memory of a child is not the device's.
    if is_active() && crate::device::was_forked() {
        return;
    }
    with(|check| check.unmapping(address as u64, len as u64, function));
}

/// Starts the checker of the process if `RDMA_SOFT_CHECK` says so.
///
/// # Errors
/// [`OptionsError`] if the variable is not valid.
pub(crate) fn start_from_environment() -> Result<(), OptionsError> {
    let text = std::env::var("RDMA_SOFT_CHECK").unwrap_or_default();
    if matches!(text.as_str(), "" | "0") || is_active() {
        return Ok(());
    }
    let options: Options = text.parse()?;
    exit::register(options.exit);
    *lock() = Some(Checker::new(options, false));
    ACTIVE.store(true, Ordering::Release);
    Ok(())
}

/// Checks the device of this process while it exists.
///
/// Start it before the first verb, because it does not know older objects and work. A process has at most one checker.
#[derive(Debug)]
#[must_use = "the checker stops when the session is dropped"]
pub struct Session {
    _private: (),
}

/// A process has at most one checker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("this process already has a checker: another session, or that of RDMA_SOFT_CHECK")]
pub struct AlreadyChecked;

impl Session {
    /// Starts the checker. Its reports are kept, and are written only to the files that `options` name.
    ///
    /// # Errors
    /// [`AlreadyChecked`] if the process has a checker.
    pub fn start(options: Options) -> Result<Session, AlreadyChecked> {
        let mut checker = lock();
        if checker.is_some() {
            return Err(AlreadyChecked);
        }
        *checker = Some(Checker::new(options, true));
        ACTIVE.store(true, Ordering::Release);
        drop(checker);
        // The device's thread may sleep without a deadline. It now looks for completions that nobody takes.
        if let Some(device) = crate::device::existing() {
            device.server.wake_before(Time(0));
        }
        Ok(Session { _private: () })
    }

    /// Takes the reports that were made since the last call, at most [`Options::limit`] of each kind.
    #[must_use]
    pub fn take_reports(&self) -> Vec<Report> {
        lock().as_mut().map(|checker| std::mem::take(&mut checker.reports)).unwrap_or_default()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        ACTIVE.store(false, Ordering::Release);
        *lock() = None;
    }
}

impl Checker {
    fn new(options: Options, is_session: bool) -> Checker {
        Checker {
            flights: Flights::new(options.bytes),
            output: Output::new(&options, is_session),
            options,
            is_session,
            reports: Vec::new(),
            counts: HashMap::new(),
            reported: HashSet::new(),
            regions: Regions::new(),
            queues: Queues::default(),
            origins: Origins::default(),
        }
    }

    /// Makes a report, unless its kind is suppressed.
    pub(crate) fn report(&mut self, report: Report) {
        if self.options.suppressed.contains(&report.kind) {
            return;
        }
        let count = self.counts.entry(report.kind).or_default();
        *count += 1;
        if *count > self.options.limit {
            return;
        }
        self.output.write(&report);
        if self.is_session {
            self.reports.push(report);
        }
    }

    /// Makes a report about an object, but only the first time.
    pub(crate) fn report_once(&mut self, kind: Kind, object: u64, report: impl FnOnce() -> Report) {
        if !self.options.suppressed.contains(&kind) && self.reported.insert((kind, object)) {
            self.report(report());
        }
    }

    /// Whether a report of this kind about an object would be made.
    fn is_new(&self, kind: Kind, object: u64) -> bool {
        !self.options.suppressed.contains(&kind) && !self.reported.contains(&(kind, object))
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn a_panic_inside_the_checker_leaves_it_usable() {
        let session = Session::start(Options::default()).unwrap();
        let panicked = catch_unwind(|| with(|_| -> () { panic!("expected by the test") }));
        assert!(panicked.is_err());
        with(|check| check.report(Report::new(Kind::Overlap, "after the panic"))).expect("the thread is outside");
        assert!(with(|_| with(|_| ())).unwrap().is_none(), "a call from inside is ignored");
        let of_test = |report: &Report| report.text == "after the panic";
        assert_eq!(session.take_reports().into_iter().filter(of_test).count(), 1);
    }
}
