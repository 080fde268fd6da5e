//! C's launches beside those of the other side.

use anyhow::{Context, Result};

use super::columns::{Columns, Figure, is_rate};

/// How far a printed figure may be from what C prints.
pub(super) const TOLERANCE: f64 = 0.02;

/// The outcome of a case.
#[derive(Clone, Debug)]
pub(super) struct Comparison {
    /// Instructions of a message: the fewest of C's launches, and of the other's.
    pub(super) best: [f64; 2],
    /// How much more the worst launch of each took than its best, as a fraction.
    pub(super) spread: [f64; 2],
    pub(super) columns: Result<Vec<Column>, String>,
}

/// One of the columns that both print.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Column {
    pub(super) name: String,
    /// The best of C's launches, and of the other's.
    pub(super) best: [Figure; 2],
    /// The worst of each.
    worst: [Figure; 2],
}

impl Comparison {
    /// Compares the launches of both sides, of which there is at least one.
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

/// The columns of both, or how they differ.
fn columns(launches: [&[Columns]; 2]) -> Result<Vec<Column>, String> {
    let [c, other] = launches;
    let (Some(first), Some(theirs)) = (c.first(), other.first()) else { return Err("no launches".to_owned()) };
    if first.names() != theirs.names() {
        return Err(format!("C prints {:?}, the other {:?}", first.names(), theirs.names()));
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
    /// How much more than C's best the other's best is, as a fraction.
    pub(super) fn deviation(&self) -> f64 {
        let [c, other] = self.best.map(|figure| figure.value);
        if c == other { 0.0 } else { other / c - 1.0 }
    }

    /// How far what the other's launches span is from what C's span, as a fraction of C's; 0 if they overlap, and for a
    /// difference in the last printed digit.
    ///
    /// Where launches repeat each other the spans are points. They do not in what a few messages decide: the largest
    /// time, the last percentiles and the deviation say how many ticks of the timer fell between two messages.
    pub(super) fn excess(&self) -> f64 {
        let span = |side: usize| {
            let (best, worst) = (self.best[side].value, self.worst[side].value);
            (best.min(worst), best.max(worst))
        };
        let ((low, high), (other_low, other_high)) = (span(0), span(1));
        let (c, other) = if other_low > high { (high, other_low) } else { (low, other_high.min(low)) };
        // What is printed as 0.15 and as 0.16 may differ by less than the sum of two roundings.
        let [best, others_best] = self.best;
        let rounding = if best.is_whole() { 0.0 } else { best.unit().max(others_best.unit()) * 1.000_001 };
        if (other - c).abs() <= rounding { 0.0 } else { other / c - 1.0 }
    }

    /// Whether it is within the tolerance. Whole numbers, which count what was asked for, have to be the same.
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

    fn broken(columns: &[Column]) -> Vec<&str> {
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
    fn a_column_is_held_to_what_the_launches_of_c_span() {
        let c = ["2 1000 29.24 31.00 30.00 0.11", "2 1000 29.24 34.00 30.00 0.14"];
        // 2 % off where C repeats itself, anywhere between where it does not, and one unit of the last digit.
        assert!(broken(&columns_of(&c, &["2 1000 29.80 33.00 30.59 0.15"])).is_empty());
        assert_eq!(broken(&columns_of(&c, &["2 1000 29.90 35.00 29.30 0.09"])), ["t_min", "t_max", "t_avg", "t_stdev"]);
        // As far off at best, but not in each launch.
        let spans = ["2 1000 29.90 35.00 29.30 0.09", "2 1000 29.90 33.00 29.50 0.12"];
        assert_eq!(broken(&columns_of(&c, &spans)), ["t_min"]);
    }

    #[test]
    fn sizes_and_numbers_of_iterations_are_the_same_or_wrong() {
        let c = ["2 1000 29.24 31.00 30.00 0.11"];
        assert_eq!(broken(&columns_of(&c, &["2 999 29.24 31.00 30.00 0.11"])), ["#iterations"]);
    }

    #[test]
    fn the_best_of_rates_is_the_largest() {
        let rates = |rows: &[&str]| -> Vec<Columns> {
            let header = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]";
            rows.iter().map(|row| Columns::perftest(&[header.to_owned(), (*row).to_owned()]).unwrap()).collect()
        };
        let c = rates(&["64 5000 4.13 4.13 0.067632", "64 5000 4.13 4.10 0.067000"]);
        let ours = rates(&["64 5000 4.13 4.00 0.060000", "64 5000 4.13 4.12 0.067400"]);
        let columns = columns([&c, &ours]).unwrap();
        assert!(broken(&columns).is_empty());
        assert_eq!(columns[4].best.map(|figure| figure.to_string()), ["0.067632", "0.067400"]);
        assert_eq!(format!("{:+.4}", columns[4].deviation()), "-0.0034");
    }

    #[test]
    fn other_columns_cannot_be_compared() {
        let pingpong = Columns::pingpong(&["= 1.00 usec/iter".to_owned()]).unwrap();
        assert!(columns([&latency(&["2 1000 1 2 3 4"]), &[pingpong]]).unwrap_err().contains("usec/iter"));
    }
}
