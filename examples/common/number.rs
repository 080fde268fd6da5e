//! Numbers on the command line.

use std::fmt::Display;
use std::ops::RangeInclusive;

/// Parses a number as `strtoul(3)` with base 0 does, so that what works with the C programs works here: decimal,
/// hexadecimal after `0x`, octal after `0`.
pub(crate) fn within<T>(text: &str, range: RangeInclusive<T>) -> Result<T, String>
where
    T: TryFrom<u64> + PartialOrd + Display,
{
    let (digits, radix) = match text.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&text[2..], 16),
        [b'0', _, ..] => (&text[1..], 8),
        _ => (text, 10),
    };
    // `from_str_radix` would take a sign.
    if !digits.chars().all(|digit| digit.is_digit(radix)) {
        return Err(format!("not a number; it is {} to {}", range.start(), range.end()));
    }
    u64::from_str_radix(digits, radix)
        .ok()
        .and_then(|value| T::try_from(value).ok())
        .filter(|value| range.contains(value))
        .ok_or_else(|| format!("out of range; it is {} to {}", range.start(), range.end()))
}

#[cfg(test)]
mod tests {
    use super::within;

    #[test]
    fn numbers_have_the_bases_of_c() {
        assert_eq!(within("4096", 1..=10_000_u32), Ok(4096));
        assert_eq!(within("0x1000", 1..=10_000_u32), Ok(4096));
        assert_eq!(within("010", 1..=10_000_u32), Ok(8));
        assert_eq!(within("0", 0..=3_u8), Ok(0));
    }

    #[test]
    fn what_is_no_number_or_out_of_range_is_refused_with_the_range() {
        for text in ["", "-1", "+1", "0x", "0x+1", "09", "4k", " 4", "é"] {
            let error = within(text, 1..=9_u32).unwrap_err();
            assert!(error.ends_with("it is 1 to 9"), "{text}: {error}");
        }
        assert_eq!(within("0", 1..=9_u32), Err("out of range; it is 1 to 9".into()));
        assert_eq!(within("256", 0..=255_u8), Err("out of range; it is 0 to 255".into()));
        assert_eq!(within("99999999999999999999", 0..=255_u8), Err("out of range; it is 0 to 255".into()));
    }
}
