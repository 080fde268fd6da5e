//! Compares the results of the C program and the other program, launch by launch.

use anyhow::{Context, Result};

use super::columns::{Columns, Figure, is_rate};

/// Largest relative deviation of a printed figure from the C program's.
pub(super) const TOLERANCE: f64 = 0.02;

/// Comparison of both sides of a case. Arrays have C's value first.
#[derive(Clone, Debug)]
pub(super) struct Comparison {
    /// Fewest instructions per message over all launches.
    pub(super) best: [f64; 2],
    /// Excess of the worst launch over the best, as a fraction.
    pub(super) spread: [f64; 2],
    /// Printed columns, or how the columns of both sides differ.
    pub(super) columns: Result<Vec<Column>, String>,
}

/// A column that both programs print.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Column {
    pub(super) name: String,
    /// Best figure over all launches.
    pub(super) best: [Figure; 2],
    /// Worst figure over all launches.
    worst: [Figure; 2],
}

impl Comparison {
    /// Compares the launches of both sides. Each side needs at least one.
    pub(super) fn new(launches: [&[Columns]; 2]) -> Result<Self> {
        let (mut best, mut spread) = ([0.0; 2], [0.0; 2]);
        for (side, launches) in launches.iter().enumerate() {
            let counts: Vec<f64> = launches.iter().map(Columns::nanoseconds).collect::<Result<_>>()?;
            let fewest = counts.iter().copied().reduce(f64::min).context("no launches")?;
            best[side] = fewest;
            spread[side] = counts.iter().copied().fold(fewest, f64::max) / fewest - 1.0;
        }
        Ok(Self { best, spread, columns: columns(launches) })
    }

    pub(super) fn ratio(&self) -> f64 {
        self.best[1] / self.best[0]
    }
}

/// The common columns of both sides.
///
/// # Errors
/// With the difference if both sides print different columns.
fn columns(launches: [&[Columns]; 2]) -> Result<Vec<Column>, String> {
    let [c, other] = launches;
    let (Some(first), Some(theirs)) = (c.first(), other.first()) else { return Err("no launches".to_owned()) };
    if first.names() != theirs.names() {
        return Err(format!("C prints {:?}, the other side {:?}", first.names(), theirs.names()));
    }
    let column = |index: usize| {
        let name = first.names()[index].to_owned();
        let figures = |launches: &[Columns]| -> Vec<Figure> {
            let mut figures: Vec<Figure> =
                launches.iter().filter_map(|columns| columns.0.get(index)).map(|column| column.1).collect();
            figures.sort_by(|a, b| a.value.total_cmp(&b.value));
            if is_rate(&name) {
                figures.reverse();
            }
            figures
        };
        let (c, other) = (figures(c), figures(other));
        Column { best: [c[0], other[0]], worst: [c[c.len() - 1], other[other.len() - 1]], name }
    };
    Ok((0..first.0.len()).map(column).collect())
}

impl Column {
    /// Deviation of the other side's best from C's best, as a fraction.
    pub(super) fn deviation(&self) -> f64 {
        let [c, other] = self.best.map(|figure| figure.value);
        if c == other { 0.0 } else { other / c - 1.0 }
    }

    /// Distance between the range of the other side's launches and the range of C's, as a fraction of C's.
    ///
    /// It is 0 if the ranges overlap, or if they differ by one unit in the last printed digit. Where launches repeat
    /// exactly, a range is a point. The maximum, the highest percentiles and the standard deviation do not repeat: a few
    /// messages decide them, namely those that a timer tick interrupted.
    pub(super) fn excess(&self) -> f64 {
        let span = |side: usize| {
            let (best, worst) = (self.best[side].value, self.worst[side].value);
            (best.min(worst), best.max(worst))
        };
        let ((low, high), (other_low, other_high)) = (span(0), span(1));
        let (c, other) = if other_low > high { (high, other_low) } else { (low, other_high.min(low)) };
        // Values printed as 0.15 and 0.16 may differ by less than the sum of the two rounding errors.
        let [best, others_best] = self.best;
        let rounding = if best.is_whole() { 0.0 } else { best.unit().max(others_best.unit()) * 1.000_001 };
        if (other - c).abs() <= rounding { 0.0 } else { other / c - 1.0 }
    }

