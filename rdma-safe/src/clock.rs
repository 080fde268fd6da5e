//! The clock of a device, which stamps completions.

use std::time::{Duration, Instant, SystemTime};

use rdma_sys::*;

use crate::errno::check;
use crate::{Context, Result};

/// The clock that completions are stamped by: its rate, and how many bits it has.
///
/// It counts ticks and wraps. What it is set to says nothing; a [`ClockReading`] ties it to the clocks of the host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DeviceClock {
    khz: u64,
    mask: u64,
}

impl DeviceClock {
    /// Its rate in kHz.
    #[must_use]
    pub fn khz(self) -> u64 {
        self.khz
    }

    /// The bits that it has: timestamps wrap after this one.
    #[must_use]
    pub fn mask(self) -> u64 {
        self.mask
    }

    /// How long it takes until it wraps: two timestamps further apart cannot be compared.
    #[must_use]
    pub fn period(self) -> Duration {
        // One more tick than the mask, which may be all bits.
        self.duration(self.mask).saturating_add(self.duration(1))
    }

    /// Ticks as time, rounded down to nanoseconds.
    #[must_use]
    pub fn duration(self, ticks: u64) -> Duration {
        let nanos = u128::from(ticks) * 1_000_000 / u128::from(self.khz);
        let (seconds, nanos) = (nanos / 1_000_000_000, nanos % 1_000_000_000);
        Duration::new(u64::try_from(seconds).unwrap_or(u64::MAX), nanos as u32)
    }

    /// Time from the timestamp `earlier` to the timestamp `later`, less than [`DeviceClock::period`].
    #[must_use]
    pub fn between(self, earlier: u64, later: u64) -> Duration {
        self.duration(self.ticks(earlier, later))
    }

    /// Ticks from `earlier` to `later`, which may have wrapped.
    fn ticks(self, earlier: u64, later: u64) -> u64 {
        later.wrapping_sub(earlier) & self.mask
    }
}

/// The clock of a device beside those of the host, read at the same time. Made by [`Context::read_clock`].
///
/// Timestamps within half a period of it, before or after, can be converted. The clocks drift apart, by some microseconds a
/// second, so take a new reading from time to time.
#[derive(Clone, Copy, Debug)]
pub struct ClockReading {
    clock: DeviceClock,
    ticks: u64,
    instant: Instant,
    system_time: SystemTime,
    uncertainty: Duration,
}

impl ClockReading {
    /// The clock that was read.
    #[must_use]
    pub fn clock(&self) -> DeviceClock {
        self.clock
    }

    /// What it showed, in ticks.
    #[must_use]
    pub fn ticks(&self) -> u64 {
        self.ticks
    }

    /// When that was, by the monotonic clock of the host.
    #[must_use]
    pub fn instant(&self) -> Instant {
        self.instant
    }

    /// When that was, by the calendar of the host.
    #[must_use]
    pub fn system_time(&self) -> SystemTime {
        self.system_time
    }

    /// How far from it, at most, the clock was read: half of what the reading took.
    #[must_use]
    pub fn uncertainty(&self) -> Duration {
        self.uncertainty
    }

    /// When `timestamp` was taken, by the monotonic clock of the host; `None` beyond what that clock can show.
    #[must_use]
    pub fn instant_of(&self, timestamp: u64) -> Option<Instant> {
        match self.offset(timestamp) {
            Offset::After(later) => self.instant.checked_add(later),
            Offset::Before(earlier) => self.instant.checked_sub(earlier),
        }
    }

    /// When `timestamp` was taken, by the calendar of the host; `None` beyond what it can show.
    #[must_use]
    pub fn system_time_of(&self, timestamp: u64) -> Option<SystemTime> {
        match self.offset(timestamp) {
            Offset::After(later) => self.system_time.checked_add(later),
            Offset::Before(earlier) => self.system_time.checked_sub(earlier),
        }
    }

    /// The shorter way round from the reading to `timestamp`.
    fn offset(&self, timestamp: u64) -> Offset {
        let (after, before) = (self.clock.ticks(self.ticks, timestamp), self.clock.ticks(timestamp, self.ticks));
        if after <= before {
            Offset::After(self.clock.duration(after))
        } else {
            Offset::Before(self.clock.duration(before))
        }
    }
}

enum Offset {
    After(Duration),
    Before(Duration),
}

