//! Text tables.

use std::fmt::Write;

use super::{Report, Row, compat};
use crate::plan::{Metric, Plan};
use crate::stats::{Bandwidth, Latency, Perftest};
use crate::units::Nanos;

/// A table that is printed line by line.
///
/// With `--compat perftest` it is identical to perftest's table.
#[derive(Debug)]
pub(crate) struct Table {
    metric: Metric,
    compat: bool,
    bidirectional: bool,
    gbits: bool,
    percentiles: Vec<f64>,
    definition: &'static str,
    columns: Vec<Column>,
}

#[derive(Debug)]
struct Column {
    title: String,
    width: usize,
}

impl Column {
    fn new(title: impl Into<String>, width: usize) -> Column {
        let title = title.into();
        Column { width: width.max(title.chars().count()), title }
    }
}

const MIB: f64 = (1 << 20) as f64;
/// Bytes per second.
const GBITS: f64 = 1e9 / 8.0;

impl Table {
    /// A table with bandwidths in Gb/s if `gbits` is set, otherwise in MiB/s.
    pub(crate) fn new(plan: &Plan, percentiles: &[f64], gbits: bool) -> Table {
        let mut table = Table {
            metric: plan.metric,
            compat: plan.compat,
            bidirectional: plan.bidirectional,
            gbits,
            percentiles: percentiles.to_vec(),
            definition: plan.latency_definition(),
            columns: Vec::new(),
        };
        if plan.metric == Metric::Lat {
            // The median is in the column t_typical.
            table.percentiles.retain(|percent| *percent != 50.0);
        }
        table.columns = table.columns();
        table
    }

    /// The column titles, without a line feed.
    pub(crate) fn header(&self) -> String {
        if self.compat {
            return perftest_header(self.metric, self.gbits).to_owned();
        }
        self.line(self.columns.iter().map(|column| column.title.clone()))
    }

    /// The line of one size, without a line feed.
    pub(crate) fn row(&self, row: &Row) -> String {
        match (&row.perftest, self.metric) {
            (Some(perftest), _) if self.compat => perftest_row(row.size, perftest, self.gbits),
            (_, Metric::Bw) => self.line(self.bandwidth_cells(row).into_iter().chain(cpu_cells(row))),
            (_, Metric::Lat) => self.line(self.latency_cells(row).into_iter().chain(cpu_cells(row))),
        }
    }

    /// Notes below the table. Each line ends in a line feed.
    pub(crate) fn footer(&self, report: &Report) -> String {
        let mut out = String::new();
        if self.compat {
            out.push_str(&compat::comparison(&report.rows, self.unit()));
        } else if !report.rows.is_empty() {
            let shared = if report.plan.shared_receives { ", with a shared receive queue" } else { "" };
            _ = writeln!(out, " connection: {}{shared}", report.plan.transport.name());
        }
        if report.rows.iter().any(|row| row.latency.is_some()) {
            let samples = report.rows.iter().filter_map(|row| row.latency.as_ref());
            let samples = range(samples.map(|latency| latency.samples as f64), |count| count.to_string());
            let each = if report.rows.len() > 1 { " for each size" } else { "" };
            _ = writeln!(out, " latency: {}; samples: {}{each}", self.definition, samples.unwrap_or_default());
        }
        notes(&mut out, &report.rows);
        out
    }

    fn columns(&self) -> Vec<Column> {
        let mut columns = vec![Column::new("#bytes", 10), Column::new("#iterations", 0)];
        let mut add = |title: String| columns.push(Column::new(title, 9));
        match self.metric {
            Metric::Bw => {
                let (unit, _) = self.unit();
                for title in ["BW peak", "BW average"] {
                    add(format!("{title}[{unit}]"));
                }
                if self.bidirectional {
                    for title in ["BW reverse", "BW sum"] {
                        add(format!("{title}[{unit}]"));
                    }
                }
                add("MsgRate[Mpps]".into());
                self.percentiles.iter().for_each(|percent| add(format!("p{percent}[µs]")));
            }
            Metric::Lat => {
                for title in ["t_min", "t_typical", "t_avg", "t_stdev"] {
                    add(format!("{title}[µs]"));
                }
                self.percentiles.iter().for_each(|percent| add(format!("p{percent}[µs]")));
                add("t_max[µs]".into());
            }
        }
        add("CPU[%]".into());
        add("server CPU[%]".into());
        columns
    }

    /// Right-aligned cells, with two spaces between columns.
    fn line(&self, cells: impl IntoIterator<Item = String>) -> String {
        let mut line = String::new();
        for (column, cell) in self.columns.iter().zip(cells) {
            let gap = if line.is_empty() { " " } else { "  " };
            _ = write!(line, "{gap}{cell:>width$}", width = column.width);
        }
        line
    }

