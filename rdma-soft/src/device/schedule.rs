//! How the kernel schedules the server thread.

#![allow(unsafe_code)]

use std::time::Duration;

/// The shortest slice that Linux grants a thread: `sched_setattr(2)`.
const SLICE: Duration = Duration::from_micros(100);

/// First version of `struct sched_attr` of `sched_setattr(2)`, which the libc crate lacks for some C libraries.
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

/// Asks the kernel to run this thread soon after it is woken. Needs no privileges.
///
/// The thread runs for a few microseconds at a time. A program that waits for memory to change occupies its processor for a
/// whole slice, 2.8 ms by default, and since Linux 6.6 a thread with a slice of the same length does not preempt it. A thread
/// with a shorter slice does, since Linux 6.12. Older kernels ignore the slice.
pub(super) fn prefer_latency() {
    // With the default timer slack the kernel may delay a timer by 50 µs.
    // SAFETY: the arguments are numbers, and only this thread changes.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
    let mut attr = SchedAttr::default();
    let len = size_of::<SchedAttr>() as u32;
    // SAFETY: the kernel writes at most `len` bytes, and as many are there. Zero is this thread.
    let read = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, len, 0) };
    let is_fair = matches!(attr.policy as libc::c_int, libc::SCHED_OTHER | libc::SCHED_BATCH);
    // Leave a policy that the user has chosen. The niceness is among the attributes that are written back, so it stays, too.
    if read != 0 || !is_fair {
        return;
    }
    attr.size = len;
    attr.runtime = SLICE.as_nanos() as u64;
    // If the kernel refuses, the thread keeps its default slice.
    // SAFETY: the kernel reads `size` bytes, and as many are there.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
}
