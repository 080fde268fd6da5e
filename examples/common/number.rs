//! Numbers on the command line.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

/// The largest value of an `int` in C.
pub const MAX_INT: u32 = i32::MAX as u32;

/// Parses a number in `range`, for `value_parser` of an option.
pub fn within<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone
where
    T: TryFrom<u64> + PartialOrd + Display + Clone,
{
    move |text| parse(text, &range)
}

/// Parses a time in whole seconds.
pub fn seconds(range: RangeInclusive<u64>) -> impl Fn(&str) -> Result<Duration, String> + Clone {
    move |text| parse(text, &range).map(Duration::from_secs)
}

/// Parses a number as `strtoul(3)` with base 0 does, as the C programs do: decimal, hexadecimal after `0x`, octal after `0`.
pub fn parse<T>(text: &str, range: &RangeInclusive<T>) -> Result<T, String>
where
    T: TryFrom<u64> + PartialOrd + Display,
{
    let (digits, radix) = match text.as_bytes() {
        [b'0', b'x' | b'X', ..] => (&text[2..], 16),
        [b'0', _, ..] => (&text[1..], 8),
        _ => (text, 10),
    };
    // `from_str_radix` would accept a sign.
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
    use super::*;

    #[test]
    fn numbers_have_the_bases_of_c() {
        let number = within(0..=10_000_u32);
        assert_eq!(["4096", "0x1000", "010", "0"].map(number), [Ok(4096), Ok(4096), Ok(8), Ok(0)]);
        assert_eq!(seconds(1..=9)("0x9"), Ok(Duration::from_secs(9)));
    }

    #[test]
    fn an_error_names_the_range() {
        for text in ["", "-1", "+1", "0x", "0x+1", "09", "4k", " 4", "é"] {
            let error = within(1..=9_u32)(text).unwrap_err();
            assert!(error.ends_with("it is 1 to 9"), "{text}: {error}");
        }
        assert_eq!(within(1..=9_u32)("0"), Err("out of range; it is 1 to 9".into()));
        assert_eq!(within(0..=255_u8)("256"), Err("out of range; it is 0 to 255".into()));
        assert_eq!(within(0..=255_u8)("99999999999999999999"), Err("out of range; it is 0 to 255".into()));
    }
}
