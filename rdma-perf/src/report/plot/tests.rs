use super::*;
use crate::testing::sample;
use crate::testing::scratch::Scratch;

/// Panics unless all tags are closed in order and each `&` begins an entity.
fn assert_well_formed(svg: &str) {
    let mut open: Vec<&str> = Vec::new();
    for part in svg.split('<').skip(1) {
        let (tag, text) = part.split_once('>').unwrap_or_else(|| panic!("`<{part}` is not closed"));
        let name = tag.trim_start_matches('/').split([' ', '\n', '/']).next().unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') && !tag.starts_with(['?', '!']) {
            open.push(name);
        }
        let entity =
            |rest: &str| ["amp;", "lt;", "gt;", "quot;", "apos;", "#"].iter().any(|name| rest.starts_with(name));
        assert!(part.split('&').skip(1).all(entity), "{part}");
        assert!(!text.contains('"') || !tag.is_empty());
    }
    assert!(open.is_empty(), "{open:?}");
    assert!(svg.starts_with("<svg ") && svg.contains("xmlns=\"http://www.w3.org/2000/svg\""));
}

/// The texts in a chart.
fn texts(svg: &str) -> Vec<String> {
    let texts = svg.split("<text").skip(1).filter_map(|part| part.split_once('>')?.1.split_once("</text>"));
    texts.map(|(text, _)| text.trim().to_owned()).collect()
}

#[test]
fn a_bandwidth_chart_has_three_panels_and_a_legend() {
    let reports =
        [sample::report("write bw host -a", "classic"), sample::report("write bw host -a -l 16", "16 a list")];
    let svg = svg(&reports, Some("Two ways to post")).unwrap();
    assert_well_formed(&svg);
    let texts = texts(&svg);
    for text in [
        "Two ways to post",
        "classic",
        "16 a list",
        "Bandwidth",
        "64 MiB/s",
        "4 GiB/s",
        "Message rate",
        "messages",
        "100k/s",
        "Latency",
        "p50",
        "p99",
        "p99.9",
        "message size, bytes",
        "2M",
    ] {
        assert!(texts.iter().any(|known| known == text), "{text} in {texts:?}");
    }
    assert!(svg.contains("#0072B2") && svg.contains("#D55E00"), "one colour each");
}

#[test]
fn a_latency_chart_has_one_panel() {
    let svg = svg(&[sample::report("send lat host -s 2..64K", "run")], None).unwrap();
    let texts = texts(&svg);
    assert!(texts.iter().any(|text| text == "RDMA send latency, 1 queue pair, mlx5_0"), "{texts:?}");
    assert!(texts.iter().any(|text| text == "Latency: one way: half of a round trip of two messages"), "{texts:?}");
    assert!(texts.iter().all(|text| text != "Bandwidth"));
}

#[test]
fn a_single_size_is_drawn_as_points() {
    let svg = svg(&[sample::report("write bw host -s 64K", "run")], None).unwrap();
    assert_well_formed(&svg);
    assert!(svg.matches("<circle").count() >= 5, "bandwidth, rate and three percentiles");
    for text in ["64K", "MiB/s", "2000", "thousand messages/s"] {
        assert!(texts(&svg).iter().any(|known| known == text), "{text} in {:?}", texts(&svg));
    }
}

#[test]
fn points_of_several_reports_are_shifted() {
    let report = |arguments: &str| sample::report(arguments, "run");
    assert_eq!(shifts(&[report("send lat host"), report("send lat host")]), [-0.05, 0.05]);
    assert_eq!(shifts(&[report("send lat host"), report("send lat host -s 64")]), [0.0, 0.0]);
    let many: Vec<Report> = (0..20).map(|_| report("send lat host")).collect();
    assert!(shifts(&many).iter().all(|shift| shift.abs() < 0.5), "within the axis");
}

#[test]
fn both_directions_are_added() {
    let mut report = sample::report("write bw host -s 64 -b", "run");
    let own = Bandwidth { average: 4.0 * MIB, message_rate: 1e6, peak: None };
    (report.rows[0].bandwidth, report.rows[0].reverse) = (Some(own), Some(own));
    assert_eq!(both_directions(&report.rows[0], |own| own.average), Some(8.0 * MIB));
    let texts = texts(&svg(&[report], None).unwrap());
    assert_eq!(texts[0], "RDMA write bandwidth, sum of both directions, 1 queue pair, mlx5_0");
}

#[test]
fn different_latency_definitions_are_shown() {
    let reports = [sample::report("write lat host", "ping-pong"), sample::report("write lat host --ack", "ack")];
    let texts = texts(&svg(&reports, None).unwrap());
    assert!(texts.iter().any(|text| text.starts_with("Latency of ack: from the post")), "{texts:?}");
}

#[test]
fn labels_are_escaped_and_unique() {
    let odd = sample::report("send lat host", "<b>&\"x\"\u{1}");
    let svg = svg(&[odd.clone(), odd], Some("a < b && c\n")).unwrap();
    assert_well_formed(&svg);
    assert!(texts(&svg).iter().any(|text| text.ends_with("(2)")));
}

#[test]
fn duplicate_labels_get_file_names() {
    let title = sample::plan("send lat host").title();
    let mut reports = ["x", "x", "y", &title, &title].map(|label| sample::report("send lat host", label));
    let paths = ["d/a.json", "b.json", "c.json", "before.json", "after.json"].map(PathBuf::from);
    disambiguate_labels(&mut reports, &paths);
    assert_eq!(reports.map(|report| report.label), ["a: x", "b: x", "y", "before", "after"]);
}

#[test]
fn empty_reports_are_refused_and_missing_values_left_out() {
    assert!(svg(&[], None).unwrap_err().to_string().contains("nothing to draw"));
    let mut report = sample::report("write bw host", "run");
    let rows = std::mem::take(&mut report.rows);
    assert!(svg(&[report.clone()], None).is_err());
    report.rows = rows;
    report.rows[0].latency = None;
    report.rows[0].bandwidth.as_mut().unwrap().average = f64::NAN;
    let texts = texts(&svg(&[report], None).unwrap());
    assert!(texts.iter().all(|text| text != "Latency" && text != "Bandwidth"), "{texts:?}");
}

#[test]
fn a_chart_is_written_as_an_svg_file() {
    let scratch = Scratch::new();
    let report = sample::report("send lat host", "run");
    let results = scratch.path("run.json");
    report.save(&results).unwrap();
    let output = scratch.path("chart.svg");
    assert_eq!(main(&[results.clone(), results], &output, None).unwrap(), 0);
    assert_well_formed(&std::fs::read_to_string(output).unwrap());
    let error = draw(&[report], &scratch.path("chart.png"), None).unwrap_err().to_string();
    assert!(error.contains(".svg"), "{error}");
}

#[test]
fn a_long_legend_is_wrapped() {
    let labels: Vec<String> = (0..12).map(|n| format!("a report with a long label, number {n}")).collect();
    let lines = legend(&labels);
    assert!(lines.len() >= 4);
    for line in &lines {
        assert!(line.iter().map(|(label, _)| entry_width(label)).sum::<u32>() <= WIDTH, "{line:?}");
    }
    assert_eq!(lines.iter().map(Vec::len).sum::<usize>(), 12);
}
