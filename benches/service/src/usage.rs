//! Processor time.

/// User and system time of this process in seconds: getrusage(2).
pub(crate) fn processor_seconds() -> f64 {
    // SAFETY: an all-zero `rusage` is valid, and `getrusage` only writes to it.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
