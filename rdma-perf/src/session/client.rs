//! The client: it decides what to run, and measures.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};

use super::control::{Control, PROTOCOL, Reply, Request};
use super::device::OpenDevice;
use super::summary;
use super::threads::{Event, Threads};
use crate::clock::Clock;
use crate::endpoint::cm::CmConnector;
use crate::interrupt::{Interrupt, Interrupted};
use crate::plan::{Length, Plan, Role};
use crate::report::display::Display;
use crate::report::{FORMAT, Report, Row};
use crate::run::Shared;
use crate::transport::MAX_MTU;

/// Longest set-up of the server. Registering several gigabytes takes a second.
const SETUP_LIMIT: Duration = Duration::from_secs(120);

/// Time that the server has after `--timeout` to answer, since it may compare gigabytes.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// Settings of a client that are not part of the plan.
pub(crate) struct Client<'c> {
    pub(crate) opened: &'c OpenDevice,
    pub(crate) clock: Clock,
    pub(crate) label: String,
    pub(crate) percents: Vec<f64>,
    /// Whether the sizes are defaults. Those that do not fit into a datagram are then left out.
    pub(crate) default_sizes: bool,
    pub(crate) interrupt: &'c Interrupt,
}

impl Client<'_> {
    /// Runs the plan against the server.
    ///
    /// # Errors
    /// A failure of the set-up. A later failure is returned with the report, which has the rows measured until then.
    pub(crate) fn run(&self, mut control: Control, plan: &Plan, display: &mut Display) -> Result<(Report, Result<()>)> {
        let mut plan = plan.clone();
        let (mut threads, mut report) = match self.set_up(&mut control, &mut plan) {
            Ok(ready) => ready,
            Err(error) => {
                // The send fails if the server is gone.
                let _ = control.send(&Request::Failed { reason: format!("{error:#}") });
                return Err(error);
            }
        };
        let plan = &plan;
        if plan.compat {
            // perftest's loop does not check for it.
            self.interrupt.exit_on_next_signal();
        }
        display.connected(&report);
        for index in 0..plan.sizes.len() {
            match self.size(&mut threads, &mut control, plan, index, display) {
                Ok((row, interrupted)) => {
                    if row.messages > 0 {
                        display.row(&report, &row);
                        report.rows.push(row);
                    }
                    if interrupted {
                        let _ = control.send(&Request::Bye);
                        return Ok((report, Err(Interrupted.into())));
                    }
                }
                Err(error) => {
                    let _ = control.send(&Request::Failed { reason: format!("{error:#}") });
                    return Ok((report, Err(error)));
                }
            }
        }
        // The results are complete, so a server that is gone is no failure.
        let _ = control.send(&Request::Bye);
        Ok((report, Ok(())))
    }

    /// Sets up both ends. Ctrl-C ends it.
    fn set_up(&self, control: &mut Control, plan: &mut Plan) -> Result<(Threads, Report)> {
        let check = || self.interrupt.check();
        if self.default_sizes {
            plan.cut_datagrams(mtu_of(self.opened.host.mtu));
        }
        plan.check_datagrams(mtu_of(self.opened.host.mtu))?;
        let mut threads = Threads::new(self.opened, plan, Role::Client, self.clock, &plan.pinning.client, &check)?;
        let mut host = self.opened.host.clone();
        (host.extended_post, host.extended_poll) = threads.interfaces();
        let hello = Request::Hello {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            plan: Box::new(plan.clone()),
            host: Box::new(host.clone()),
        };
        let Reply::Accepted { host: server, workers, cm_address } = control.request(&hello, SETUP_LIMIT)? else {
            bail!("the server sent an unexpected reply");
        };
        // The server refers to sizes by index, so only the last sizes of a sweep may be removed now.
        if self.default_sizes && plan.sizes.len() > 1 {
            plan.cut_datagrams(mtu_of(server.mtu));
        }
        plan.check_datagrams(mtu_of(server.mtu))?;
        threads.connect(&workers, plan, Role::Client, &check)?;
        control.send(&Request::Connect { workers: threads.addresses() })?;
        if plan.rdma_cm {
            let cm_address = cm_address.context("the server sent no address for rdmacm")?;
            let connector = CmConnector::new(cm_address, self.opened.ip, self.opened.device_port())?;
            threads
                .connect_by_address(&connector, &workers, plan, &check)
                .map_err(|error| self.server_reason(error, control))?;
        }
        if !matches!(control.wait_reply(SETUP_LIMIT)?, Reply::Connected) {
            bail!("the server sent an unexpected reply");
        }
        let report = Report {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").into(),
            label: self.label.clone(),
            client: host,
            server: *server,
            unix_time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            plan: plan.clone(),
            rows: Vec::new(),
        };
        Ok((threads, report))
    }

    /// Runs one size. Returns its row, and whether Ctrl-C was pressed.
    fn size(
        &self,
        threads: &mut Threads,
        control: &mut Control,
        plan: &Plan,
        index: usize,
        display: &mut Display,
    ) -> Result<(Row, bool)> {
        threads.prepare(plan, index)?;
        if !matches!(control.request(&Request::Prepare { size: index }, SETUP_LIMIT)?, Reply::Prepared) {
            bail!("the server sent an unexpected reply");
        }
        let shared = Shared::default();
        let mut interrupted = false;
        let mut ours = Vec::new();
        let mut done = None;
        let size = plan.sizes[index];
        let started = Instant::now();
        let mut finished = None;
        let outcomes = threads.run(plan, index, &shared, |supervisor| {
            let mut ended = false;
            while !(ended && done.is_some()) {
                // Handled once, because the descriptor stays readable.
                let interrupt = (!interrupted).then_some(self.interrupt);
                match supervisor.next(control, interrupt, display.shows_progress() || finished.is_some())? {
                    Event::Sent(sent) => {
                        control.send(&Request::Finished { sent: sent.clone() })?;
                        ours = sent;
                        finished = Some(Instant::now());
                    }
                    Event::Control => {
                        let Reply::Done { sent, reverse, validated, cpu } = control.reply(SETUP_LIMIT)? else {
                            bail!("the server sent an unexpected reply");
                        };
                        supervisor.set_expected(&sent);
                        done = Some((sent, reverse, validated, cpu));
                    }
                    Event::Failed(error) => return Err(self.server_reason(error, control)),
                    Event::Ended => ended = true,
                    Event::Interrupted => {
                        interrupted = true;
                        supervisor.stop();
                    }
                    Event::Tick => {
                        if done.is_none() && finished.is_some_and(|since| since.elapsed() > plan.timeout + ANSWER_LIMIT)
                        {
                            bail!("the server did not finish in time: it hangs, or its host is gone");
                        }
                        let messages = shared.progress.load(Ordering::Relaxed);
                        display.progress(size, fraction(plan, messages, started.elapsed()), messages);
                    }
                }
            }
            Ok(())
        })?;
        let (server_sent, reverse, validated, cpu) = done.context("the server has not replied")?;
        let compared = threads.check(plan, index, &ours, &server_sent)?;
        let mut row = summary::row(plan, size, &outcomes, &self.percents, self.clock)?;
        row.reverse = reverse;
        row.server_cpu = cpu;
        row.interrupted = interrupted;
        row.validated = row.validated.map(|received| received.saturating_add(compared).saturating_add(validated));
        Ok((row, interrupted))
    }

    /// Adds the server's reason to `error`, if it has sent one, because it is closer to the cause.
    fn server_reason(&self, error: anyhow::Error, control: &mut Control) -> anyhow::Error {
        match control.reply(Duration::from_millis(200)) {
            Err(server) if server.to_string().starts_with("the server: ") => error.context(format!("{server:#}")),
            _ => error,
        }
    }
}

/// The MTU of a host's port, or the largest one if unknown.
fn mtu_of(known: u32) -> u64 {
    if known == 0 { MAX_MTU } else { known.into() }
}

fn fraction(plan: &Plan, messages: u64, elapsed: Duration) -> f64 {
    let share = match (plan.messages_of_lane(), plan.length, plan.warm_up) {
        (Some(of_lane), ..) => messages as f64 / (of_lane * u64::from(plan.queue_pairs())) as f64,
        (None, Length::Time(time), crate::plan::WarmUp::Time(warm_up)) => elapsed.div_duration_f64(time + warm_up),
        _ => 0.0,
    };
    share.clamp(0.0, 1.0)
}
