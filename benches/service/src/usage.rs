//! Processor time.

/// User and system time of this process in seconds: getrusage(2).
pub(crate) fn processor_seconds() -> f64 {
    seconds_of(libc::RUSAGE_SELF)
}

/// User and system time of the children of this process that have ended, in seconds: getrusage(2).
#[allow(dead_code, reason = "not all programs that share this file have such children")]
pub(crate) fn children_seconds() -> f64 {
    seconds_of(libc::RUSAGE_CHILDREN)
}

fn seconds_of(who: libc::c_int) -> f64 {
    // SAFETY: an all-zero `rusage` is valid, and `getrusage` only writes to it.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(who, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
