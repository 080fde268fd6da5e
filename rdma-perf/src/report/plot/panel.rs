//! A panel of a chart: curves over the message size.

use std::error::Error;

use plotters::prelude::*;

use super::axis;
use super::style::{Area, FONT, TEXT, anchor, font, style, text_width};

/// Scale of the vertical axis.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scale {
    /// Linear, in this unit.
    Linear(f64),
    /// Logarithmic, from nanoseconds.
    Time,
    /// Logarithmic, from bytes per second.
    Bandwidth,
    /// Logarithmic, from messages per second.
    Rate,
}

/// Line style of a curve, for curves of the same colour.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Mark {
    Solid,
    Dashed,
    Dotted,
}

impl Mark {
    /// Length of a dash and of the gap after it, in pixels.
    fn dashes(self) -> Option<(i32, i32)> {
        match self {
            Mark::Solid => None,
            Mark::Dashed => Some((9, 6)),
            Mark::Dotted => Some((2, 5)),
        }
    }
}

#[derive(Debug)]
pub(super) struct Curve {
    pub(super) colour: RGBColor,
    pub(super) mark: Mark,
    /// Meaning of the line style.
    pub(super) name: Option<String>,
    /// Horizontal shift, in powers of two.
    pub(super) shift: f64,
    /// Sizes and values.
    pub(super) points: Vec<(u64, f64)>,
}

#[derive(Debug)]
pub(super) struct Panel {
    title: &'static str,
    unit: &'static str,
    scale: Scale,
    sizes: Vec<u64>,
    curves: Vec<Curve>,
}

impl Panel {
    pub(super) fn new(
        title: &'static str,
        unit: &'static str,
        scale: Scale,
        sizes: &[u64],
        curves: Vec<Curve>,
    ) -> Panel {
        Panel { title, unit, scale, sizes: sizes.to_vec(), curves }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.curves.iter().all(|curve| curve.points.is_empty())
    }

    pub(super) fn draw(&self, area: &Area<'_>) -> Result<(), Box<dyn Error>> {
        let (width, _) = area.dim_in_pixel();
        let x = axis::sizes(&self.sizes, width as usize / 70);
        let y = self.heights();
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .margin_top(36)
            .margin_right(22)
            .x_label_area_size(56)
            .y_label_area_size(92)
            .build_cartesian_2d(x, y)?;
        let height_text = |value: &f64| match self.scale {
            Scale::Linear(_) => axis::trimmed(*value),
            Scale::Time => axis::time_text(*value),
            Scale::Bandwidth => axis::bandwidth_text(*value),
            Scale::Rate => axis::rate_text(*value),
        };
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(RGBColor(222, 222, 222))
            .axis_style(RGBColor(110, 110, 110))
            .label_style(style())
            .axis_desc_style(style())
            .x_label_formatter(&|log| axis::size_text(*log))
            .y_label_formatter(&height_text)
            .x_desc("message size, bytes")
            .y_desc(self.unit)
            .draw()?;
        for curve in &self.curves {
            let place = |(size, value): &(u64, f64)| self.place(*size, *value, curve.shift);
            let points: Vec<_> = curve.points.iter().map(place).collect();
            let line = curve.colour.stroke_width(2);
            let path = points.iter().copied();
            match curve.mark.dashes() {
                None => chart.draw_series(LineSeries::new(path, line))?,
                Some((dash, gap)) => chart.draw_series(DashedLineSeries::new(path, dash, gap, line))?,
            };
            chart.draw_series(points.iter().map(|point| dot(*point, curve.mark, curve.colour)))?;
        }
        self.draw_heading(area)
    }

    fn place(&self, size: u64, value: f64, shift: f64) -> (f64, f64) {
        let height = match self.scale {
            Scale::Linear(unit) => value / unit,
            Scale::Time | Scale::Rate => value.log10(),
            Scale::Bandwidth => value.log2(),
        };
        ((size.max(1) as f64).log2() + shift, height)
    }

    fn heights(&self) -> axis::Axis {
        let values = || self.curves.iter().flat_map(|curve| &curve.points).map(|(_, value)| *value);
        let (min, max) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
        match self.scale {
            Scale::Linear(unit) => axis::linear(max / unit),
            Scale::Time | Scale::Rate => axis::decimal(min, max),
            Scale::Bandwidth => axis::binary(min, max),
        }
    }

    /// Draws the title at the left and the meanings of line styles at the right.
    fn draw_heading(&self, area: &Area<'_>) -> Result<(), Box<dyn Error>> {
        let (width, _) = area.dim_in_pixel();
        let bold = font(FONT).style(FontStyle::Bold).color(&TEXT);
        let y = 20;
        area.draw(&Text::new(self.title, (102, y), bold.pos(anchor(false))))?;
        let mut kinds: Vec<(&str, Mark)> = Vec::new();
        for curve in &self.curves {
            match &curve.name {
                Some(name) if kinds.iter().all(|(known, _)| known != name) => kinds.push((name, curve.mark)),
                _ => {}
            }
        }
        let grey = RGBColor(70, 70, 70);
        let mut x = width as i32 - 22;
        for (name, mark) in kinds.into_iter().rev() {
            x -= text_width(name) as i32 + 58;
            let (dash, gap) = mark.dashes().unwrap_or((36, 0));
            for start in (0..36).step_by((dash + gap) as usize) {
                let end = (start + dash).min(36);
                area.draw(&PathElement::new([(x + start, y), (x + end, y)], grey.stroke_width(2)))?;
            }
            area.draw(&dot((x + 18, y), mark, grey))?;
            area.draw(&Text::new(name.to_owned(), (x + 43, y), style().pos(anchor(false))))?;
        }
        Ok(())
    }
}

fn dot<Coordinate>(point: Coordinate, mark: Mark, colour: RGBColor) -> Circle<Coordinate, i32> {
    match mark {
        Mark::Solid => Circle::new(point, 4, colour.filled()),
        Mark::Dashed => Circle::new(point, 4, colour.stroke_width(2)),
        Mark::Dotted => Circle::new(point, 2, colour.filled()),
    }
}
