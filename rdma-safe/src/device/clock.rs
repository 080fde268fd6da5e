//! The device clock, which timestamps completions.

use std::time::{Duration, Instant, SystemTime};

use rdma_sys::*;

use crate::errno::check;
use crate::error::Verb;
use crate::{Context, Result};

/// Description of the clock that timestamps completions: its frequency and its width.
///
/// It counts ticks and wraps. Its value has no defined origin; a [`ClockReading`] relates it to the clocks of the host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DeviceClock {
    khz: u64,
    mask: u64,
}

impl DeviceClock {
    /// Frequency in kHz.
    #[must_use]
    pub fn khz(self) -> u64 {
        self.khz
    }

    /// Largest timestamp, as a bit mask. Timestamps wrap after it.
    #[must_use]
    pub fn mask(self) -> u64 {
        self.mask
    }

    /// Time until the clock wraps. Timestamps that are further apart cannot be compared.
    #[must_use]
    pub fn period(self) -> Duration {
        // One tick more than the mask, which may have all bits.
        self.duration(self.mask).saturating_add(self.duration(1))
    }

    /// Converts ticks to time, rounded down to nanoseconds.
    #[must_use]
    pub fn duration(self, ticks: u64) -> Duration {
        let nanos = u128::from(ticks) * 1_000_000 / u128::from(self.khz);
        let (seconds, nanos) = (nanos / 1_000_000_000, nanos % 1_000_000_000);
        Duration::new(u64::try_from(seconds).unwrap_or(u64::MAX), nanos as u32)
    }

    /// Time from timestamp `earlier` to timestamp `later`, less than [`DeviceClock::period`].
    #[must_use]
    pub fn between(self, earlier: u64, later: u64) -> Duration {
        self.duration(self.ticks(earlier, later))
    }

    /// Ticks from `earlier` to `later`. The clock may have wrapped in between.
    fn ticks(self, earlier: u64, later: u64) -> u64 {
        later.wrapping_sub(earlier) & self.mask
    }
}

/// A simultaneous reading of the device clock and the host clocks. Made by [`Context::read_clock`].
///
/// It converts timestamps up to half a clock period before or after the reading. The clocks drift apart by some
/// microseconds per second, so take a new reading from time to time.
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

    /// Value of the device clock, in ticks.
    #[must_use]
    pub fn ticks(&self) -> u64 {
        self.ticks
    }

    /// Time of the reading on the monotonic clock of the host.
    #[must_use]
    pub fn instant(&self) -> Instant {
        self.instant
    }

    /// Time of the reading on the wall clock of the host.
    #[must_use]
    pub fn system_time(&self) -> SystemTime {
        self.system_time
    }

    /// Largest deviation between the readings: half of the time that the query took.
    #[must_use]
    pub fn uncertainty(&self) -> Duration {
        self.uncertainty
    }

    /// Time of `timestamp` on the monotonic clock; `None` if that clock cannot represent it.
    #[must_use]
    pub fn instant_of(&self, timestamp: u64) -> Option<Instant> {
        match self.offset(timestamp) {
            Offset::After(later) => self.instant.checked_add(later),
            Offset::Before(earlier) => self.instant.checked_sub(earlier),
        }
    }

    /// Time of `timestamp` on the wall clock; `None` if that clock cannot represent it.
    #[must_use]
    pub fn system_time_of(&self, timestamp: u64) -> Option<SystemTime> {
        match self.offset(timestamp) {
            Offset::After(later) => self.system_time.checked_add(later),
            Offset::Before(earlier) => self.system_time.checked_sub(earlier),
        }
    }

    /// The shorter distance from the reading to `timestamp`.
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
    /// Description of the clock that timestamps completions, as the device reports it.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the device does not timestamp completions, or does not
    /// report the frequency of its clock.
    pub fn clock(&self) -> Result<DeviceClock> {
        let attributes = self.attributes();
        match (attributes.hca_core_clock(), attributes.completion_timestamp_mask()) {
            (khz @ 1.., Some(mask)) => Ok(DeviceClock { khz, mask }),
            _ => Err(self.unsupported("timestamps of completions")),
        }
    }

    /// Current value of the device clock, in ticks: `ibv_query_rt_values_ex(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if it cannot be read; [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_query_rt_values_ex")]
    pub fn raw_clock(&self) -> Result<u64> {
        let unsupported = || self.unsupported("reading its clock (ibv_query_rt_values_ex)");
        let mut values = ibv_values_ex { comp_mask: IBV_VALUES_MASK_RAW_CLOCK.0, ..ibv_values_ex::zeroed() };
        // SAFETY: the context is valid, and `values` is a valid in and out pointer.
        match check(unsafe { ibv_query_rt_values_ex(self.as_raw(), &mut values) }) {
            // The provider reports which values it has set.
            Ok(()) if values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK.0 != 0 => {
                // mlx4 and mlx5 put all ticks into `tv_nsec`.
                let (high, low) = (values.raw_clock.tv_sec as u64, values.raw_clock.tv_nsec as u64);
                Ok(high.wrapping_mul(1_000_000_000).wrapping_add(low))
            }
            Ok(()) => Err(unsupported()),
            Err(errno) if errno.is_unsupported() => Err(unsupported()),
            Err(errno) => Err(self.verb_error(Verb::QueryRtValuesEx, errno)),
        }
    }

    /// Reads the device clock and the host clocks together, to convert timestamps of completions.
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
    fn ticks_are_converted_by_the_frequency_of_the_clock() {
        assert_eq!(MHZ.duration(1_500), Duration::from_micros(1_500));
        let odd = DeviceClock { khz: 156_250, mask: u64::MAX };
        assert_eq!(odd.duration(1), Duration::from_nanos(6), "rounded down");
        assert_eq!(odd.duration(156_250_000), Duration::from_secs(1));
        // The longest duration: 584 years at 1 GHz, without overflow at any frequency.
        assert_eq!(DeviceClock { khz: 1, mask: u64::MAX }.duration(u64::MAX).as_secs(), u64::MAX / 1_000);
        assert!(DeviceClock { khz: u64::MAX, mask: u64::MAX }.period() < Duration::from_secs(1));
        assert_eq!(MHZ.period(), Duration::from_micros(65_536));
    }

    #[test]
    fn intervals_are_right_across_a_wrap() {
        assert_eq!(MHZ.between(0xfff0, 0x10), Duration::from_micros(0x20));
        assert_eq!(MHZ.between(5, 5), Duration::ZERO);
        assert_eq!(MHZ.between(0x1_0005, 0x6), Duration::from_micros(1), "bits beyond the mask do not count");
    }

    #[test]
    fn a_timestamp_is_taken_as_the_nearer_one_before_or_after_the_reading() {
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
