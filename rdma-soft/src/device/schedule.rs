//! How the kernel schedules the server thread.

#![allow(unsafe_code)]

use std::time::Duration;

/// The shortest slice that Linux grants a thread: `sched_setattr(2)`.
const SLICE: Duration = Duration::from_micros(100);

/// `struct sched_attr` of `sched_setattr(2)` in its first version, which libc does not have for every C library.
#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Asks the kernel to run this thread soon after it is woken. It needs no privileges.
///
/// The thread runs for a few microseconds at a time. A program that waits for memory to change occupies its processor for a whole slice,
/// 2.8 ms by default, and since Linux 6.6 a thread with a slice of the same length does not preempt it. A thread with a shorter slice
/// does, since Linux 6.12. Older kernels ignore the slice.
pub(super) fn prefer_latency() {
    // Without it the kernel may delay a timer by 50 µs.
    // SAFETY: it takes numbers, and changes this thread only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
    let mut attr = SchedAttr::default();
    let len = size_of::<SchedAttr>() as u32;
    // SAFETY: the kernel writes at most `len` bytes, and as many are there. Zero is this thread.
    let read = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, len, 0) };
    let is_fair = matches!(attr.policy as libc::c_int, libc::SCHED_OTHER | libc::SCHED_BATCH);
    // A policy that the user has chosen for the program stays, and so does the niceness, which is among the attributes.
    if read != 0 || !is_fair {
        return;
    }
    attr.size = len;
    attr.runtime = SLICE.as_nanos() as u64;
    // A system that refuses keeps its usual slice.
    // SAFETY: the kernel reads `size` bytes, and as many are there.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
}
