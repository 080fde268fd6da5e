//! Results as comma-separated values (RFC 4180), one line per size. Columns may be added at the end, but never removed.

use super::{Report, Row};
use crate::plan::Plan;
use crate::stats::{Latency, Perftest};

type Column = (&'static str, fn(&Report, &Row) -> String);

/// The common percentiles always have columns, so that the header does not depend on options.
const COLUMNS: &[Column] = &[
    ("label", |report, _| quoted(&report.label)),
    ("version", |report, _| quoted(&report.version)),
    ("client", |report, _| quoted(&report.client.name)),
    ("client_device", |report, _| quoted(&report.client.device)),
    ("server", |report, _| quoted(&report.server.name)),
    ("server_device", |report, _| quoted(&report.server.device)),
    ("mtu", |report, _| report.client.mtu.to_string()),
    ("verb", |report, _| report.plan.verb.name().into()),
    ("metric", |report, _| name(&report.plan.metric)),
    ("transport", |report, _| name(&report.plan.transport)),
    ("queue_pairs", |report, _| report.plan.queue_pairs().to_string()),
    ("threads", |report, _| report.plan.threads.to_string()),
    ("tx_depth", |report, _| report.plan.tx_depth.to_string()),
    ("cq_mod", |report, _| report.plan.cq_mod.to_string()),
    ("post_list", |report, _| report.plan.post_list.to_string()),
    ("inline", |report, _| report.plan.inline.to_string()),
    ("events", |report, _| report.plan.events.to_string()),
    ("bidirectional", |report, _| report.plan.bidirectional.to_string()),
    ("options", |report, _| quoted(&options(&report.plan))),
    ("size", |_, row| row.size.to_string()),
    ("messages", |_, row| row.messages.to_string()),
    ("warm_up_messages", |_, row| row.warm_up_messages.to_string()),
    ("seconds", |_, row| row.seconds.to_string()),
    ("bytes_per_second", |_, row| number(row.bandwidth.map(|own| own.average))),
    ("messages_per_second", |_, row| number(row.bandwidth.map(|own| own.message_rate))),
    ("peak_bytes_per_second", |_, row| number(row.bandwidth.and_then(|own| own.peak))),
    ("reverse_bytes_per_second", |_, row| number(row.reverse.map(|reverse| reverse.average))),
    ("reverse_messages_per_second", |_, row| number(row.reverse.map(|reverse| reverse.message_rate))),
    ("latency_definition", |_, row| {
        row.latency.as_ref().map_or_else(String::new, |latency| quoted(&latency.definition))
    }),
    ("latency_samples", |_, row| row.latency.as_ref().map_or_else(String::new, |latency| latency.samples.to_string())),
    ("min_ns", |_, row| latency(row, |latency| Some(latency.min))),
    ("mean_ns", |_, row| latency(row, |latency| Some(latency.mean))),
    ("standard_deviation_ns", |_, row| latency(row, |latency| Some(latency.standard_deviation))),
    ("p50_ns", |_, row| latency(row, |latency| latency.percentile(50.0))),
    ("p90_ns", |_, row| latency(row, |latency| latency.percentile(90.0))),
    ("p99_ns", |_, row| latency(row, |latency| latency.percentile(99.0))),
    ("p99.9_ns", |_, row| latency(row, |latency| latency.percentile(99.9))),
    ("p99.99_ns", |_, row| latency(row, |latency| latency.percentile(99.99))),
    ("max_ns", |_, row| latency(row, |latency| Some(latency.max))),
    ("other_percentiles_ns", |_, row| row.latency.as_ref().map_or_else(String::new, others)),
    ("validated", |_, row| row.validated.map_or_else(String::new, |count| count.to_string())),
    ("peak_resident_bytes", |_, row| row.peak_resident.to_string()),
    ("perftest_bw_peak_mib", |_, row| perftest(row, 0)),
    ("perftest_bw_average_mib", |_, row| perftest(row, 1)),
    ("perftest_msg_rate_mpps", |_, row| perftest(row, 2)),
    ("perftest_t_min_us", |_, row| perftest(row, 3)),
    ("perftest_t_max_us", |_, row| perftest(row, 4)),
    ("perftest_t_typical_us", |_, row| perftest(row, 5)),
    ("perftest_t_avg_us", |_, row| perftest(row, 6)),
    ("perftest_t_stdev_us", |_, row| perftest(row, 7)),
    ("perftest_p99_us", |_, row| perftest(row, 8)),
    ("perftest_p99.9_us", |_, row| perftest(row, 9)),
    ("service_level", |report, _| report.plan.connection.service_level.to_string()),
    ("traffic_class", |report, _| report.plan.connection.traffic_class.to_string()),
    ("qp_timeout", |report, _| report.plan.connection.timeout.to_string()),
    ("retry_count", |report, _| report.plan.connection.retries.to_string()),
    ("rnr_retry", |report, _| report.plan.connection.rnr_retries.to_string()),
    ("client_cpus", |report, _| cpus(&report.plan.pinning.client)),
    ("server_cpus", |report, _| cpus(&report.plan.pinning.server)),
    ("client_cpu_percent", |_, row| number(row.client_cpu.map(|cpu| cpu.percent))),
    ("client_cpu_user_seconds", |_, row| number(row.client_cpu.map(|cpu| cpu.user))),
    ("client_cpu_system_seconds", |_, row| number(row.client_cpu.map(|cpu| cpu.system))),
    ("server_cpu_percent", |_, row| number(row.server_cpu.map(|cpu| cpu.percent))),
    ("server_cpu_user_seconds", |_, row| number(row.server_cpu.map(|cpu| cpu.user))),
    ("server_cpu_system_seconds", |_, row| number(row.server_cpu.map(|cpu| cpu.system))),
    ("use_srq", |report, _| report.plan.shared_receives.to_string()),
];

/// The column names, without a line feed.
pub(crate) fn header() -> String {
    COLUMNS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(",")
}

/// The line of one size, without a line feed.
pub(crate) fn line(report: &Report, row: &Row) -> String {
    COLUMNS.iter().map(|(_, value)| value(report, row)).collect::<Vec<_>>().join(",")
}

/// The header and one line per row.
pub(crate) fn text(report: &Report) -> String {
    let lines = std::iter::once(header()).chain(report.rows.iter().map(|row| line(report, row)));
    lines.map(|line| line + "\n").collect()
}

/// Options without a column that affect the measurement.
fn options(plan: &Plan) -> String {
    let switches = [
        (plan.compat, "compat"),
        (plan.immediate, "imm"),
        (plan.acknowledged, "ack"),
        (plan.huge_pages, "huge-pages"),
        (plan.validate, "validate"),
        (plan.yield_cpu, "yield"),
        (plan.rdma_cm, "rdma-cm"),
        (plan.rate.is_some(), "rate"),
    ];
    switches.into_iter().filter(|(is_set, _)| *is_set).map(|(_, name)| name).collect::<Vec<_>>().join(" ")
}

/// A list of pinned processors.
fn cpus(list: &[u32]) -> String {
    list.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

/// The serde name of a variant.
fn name(variant: &impl serde::Serialize) -> String {
    let value = serde_json::to_value(variant).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}

fn number(value: Option<f64>) -> String {
    value.filter(|value| value.is_finite()).map_or_else(String::new, |value| value.to_string())
}

fn latency(row: &Row, field: fn(&Latency) -> Option<f64>) -> String {
    number(row.latency.as_ref().and_then(field))
}

fn others(latency: &Latency) -> String {
    let own_column = |percent: f64| [50.0, 90.0, 99.0, 99.9, 99.99].contains(&percent);
    let others = latency.percentiles.iter().filter(|each| !own_column(each.percent));
    others.map(|each| format!("{}={}", each.percent, each.nanoseconds)).collect::<Vec<_>>().join(";")
}

fn perftest(row: &Row, column: usize) -> String {
    let columns = match row.perftest {
        Some(Perftest::Bandwidth { peak, average, message_rate, .. }) => {
            [Some(peak), Some(average), Some(message_rate), None, None, None, None, None, None, None]
        }
        Some(Perftest::Latency {
            min,
            max,
            typical,
            average,
            standard_deviation,
            percentile_99,
            percentile_99_9,
            ..
        }) => {
            let [min, max, typical, average] = [min, max, typical, average].map(Some);
            let [deviation, p99, p99_9] = [standard_deviation, percentile_99, percentile_99_9].map(Some);
            [None, None, None, min, max, typical, average, deviation, p99, p99_9]
        }
        None => [None; 10],
    };
    number(columns.get(column).copied().flatten())
}

/// Quotes a field if necessary.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::sample;

    /// Splits a line into fields, by the rules of RFC 4180.
    fn fields(line: &str) -> Vec<String> {
        let (mut fields, mut field, mut inside) = (Vec::new(), String::new(), false);
        let mut rest = line.chars().peekable();
        while let Some(char) = rest.next() {
            match char {
                '"' if inside && rest.peek() == Some(&'"') => field.extend(rest.next()),
                '"' => inside = !inside,
                ',' if !inside => fields.push(std::mem::take(&mut field)),
                char => field.push(char),
            }
        }
        fields.push(field);
        fields
    }

    fn value(report: &Report, column: &str) -> String {
        let at = COLUMNS.iter().position(|(name, _)| *name == column).unwrap();
        fields(&line(report, &report.rows[0]))[at].clone()
    }

    #[test]
    fn every_line_has_every_column() {
        for arguments in ["write bw host -a -b", "send lat host --compat perftest", "read bw host -s 64 --validate"] {
            let report = sample::report(arguments, "two, \"quoted\"");
            let text = text(&report);
            assert_eq!(text.lines().count(), report.rows.len() + 1);
            assert!(text.lines().all(|line| fields(line).len() == COLUMNS.len()), "{text}");
            assert_eq!(value(&report, "label"), "two, \"quoted\"");
        }
    }

    #[test]
    fn absent_values_are_empty() {
        let mut report = sample::report("write lat host -s 64 --imm", "run");
        assert_eq!(value(&report, "bytes_per_second"), "");
        assert_eq!(value(&report, "perftest_t_max_us"), "");
        assert_eq!((value(&report, "metric"), value(&report, "transport")), ("lat".into(), "rc".into()));
        assert_eq!(value(&report, "options"), "imm");
        report.rows[0].latency.as_mut().unwrap().mean = f64::NAN;
        assert_eq!(value(&report, "mean_ns"), "");
    }

    #[test]
    fn processors_and_the_connection_have_columns() {
        let report = sample::report("write bw host -s 64 --sl 3 --tclass 104 --cpu 2,0", "");
        assert_eq!((value(&report, "service_level"), value(&report, "traffic_class")), ("3".into(), "104".into()));
        assert_eq!((value(&report, "client_cpus"), value(&report, "server_cpus")), ("2 0".into(), "".into()));
        assert_eq!(
            (value(&report, "client_cpu_percent"), value(&report, "server_cpu_percent")),
            ("100".into(), "25".into())
        );
    }

    #[test]
    fn percentiles_without_a_column_are_kept() {
        let mut report = sample::report("send lat host", "");
        report.rows[0].latency.as_mut().unwrap().percentiles[1].percent = 75.0;
        assert_eq!(value(&report, "p90_ns"), "");
        assert!(value(&report, "other_percentiles_ns").starts_with("75="));
    }
}
