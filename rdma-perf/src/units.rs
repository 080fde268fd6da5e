//! Parses and prints sizes, rates and durations.

use std::fmt;
use std::time::Duration;

/// Parses a size such as `64`, `4K`, `1M` or `1G`, in powers of 1024.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let (digits, factor) = match text.trim().trim_end_matches(['b', 'B', 'i']).char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text[..at], 1 << 10),
        Some((at, 'm' | 'M')) => (&text[..at], 1 << 20),
        Some((at, 'g' | 'G')) => (&text[..at], 1 << 30),
        _ => (text.trim().trim_end_matches(['b', 'B']), 1_u64),
    };
    let number: u64 = digits.trim().parse().map_err(|_| format!("`{text}` is not a size such as 64, 4K or 1M"))?;
    number.checked_mul(factor).ok_or_else(|| format!("`{text}` is too large"))
}

/// Parses a list of sizes such as `64,4K,1M`. `2..8M` stands for the powers of two in this range.
pub(crate) fn sizes(text: &str) -> Result<Vec<u64>, String> {
    let mut list = Vec::new();
    for part in text.split(',') {
        match part.split_once("..") {
            None => list.push(size(part)?),
            Some((from, to)) => {
                let (from, to) = (size(from)?.max(1), size(to.trim_start_matches('='))?);
                if from > to {
                    return Err(format!("`{part}` ends before it begins"));
                }
                list.extend(
                    std::iter::successors(Some(from), |size| size.checked_mul(2)).take_while(|size| *size <= to),
                );
            }
        }
    }
    Ok(list)
}

/// Parses a time such as `500ms`, `10s`, `2m`, or `10` for seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().map_err(|_| format!("`{text}` is not a time such as 500ms or 10s"))?;
    let seconds = match unit.trim() {
        "ns" => number * 1e-9,
        "us" | "µs" | "usec" => number * 1e-6,
        "ms" => number * 1e-3,
        "" | "s" => number,
        "m" | "min" => number * 60.0,
        "h" => number * 3600.0,
        unit => return Err(format!("`{unit}` is not a unit of time: use ns, us, ms, s, m or h")),
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("`{text}` is too long"))
}

/// A limit of the send rate.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Rate {
    BytesPerSecond(f64),
    MessagesPerSecond(f64),
}

impl Rate {
    /// The rate in messages of `size` bytes per second.
    pub(crate) fn messages(self, size: u64) -> f64 {
        match self {
            Rate::BytesPerSecond(bytes) => bytes / size.max(1) as f64,
            Rate::MessagesPerSecond(messages) => messages,
        }
    }
}

/// Parses a rate such as `10Gb/s`, `500MiB/s`, `1Mmsg/s`.
pub(crate) fn rate(text: &str) -> Result<Rate, String> {
    let wrong = || format!("`{text}` is not a rate such as 10Gb/s, 500MiB/s or 1Mmsg/s");
    let body = text.trim().strip_suffix("/s").or_else(|| text.trim().strip_suffix("ps")).ok_or_else(wrong)?;
    let split = body.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
    let (number, unit) = body.split_at(split);
    let number: f64 = number.parse().map_err(|_| wrong())?;
    if !number.is_finite() || number <= 0.0 {
        return Err(format!("`{text}` is not more than zero"));
    }
    let scale = |prefix: &str| match prefix {
        "" => Some(1.0),
        "k" | "K" => Some(1e3),
        "M" => Some(1e6),
        "G" => Some(1e9),
        "Ki" => Some(1024.0),
        "Mi" => Some(1024.0 * 1024.0),
        "Gi" => Some(1024.0 * 1024.0 * 1024.0),
        _ => None,
    };
    let unit = unit.trim();
    if let Some(prefix) = unit.strip_suffix("msg") {
        return scale(prefix).map(|scale| Rate::MessagesPerSecond(number * scale)).ok_or_else(wrong);
    }
    if let Some(prefix) = unit.strip_suffix("bit").or_else(|| unit.strip_suffix('b')) {
        return scale(prefix).map(|scale| Rate::BytesPerSecond(number * scale / 8.0)).ok_or_else(wrong);
    }
    let prefix = unit.strip_suffix('B').ok_or_else(wrong)?;
    scale(prefix).map(|scale| Rate::BytesPerSecond(number * scale)).ok_or_else(wrong)
}

