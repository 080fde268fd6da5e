//! SVG charts of results.

mod axis;
mod panel;
mod style;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use plotters::prelude::*;

use super::{Report, Row, file};
use crate::plan::Metric;
use crate::stats::Bandwidth;
use panel::{Curve, Mark, Panel, Scale};
use style::{Area, EM, FONT, TEXT, anchor, font, style, text_width};

const WIDTH: u32 = 1000;
const MARGIN: u32 = 16;
/// Font size of the heading.
const HEADING: u32 = 20;
const LINE: u32 = 24;
/// Width of bold letters relative to normal ones.
const BOLD: f64 = 1.1;
const PANEL: u32 = 360;

/// Okabe and Ito's palette, which works with any colour vision.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(90, 90, 90),
    RGBColor(0, 0, 0),
];
/// Runs `rdma-perf plot`.
pub(crate) fn main(results: &[PathBuf], output: &Path, title: Option<&str>) -> Result<i32> {
    let mut reports = results.iter().map(|path| Report::load(path)).collect::<Result<Vec<_>, _>>()?;
    disambiguate_labels(&mut reports, results);
    draw(&reports, output, title)?;
    Ok(0)
}

/// Adds the file name to labels that several reports share.
fn disambiguate_labels(reports: &mut [Report], paths: &[PathBuf]) {
    let labels: Vec<String> = reports.iter().map(|report| report.label.clone()).collect();
    for (at, (report, path)) in reports.iter_mut().zip(paths).enumerate() {
        let is_same = labels.iter().enumerate().any(|(other, label)| other != at && *label == labels[at]);
        let Some(name) = path.file_stem().filter(|_| is_same) else { continue };
        let name = name.to_string_lossy();
        // The heading already shows what the default label says.
        let label = if report.label == report.plan.title() { name.into() } else { format!("{name}: {}", report.label) };
        report.label = label;
    }
}

/// Draws `reports` on one chart, with one colour each.
pub(crate) fn draw(reports: &[Report], path: &Path, title: Option<&str>) -> Result<()> {
    check_name(path)?;
    let text = svg(reports, title)?;
    file::replace(path, text.as_bytes()).with_context(|| format!("cannot write `{}`", path.display()))
}

/// Refuses names that do not end in .svg. Called before measuring, so that no results are lost.
pub(crate) fn check_name(path: &Path) -> Result<()> {
    if !path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("svg")) {
        bail!("charts are SVG files: `{}` must end in .svg", path.display());
    }
    Ok(())
}

/// The chart as SVG text.
pub(crate) fn svg(reports: &[Report], title: Option<&str>) -> Result<String> {
    if reports.iter().all(|report| report.rows.is_empty()) {
        bail!("there is nothing to draw: no report has a row");
    }
    let chart = Chart::new(reports, title);
    let mut text = String::new();
    chart.draw(&mut text).map_err(|error| anyhow::anyhow!("cannot draw the chart: {error}"))?;
    Ok(text)
}

struct Chart {
    title: String,
    /// Labels and their colours, in lines.
    legend: Vec<Vec<(String, RGBColor)>>,
    /// Panels drawn side by side.
    throughput: Vec<Panel>,
    latency: Option<Panel>,
    footer: Vec<String>,
}

impl Chart {
    fn new(reports: &[Report], title: Option<&str>) -> Chart {
        let labels = labels(reports);
        let sizes: Vec<u64> = reports.iter().flat_map(|report| report.rows.iter().map(|row| row.size)).collect();
        let mut throughput = Vec::new();
        if reports.iter().any(|report| report.plan.metric == Metric::Bw) {
            let sweeps = sizes.iter().any(|size| *size != sizes[0]);
            let average = curves(reports, |row| both_directions(row, |own| own.average));
            let (unit, scale) = match greatest(&average) {
                // On a linear axis all small messages would lie at the bottom.
                _ if sweeps => ("", Scale::Bandwidth),
                most if most >= 10.0 * GIB => ("GiB/s", Scale::Linear(GIB)),
                _ => ("MiB/s", Scale::Linear(MIB)),
            };
            throughput.push(Panel::new("Bandwidth", unit, scale, &sizes, average));
            let rate = curves(reports, |row| both_directions(row, |own| own.message_rate));
            let (unit, scale) = match greatest(&rate) {
                _ if sweeps => ("messages", Scale::Rate),
                most if most >= 1e6 => ("million messages/s", Scale::Linear(1e6)),
                _ => ("thousand messages/s", Scale::Linear(1e3)),
            };
            throughput.push(Panel::new("Message rate", unit, scale, &sizes, rate));
            throughput.retain(|panel| !panel.is_empty());
        }
        let latency = Panel::new("Latency", "", Scale::Time, &sizes, latency_curves(reports));
        let latency = (!latency.is_empty()).then_some(latency);
        let footer = if latency.is_some() { definitions(reports, &labels) } else { Vec::new() };
        Chart {
            title: title.map_or_else(|| heading(reports), printable),
            legend: legend(&labels),
            throughput,
            latency,
            footer,
        }
    }

