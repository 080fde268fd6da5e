//! The end of the process, and its children.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use super::{Checker, Kind, Report, is_active, with};
use crate::device;

/// Exit status of a process with reports.
static STATUS: AtomicU8 = AtomicU8::new(0);

/// Whether this process is a child that has used its parent's device.
static HAS_CHILD_REPORTED: AtomicBool = AtomicBool::new(false);

/// Ends the process with `status` if there are reports.
pub(super) fn register(status: u8) {
    STATUS.store(status, Ordering::Relaxed);
    // SAFETY: the function takes no arguments, does not unwind, and exists as long as this library is loaded.
    unsafe { libc::atexit(at_exit) };
}

extern "C" fn at_exit() {
    let has_reports = if device::is_child() {
        HAS_CHILD_REPORTED.load(Ordering::Relaxed)
    } else {
        device::report_leaks_at_exit();
        with(|check| check.summarize()).unwrap_or(false)
    };
    let status = STATUS.load(Ordering::Relaxed);
    if has_reports && status != 0 {
        // SAFETY: flushing all streams and ending the process are always allowed. Functions that were registered before this one do
        // not run.
        unsafe {
            libc::fflush(std::ptr::null_mut());
            libc::_exit(status.into());
        }
    }
}

impl Checker {
    /// Writes the number of reports of each kind. Returns whether there are any.
    fn summarize(&mut self) -> bool {
        let mut counts: Vec<(Kind, usize)> = self.counts.iter().map(|(kind, count)| (*kind, *count)).collect();
        counts.sort();
        if counts.is_empty() {
            return false;
        }
        let each: Vec<String> = counts.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        let text = format!("rdma-soft check: reports: {}", each.join(", "));
        self.output.write_line(&text);
        true
    }
}

/// Reports that a child process has used the device of its parent. The caller reports each child once.
pub(crate) fn used_after_fork() {
    // The options are read without the lock, which a thread of the parent may have held at the fork.
    let Some(mut checker) = is_active().then(|| super::CHECKER.try_lock().ok()).flatten() else { return };
    let Some(checker) = checker.as_mut() else { return };
    if checker.options.suppressed.contains(&Kind::UsedAfterFork) {
        return;
    }
    HAS_CHILD_REPORTED.store(true, Ordering::Relaxed);
    checker.report(Report::new(
        Kind::UsedAfterFork,
        "a child process used the device, its memory or its descriptors: only the process that opened the device may",
    ));
}
