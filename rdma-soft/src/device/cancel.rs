//! Cancellation of threads by the program: `pthread_cancel(3)`.

#![allow(unsafe_code)]

/// Defers the cancellation of a thread while it serves the device, which would otherwise stay locked or lose events.
///
/// Dropping it does not restore the state: a cancelled thread unwinds its stack, and there must be nothing to drop.
#[derive(Clone, Copy)]
pub(crate) struct Cancel(libc::c_int);

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
}

impl Cancel {
    /// Defers cancellation until [`restore`](Cancel::restore).
    pub(crate) fn defer() -> Cancel {
        const DISABLE: libc::c_int = 1;
        Cancel(set(DISABLE))
    }

    pub(crate) fn restore(self) {
        set(self.0);
    }

    /// Runs a call that waits. The thread may be cancelled there, if the program allows it.
    pub(super) fn allow<R>(self, wait: impl FnOnce() -> R) -> R {
        let deferred = set(self.0);
        let result = wait();
        set(deferred);
        result
    }
}

fn set(state: libc::c_int) -> libc::c_int {
    let mut before = 0;
    // SAFETY: the call writes a number, and affects only this thread.
    unsafe { pthread_setcancelstate(state, &raw mut before) };
    before
}
