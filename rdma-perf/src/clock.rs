//! A clock that is cheap to read: the processor's time stamp counter if it is reliable.

use std::time::{Duration, Instant};

/// Duration of one comparison of the counter with the system clock.
const CALIBRATION: Duration = Duration::from_millis(40);
/// Largest relative difference between two such comparisons.
const TOLERANCE: f64 = 0.001;

/// Reads time in ticks and converts them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    source: Source,
    nanos_per_tick: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Source {
    /// The processor's counter.
    Counter,
    /// `CLOCK_MONOTONIC_RAW`, whose ticks are nanoseconds.
    System,
}

impl Clock {
    /// Chooses the counter if the kernel trusts it and it runs evenly. Takes a tenth of a second.
    pub(crate) fn calibrate() -> Self {
        let system = Clock { source: Source::System, nanos_per_tick: 1.0 };
        if !counter_is_reliable() {
            return system;
        }
        let (first, second) = (measure_tick(), measure_tick());
        if !(first.is_normal() && (first / second - 1.0).abs() < TOLERANCE) {
            return system;
        }
        Clock { source: Source::Counter, nanos_per_tick: f64::midpoint(first, second) }
    }

    /// A clock whose ticks are nanoseconds.
    #[cfg(test)]
    pub(crate) fn nanoseconds() -> Self {
        Clock { source: Source::System, nanos_per_tick: 1.0 }
    }

    /// The time in ticks.
    #[inline]
    pub(crate) fn now(self) -> u64 {
        match self.source {
            Source::Counter => counter(),
            Source::System => system_nanos(),
        }
    }

    pub(crate) fn nanos(self, ticks: u64) -> f64 {
        ticks as f64 * self.nanos_per_tick
    }

    pub(crate) fn ticks(self, time: Duration) -> u64 {
        (time.as_nanos() as f64 / self.nanos_per_tick) as u64
    }

    /// Millions of ticks per second, the unit of perftest's formulas.
    pub(crate) fn megahertz(self) -> f64 {
        1000.0 / self.nanos_per_tick
    }
}

/// Measures the nanoseconds per tick of the counter.
fn measure_tick() -> f64 {
    let (ticks, nanos) = read_both();
    let start = Instant::now();
    while start.elapsed() < CALIBRATION {
        std::thread::sleep(CALIBRATION / 4);
    }
    let (later_ticks, later_nanos) = read_both();
    (later_nanos - nanos) as f64 / later_ticks.wrapping_sub(ticks) as f64
}

/// Reads both clocks at nearly the same time: the closest pair of several readings.
fn read_both() -> (u64, u64) {
    let reading = |_| {
        let before = counter();
        let nanos = system_nanos();
        let after = counter();
        (after.wrapping_sub(before), before.wrapping_add(after.wrapping_sub(before) / 2), nanos)
    };
    let (_, ticks, nanos) = (0..16).map(reading).min_by_key(|(width, ..)| *width).unwrap_or_default();
    (ticks, nanos)
}

fn system_nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid `struct timespec`. The clock exists since Linux 2.6.28.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_RAW, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// On x86 the kernel watches the counter, and removes it from this list if it does not run evenly on all processors.
#[cfg(target_arch = "x86_64")]
fn counter_is_reliable() -> bool {
    const AVAILABLE: &str = "/sys/devices/system/clocksource/clocksource0/available_clocksource";
    std::fs::read_to_string(AVAILABLE).is_ok_and(|list| list.split_whitespace().any(|name| name == "tsc"))
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and Linux lets user space execute it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(target_arch = "aarch64")]
fn counter_is_reliable() -> bool {
    true
}

#[cfg(target_arch = "aarch64")]
#[inline]
fn counter() -> u64 {
    let count;
    // SAFETY: reads the virtual counter, which Linux allows in user space, and has no other effect.
    unsafe { core::arch::asm!("mrs {}, cntvct_el0", out(reg) count, options(nomem, nostack, preserves_flags)) };
    count
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn counter_is_reliable() -> bool {
    false
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn counter() -> u64 {
    system_nanos()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tick_agrees_with_the_system_clock() {
        let clock = Clock::calibrate();
        let (start, ticks) = (Instant::now(), clock.now());
        std::thread::sleep(Duration::from_millis(50));
        let (elapsed, ticks) = (start.elapsed(), clock.now() - ticks);
        let ratio = clock.nanos(ticks) / elapsed.as_nanos() as f64;
        assert!((0.9..1.1).contains(&ratio), "{ratio} with {clock:?}");
        assert_eq!(clock.ticks(Duration::ZERO), 0);
        assert!(clock.megahertz() > 0.0);
    }
}
