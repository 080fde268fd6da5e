//! Fonts and colours of charts.

use plotters::coord::Shift;
use plotters::prelude::*;

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Font size of all text except the heading. A README shows a chart of [`WIDTH`](super::WIDTH) at about 85 % of its size.
pub(super) const FONT: u32 = 16;
/// Average character width of a sans-serif font, in ems. No font is available to measure.
pub(super) const EM: f64 = 0.56;
pub(super) const TEXT: RGBColor = RGBColor(30, 30, 30);

pub(super) fn style() -> TextStyle<'static> {
    font(FONT).color(&TEXT)
}

/// A font of `pixels` in the SVG file. plotters-svg divides sizes by 1.24.
pub(super) fn font(pixels: u32) -> FontDesc<'static> {
    ("sans-serif", f64::from(pixels) * 1.24).into_font()
}

pub(super) fn anchor(centred: bool) -> plotters::style::text_anchor::Pos {
    use plotters::style::text_anchor::{HPos, Pos, VPos};
    Pos::new(if centred { HPos::Center } else { HPos::Left }, VPos::Center)
}

pub(super) fn text_width(text: &str) -> u32 {
    (text.chars().count() as f64 * f64::from(FONT) * EM).ceil() as u32
}
