//! Axes of charts: the positions and labels of their marks.

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;

use crate::units::Bytes;

/// An axis in chart coordinates, which are plain or logarithmic.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Axis {
    pub(crate) range: Range<f64>,
    pub(crate) marks: Vec<f64>,
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        RangedCoordf64::from(self.range.clone()).map(value, limit)
    }

    /// Always the axis's own marks.
    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.marks.clone() }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

/// A linear axis from zero to a round number, with marks at multiples of 1, 2 or 5.
pub(crate) fn linear(max: f64) -> Axis {
    let max = if max.is_finite() && max > 0.0 { max } else { 1.0 };
    let power = 10_f64.powf((max / 6.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| max / step <= 6.0);
    let step = step.unwrap_or(10.0 * power);
    let count = (max / step).ceil();
    Axis { range: 0.0..count * step * 1.02, marks: (0..=count as u32).map(|n| f64::from(n) * step).collect() }
}

/// A logarithmic axis to base 10, with marks at 1, 2 and 5 times powers of ten, or only at powers if that is too many.
pub(crate) fn decimal(min: f64, max: f64) -> Axis {
    // Leaves room for at least two marks.
    let widen = (4.0 / (max / min)).max(1.0).sqrt() * 1.1;
    let range = (min / widen).log10()..(max * widen).log10();
    let factors: &[f64] = if range.end - range.start > 3.5 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let powers = range.start.floor() as i32..=range.end.ceil() as i32;
    let marks = powers.flat_map(|power| factors.iter().map(move |factor| f64::from(power) + factor.log10()));
    let marks = marks.filter(|mark| range.contains(mark)).collect();
    Axis { range, marks }
}

/// A logarithmic axis to base 2, with marks at evenly spaced powers of two.
pub(crate) fn binary(min: f64, max: f64) -> Axis {
    const MOST: f64 = 7.0;
    // Leaves room for at least two marks.
    let widen = (4.0 / (max / min)).max(1.0).sqrt() * 1.1;
    let range = (min / widen).log2()..(max * widen).log2();
    let span = range.end - range.start;
    // A step of 10 marks KiB, MiB and GiB.
    let step = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0].into_iter().find(|step| span / step < MOST).unwrap_or(100.0);
    let marks = ((range.start / step).ceil() as i32..=(range.end / step).floor() as i32).map(|n| f64::from(n) * step);
    Axis { marks: marks.collect(), range }
}

/// A logarithmic axis to base 2, with marks at the sizes, or at evenly spaced powers of two if that is too many.
pub(crate) fn sizes(sizes: &[u64], most: usize) -> Axis {
    let mut logs: Vec<f64> = sizes.iter().map(|size| (*size.max(&1) as f64).log2()).collect();
    logs.sort_by(f64::total_cmp);
    logs.dedup();
    let (min, max) = (logs.first().copied().unwrap_or(0.0), logs.last().copied().unwrap_or(0.0));
    let span = max - min;
    let pad = (span * 0.04).max(0.5);
    let close = (span + pad) / most as f64;
    let are_apart = logs.windows(2).all(|pair| pair[1] - pair[0] >= close);
    let marks = if logs.len() <= most && are_apart {
        logs
    } else {
        let step = (span / (most - 1).max(1) as f64).ceil().max(1.0) as usize;
        let mut powers = (min.ceil() as u32..=max.floor() as u32).step_by(step).map(f64::from).peekable();
        if powers.peek().is_some() { powers.collect() } else { vec![min] }
    };
    Axis { range: min - pad..max + pad, marks }
}

/// Label of a mark of [`sizes`].
pub(crate) fn size_text(log: f64) -> String {
    Bytes(log.exp2().round() as u64).to_string()
}

/// Label of a mark of [`decimal`] in nanoseconds.
pub(crate) fn time_text(log: f64) -> String {
    let nanoseconds = 10_f64.powf(log);
    let (number, unit) = match nanoseconds {
        // Marks may be off by a rounding error.
        ns if ns < 0.9999e3 => (ns, "ns"),
        ns if ns < 0.9999e6 => (ns / 1e3, "µs"),
        ns if ns < 0.9999e9 => (ns / 1e6, "ms"),
        ns => (ns / 1e9, "s"),
    };
    format!("{} {unit}", trimmed(number))
}

/// Label of a mark of [`binary`] in bytes per second.
pub(crate) fn bandwidth_text(log: f64) -> String {
    let units = [(40.0, "TiB/s"), (30.0, "GiB/s"), (20.0, "MiB/s"), (10.0, "KiB/s")];
    let (power, unit) = units.into_iter().find(|(power, _)| log >= *power).unwrap_or((0.0, "B/s"));
    format!("{} {unit}", trimmed((log - power).exp2()))
}

