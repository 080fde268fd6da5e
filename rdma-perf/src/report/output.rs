//! Files that a test writes: results and a chart.

use std::path::Path;

use anyhow::Result;

use super::file::{self, Form};
use super::{Report, plot};

/// Files to write when a test ends.
#[derive(Debug)]
pub(crate) struct Output<'a> {
    results: Option<&'a Path>,
    chart: Option<&'a Path>,
}

impl<'a> Output<'a> {
    /// Checks names and permissions before the run, so that no measurement is lost to a bad path.
    ///
    /// # Errors
    /// A name with a wrong extension, or a file that cannot be written.
    pub(crate) fn new(results: Option<&'a Path>, chart: Option<&'a Path>) -> Result<Self> {
        results.map(Form::of).transpose()?;
        chart.map_or(Ok(()), plot::check_name)?;
        results.iter().chain(&chart).try_for_each(|path| file::check_writable(path))?;
        Ok(Output { results, chart })
    }

    /// Writes the files, unless the report has no rows.
    pub(crate) fn write(&self, report: &Report) -> Result<()> {
        if report.rows.is_empty() {
            return Ok(());
        }
        if let Some(path) = self.results {
            report.save(path)?;
        }
        if let Some(path) = self.chart {
            plot::draw(std::slice::from_ref(report), path, None)?;
        }
        Ok(())
    }
}