    /// Whether the column is within the tolerance. Whole numbers are requested counts and have to be equal.
    pub(super) fn met(&self) -> bool {
        let tolerance = if self.best[0].is_whole() { 0.0 } else { TOLERANCE };
        self.excess().abs() <= tolerance
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn latency(rows: &[&str]) -> Vec<Columns> {
        let header = " #bytes #iterations    t_min[usec]    t_max[usec]  t_avg[usec]    t_stdev[usec]";
        rows.iter().map(|row| Columns::perftest(&[header.to_owned(), (*row).to_owned()]).unwrap()).collect()
    }

    fn columns_of(c: &[&str], other: &[&str]) -> Vec<Column> {
        columns([&latency(c), &latency(other)]).unwrap()
    }

    fn unmet(columns: &[Column]) -> Vec<&str> {
        columns.iter().filter(|column| !column.met()).map(|column| column.name.as_str()).collect()
    }

    #[test]
    fn the_fewest_instructions_of_each_side_are_compared() {
        let c = latency(&["2 1000 29.24 33.00 30.20 0.10", "2 1000 29.24 33.00 30.00 0.10"]);
        let ours = latency(&["2 1000 29.24 33.00 30.12 0.10", "2 1000 29.24 33.00 30.18 0.10"]);
        let comparison = Comparison::new([&c, &ours]).unwrap();
        assert_eq!(format!("{:.4}", comparison.ratio()), "1.0040");
        assert_eq!(format!("{:.4} {:.4}", comparison.spread[0], comparison.spread[1]), "0.0067 0.0020");
        assert!(Comparison::new([&c, &[]]).is_err());
    }

    #[test]
    fn a_column_is_compared_with_the_range_of_the_c_launches() {
        let c = ["2 1000 29.24 31.00 30.00 0.11", "2 1000 29.24 34.00 30.00 0.14"];
        // t_min and t_avg deviate by 2 % from equal launches of C. t_max lies within the range of C. t_stdev is beyond the range
        // by one unit of the last digit.
        assert!(unmet(&columns_of(&c, &["2 1000 29.80 33.00 30.59 0.15"])).is_empty());
        assert_eq!(unmet(&columns_of(&c, &["2 1000 29.90 35.00 29.30 0.09"])), ["t_min", "t_max", "t_avg", "t_stdev"]);
        // The best launch is as far off, but the ranges overlap.
        let spans = ["2 1000 29.90 35.00 29.30 0.09", "2 1000 29.90 33.00 29.50 0.12"];
        assert_eq!(unmet(&columns_of(&c, &spans)), ["t_min"]);
    }

    #[test]
    fn sizes_and_iteration_counts_have_to_be_equal() {
        let c = ["2 1000 29.24 31.00 30.00 0.11"];
        assert_eq!(unmet(&columns_of(&c, &["2 999 29.24 31.00 30.00 0.11"])), ["#iterations"]);
    }

    #[test]
    fn the_best_rate_is_the_highest() {
        let rates = |rows: &[&str]| -> Vec<Columns> {
            let header = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]";
            rows.iter().map(|row| Columns::perftest(&[header.to_owned(), (*row).to_owned()]).unwrap()).collect()
        };
        let c = rates(&["64 5000 4.13 4.13 0.067632", "64 5000 4.13 4.10 0.067000"]);
        let ours = rates(&["64 5000 4.13 4.00 0.060000", "64 5000 4.13 4.12 0.067400"]);
        let columns = columns([&c, &ours]).unwrap();
        assert!(unmet(&columns).is_empty());
        assert_eq!(columns[4].best.map(|figure| figure.to_string()), ["0.067632", "0.067400"]);
        assert_eq!(format!("{:+.4}", columns[4].deviation()), "-0.0034");
    }

    #[test]
    fn different_columns_cannot_be_compared() {
        let pingpong = Columns::pingpong(&["= 1.00 usec/iter".to_owned()]).unwrap();
        assert!(columns([&latency(&["2 1000 1 2 3 4"]), &[pingpong]]).unwrap_err().contains("usec/iter"));
    }
}
