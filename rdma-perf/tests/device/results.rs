//! Result formats, and perftest's columns.

use crate::support::{Report, Scratch, device};

#[test]
fn csv_has_a_field_for_each_column() {
    let Some(rdma) = device() else { return };
    let output = rdma.run("write bw --loopback --format csv --size 64,128 --iters 20 --label run --quiet");
    let lines: Vec<Vec<&str>> = output.success().lines().map(|line| line.split(',').collect()).collect();
    let [header, first, second] = &lines[..] else { panic!("{}", output.stdout) };
    assert_eq!((header.len(), header.len()), (first.len(), second.len()));
    let of = |line: &[&str], name: &str| line[header.iter().position(|column| *column == name).unwrap()].to_owned();
    assert_eq!((of(first, "size"), of(second, "size")), ("64".into(), "128".into()));
    assert_eq!((of(first, "label"), of(first, "messages")), ("run".into(), "20".into()));
    assert!(of(first, "bytes_per_second").parse::<f64>().unwrap() > 0.0);
    assert_eq!(output.stderr, "", "--quiet prints only the results");
}

#[test]
fn json_describes_both_ends_and_the_test() {
    let Some(rdma) = device() else { return };
    let report = rdma.measure("send lat --size 64 --iters 20 --percentiles 25,99.5 --label one");
    assert_eq!(report.at("/label"), "one");
    assert_eq!((report.at("/plan/verb"), report.at("/plan/metric")), (&"send".into(), &"lat".into()));
    assert_eq!(report.at("/client/device"), report.at("/server/device"));
    let percentiles = report.row().pointer("/latency/percentiles").unwrap().as_array().unwrap();
    let has = |percent: f64| percentiles.iter().any(|each| each["percent"] == percent);
    assert!(has(25.0) && !has(99.5), "20 samples have none beyond 99.5 %: {percentiles:?}");
}

#[test]
fn a_table_has_a_line_for_each_size() {
    let Some(rdma) = device() else { return };
    let output = rdma.run("write bw --loopback --size 64,1K --iters 20 --validate --report-gbits");
    let lines: Vec<&str> = output.success().lines().collect();
    assert!(lines[0].contains("#bytes") && lines[0].contains("BW average[Gb/s]"), "{}", output.stdout);
    for (line, size) in lines[1..].iter().zip(["64", "1024"]) {
        assert_eq!(line.split_whitespace().take(2).collect::<Vec<_>>(), [size, "20"], "{}", output.stdout);
    }
    assert!(output.stdout.contains("without a difference"), "{}", output.stdout);
}

#[test]
fn results_are_written_and_drawn() {
    let Some(rdma) = device() else { return };
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name).display().to_string();
    let (json, csv, chart) = (path("a.json"), path("a.csv"), path("a.svg"));
    let run = "write bw --loopback --size 64,128 --iters 20";
    rdma.run(&format!("{run} --output {json} --plot {chart}")).success();
    rdma.run(&format!("{run} --output {csv}")).success();
    assert_eq!(Report::load(&scratch.path("a.json")).counts("/size"), [64, 128]);
    assert_eq!(std::fs::read_to_string(&csv).unwrap().lines().count(), 3);
    rdma.run(&format!("{run} --output {} --label other", path("b.json"))).success();
    let both = path("both.svg");
    // Run without a device, which plotting does not need.
    let mut plot = std::process::Command::new(env!("CARGO_BIN_EXE_rdma-perf"));
    let status = plot.args(["plot", &json, &path("b.json"), "--output", &both]).status().unwrap();
    assert!(status.success());
    for chart in [&chart, &both] {
        let text = std::fs::read_to_string(chart).unwrap();
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
    }
    assert!(std::fs::read_to_string(&both).unwrap().contains("other"));
    std::fs::copy(scratch.path("a.json"), scratch.path("later.json")).unwrap();
    let mut plot = std::process::Command::new(env!("CARGO_BIN_EXE_rdma-perf"));
    assert!(plot.args(["plot", &json, &path("later.json"), "--output", &both]).status().unwrap().success());
    let text = std::fs::read_to_string(&both).unwrap();
    assert!(text.contains("later"), "runs without a label are named after their files: {text}");
    let nowhere = rdma.run(&format!("{run} --plot {}", path("missing/a.svg")));
    assert_eq!(nowhere.failure(1, &["cannot write", "missing/a.svg"]).matches("MTU").count(), 0);
    let early = rdma.run(&format!("{run} --output {}", path("a.txt")));
    assert_eq!(early.failure(1, &[".json or .csv"]).matches("MTU").count(), 0, "the error comes before the run");
}

