//! Scheduling of the server thread.

#![allow(unsafe_code)]

use std::time::Duration;

/// The shortest slice that Linux allows: `sched_setattr(2)`.
const SLICE: Duration = Duration::from_micros(100);

/// The first version of `struct sched_attr` of `sched_setattr(2)`. The libc crate lacks it for some C libraries.
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

/// Asks the kernel to run this thread soon after it is woken. This needs no privileges.
///
/// The thread runs for a few microseconds at a time. A program that spins on memory occupies its processor for a whole slice, 2.8
/// ms by default. Since Linux 6.6 a thread with a slice of the same length does not preempt it. Since Linux 6.12 a thread with a
/// shorter slice does. Older kernels ignore the slice.
pub(super) fn prefer_latency() {
    if cfg!(miri) {
        return;
    }
    // The default timer slack lets the kernel delay a timer by 50 µs.
    // SAFETY: the arguments are numbers, and only this thread is affected.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) };
    let mut attr = SchedAttr::default();
    let len = size_of::<SchedAttr>() as u32;
    // SAFETY: the kernel writes at most `len` bytes, the size of the structure. Zero is this thread.
    let read = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, len, 0) };
    let is_fair = matches!(attr.policy as libc::c_int, libc::SCHED_OTHER | libc::SCHED_BATCH);
    // Keep a policy that the user has chosen. The niceness is among the attributes, so it is written back unchanged.
    if read != 0 || !is_fair {
        return;
    }
    attr.size = len;
    attr.runtime = SLICE.as_nanos() as u64;
    // If the kernel refuses, the thread keeps its default slice.
    // SAFETY: the kernel reads `size` bytes, the size of the structure.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
}