    fn draw(&self, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let upper = if self.throughput.is_empty() { 0 } else { PANEL };
        let lower = if self.latency.is_some() { PANEL } else { 0 };
        let top = MARGIN + 34 + self.legend.len() as u32 * LINE;
        let bottom = MARGIN + self.footer.len() as u32 * LINE;
        let root = SVGBackend::with_string(text, (WIDTH, top + upper + lower + bottom)).into_drawing_area();
        // On a transparent background, the dark text would be unreadable on dark pages.
        root.fill(&WHITE)?;
        let middle = (WIDTH / 2) as i32;
        let heading = font(HEADING).style(FontStyle::Bold).color(&TEXT).pos(anchor(true));
        root.draw(&Text::new(
            shortened(&self.title, f64::from(HEADING) * EM * BOLD),
            (middle, (MARGIN + 10) as i32),
            heading,
        ))?;
        self.draw_legend(&root)?;
        let count = self.throughput.len().max(1) as u32;
        for (panel, n) in self.throughput.iter().zip(0..) {
            let width = WIDTH / count;
            let area = root.clone().shrink(((n * width) as i32, top as i32), (width, upper));
            panel.draw(&area)?;
        }
        if let Some(panel) = &self.latency {
            panel.draw(&root.clone().shrink((0, (top + upper) as i32), (WIDTH, lower)))?;
        }
        for (line, n) in self.footer.iter().zip(0..) {
            let y = top + upper + lower + n * LINE + LINE / 2;
            root.draw(&Text::new(
                shortened(line, f64::from(FONT) * EM),
                (middle, y as i32),
                style().pos(anchor(true)),
            ))?;
        }
        root.present()?;
        Ok(())
    }

    fn draw_legend(&self, root: &Area<'_>) -> Result<(), Box<dyn std::error::Error>> {
        for (line, n) in self.legend.iter().zip(0..) {
            let y = (MARGIN + 34 + n * LINE + LINE / 2) as i32;
            let width: u32 = line.iter().map(|(label, _)| entry_width(label)).sum();
            let mut x = (WIDTH.saturating_sub(width) / 2) as i32;
            for (label, colour) in line {
                root.draw(&PathElement::new([(x, y), (x + 24, y)], colour.stroke_width(4)))?;
                root.draw(&Text::new(label.clone(), (x + 32, y), style().pos(anchor(false))))?;
                x += entry_width(label) as i32;
            }
        }
        Ok(())
    }
}

const MIB: f64 = (1 << 20) as f64;
const GIB: f64 = (1 << 30) as f64;

/// Width of a line sample, its label and the gap after it.
fn entry_width(label: &str) -> u32 {
    32 + text_width(label) + 24
}

/// Shortens a line to the width of the chart, given the width of a character.
fn shortened(line: &str, character: f64) -> String {
    let most = (f64::from(WIDTH - 2 * MARGIN) / character) as usize;
    if line.chars().count() <= most {
        return line.to_owned();
    }
    line.chars().take(most - 1).chain(['…']).collect()
}

/// Replaces control characters, most of which XML cannot represent.
fn printable(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect()
}

/// A unique label for each report.
fn labels(reports: &[Report]) -> Vec<String> {
    let mut labels: Vec<String> = Vec::new();
    for report in reports {
        let label = printable(report.label.trim());
        let label = if label.is_empty() { heading(std::slice::from_ref(report)) } else { label };
        let label: String =
            if label.chars().count() > 48 { label.chars().take(47).chain(['…']).collect() } else { label };
        let numbered = (2..).map(|n| format!("{label} ({n})"));
        let free = std::iter::once(label.clone()).chain(numbered).find(|label| !labels.contains(label));
        labels.push(free.unwrap_or(label));
    }
    labels
}

fn legend(labels: &[String]) -> Vec<Vec<(String, RGBColor)>> {
    let mut lines: Vec<Vec<(String, RGBColor)>> = Vec::new();
    let mut room = 0;
    for (label, colour) in labels.iter().zip(COLOURS.into_iter().cycle()) {
        let width = entry_width(label);
        match lines.last_mut() {
            Some(line) if room >= width => {
                line.push((label.clone(), colour));
                room -= width;
            }
            _ => {
                lines.push(vec![(label.clone(), colour)]);
                room = (WIDTH - 2 * MARGIN).saturating_sub(width);
            }
        }
    }
    lines
}

