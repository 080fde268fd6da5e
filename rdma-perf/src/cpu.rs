//! Processors: pinning of threads, and processor time of the process.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

/// The highest processor number in `cpu_set_t`.
pub(crate) const MAX_CPU: u32 = 1023;

/// Refuses processors that do not exist or that this process may not use.
pub(crate) fn check(wanted: &[u32]) -> Result<()> {
    if wanted.is_empty() {
        return Ok(());
    }
    let allowed = sched_getaffinity(None).context("cannot read the processors of this process")?;
    let missing = wanted.iter().find(|cpu| **cpu > MAX_CPU || !allowed.is_set(**cpu as usize));
    if let Some(missing) = missing {
        let allowed: Vec<u32> = (0..=MAX_CPU).filter(|cpu| allowed.is_set(*cpu as usize)).collect();
        bail!(
            "processor {missing} does not exist or is not allowed for this process, which may use {}; see taskset(1) and lscpu(1)",
            ranges(&allowed)
        );
    }
    Ok(())
}

/// A sorted list such as `0-3,8`.
fn ranges(list: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for cpu in list {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *cpu => *last = *cpu,
            _ => parts.push((*cpu, *cpu)),
        }
    }
    let text = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    parts.iter().map(text).collect::<Vec<_>>().join(",")
}

/// Pins the calling thread to one processor until it is dropped.
#[must_use = "the thread is unpinned when this is dropped"]
pub(crate) struct Pinned {
    before: CpuSet,
}

impl Pinned {
    pub(crate) fn to(cpu: u32) -> Result<Self> {
        let before = sched_getaffinity(None)?;
        let mut only = CpuSet::new();
        only.set(cpu.min(MAX_CPU) as usize);
        sched_setaffinity(None, &only).with_context(|| format!("cannot pin a thread to processor {cpu}"))?;
        Ok(Pinned { before })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // The affinity was valid before. If a control group has forbidden it since, the kernel moves the thread itself.
        let _ = sched_setaffinity(None, &self.before);
    }
}

/// Processor time of a process, in seconds: getrusage(2).
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct CpuUse {
    pub(crate) user: f64,
    pub(crate) system: f64,
    /// Elapsed time.
    pub(crate) seconds: f64,
    /// Processor time in percent of the elapsed time; 100 is one busy processor.
    pub(crate) percent: f64,
}

impl CpuUse {
    pub(crate) fn new(user: f64, system: f64, seconds: f64) -> Self {
        let percent = if seconds > 0.0 { (user + system) / seconds * 100.0 } else { 0.0 };
        CpuUse { user, system, seconds, percent }
    }
}

/// Processor time of the process up to a point in time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    at: Instant,
    user: f64,
    system: f64,
}

impl Usage {
    pub(crate) fn now() -> Self {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: zeroes are a valid `rusage`, and `usage` has room for one. The call fails only for other arguments.
        let usage = unsafe {
            libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
            usage.assume_init()
        };
        let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
        Usage { at: Instant::now(), user: seconds(usage.ru_utime), system: seconds(usage.ru_stime) }
    }

    pub(crate) fn until(self, end: Usage) -> CpuUse {
        let seconds = end.at.saturating_duration_since(self.at).as_secs_f64();
        CpuUse::new((end.user - self.user).max(0.0), (end.system - self.system).max(0.0), seconds)
    }
}

/// The processor time from the earliest start to the latest end.
pub(crate) fn combined(usages: impl Iterator<Item = (Usage, Usage)>) -> Option<CpuUse> {
    let span = usages.reduce(|(begin, end), (other_begin, other_end)| {
        let begin = if other_begin.at < begin.at { other_begin } else { begin };
        (begin, if other_end.at > end.at { other_end } else { end })
    });
    span.map(|(begin, end)| begin.until(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_that_does_not_exist_is_refused() {
        assert!(check(&[]).is_ok());
        let error = check(&[MAX_CPU + 1]).unwrap_err().to_string();
        assert!(error.contains("processor 1024 does not exist") && error.contains("which may use "), "{error}");
    }

    #[test]
    fn ranges_shorten_lists() {
        assert_eq!(ranges(&[0, 1, 2, 3, 8, 10, 11]), "0-3,8,10-11");
    }

    #[test]
    fn a_thread_is_pinned_and_unpinned() {
        let before = sched_getaffinity(None).unwrap();
        let some = (0..=MAX_CPU).find(|cpu| before.is_set(*cpu as usize)).unwrap();
        assert!(check(&[some]).is_ok());
        let pinned = Pinned::to(some).unwrap();
        assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
        drop(pinned);
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }

    #[test]
    fn a_busy_thread_uses_processor_time() {
        let begin = Usage::now();
        let mut x = 1_u64;
        // Loops until the time is reached, since other processes may use this processor.
        let used = loop {
            (0..100_000).for_each(|_| x = std::hint::black_box(x.wrapping_mul(3)));
            let used = begin.until(Usage::now());
            if used.user >= 0.05 {
                break used;
            }
        };
        let percent = (used.user + used.system) / used.seconds * 100.0;
        assert!(used.seconds > 0.0 && (used.percent - percent).abs() < 0.01, "{used:?}, {percent}");
    }

    #[test]
    fn several_threads_are_combined_from_first_start_to_last_end() {
        let at = |millis: u64, user| Usage {
            at: BASE.with(|base| *base) + std::time::Duration::from_millis(millis),
            user,
            system: 0.0,
        };
        thread_local!(static BASE: Instant = Instant::now());
        let used = combined([(at(10, 1.0), at(30, 2.0)), (at(0, 0.5), at(20, 1.5))].into_iter()).unwrap();
        assert_eq!((used.user, used.seconds), (1.5, 0.03));
        assert!(combined(std::iter::empty()).is_none());
    }
}
