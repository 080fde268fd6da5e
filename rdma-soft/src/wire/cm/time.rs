//! Time values of messages.

use std::time::Duration;

/// Greatest value of a field of 5 bits.
const MAX: u8 = 31;

/// Converts a time value of 5 bits to a duration, as Linux does: 2ᵗ⁻⁸ ms, and at least 1 ms.
///
/// The specification says 4.096 µs · 2ᵗ, which is 5 % longer for values of 8 and more. The source is `cm_convert_to_ms` in
/// Linux's drivers/infiniband/core/cm.c. The upper 3 bits are ignored.
#[must_use]
pub const fn timeout(value: u8) -> Duration {
    Duration::from_millis(1 << (value & MAX).saturating_sub(8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_those_of_linux() {
        let millis = |value| timeout(value).as_millis();
        assert_eq!((millis(0), millis(7), millis(8), millis(9)), (1, 1, 1, 2));
        // rdma_cm's response timeout, its MRA, and the longest.
        assert_eq!((millis(20), millis(24), millis(31)), (4096, 65_536, 8_388_608));
        assert_eq!((millis(32), millis(0xff)), (1, 8_388_608));
    }
}