/// Label of a mark of [`decimal`] in messages per second.
pub(crate) fn rate_text(log: f64) -> String {
    let (number, unit) = match 10_f64.powf(log) {
        // Marks may be off by a rounding error.
        rate if rate < 0.9999e3 => (rate, ""),
        rate if rate < 0.9999e6 => (rate / 1e3, "k"),
        rate if rate < 0.9999e9 => (rate / 1e6, "M"),
        rate => (rate / 1e9, "G"),
    };
    format!("{}{unit}/s", trimmed(number))
}

/// Label of a mark of [`linear`].
pub(crate) fn trimmed(number: f64) -> String {
    let text = format!("{number:.6}");
    let text = if number.abs() >= 1e-3 || number == 0.0 { text } else { format!("{number:.9}") };
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_marks_are_round_and_cover_the_maximum() {
        for max in [0.0, 0.037, 1.0, 7.3, 94.0, 11_800.0, 46_500.0] {
            let axis = linear(max);
            assert!((4..=8).contains(&axis.marks.len()), "{max}: {axis:?}");
            assert!(axis.marks.last().unwrap() >= &(max * 0.999_999), "{max}: {axis:?}");
        }
        assert_eq!(
            linear(94.0).marks.iter().map(|mark| trimmed(*mark)).collect::<Vec<_>>(),
            ["0", "20", "40", "60", "80", "100"]
        );
    }

    #[test]
    fn time_axes_have_2_to_13_marks() {
        for (min, max) in [(2000.0, 2000.0), (1800.0, 2100.0), (900.0, 1.2e6), (50.0, 4e9)] {
            let axis = decimal(min, max);
            assert!((2..=13).contains(&axis.marks.len()), "{axis:?}");
            assert!(axis.range.contains(&f64::log10(min)) && axis.range.contains(&f64::log10(max)));
        }
        let marks = decimal(900.0, 12_000.0).marks;
        assert_eq!(marks.into_iter().map(time_text).collect::<Vec<_>>(), ["1 µs", "2 µs", "5 µs", "10 µs"]);
    }

    #[test]
    fn bandwidths_have_binary_units_and_rates_decimal_ones() {
        let text = |min: f64, max: f64| binary(min, max).marks.into_iter().map(bandwidth_text).collect::<Vec<_>>();
        let mib = f64::from(1 << 20);
        assert_eq!(text(2.0 * mib, 12e3 * mib), ["4 MiB/s", "16 MiB/s", "64 MiB/s", "256 MiB/s", "1 GiB/s", "4 GiB/s"]);
        assert_eq!(text(1000.0 * mib, 1000.0 * mib), ["512 MiB/s", "1 GiB/s", "2 GiB/s"]);
        assert_eq!(text(1.0, 1e12), ["1 B/s", "1 KiB/s", "1 MiB/s", "1 GiB/s", "1 TiB/s"]);
        for (min, max) in [(0.001, 0.001), (1.0, 3.0), (5.0, 1e5), (1e-3, 1e15)] {
            let axis = binary(min, max);
            assert!((2..=8).contains(&axis.marks.len()), "{axis:?}");
            assert!(axis.range.contains(&min.log2()) && axis.range.contains(&max.log2()));
        }
        let text = |min, max| decimal(min, max).marks.into_iter().map(rate_text).collect::<Vec<_>>();
        assert_eq!(text(700.0, 9e6), ["1k/s", "10k/s", "100k/s", "1M/s"]);
        assert_eq!(text(0.2, 0.2), ["0.1/s", "0.2/s"]);
    }

    #[test]
    fn few_sizes_have_their_own_marks() {
        let text = |list: &[u64]| sizes(list, 8).marks.into_iter().map(size_text).collect::<Vec<_>>();
        assert_eq!(text(&[1 << 20, 64, 4096]), ["64", "4K", "1M"]);
        assert_eq!(text(&[5000]), ["5000"]);
        let all: Vec<u64> = (1..24).map(|power| 1 << power).collect();
        assert_eq!(text(&all), ["2", "32", "512", "8K", "128K", "2M"]);
        assert_eq!(text(&[64, 65, 1 << 20]), ["64", "256", "1K", "4K", "16K", "64K", "256K", "1M"]);
        assert_eq!(text(&[65, 66, 67]), ["65"], "no power of two lies between them");
    }
}
