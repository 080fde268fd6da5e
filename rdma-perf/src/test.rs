//! A test as the user sees it: from the command line to the results.

use std::io::{IsTerminal, stderr};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::{Format, OutputArgs, TestArgs};
use crate::clock::Clock;
use crate::control::Control;
use crate::cpu;
use crate::doctor::{amount, available_memory};
use crate::interrupt::{INTERRUPTED, Interrupt};
use crate::plan::{Metric, Plan, Role, Verb};
use crate::report::file::{self, Form};
use crate::report::table::Table;
use crate::report::{Host, Report, Row, csv, plot};
use crate::run::Interrupted;
use crate::session::Opened;
use crate::session::client::{Client, Observer};
use crate::session::server::Server;
use crate::units::{Bytes, Nanos, Rate};
use crate::worker::Layout;

/// The exit status when a limit was not kept.
const LIMIT_BROKEN: i32 = 3;

const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Runs the test and shows what came of it; the exit status.
pub(crate) fn main(args: &TestArgs, verb: Verb, metric: Metric) -> Result<i32> {
    let plan = match args.plan(verb, metric) {
        Ok(plan) => plan,
        Err(reason) => {
            eprintln!("error: {reason}\n\nFor more information, try '--help'.");
            return Ok(2);
        }
    };
    let interrupt = Arc::new(Interrupt::install()?);
    // Before anything is measured that could not be kept.
    let form = args.out.output.as_deref().map(Form::of).transpose()?;
    args.out.plot.as_deref().map_or(Ok(()), plot::check_name)?;
    args.out.output.iter().chain(&args.out.plot).try_for_each(|path| file::check_writable(path))?;
    cpu::check(&plan.pinning.client).context("--cpu")?;
    if let Some(warning) = scarce(&plan, args.loopback, available_memory()).filter(|_| !args.out.quiet) {
        eprintln!("rdma-perf: warning: {warning}");
    }
    let opened = Opened::open(&args.device)?;
    let clock = Clock::calibrate();
    let server = args.host.as_deref().unwrap_or("this process");
    let control = match &args.host {
        Some(host) if plan.compat => Control::connect_alone(host, args.device.port, CONNECT_LIMIT, &interrupt),
        Some(host) => Control::connect(host, args.device.port, CONNECT_LIMIT, Some(&interrupt)),
        None => loopback(&opened, clock, &interrupt),
    };
    let client = Client {
        opened: &opened,
        clock,
        label: args.out.label.clone().unwrap_or_else(|| plan.title()),
        percents: percents(&args.out),
        any_size: args.load.is_any_size(),
        interrupt: &interrupt,
    };
    let mut display = Display::new(args, &plan);
    let (report, ending) = match control.and_then(|control| {
        client.run(control, &plan, &mut display).with_context(|| format!("the test against {server} failed"))
    }) {
        Ok(ended) => ended,
        Err(error) if error.is::<Interrupted>() => {
            eprintln!("rdma-perf: interrupted before anything was measured");
            return Ok(INTERRUPTED);
        }
        Err(error) => return Err(error),
    };
    display.finish(&report)?;
    if !report.rows.is_empty() {
        if let Some(path) = args.out.output.as_deref().filter(|_| form.is_some()) {
            report.save(path)?;
        }
        if let Some(path) = &args.out.plot {
            plot::draw(std::slice::from_ref(&report), path, None)?;
        }
    }
    match ending {
        Ok(()) => Ok(limits(&args.out, &report)),
        Err(error) if error.is::<Interrupted>() => {
            match report.rows.last() {
                Some(row) if row.interrupted => {
                    eprintln!("rdma-perf: interrupted; the row of {} bytes is of the part that was measured", row.size)
                }
                Some(_) => eprintln!("rdma-perf: interrupted; the rows above are whole"),
                None => eprintln!("rdma-perf: interrupted before anything was measured; no results were written"),
            }
            Ok(INTERRUPTED)
        }
        Err(error) => Err(error).with_context(|| format!("the test against {server} failed")),
    }
}

/// What to say when the buffers of this process are more than it can have.
fn scarce(plan: &Plan, loopback: bool, available: Option<u64>) -> Option<String> {
    let server = if loopback { Layout::total(plan, Role::Server) } else { 0 };
    let memory = Layout::total(plan, Role::Client).saturating_add(server);
    let free = available.filter(|free| memory > *free)?;
    Some(format!(
        "the test takes {} of memory here, and {} are free: the process may be killed; a smaller --size, --qps or --rx-depth \
         takes less",
        amount(memory),
        amount(free)
    ))
}