/// Splits a header and a row of the same columns into titles and numbers.
#[track_caller]
fn check_table(text: &str, titles: &[&str], size: &str, iterations: &str) {
    let mut lines = text.lines();
    let (header, row) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    let mut rest = header;
    for title in titles {
        rest = rest.split_once(title).unwrap_or_else(|| panic!("no {title} in `{header}`")).1;
    }
    let cells: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(cells.len(), titles.len(), "{text}");
    assert_eq!(cells[..2], [size, iterations], "{text}");
    assert!(cells.iter().all(|cell| cell.parse::<f64>().is_ok()), "{text}");
}

const BANDWIDTH: [&str; 5] = ["#bytes", "#iterations", "BW peak[MiB/sec]", "BW average[MiB/sec]", "MsgRate[Mpps]"];
const LATENCY: [&str; 9] = [
    "#bytes",
    "#iterations",
    "t_min[usec]",
    "t_max[usec]",
    "t_typical[usec]",
    "t_avg[usec]",
    "t_stdev[usec]",
    "99% percentile[usec]",
    "99.9% percentile[usec]",
];

#[test]
fn compat_prints_perftests_columns() {
    let Some(rdma) = device() else { return };
    for (test, size) in [
        ("send lat", "2"),
        ("send lat --events", "2"),
        ("write lat", "2"),
        ("read lat --events", "2"),
        ("atomic lat --events", "8"),
        ("send bw --size 1K", "1024"),
        ("send bw --size 1K --events", "1024"),
        ("write bw --size 1K", "1024"),
        ("write bw --size 1K --events", "1024"),
        ("read bw --size 1K --events", "1024"),
    ] {
        let output = rdma.run(&format!("{test} --loopback --compat perftest --iters 50 --yield"));
        let titles: &[&str] = if test.contains("lat") { &LATENCY } else { &BANDWIDTH };
        check_table(output.success(), titles, size, "50");
        assert!(output.stdout.contains("perftest's figures -> those of all messages"), "{test}: {}", output.stdout);
    }
}

#[test]
fn perftests_figures_agree_with_the_run() {
    let Some(rdma) = device() else { return };
    let report = rdma.measure("read lat --compat perftest --iters 50");
    let perftest = |name: &str| report.number(&format!("/perftest/latency/{name}"));
    assert!(perftest("min") <= perftest("typical") && perftest("typical") <= perftest("max"));
    // perftest's maximum leaves out the slowest message.
    assert!(perftest("max") * 1e3 <= report.number("/latency/max") * 1.01);
    let report = rdma.measure("write bw --compat perftest --iters 50 --size 1K");
    let perftest = |name: &str| report.number(&format!("/perftest/bandwidth/{name}"));
    let (rate, own) = (perftest("message_rate") * 1e6, report.number("/bandwidth/message_rate"));
    // perftest's time is from the first post to the last completion, ours from just before to just after.
    assert!(rate >= own * 0.999, "{rate} and {own}");
    assert!((perftest("average") * f64::from(1 << 20) / (rate * 1024.0) - 1.0).abs() < 1e-3);
    rdma.run("write bw --loopback --compat perftest --duration 1s").failure(2, &["--iters"]);
}
