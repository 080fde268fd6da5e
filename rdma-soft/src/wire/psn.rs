//! Packet sequence numbers.

use std::fmt;

/// A packet sequence number (PSN): 24 bits that wrap.
///
/// Two numbers are ordered if they are less than 2²³ apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    const MASK: u32 = 0xff_ffff;

    /// Takes the lower 24 bits.
    #[must_use]
    pub const fn new(number: u32) -> Self {
        Psn(number & Psn::MASK)
    }

    /// Returns the number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the PSN that many packets later.
    #[must_use]
    #[allow(clippy::should_implement_trait, reason = "the argument is a packet count, and the sum wraps")]
    pub const fn add(self, packets: u32) -> Self {
        Psn::new(self.0.wrapping_add(packets))
    }

    /// Returns the distance from `earlier`, from −2²³ to 2²³ − 1. Negative if `self` is earlier.
    #[must_use]
    pub const fn since(self, earlier: Psn) -> i32 {
        // Shift the sign bit of the 24-bit number to the sign bit of the word, and back.
        (self.0.wrapping_sub(earlier.0) << 8) as i32 >> 8
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_wrap_at_24_bits() {
        let last = Psn::new(0xff_ffff);
        assert_eq!(last.add(1), Psn::new(0));
        assert_eq!((Psn::new(0).since(last), last.since(Psn::new(0))), (1, -1));
        assert_eq!(Psn::new(0x80_0000).since(Psn::new(0)), -0x80_0000);
        assert_eq!(Psn::new(0x7f_ffff).since(Psn::new(0)), 0x7f_ffff);
        assert_eq!(Psn::new(0x1234_5678).get(), 0x34_5678);
    }
}
