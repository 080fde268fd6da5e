//! Random numbers.

use std::hash::{BuildHasher, RandomState};

/// The SplitMix64 generator. The same seed gives the same numbers, and any seed is good.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns true for this share of the calls, from 0 to 1.
    pub(crate) fn chance(&mut self, share: f64) -> bool {
        // A uniform number of 53 bits, the precision of `f64`.
        ((self.next() >> 11) as f64) < share * (1_u64 << 53) as f64
    }
}

/// The mixing function of SplitMix64, a bijection.
pub(crate) fn mix(word: u64) -> u64 {
    let mixed = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// Returns a number that differs from call to call and from process to process.
pub(crate) fn seed() -> u64 {
    RandomState::new().hash_one(())
}
