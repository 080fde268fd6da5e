//! Ctrl-C: the first press ends the test gracefully, the second ends the process.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use signal_hook::consts::SIGINT;

/// Exit status of a program that Ctrl-C ended, by the convention of shells.
pub(crate) const INTERRUPTED: i32 = 130;

/// The test ended because another thread or the peer failed, or because of Ctrl-C.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Interrupted;

/// Fails if the set-up is to end. Long set-up loops call it between steps.
pub(crate) type Check<'c> = &'c dyn Fn() -> Result<()>;

/// Records Ctrl-C. Its descriptor becomes readable when Ctrl-C is pressed.
#[derive(Debug)]
pub(crate) struct Interrupt {
    pressed: Arc<AtomicBool>,
    /// Whether the next SIGINT ends the process.
    exits_on_signal: Arc<AtomicBool>,
    read: UnixStream,
    write: UnixStream,
}

impl Interrupt {
    pub(crate) fn install() -> Result<Self> {
        let interrupt = Interrupt::new()?;
        let write = interrupt.write.try_clone()?;
        // A handler is installed before its action is registered, and a signal in between would be lost.
        with_signal_blocked(SIGINT, || {
            // In this order the first signal does not end the process.
            signal_hook::flag::register(SIGINT, interrupt.pressed.clone())?;
            signal_hook::low_level::pipe::register(SIGINT, write)?;
            signal_hook::flag::register_conditional_shutdown(SIGINT, INTERRUPTED, interrupt.exits_on_signal.clone())?;
            signal_hook::flag::register(SIGINT, interrupt.exits_on_signal.clone())
        })?;
        Ok(interrupt)
    }

    fn new() -> Result<Self> {
        let (read, write) = UnixStream::pair()?;
        Ok(Interrupt { pressed: Arc::default(), exits_on_signal: Arc::default(), read, write })
    }

    /// Fails once Ctrl-C was pressed.
    pub(crate) fn check(&self) -> Result<()> {
        if self.pressed.load(Ordering::Relaxed) { Err(Interrupted.into()) } else { Ok(()) }
    }

    /// Lets the next Ctrl-C end the process, for loops that do not check for it.
    pub(crate) fn exit_on_next_signal(&self) {
        self.exits_on_signal.store(true, Ordering::Relaxed);
    }

    /// An instance without signal handlers, for tests.
    #[cfg(test)]
    pub(crate) fn for_test() -> Arc<Self> {
        Arc::new(Interrupt::new().unwrap())
    }

    /// Simulates a signal that arrives when only the first action is registered.
    #[cfg(test)]
    pub(crate) fn press_early(&self) {
        self.pressed.store(true, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn press(&self) {
        self.press_early();
        std::io::Write::write_all(&mut &self.write, &[0]).unwrap();
    }
}

/// Calls `what` with the signal blocked in this thread. If no other thread can take it, the signal is delivered
/// afterwards.
fn with_signal_blocked<T>(signal: i32, what: impl FnOnce() -> std::io::Result<T>) -> std::io::Result<T> {
    // SAFETY: a signal set consists of integers, so zeroes are valid.
    let (mut held, mut before) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: both sets are valid.
    let errno = unsafe {
        libc::sigemptyset(&mut held);
        libc::sigaddset(&mut held, signal);
        libc::pthread_sigmask(libc::SIG_BLOCK, &held, &mut before)
    };
    if errno != 0 {
        return Err(std::io::Error::from_raw_os_error(errno));
    }
    let done = what();
    // SAFETY: the call above wrote the set.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    done
}

impl AsFd for Interrupt {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.read.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocked_signal_is_delivered_afterwards() {
        // No other test of this process uses this signal.
        let signal = signal_hook::consts::SIGWINCH;
        let came = Arc::new(AtomicBool::new(false));
        with_signal_blocked(signal, || {
            signal_hook::flag::register(signal, came.clone())?;
            // SAFETY: the signal is sent to this thread, which blocks it.
            unsafe { libc::pthread_kill(libc::pthread_self(), signal) };
            assert!(!came.load(Ordering::Relaxed));
            Ok(())
        })
        .unwrap();
        assert!(came.load(Ordering::Relaxed));
    }
}
