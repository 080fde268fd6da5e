//! Size classes: 64 B to 64 MiB, four to each power of two.

/// Smallest class in bytes.
pub(crate) const MIN: usize = 64;

/// Largest class in bytes.
pub(crate) const MAX: usize = 64 << 20;

/// Number of classes.
pub(crate) const COUNT: usize = 4 * (MAX.trailing_zeros() - MIN.trailing_zeros()) as usize + 1;

/// The class of an allocation of `len` bytes, or `None` above [`MAX`].
pub(crate) fn of(len: usize) -> Option<usize> {
    (len <= MAX).then(|| of_any(len))
}

/// The class of an allocation of `len` bytes. Above [`MAX`], a number of at least [`COUNT`].
#[inline(always)]
pub(crate) fn of_any(len: usize) -> usize {
    if len <= MIN {
        return 0;
    }
    // The two bits below the leading one of `len - 1` select the quarter. A class ends its quarter.
    quarter(len - 1) + 1
}

/// The largest class whose blocks have at most `len` bytes, if there is one.
pub(crate) fn at_most(len: usize) -> Option<usize> {
    (len >= MIN).then(|| quarter(len).min(COUNT - 1))
}

/// The class whose blocks have exactly `capacity` bytes, if there is one.
pub(crate) fn of_block(capacity: usize) -> Option<usize> {
    let class = quarter(capacity);
    (class < COUNT && size(class) == capacity).then_some(class)
}

/// The number of quarters of a power of two between [`MIN`] and `value`. For less than that, any number.
#[inline(always)]
pub(crate) fn quarter(value: usize) -> usize {
    // The base-two logarithm, by one instruction of x86-64, unlike `ilog2`, whose subtraction stays.
    let power = (usize::BITS - 1) ^ value.leading_zeros();
    // The upper three bits are four to seven.
    let upper = value.wrapping_shr(power.wrapping_sub(2));
    (power as usize).wrapping_sub(MIN.trailing_zeros() as usize + 1).wrapping_mul(4).wrapping_add(upper)
}

/// Bytes of a block of `class`, which must be less than [`COUNT`].
#[inline(always)]
pub(crate) const fn size(class: usize) -> usize {
    (4 + (class & 3)) << (class / 4 + MIN.trailing_zeros() as usize - 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_holds_its_size_and_nothing_more() {
        for class in 0..COUNT {
            assert_eq!(of(size(class)), Some(class));
            assert_eq!((of_block(size(class)), of_block(size(class) - 1)), (Some(class), None));
            let next = (class + 1 < COUNT).then_some(class + 1);
            assert_eq!(of(size(class) + 1), next);
            assert_eq!((at_most(size(class)), at_most(size(class) + 1)), (Some(class), Some(class)));
            assert_eq!(at_most(size(class) - 1), class.checked_sub(1));
        }
        assert_eq!((at_most(0), at_most(usize::MAX)), (None, Some(COUNT - 1)));
        assert!((0..MIN).all(|capacity| of_block(capacity).is_none()));
        assert_eq!((size(0), size(COUNT - 1), COUNT), (64, 64 << 20, 81));
    }

    #[test]
    fn allocations_above_the_smallest_class_waste_at_most_a_quarter() {
        // The first byte after a class wastes most.
        for len in (1..COUNT).map(|class| size(class - 1) + 1) {
            let block = size(of(len).unwrap());
            assert!(4 * (block - len) < len, "{len} bytes in a block of {block}");
        }
    }

    #[test]
    fn sizes_are_multiples_of_sixteen() {
        assert!((0..COUNT).all(|class| size(class) % 16 == 0));
    }
}
