//! Functions of the C library that Miri lacks. Miri calls the definitions in this file instead.
//!
//! They do what this library and programs over it need under Miri, and no more.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Waits by a set of descriptors, which Miri has: `epoll(7)`.
///
/// # Safety
/// `fds` points to `count` entries, which nothing else uses during the call.
#[unsafe(no_mangle)]
unsafe extern "C" fn poll(fds: *mut libc::pollfd, count: libc::nfds_t, millis: libc::c_int) -> libc::c_int {
    const MOST: usize = 16;
    // SAFETY: the caller's promise. Without entries, the pointer may be null, which a slice must not be.
    let fds = if count == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(fds, count as usize) } };
    // SAFETY: it takes no pointers and returns a new descriptor.
    let set = unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) };
    for (at, entry) in fds.iter_mut().enumerate() {
        entry.revents = 0;
        if entry.fd < 0 {
            continue;
        }
        let events = entry.events as u32 | libc::EPOLLET as u32;
        let mut event = libc::epoll_event { events, u64: at as u64 };
        // SAFETY: the event is there.
        if unsafe { libc::epoll_ctl(set.as_raw_fd(), libc::EPOLL_CTL_ADD, entry.fd, &raw mut event) } != 0 {
            return -1;
        }
    }
    let mut ready = [libc::epoll_event { events: 0, u64: 0 }; MOST];
    // SAFETY: as many entries are there.
    let found = unsafe { libc::epoll_wait(set.as_raw_fd(), ready.as_mut_ptr(), MOST as libc::c_int, millis) };
    for event in ready.iter().take(usize::try_from(found).unwrap_or(0)) {
        fds[event.u64 as usize].revents = event.events as libc::c_short;
    }
    found
}

/// Waits by [`poll`], for whole milliseconds, rounded up.
///
/// # Safety
/// `fds` points to `count` entries, and `timeout` to a time, or it is null. There is no mask of signals.
#[unsafe(no_mangle)]
unsafe extern "C" fn ppoll(
    fds: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout: *const libc::timespec,
    _mask: *const libc::sigset_t,
) -> libc::c_int {
    // SAFETY: the caller's promise.
    let millis = unsafe { timeout.as_ref() }.map_or(-1, |time| {
        let millis = time.tv_sec.saturating_mul(1000) + (time.tv_nsec + 999_999) / 1_000_000;
        libc::c_int::try_from(millis).unwrap_or(libc::c_int::MAX)
    });
    // SAFETY: the caller's promise.
    unsafe { poll(fds, count, millis) }
}

/// Does nothing: Miri has no signals.
#[unsafe(no_mangle)]
extern "C" fn sigfillset(_set: *mut libc::sigset_t) -> libc::c_int {
    0
}

/// Does nothing: Miri has no signals.
#[unsafe(no_mangle)]
extern "C" fn pthread_sigmask(
    _how: libc::c_int,
    _set: *const libc::sigset_t,
    _before: *mut libc::sigset_t,
) -> libc::c_int {
    0
}

/// Does nothing: Miri cancels no threads.
///
/// # Safety
/// `before` points to a number.
#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_setcancelstate(_state: libc::c_int, before: *mut libc::c_int) -> libc::c_int {
    // SAFETY: the caller's promise.
    unsafe { before.write(0) };
    0
}

/// Does nothing: Miri has no pages, and reports an access to memory that is not there.
#[unsafe(no_mangle)]
extern "C" fn madvise(_address: *mut libc::c_void, _len: libc::size_t, _advice: libc::c_int) -> libc::c_int {
    0
}