/// Prints bytes in the largest unit that divides them.
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(30, "G"), (20, "M"), (10, "K")] {
            if self.0 >= 1 << shift && self.0 % (1 << shift) == 0 {
                return f.pad(&format!("{}{unit}", self.0 >> shift));
            }
        }
        f.pad(&self.0.to_string())
    }
}

/// Prints an amount of memory with one decimal.
pub(crate) fn amount(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0x4000_0000.. => (30, "GiB"),
        0x10_0000.. => (20, "MiB"),
        _ => (10, "KiB"),
    };
    let text = format!("{:.1}", bytes as f64 / f64::from(1 << unit));
    format!("{} {name}", text.trim_end_matches(".0"))
}

/// Prints nanoseconds in a unit that keeps the number short.
pub(crate) struct Nanos(pub(crate) f64);

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, unit) = match self.0 {
            ns if ns < 1e3 => (ns, "ns"),
            ns if ns < 1e6 => (ns / 1e3, "µs"),
            ns if ns < 1e9 => (ns / 1e6, "ms"),
            ns => (ns / 1e9, "s"),
        };
        let digits = if number < 10.0 { 2 } else { usize::from(number < 100.0) };
        f.pad(&format!("{number:.digits$} {unit}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_accept_units_lists_and_ranges() {
        assert_eq!(sizes("64,4K,1MiB,2g"), Ok(vec![64, 4096, 1 << 20, 2 << 30]));
        assert_eq!(sizes("2..16"), Ok(vec![2, 4, 8, 16]));
        assert_eq!(sizes("1K..5K,7"), Ok(vec![1024, 2048, 4096, 7]));
        assert_eq!(sizes("0"), Ok(vec![0]));
        for wrong in ["", "x", "4T", "8..2", "99999999999999999999", "-1", "20000000000G"] {
            assert!(sizes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn durations_accept_units() {
        assert_eq!(duration("10"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("250us"), Ok(Duration::from_micros(250)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        for wrong in ["", "s", "1x", "-1s", "1e400s"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn rates_are_in_bits_bytes_or_messages() {
        assert_eq!(rate("8Gb/s"), Ok(Rate::BytesPerSecond(1e9)));
        assert_eq!(rate("100Gbps"), Ok(Rate::BytesPerSecond(12.5e9)));
        assert_eq!(rate("1MiB/s"), Ok(Rate::BytesPerSecond(1_048_576.0)));
        assert_eq!(rate("2Mmsg/s"), Ok(Rate::MessagesPerSecond(2e6)));
        assert_eq!(Rate::BytesPerSecond(6400.0).messages(64), 100.0);
        for wrong in ["", "10", "10/s", "xGb/s", "0b/s", "1Tb/s", "-1MB/s"] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn numbers_print_short() {
        assert_eq!(
            [Bytes(64), Bytes(4096), Bytes(5000), Bytes(8 << 20)].map(|b| b.to_string()),
            ["64", "4K", "5000", "8M"]
        );
        assert_eq!(
            [Nanos(12.0), Nanos(1500.0), Nanos(2.5e7)].map(|t| t.to_string()),
            ["12.0 ns", "1.50 µs", "25.0 ms"]
        );
    }

    #[test]
    fn amounts_print_with_a_unit() {
        assert_eq!([65536, 8 << 20, 5 << 29].map(amount), ["64 KiB", "8 MiB", "2.5 GiB"]);
    }
}