    fn bandwidth_cells(&self, row: &Row) -> Vec<String> {
        let bandwidth = |bytes: Option<f64>| figure(bytes, 2, self.unit().1);
        let own = row.bandwidth.as_ref();
        let average = own.map(|own| own.average);
        let mut cells = vec![row.size.to_string(), row.messages.to_string()];
        cells.push(bandwidth(own.and_then(|own| own.peak)));
        cells.push(bandwidth(average));
        let reverse = row.reverse.as_ref().map(|reverse: &Bandwidth| reverse.average);
        if self.bidirectional {
            cells.push(bandwidth(reverse));
            cells.push(bandwidth(average.zip(reverse).map(|(there, back)| there + back)));
        }
        cells.push(figure(own.map(|own| own.message_rate), 6, 1e6));
        cells.extend(self.percentile_cells(row.latency.as_ref()));
        cells
    }

    fn latency_cells(&self, row: &Row) -> Vec<String> {
        let latency = row.latency.as_ref();
        let of = |field: fn(&Latency) -> f64| micros(latency.map(field));
        let mut cells = vec![row.size.to_string(), row.messages.to_string(), of(|latency| latency.min)];
        cells.push(micros(latency.and_then(|latency| latency.percentile(50.0))));
        cells.push(of(|latency| latency.mean));
        cells.push(of(|latency| latency.standard_deviation));
        cells.extend(self.percentile_cells(latency));
        cells.push(of(|latency| latency.max));
        cells
    }

    fn percentile_cells(&self, latency: Option<&Latency>) -> impl Iterator<Item = String> {
        self.percentiles.iter().map(move |percent| micros(latency.and_then(|latency| latency.percentile(*percent))))
    }

    /// Name of the bandwidth unit, and its bytes per second.
    fn unit(&self) -> (&'static str, f64) {
        if self.gbits { ("Gb/s", GBITS) } else { ("MiB/s", MIB) }
    }
}

fn figure(value: Option<f64>, digits: usize, unit: f64) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{:.digits$}", value / unit))
}

fn micros(nanoseconds: Option<f64>) -> String {
    figure(nanoseconds, 2, 1e3)
}

fn cpu_cells(row: &Row) -> [String; 2] {
    [row.client_cpu, row.server_cpu].map(|cpu| figure(cpu.map(|cpu| cpu.percent), 1, 1.0))
}

fn notes(out: &mut String, rows: &[Row]) {
    let seconds = range(rows.iter().map(|row| row.seconds), |seconds| Nanos(seconds * 1e9).to_string());
    let messages = range(rows.iter().map(|row| row.messages as f64), |count| count.to_string());
    let warm_up = range(rows.iter().map(|row| row.warm_up_messages as f64), |count| count.to_string());
    let each = if rows.len() > 1 { " for each size" } else { "" };
    if let (Some(seconds), Some(messages), Some(warm_up)) = (seconds, messages, warm_up) {
        _ = writeln!(out, " sampled: {seconds}, {messages} messages{each}, after {warm_up} messages of warm-up");
    }
    if rows.iter().any(|row| row.client_cpu.is_some()) {
        let both = if rows.iter().all(|row| row.server_cpu.is_none()) { ", which includes the server" } else { "" };
        _ = writeln!(out, " CPU: user and system time of the process{both}; 100 % is one processor");
    }
    let validated: Vec<u64> = rows.iter().filter_map(|row| row.validated).collect();
    if !validated.is_empty() {
        let count = validated.iter().sum::<u64>();
        _ = writeln!(out, " validated: {count} messages or memory slots, without a difference");
    }
    if let Some(peak) = rows.iter().map(|row| row.peak_resident).max().filter(|peak| *peak > 0) {
        _ = writeln!(out, " peak resident memory: {:.1} MiB", peak as f64 / MIB);
    }
}

/// The only value, or the minimum and maximum.
fn range(values: impl Iterator<Item = f64>, text: fn(f64) -> String) -> Option<String> {
    let (least, greatest) =
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), value| (a.min(value), b.max(value)));
    if least > greatest {
        return None;
    }
    let (least, greatest) = (text(least), text(greatest));
    Some(if least == greatest { least } else { format!("{least} to {greatest}") })
}

/// `RESULT_FMT`, `RESULT_FMT_G` and `RESULT_FMT_LAT` of perftest_parameters.h. Earlier releases, such as 4.5, print
/// `MB/sec` for the same 2^20 bytes.
fn perftest_header(metric: Metric, gbits: bool) -> &'static str {
    match (metric, gbits) {
        (Metric::Bw, false) => " #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]",
        (Metric::Bw, true) => " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]",
        (Metric::Lat, _) => {
            " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   \
             99% percentile[usec]   99.9% percentile[usec] "
        }
    }
}

