//! A timer that interrupts system calls without a timeout.

use std::mem::zeroed;
use std::ptr::null_mut;
use std::time::Duration;

use anyhow::{Result, bail};

/// The signal of the timer. Nothing else in this program uses it.
const SIGNAL: libc::c_int = libc::SIGUSR1;

/// Interrupts system calls of the thread that created it periodically, until dropped. They fail with `EINTR`.
#[derive(Debug)]
pub(super) struct Alarm(libc::timer_t);

impl Alarm {
    /// Interrupts every `period`.
    pub(super) fn new(period: Duration) -> Result<Self> {
        extern "C" fn nothing(_signal: libc::c_int) {}

        // SAFETY: zeroes are a valid `struct sigaction` with an empty mask and no flags, in particular without
        // `SA_RESTART`.
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
        // SAFETY: the handler is async-signal-safe because it does nothing. All pointers are to valid objects. The
        // timer is armed only if it was created.
        let made = unsafe {
            libc::sigaction(SIGNAL, &action, null_mut()) == 0
                && libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) == 0
        };
        if !made {
            bail!("cannot create a timer: {}", std::io::Error::last_os_error());
        }
        let alarm = Alarm(timer);
        // SAFETY: the timer was created above.
        if unsafe { libc::timer_settime(alarm.0, 0, &times, null_mut()) } != 0 {
            bail!("cannot arm a timer: {}", std::io::Error::last_os_error());
        }
        Ok(alarm)
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // SAFETY: created in `new` and deleted once.
        unsafe { libc::timer_delete(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_call_without_a_timeout_is_interrupted() {
        let _alarm = Alarm::new(Duration::from_millis(20)).unwrap();
        // SAFETY: no descriptors are passed.
        let result = unsafe { libc::poll(null_mut(), 0, 600_000) };
        assert_eq!((result, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EINTR)));
    }
}
