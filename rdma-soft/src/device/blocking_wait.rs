//! Waiting for several descriptors like `read(2)` waits for one.
//!
//! Any signal with a handler ends `poll(2)`. It ends `read(2)` only if the handler was installed without `SA_RESTART`. Programs
//! rely on that for `ibv_get_cq_event(3)`.

#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::time::Duration;

use super::cancel::Cancel;

/// The result of a wait.
pub(super) struct Woken {
    /// Whether a descriptor is readable.
    pub(super) is_ready: bool,
    /// Whether a signal arrived whose handler interrupts system calls.
    pub(super) is_interrupted: bool,
}

/// Waits until a descriptor is readable, with all signals blocked.
///
/// A signal between two waits is handled, and the next wait goes on, as if it had come before a call of `read(2)`.
pub(super) fn wait(fds: [RawFd; 2], timeout: Duration, cancel: Cancel) -> Woken {
    let mut polled = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    let all = set(|set| {
        // SAFETY: `set` points to memory for a set, which the call writes.
        unsafe { libc::sigfillset(set) };
    });
    let before = set(|before| {
        // SAFETY: `all` is a whole set, and `before` points to memory for one. Only the mask of this thread changes.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, before) };
    });
    let millis = timeout.as_millis() as libc::c_int;
    // SAFETY: the pointer and the length are of one array, which lives until the call returns.
    let found = cancel.allow(|| unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, millis) });
    let woken = Woken { is_ready: found > 0, is_interrupted: has_interrupted(&before) };
    // SAFETY: `before` is a valid set. The handlers of pending signals run here.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    woken
}

fn set(fill: impl FnOnce(*mut libc::sigset_t)) -> libc::sigset_t {
    let mut set = MaybeUninit::zeroed();
    fill(set.as_mut_ptr());
    // SAFETY: zeros are an empty set, so it is valid even if `fill` failed.
    unsafe { set.assume_init() }
}

/// Whether a signal is pending that is not in `blocked`, and whose handler interrupts system calls.
fn has_interrupted(blocked: &libc::sigset_t) -> bool {
    let pending = set(|pending| {
        // SAFETY: `pending` points to memory for a set.
        unsafe { libc::sigpending(pending) };
    });
    (1..=libc::SIGRTMAX()).any(|signal| {
        // SAFETY: both sets are valid.
        let is_new =
            unsafe { libc::sigismember(&raw const pending, signal) == 1 && libc::sigismember(blocked, signal) == 0 };
        is_new && ends_calls(signal)
    })
}

fn ends_calls(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: `action` has memory for the structure. The new action is null, so none is installed.
    let found = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: zeros are a valid action, so it is valid even if the call failed.
    let action = unsafe { action.assume_init() };
    let has_handler = ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction);
    found == 0 && has_handler && action.sa_flags & libc::SA_RESTART == 0
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;
    use crate::device::signal::Signal;

    static HANDLED: AtomicU32 = AtomicU32::new(0);

    extern "C" fn handler(_: libc::c_int) {
        HANDLED.fetch_add(1, Ordering::SeqCst);
    }

    /// Waits while a signal arrives repeatedly, until `is_over`. Returns how many waits were interrupted.
    fn interrupted(signal: libc::c_int, flags: libc::c_int, is_over: impl Fn(u32) -> bool) -> u32 {
        let action = libc::sigaction {
            sa_sigaction: handler as extern "C" fn(libc::c_int) as usize,
            sa_flags: flags,
            // SAFETY: a structure of zeros has the empty set as its mask.
            ..unsafe { std::mem::zeroed() }
        };
        // SAFETY: the structure is valid, and the handler only counts.
        assert_eq!(unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) }, 0);
        let idle = Signal::new().unwrap();
        let (is_done, waits) = (AtomicBool::new(false), AtomicU32::new(0));
        // SAFETY: the call takes no arguments.
        let waiter = unsafe { libc::pthread_self() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::SeqCst) {
                    // SAFETY: the waiter runs, since it joins this thread.
                    unsafe { libc::pthread_kill(waiter, signal) };
                    std::thread::yield_now();
                }
            });
            while !is_over(waits.load(Ordering::SeqCst)) {
                let woken = wait([idle.fd(), -1], Duration::from_millis(1), Cancel::defer());
                assert!(!woken.is_ready);
                waits.fetch_add(u32::from(woken.is_interrupted), Ordering::SeqCst);
            }
            is_done.store(true, Ordering::SeqCst);
        });
        waits.into_inner()
    }

    #[test]
    #[cfg_attr(miri, ignore = "it waits for descriptors")]
    fn a_signal_ends_a_wait_unless_its_handler_has_calls_restarted() {
        interrupted(libc::SIGUSR1, 0, |waits| waits > 3);
        let before = HANDLED.load(Ordering::SeqCst);
        let enough = |_| HANDLED.load(Ordering::SeqCst) > before + 3;
        assert_eq!(interrupted(libc::SIGUSR2, libc::SA_RESTART, enough), 0);
    }
}
