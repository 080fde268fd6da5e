//! Random numbers that are the same for the same seed.

/// The SplitMix64 generator. Any seed is good.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }
}

/// The mixing function of SplitMix64, a bijection.
pub(super) fn mix(word: u64) -> u64 {
    let mixed = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}