/// `REPORT_FMT` and `REPORT_FMT_LAT` of perftest_parameters.h.
fn perftest_row(size: u64, row: &Perftest, gbits: bool) -> String {
    match *row {
        Perftest::Bandwidth { iterations, peak, average, message_rate } => {
            let scale = if gbits { MIB / GBITS } else { 1.0 };
            let (peak, average) = (peak * scale, average * scale);
            format!(
                " {size:<7}    {iterations:<10}       {peak:<7.2}            {average:<7.2}\t\t   {message_rate:<7.6}"
            )
        }
        Perftest::Latency {
            iterations,
            min,
            max,
            typical,
            average,
            standard_deviation,
            percentile_99,
            percentile_99_9,
        } => format!(
            " {size:<7} {iterations}          {min:<7.2}        {max:<7.2}      {typical:<7.2}  \t       {average:<7.2}     \
             \t{standard_deviation:<7.2}\t\t{percentile_99:<7.2} \t\t{percentile_99_9:<7.2}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sample;

    const PERCENTILES: [f64; 3] = [50.0, 99.0, 99.9];

    #[test]
    fn perftest_rows_match_its_printf_formats() {
        let row = Perftest::Bandwidth { iterations: 5000, peak: 148.73, average: 147.5, message_rate: 0.067_541 };
        assert_eq!(
            perftest_row(65536, &row, false),
            " 65536      5000             148.73             147.50 \t\t   0.067541"
        );
        let gbits = Perftest::Bandwidth { iterations: 20000, peak: 0.0, average: 11920.929, message_rate: 12.5 };
        assert_eq!(
            perftest_row(2, &gbits, true),
            " 2          20000            0.00               100.00 \t\t   12.500000"
        );
        let row = Perftest::Latency {
            iterations: 1000,
            min: 28.9,
            max: 61.0,
            typical: 29.25,
            average: 29.3,
            standard_deviation: 0.13,
            percentile_99: 30.1,
            percentile_99_9: 61.0,
        };
        assert_eq!(
            perftest_row(2, &row, false),
            " 2       1000          28.90          61.00        29.25    \t       29.30       \t0.13   \t\t30.10   \t\t61.00  "
        );
    }

    #[test]
    fn compat_prints_perftest_columns() {
        let report = sample::report("write bw host -s 64 --compat perftest", "");
        let table = Table::new(&report.plan, &PERCENTILES, false);
        assert_eq!(
            table.header(),
            " #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]"
        );
        assert!(table.row(&report.rows[0]).starts_with(" 64         5000             "));
        assert!(Table::new(&report.plan, &PERCENTILES, true).header().contains("BW peak[Gb/sec]"));
        let report = sample::report("send lat host --compat perftest", "");
        let header = Table::new(&report.plan, &PERCENTILES, false).header();
        assert!(header.ends_with("t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] "), "{header:?}");
    }

    #[test]
    fn native_columns_are_aligned() {
        for arguments in ["write bw host -s 2,64K,8M", "write bw host -a -b", "send lat host -s 2,8M", "atomic bw host"]
        {
            let report = sample::report(arguments, "");
            let table = Table::new(&report.plan, &PERCENTILES, false);
            let header = table.header();
            for row in &report.rows {
                let line = table.row(row);
                assert_eq!(line.chars().count(), header.chars().count(), "{header}\n{line}");
                assert_eq!(line.split_whitespace().count(), table.columns.len(), "{line}");
            }
        }
    }

    #[test]
    fn a_latency_table_shows_each_percentile_once() {
        let report = sample::report("send lat host", "");
        let table = Table::new(&report.plan, &PERCENTILES, false);
        assert_eq!(
            table.header().split_whitespace().collect::<Vec<_>>(),
            [
                "#bytes",
                "#iterations",
                "t_min[µs]",
                "t_typical[µs]",
                "t_avg[µs]",
                "t_stdev[µs]",
                "p99[µs]",
                "p99.9[µs]",
                "t_max[µs]",
                "CPU[%]",
                "server",
                "CPU[%]"
            ]
        );
        let mut row = report.rows[0].clone();
        row.latency = None;
        assert_eq!(table.row(&row).split_whitespace().filter(|cell| *cell == "-").count(), 7);
    }

    #[test]
    fn bandwidth_is_in_the_unit_of_the_header() {
        let mut report = sample::report("write bw host -b", "");
        report.rows[0].bandwidth = Some(Bandwidth { average: 125e6, message_rate: 2e6, peak: None });
        report.rows[0].reverse = Some(Bandwidth { average: 250e6, message_rate: 2e6, peak: None });
        let table = Table::new(&report.plan, &[], true);
        assert!(table.header().contains("BW sum[Gb/s]"));
        assert_eq!(
            table.row(&report.rows[0]).split_whitespace().collect::<Vec<_>>(),
            ["65536", "1000", "-", "1.00", "2.00", "3.00", "2.000000", "100.0", "25.0"]
        );
    }

    #[test]
    fn the_footer_describes_the_samples() {
        let mut report = sample::report("send lat host --validate", "");
        report.rows[0].seconds = 0.25;
        let table = Table::new(&report.plan, &PERCENTILES, false);
        assert_eq!(
            table.footer(&report),
            " connection: RC\n latency: one way: half of a round trip of two messages; samples: 1000\n \
             sampled: 250 ms, 1000 messages, after 100 messages of warm-up\n \
             CPU: user and system time of the process; 100 % is one processor\n \
             validated: 1000 messages or memory slots, without a difference\n \
             peak resident memory: 12.0 MiB\n"
        );
        let mut report = sample::report("write bw host -s 64,4K", "");
        report.rows[0].messages = 10;
        assert!(table.footer(&report).contains("10 to 1000 messages for each size"));
        report.rows.clear();
        assert_eq!(table.footer(&report), "");
    }
}