impl Context {
    /// The clock that completions are stamped by, as the device describes it.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) when it does not stamp completions, or does not say how fast the clock
    /// is.
    pub fn clock(&self) -> Result<DeviceClock> {
        let attributes = self.attributes();
        match (attributes.hca_core_clock(), attributes.completion_timestamp_mask()) {
            (khz @ 1.., Some(mask)) => Ok(DeviceClock { khz, mask }),
            _ => Err(self.unsupported("timestamps of completions")),
        }
    }

    /// What the device's clock shows, in ticks: `ibv_query_rt_values_ex(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) when it cannot be read; [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_query_rt_values_ex")]
    pub fn raw_clock(&self) -> Result<u64> {
        let unsupported = || self.unsupported("reading its clock (ibv_query_rt_values_ex)");
        let mut values = ibv_values_ex { comp_mask: IBV_VALUES_MASK_RAW_CLOCK.0, ..ibv_values_ex::zeroed() };
        // SAFETY: the context is valid, and `values` is a valid in and out pointer.
        match check(unsafe { ibv_query_rt_values_ex(self.as_raw(), &mut values) }) {
            // The provider says which of the values it has set.
            Ok(()) if values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK.0 != 0 => {
                // mlx4 and mlx5 put all of the ticks into `tv_nsec`.
                let (high, low) = (values.raw_clock.tv_sec as u64, values.raw_clock.tv_nsec as u64);
                Ok(high.wrapping_mul(1_000_000_000).wrapping_add(low))
            }
            Ok(()) => Err(unsupported()),
            Err(errno) if errno.is_unsupported() => Err(unsupported()),
            Err(errno) => Err(self.verb_error("ibv_query_rt_values_ex", errno)),
        }
    }

    /// Reads the device's clock and those of the host together, to tell when completions were stamped.
    ///
    /// # Errors
    /// Those of [`Context::clock`] and [`Context::raw_clock`].
    pub fn read_clock(&self) -> Result<ClockReading> {
        let clock = self.clock()?;
        let (before, system_time) = (Instant::now(), SystemTime::now());
        let ticks = self.raw_clock()? & clock.mask;
        let uncertainty = before.elapsed() / 2;
        let instant = before.checked_add(uncertainty).unwrap_or(before);
        let system_time = system_time.checked_add(uncertainty).unwrap_or(system_time);
        Ok(ClockReading { clock, ticks, instant, system_time, uncertainty })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MHZ: DeviceClock = DeviceClock { khz: 1_000, mask: 0xffff };

    fn reading(ticks: u64) -> ClockReading {
        ClockReading {
            clock: MHZ,
            ticks,
            instant: Instant::now() + Duration::from_secs(1),
            system_time: SystemTime::now(),
            uncertainty: Duration::ZERO,
        }
    }

    #[test]
    fn ticks_become_time_by_the_rate_of_the_clock() {
        assert_eq!(MHZ.duration(1_500), Duration::from_micros(1_500));
        let odd = DeviceClock { khz: 156_250, mask: u64::MAX };
        assert_eq!(odd.duration(1), Duration::from_nanos(6), "rounded down");
        assert_eq!(odd.duration(156_250_000), Duration::from_secs(1));
        // The longest there is: 584 years at 1 GHz, and without overflow at any rate.
        assert_eq!(DeviceClock { khz: 1, mask: u64::MAX }.duration(u64::MAX).as_secs(), u64::MAX / 1_000);
        assert!(DeviceClock { khz: u64::MAX, mask: u64::MAX }.period() < Duration::from_secs(1));
        assert_eq!(MHZ.period(), Duration::from_micros(65_536));
    }

    #[test]
    fn a_clock_that_wrapped_went_on() {
        assert_eq!(MHZ.between(0xfff0, 0x10), Duration::from_micros(0x20));
        assert_eq!(MHZ.between(5, 5), Duration::ZERO);
        assert_eq!(MHZ.between(0x1_0005, 0x6), Duration::from_micros(1), "bits beyond the mask do not count");
    }

    #[test]
    fn a_timestamp_is_before_or_after_the_reading_whichever_is_nearer() {
        for ticks in [0, 100, 0x7fff, 0xffff] {
            let reading = reading(ticks);
            let at = |ticks: u64| reading.instant_of(ticks & 0xffff).unwrap();
            assert_eq!(at(ticks), reading.instant());
            assert_eq!(at(ticks.wrapping_add(30)), reading.instant() + Duration::from_micros(30));
            assert_eq!(at(ticks.wrapping_sub(30)), reading.instant() - Duration::from_micros(30));
            let earlier = reading.system_time_of(ticks.wrapping_sub(1_000) & 0xffff).unwrap();
            assert_eq!(earlier, reading.system_time() - Duration::from_millis(1));
        }
    }
}