/// A heading from the settings that all reports share.
fn heading(reports: &[Report]) -> String {
    fn common<T: PartialEq>(reports: &[Report], of: impl Fn(&Report) -> T) -> Option<T> {
        let first = reports.first().map(&of)?;
        reports.iter().all(|report| of(report) == first).then_some(first)
    }
    fn counted(count: u32, what: &str) -> String {
        format!("{count} {what}{}", if count == 1 { "" } else { "s" })
    }
    let verb = common(reports, |report| report.plan.verb).map_or("RDMA".into(), |verb| format!("RDMA {}", verb.name()));
    let metric = match common(reports, |report| report.plan.metric) {
        Some(Metric::Bw) if common(reports, |report| report.plan.bidirectional) == Some(true) => {
            " bandwidth, sum of both directions"
        }
        Some(Metric::Bw) => " bandwidth",
        Some(Metric::Lat) => " latency",
        None => "",
    };
    let mut parts = vec![format!("{verb}{metric}")];
    parts.extend(common(reports, |report| report.plan.queue_pairs()).map(|count| counted(count, "queue pair")));
    let threads = common(reports, |report| report.plan.threads).filter(|threads| *threads > 1);
    parts.extend(threads.map(|count| counted(count, "thread")));
    let device = common(reports, |report| report.client.device.clone()).filter(|device| !device.is_empty());
    parts.extend(device.map(|device| printable(&device)));
    parts.join(", ")
}

/// Definitions of the latencies, in one line if they are the same.
fn definitions(reports: &[Report], labels: &[String]) -> Vec<String> {
    let of =
        |report: &Report| report.rows.iter().find_map(|row| row.latency.as_ref().map(|own| own.definition.clone()));
    let mut known = reports.iter().zip(labels).filter_map(|(report, label)| Some((of(report)?, label))).peekable();
    let Some((first, _)) = known.peek().cloned() else { return Vec::new() };
    let all: Vec<_> = known.collect();
    if all.iter().all(|(definition, _)| *definition == first) {
        return vec![printable(&format!("Latency: {first}"))];
    }
    all.iter().map(|(definition, label)| printable(&format!("Latency of {label}: {definition}"))).collect()
}

/// Size and value of each row that has a positive value, as logarithms require.
fn points(report: &Report, value: impl Fn(&Row) -> Option<f64>) -> Vec<(u64, f64)> {
    let mut points: Vec<_> = report
        .rows
        .iter()
        .filter_map(|row| Some((row.size, value(row).filter(|value| value.is_finite() && *value > 0.0)?)))
        .collect();
    points.sort_by_key(|(size, _)| *size);
    points
}

/// The value, or the sum of both directions of a bidirectional test.
fn both_directions(row: &Row, of: fn(&Bandwidth) -> f64) -> Option<f64> {
    Some(of(row.bandwidth.as_ref()?) + row.reverse.as_ref().map_or(0.0, of))
}

/// Horizontal shift of each report's points, as a fraction of the distance from one power of two to the next. If all reports
/// have one size only, unshifted points would cover each other.
fn shifts(reports: &[Report]) -> Vec<f64> {
    let mut sizes: Vec<u64> = reports.iter().flat_map(|report| report.rows.iter().map(|row| row.size)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let count = reports.len() as f64;
    let step = if sizes.len() > 1 { 0.0 } else { (0.8 / count).min(0.1) };
    (0..reports.len()).map(|n| (n as f64 - (count - 1.0) / 2.0) * step).collect()
}

fn curves(reports: &[Report], value: impl Fn(&Row) -> Option<f64>) -> Vec<Curve> {
    let drawn = reports.iter().zip(COLOURS.into_iter().cycle()).zip(shifts(reports));
    let curve = |((report, colour), shift)| {
        let points = points(report, &value);
        Curve { colour, mark: Mark::Solid, name: None, shift, points }
    };
    drawn.map(curve).collect()
}

fn greatest(curves: &[Curve]) -> f64 {
    curves.iter().flat_map(|curve| &curve.points).fold(0.0, |max, point| max.max(point.1))
}

fn latency_curves(reports: &[Report]) -> Vec<Curve> {
    let recorded = |percent: &f64| {
        let rows = || reports.iter().flat_map(|report| &report.rows);
        rows().any(|row| row.latency.as_ref().is_some_and(|latency| latency.percentile(*percent).is_some()))
    };
    // More curves would be indistinguishable.
    let wanted: &[f64] = if reports.len() > 3 { &[50.0, 99.0] } else { &[50.0, 99.0, 99.9] };
    let mut shown: Vec<f64> = wanted.iter().copied().filter(recorded).collect();
    if shown.is_empty() {
        let any = reports.iter().flat_map(|report| &report.rows).find_map(|row| row.latency.as_ref());
        shown.extend(any.iter().flat_map(|latency| &latency.percentiles).take(wanted.len()).map(|each| each.percent));
    }
    let mut curves = Vec::new();
    for ((report, colour), shift) in reports.iter().zip(COLOURS.into_iter().cycle()).zip(shifts(reports)) {
        for (percent, mark) in shown.iter().zip([Mark::Solid, Mark::Dashed, Mark::Dotted]) {
            let points = points(report, |row| row.latency.as_ref()?.percentile(*percent));
            curves.push(Curve { colour, mark, name: Some(format!("p{percent}")), shift, points });
        }
        if shown.is_empty() {
            let points = points(report, |row| Some(row.latency.as_ref()?.mean));
            curves.push(Curve { colour, mark: Mark::Solid, name: Some("mean".into()), shift, points });
        }
    }
    curves
}

#[cfg(test)]
mod tests;
