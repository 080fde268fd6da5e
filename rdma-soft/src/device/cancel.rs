//! Threads that the program cancels: `pthread_cancel(3)`.

#![allow(unsafe_code)]

/// Keeps a thread from being cancelled while it serves the device, or the device would stay locked or lose events.
///
/// It does not restore the state when it is dropped: a cancelled thread unwinds its stack, and there must be nothing to drop.
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

    /// Runs a call that waits. The thread may be cancelled there, unless the program has ruled it out.
    pub(super) fn allow<R>(self, wait: impl FnOnce() -> R) -> R {
        let deferred = set(self.0);
        let result = wait();
        set(deferred);
        result
    }
}

fn set(state: libc::c_int) -> libc::c_int {
    let mut before = 0;
    // SAFETY: it writes a number, and changes this thread only.
    unsafe { pthread_setcancelstate(state, &raw mut before) };
    before
}