/// Percentiles to record: those to be shown, those that limits are about, and those that charts have.
fn percents(out: &OutputArgs) -> Vec<f64> {
    let limits = out.max_latency.iter().map(|limit| limit.percent);
    let mut percents: Vec<f64> = out.percentiles.iter().copied().chain(limits).chain([50.0, 99.0, 99.9]).collect();
    percents.sort_by(f64::total_cmp);
    percents.dedup();
    percents
}

/// Says which limits were broken; the exit status.
fn limits(out: &OutputArgs, report: &Report) -> i32 {
    let mut status = 0;
    let mut broken = |size: u64, what: String| {
        eprintln!("rdma-perf: at {} bytes {what}", size);
        status = LIMIT_BROKEN;
    };
    for row in &report.rows {
        if let (Some(limit), Some(bandwidth)) = (out.min_bandwidth, row.bandwidth) {
            if bandwidth.message_rate < limit.messages(row.size) {
                let gbits = |bytes: f64| bytes * 8.0 / 1e9;
                let what = match limit {
                    Rate::MessagesPerSecond(least) => {
                        format!("{:.0} messages/s are less than {least:.0}", bandwidth.message_rate)
                    }
                    Rate::BytesPerSecond(least) => {
                        format!("{:.3} Gb/s are less than {:.3} Gb/s", gbits(bandwidth.average), gbits(least))
                    }
                };
                broken(row.size, what);
            }
        }
        for limit in &out.max_latency {
            let measured = row.latency.as_ref().and_then(|latency| latency.percentile(limit.percent));
            let Some(measured) = measured else {
                let samples = row.latency.as_ref().map_or(0, |latency| latency.samples);
                broken(row.size, format!("{samples} samples are too few for p{}", limit.percent));
                continue;
            };
            if measured > limit.limit.as_nanos() as f64 {
                let (percent, limit) = (limit.percent, Nanos(limit.limit.as_nanos() as f64));
                broken(row.size, format!("the latency of {} at p{percent} is more than {limit}", Nanos(measured)));
            }
        }
    }
    status
}

/// A server within this process, and the connection to it.
fn loopback(opened: &Opened, clock: Clock, interrupt: &Arc<Interrupt>) -> Result<Control> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let server = Server { opened: opened.clone(), clock, max_memory: None, cpus: Vec::new(), is_inner: true };
    // Its failures reach the client over the connection.
    std::thread::spawn(move || server.serve(&listener, true));
    Control::connect("127.0.0.1", port, CONNECT_LIMIT, Some(interrupt))
}

/// Shows rows and progress.
struct Display {
    form: Format,
    quiet: bool,
    table: Table,
    bar: Option<ProgressBar>,
}

impl Display {
    fn new(args: &TestArgs, plan: &Plan) -> Self {
        let bar = (!args.out.quiet && !plan.compat && stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{prefix:>6} [{bar:40}] {percent:>3} % {msg}");
            let bar = ProgressBar::with_draw_target(Some(1000), ProgressDrawTarget::stderr());
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        let table = Table::new(plan, &args.out.percentiles, args.out.report_gbits);
        Display { form: args.out.format, quiet: args.out.quiet, table, bar }
    }

    /// Prints a line without disturbing the bar.
    fn line(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| println!("{line}")),
            None => println!("{line}"),
        }
    }

    fn finish(&self, report: &Report) -> Result<()> {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        match self.form {
            Format::Text if !report.rows.is_empty() => print!("{}", self.table.footer(report)),
            Format::Json => print!("{}", report.to_text(Form::Json)),
            Format::Text | Format::Csv => {}
        }
        Ok(())
    }
}

impl Observer for Display {
    fn connected(&mut self, report: &Report) {
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

    fn progress(&mut self, size: u64, share: f64, messages: u64) {
        if let Some(bar) = &self.bar {
            bar.set_prefix(Bytes(size).to_string());
            bar.set_message(format!("{messages} messages"));
            bar.set_position((share * 1000.0) as u64);
        }
    }

    fn row(&mut self, report: &Report, row: &Row) {
        match self.form {
            Format::Text => self.line(&self.table.row(row)),
            Format::Csv => self.line(csv::line(report, row).trim_end()),
            Format::Json => {}
        }
    }

    fn wants_progress(&self) -> bool {
        self.bar.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample;

    #[test]
    fn buffers_that_do_not_fit_are_warned_of() {
        let plan = sample::plan("write bw host -s 1G");
        assert_eq!(scarce(&plan, false, None), None);
        assert_eq!(scarce(&plan, false, Some(3 << 30)), None);
        let warning = scarce(&plan, false, Some(1 << 30)).unwrap();
        assert!(warning.contains("takes 1 GiB") && warning.contains("1 GiB are free"), "{warning}");
        assert!(scarce(&plan, true, Some(3 << 29)).unwrap().contains("takes 2 GiB"));
    }
}
