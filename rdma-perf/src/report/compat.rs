//! Compares perftest's statistics with those of all samples of the same run.

use std::fmt::Write;

use super::Row;
use crate::stats::{Latency, Perftest};

/// Compares perftest's figures with the figures of all messages: a table with one line per size, and the reasons for differences.
///
/// `unit` is the name of the bandwidth unit and its bytes per second. The text is empty if no row has figures of both kinds.
pub(crate) fn comparison(rows: &[Row], unit: (&str, f64)) -> String {
    let mut lines = Vec::new();
    let mut names: &[&str] = &[];
    let mut notes = "";
    for row in rows {
        let cells = match (&row.perftest, &row.latency) {
            (Some(perftest @ Perftest::Latency { .. }), Some(latency)) => {
                (names, notes) = (&LATENCY, LATENCY_NOTES);
                latency_cells(perftest, latency)
            }
            (Some(perftest @ Perftest::Bandwidth { .. }), _) => {
                (names, notes) = (&BANDWIDTH, BANDWIDTH_NOTES);
                bandwidth_cells(perftest, row, unit.1)
            }
            _ => continue,
        };
        lines.push((row.size.to_string(), cells));
    }
    if lines.is_empty() {
        return String::new();
    }
    let unit = if names == BANDWIDTH { unit.0 } else { "µs" };
    let mut out = format!("\n perftest's figures -> those of all messages of this run [{unit}]\n");
    let titles: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    lines.insert(0, ("#bytes".to_owned(), titles));
    let width = lines.iter().flat_map(|(_, cells)| cells).map(|cell| cell.chars().count()).max().unwrap_or(0);
    for (size, cells) in lines {
        _ = write!(out, " {size:<8}");
        for cell in cells {
            _ = write!(out, "  {cell:>width$}");
        }
        out.push('\n');
    }
    out.push_str(notes);
    out
}

const LATENCY: [&str; 5] = ["t_max", "t_avg", "t_stdev", "99%", "99.9%"];
const LATENCY_NOTES: &str =
    " t_max, t_avg, t_stdev: perftest drops the slowest sample from t_max, and the two slowest from the others
 t_stdev: perftest truncates each deviation to whole microseconds before squaring it
 99%, 99.9%: perftest takes the sample one rank higher; below about 1000 messages its 99.9% is its t_max
";

const BANDWIDTH: [&str; 2] = ["BW peak", "BW average"];
const BANDWIDTH_NOTES: &str =
    " BW peak: perftest takes the best window of any length, even one message; ours is that of the fastest millisecond
 BW average: both are from the first post to the last completion
";

fn latency_cells(perftest: &Perftest, latency: &Latency) -> Vec<String> {
    let Perftest::Latency { max, average, standard_deviation, percentile_99, percentile_99_9, .. } = *perftest else {
        return Vec::new();
    };
    let pairs = [
        (max, Some(latency.max)),
        (average, Some(latency.mean)),
        (standard_deviation, Some(latency.standard_deviation)),
        (percentile_99, latency.percentile(99.0)),
        (percentile_99_9, latency.percentile(99.9)),
    ];
    pairs.into_iter().map(|(theirs, ours)| cell(theirs, ours.map(|nanoseconds| nanoseconds / 1e3))).collect()
}

fn bandwidth_cells(perftest: &Perftest, row: &Row, unit: f64) -> Vec<String> {
    let Perftest::Bandwidth { peak, average, .. } = *perftest else { return Vec::new() };
    let theirs = |mib: f64| mib * f64::from(1 << 20) / unit;
    let own = row.bandwidth.as_ref();
    vec![
        cell(theirs(peak), own.and_then(|own| own.peak).map(|peak| peak / unit)),
        cell(theirs(average), own.map(|own| own.average / unit)),
    ]
}

/// Formats `theirs -> ours (difference)`.
fn cell(theirs: f64, ours: Option<f64>) -> String {
    let Some(ours) = ours else { return format!("{theirs:.2} -> -") };
    let percent = (ours / theirs - 1.0) * 100.0;
    let difference = if theirs <= 0.0 {
        // perftest computes no peak beyond 20000 messages, and no deviation if all are below a microsecond.
        "-".into()
    } else if percent.abs() < 1000.0 {
        format!("{percent:+.1}%")
    } else {
        format!("x{:.0}", ours / theirs)
    };
    format!("{theirs:.2} -> {ours:.2} ({difference})")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sample;

    const MIB: (&str, f64) = ("MiB/s", 1_048_576.0);

    #[test]
    fn a_maximum_that_perftest_drops_is_shown() {
        let mut report = sample::report("send lat host -s 2,64 --compat perftest", "");
        let latency = report.rows[0].latency.as_mut().unwrap();
        latency.max = 48_100.0;
        report.rows[0].perftest = Some(Perftest::Latency {
            iterations: 1000,
            min: 1.0,
            max: 12.0,
            typical: 2.0,
            average: 2.0,
            standard_deviation: 0.0,
            percentile_99: 3.0,
            percentile_99_9: 12.0,
        });
        let text = comparison(&report.rows, MIB);
        assert!(text.contains("12.00 -> 48.10 (+300.8%)"), "{text}");
        assert!(text.contains("0.00 -> 0.80 (-)"), "{text}");
        assert!(text.contains("perftest drops the slowest sample"), "{text}");
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[2].chars().count(), lines[3].chars().count(), "{text}");
        assert_eq!(lines[3].chars().count(), lines[4].chars().count(), "{text}");
    }

    #[test]
    fn bandwidths_are_compared_in_one_unit() {
        let mut report = sample::report("write bw host --compat perftest", "");
        report.rows[0].perftest =
            Some(Perftest::Bandwidth { iterations: 5000, peak: 200.0, average: 100.0, message_rate: 1.0 });
        let own = report.rows[0].bandwidth.as_mut().unwrap();
        (own.average, own.peak) = (100.0 * MIB.1, Some(110.0 * MIB.1));
        let text = comparison(&report.rows, MIB);
        assert!(text.contains("200.00 -> 110.00 (-45.0%)") && text.contains("100.00 -> 100.00 (+0.0%)"), "{text}");
    }

    #[test]
    fn native_rows_have_no_comparison() {
        assert_eq!(comparison(&sample::report("send lat host", "").rows, MIB), "");
    }
}
