//! Time.

use std::ops::Add;
use std::time::Duration;

/// A moment, in nanoseconds since some other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(pub u64);

impl Add<Duration> for Time {
    type Output = Time;

    fn add(self, later: Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(later.as_nanos()).unwrap_or(u64::MAX)))
    }
}
