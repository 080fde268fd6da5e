//! Interruptions of system calls that have no deadline.

use std::mem::zeroed;
use std::ptr::null_mut;
use std::time::Duration;

use anyhow::{Result, bail};

/// The signal that interrupts; nothing else here uses it.
const SIGNAL: libc::c_int = libc::SIGUSR1;

/// Interrupts system calls of the thread that made it again and again, until it is dropped: they end with `EINTR`.
#[derive(Debug)]
pub(super) struct Alarm(libc::timer_t);

impl Alarm {
    /// Interrupts every `period`.
    pub(super) fn new(period: Duration) -> Result<Self> {
        extern "C" fn nothing(_signal: libc::c_int) {}

        // SAFETY: zeroes are a valid `struct sigaction`: no flags, among them `SA_RESTART`, and an empty mask.
        let mut action: libc::sigaction = unsafe { zeroed() };
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
        // SAFETY: zeroes are a valid `struct sigevent`.
        let mut event: libc::sigevent = unsafe { zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = SIGNAL;
        event.sigev_notify_thread_id = rustix::thread::gettid().as_raw_nonzero().get();
        let interval =
            libc::timespec { tv_sec: period.as_secs() as libc::time_t, tv_nsec: period.subsec_nanos().into() };
        let times = libc::itimerspec { it_interval: interval, it_value: interval };
        let mut timer = null_mut();
        // SAFETY: the handler does nothing that a handler must not do; all pointers are to valid objects, and the timer is
        // armed only if it was made.
        let made = unsafe {
            libc::sigaction(SIGNAL, &action, null_mut()) == 0
                && libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) == 0
        };
        if !made {
            bail!("cannot make a timer: {}", std::io::Error::last_os_error());
        }
        let alarm = Alarm(timer);
        // SAFETY: the timer was just made.
        if unsafe { libc::timer_settime(alarm.0, 0, &times, null_mut()) } != 0 {
            bail!("cannot set a timer: {}", std::io::Error::last_os_error());
        }
        Ok(alarm)
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and deleted once.
        unsafe { libc::timer_delete(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_call_without_a_deadline_ends() {
        let _alarm = Alarm::new(Duration::from_millis(20)).unwrap();
        // SAFETY: waits for nothing; no descriptors are named.
        let result = unsafe { libc::poll(null_mut(), 0, 600_000) };
        assert_eq!((result, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EINTR)));
    }
}
