//! Ticks of the device's clock between messages.

use std::fmt;

/// Statistics of the time from one receive to the next.
#[derive(Debug)]
pub(crate) struct Ticks {
    /// Largest value of the clock.
    mask: u64,
    last: Option<u64>,
    max: u64,
    min: u64,
    total: u64,
    count: u32,
}

impl Ticks {
    /// Creates statistics of a clock that wraps around after `mask`.
    pub(crate) fn new(mask: u64) -> Self {
        // The minimum starts at the value of the C program, which it prints for longer times.
        Ticks { mask, last: None, max: 0, min: 0xffff_ffff, total: 0, count: 0 }
    }

    pub(crate) fn add(&mut self, timestamp: u64) {
        if let Some(last) = self.last {
            let delta = match timestamp.checked_sub(last) {
                Some(delta) => delta,
                None => self.mask.wrapping_sub(last).wrapping_add(timestamp).wrapping_add(1),
            };
            self.max = self.max.max(delta);
            self.min = self.min.min(delta);
            self.total = self.total.wrapping_add(delta);
            self.count += 1;
        }
        self.last = Some(timestamp);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }
}

impl fmt::Display for Ticks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Max receive completion clock cycles = {}", self.max)?;
        writeln!(f, "Min receive completion clock cycles = {}", self.min)?;
        let average = self.total as f64 / f64::from(self.count);
        write!(f, "Average receive completion clock cycles = {average:.6}")
    }
}

#[cfg(test)]
mod tests {
    use super::Ticks;

    #[test]
    fn lines_are_those_of_c() {
        let mut ticks = Ticks::new(u64::MAX);
        ticks.add(100);
        assert!(ticks.is_empty());
        ticks.add(110);
        ticks.add(125);
        assert_eq!(
            ticks.to_string(),
            "Max receive completion clock cycles = 15\nMin receive completion clock cycles = 10\n\
             Average receive completion clock cycles = 12.500000"
        );
    }

    #[test]
    fn the_clock_may_wrap_around() {
        let mut ticks = Ticks::new(0xffff);
        ticks.add(0xfff0);
        ticks.add(0x10);
        assert_eq!((ticks.min, ticks.max), (0x20, 0x20));
    }
}
