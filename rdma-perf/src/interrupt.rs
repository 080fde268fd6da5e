//! Ctrl-C: the first one asks for an end, the second one is it.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use signal_hook::consts::SIGINT;

use crate::run::Interrupted;

/// The exit status of a program that Ctrl-C has ended, by the convention of shells.
pub(crate) const INTERRUPTED: i32 = 130;

/// Whether the user wants an end; its descriptor becomes readable then.
#[derive(Debug)]
pub(crate) struct Interrupt {
    pressed: Arc<AtomicBool>,
    /// The next one ends the process at once.
    at_once: Arc<AtomicBool>,
    read: UnixStream,
    write: UnixStream,
}

impl Interrupt {
    pub(crate) fn install() -> Result<Self> {
        let interrupt = Interrupt::new()?;
        let write = interrupt.write.try_clone()?;
        // A handler is there before it has anything to do: what came in between would be lost.
        held_back(SIGINT, || {
            // In this order the first one ends nothing.
            signal_hook::flag::register(SIGINT, interrupt.pressed.clone())?;
            signal_hook::low_level::pipe::register(SIGINT, write)?;
            signal_hook::flag::register_conditional_shutdown(SIGINT, INTERRUPTED, interrupt.at_once.clone())?;
            signal_hook::flag::register(SIGINT, interrupt.at_once.clone())
        })?;
        Ok(interrupt)
    }

    fn new() -> Result<Self> {
        let (read, write) = UnixStream::pair()?;
        Ok(Interrupt { pressed: Arc::default(), at_once: Arc::default(), read, write })
    }

    /// Fails once Ctrl-C was pressed.
    pub(crate) fn check(&self) -> Result<()> {
        if self.pressed.load(Ordering::Relaxed) { Err(Interrupted.into()) } else { Ok(()) }
    }

    /// From now on the first one ends the process, for loops that do not look for it.
    pub(crate) fn end_at_once(&self) {
        self.at_once.store(true, Ordering::Relaxed);
    }

    /// One that a test presses.
    #[cfg(test)]
    pub(crate) fn of_test() -> Arc<Self> {
        Arc::new(Interrupt::new().unwrap())
    }

    /// As one that comes when only the first action is registered.
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

/// Calls `what`, during which the signal does not reach this thread. Where there is no other, it comes afterwards.
fn held_back<T>(signal: i32, what: impl FnOnce() -> std::io::Result<T>) -> std::io::Result<T> {
    // SAFETY: a set of signals is made of integers.
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
    // SAFETY: the set was written by the call above.
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
    fn a_signal_that_is_held_back_comes_afterwards() {
        // None that other tests of this process use.
        let signal = signal_hook::consts::SIGWINCH;
        let came = Arc::new(AtomicBool::new(false));
        held_back(signal, || {
            signal_hook::flag::register(signal, came.clone())?;
            // SAFETY: it is sent to this thread, which holds it back.
            unsafe { libc::pthread_kill(libc::pthread_self(), signal) };
            assert!(!came.load(Ordering::Relaxed));
            Ok(())
        })
        .unwrap();
        assert!(came.load(Ordering::Relaxed));
    }
}
