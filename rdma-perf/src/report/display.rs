//! Output on the terminal while a test runs.

use std::io::{IsTerminal, stderr};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::file::Form;
use super::table::Table;
use super::{Host, Report, Row, csv};
use crate::plan::Plan;
use crate::units::Bytes;

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Format {
    /// A table with the columns of perftest
    Text,
    Json,
    Csv,
}

/// Prints rows, and shows progress.
pub(crate) struct Display {
    form: Format,
    quiet: bool,
    table: Table,
    bar: Option<ProgressBar>,
}

impl Display {
    /// Prints results of `plan` in `form`. `percentiles` and `gbits` choose the columns of the table.
    pub(crate) fn new(plan: &Plan, form: Format, percentiles: &[f64], gbits: bool, quiet: bool) -> Self {
        let bar = (!quiet && !plan.compat && stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{prefix:>6} [{bar:40}] {percent:>3} % {msg}");
            let bar = ProgressBar::with_draw_target(Some(1000), ProgressDrawTarget::stderr());
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        let table = Table::new(plan, percentiles, gbits);
        Display { form, quiet, table, bar }
    }

    /// Prints a line above the progress bar.
    fn line(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| println!("{line}")),
            None => println!("{line}"),
        }
    }

    /// Ends the progress bar and prints the footer.
    pub(crate) fn finish(&self, report: &Report) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        match self.form {
            Format::Text if !report.rows.is_empty() => print!("{}", self.table.footer(report)),
            Format::Json => print!("{}", report.to_text(Form::Json)),
            Format::Text | Format::Csv => {}
        }
    }

    /// Prints the header. Called once both ends are connected, when the report has no rows.
    pub(crate) fn connected(&mut self, report: &Report) {
        let (client, server) = (&report.client, &report.server);
        if !self.quiet {
            let end = |host: &Host| format!("{}:{} ({})", host.name, host.device, host.gid);
            let interface = |extended| if extended { "extended" } else { "classic" };
            eprintln!(
                "{}: {} -> {}, MTU {}, {} posting, {} polling",
                report.plan.title(),
                end(client),
                end(server),
                report.plan.mtu.and_then(|mtu| mtu.bytes()).unwrap_or(client.mtu.min(server.mtu)),
                interface(client.extended_post),
                interface(client.extended_poll),
            );
        }
        match self.form {
            Format::Text => self.line(&self.table.header()),
            Format::Csv => self.line(csv::header().trim_end()),
            Format::Json => {}
        }
    }

    /// Shows that `share` (0 to 1) of the run of `size` is done.
    pub(crate) fn progress(&mut self, size: u64, share: f64, messages: u64) {
        if let Some(bar) = &self.bar {
            bar.set_prefix(Bytes(size).to_string());
            bar.set_message(format!("{messages} messages"));
            bar.set_position((share * 1000.0) as u64);
        }
    }

    /// Prints the row of one size.
    pub(crate) fn row(&mut self, report: &Report, row: &Row) {
        match self.form {
            Format::Text => self.line(&self.table.row(row)),
            Format::Csv => self.line(csv::line(report, row).trim_end()),
            Format::Json => {}
        }
    }

    /// Whether [`Display::progress`] has an effect.
    pub(crate) fn shows_progress(&self) -> bool {
        self.bar.is_some()
    }
}
