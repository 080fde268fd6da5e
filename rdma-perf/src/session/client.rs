//! The end that says what is to be done, and measures.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};

use super::Opened;
use super::crew::{Crew, Happening};
use super::device::peak_resident;
use crate::clock::Clock;
use crate::control::{Control, PROTOCOL, Reply, Request};
use crate::cpu::spanned;
use crate::datagram::MAX_MTU;
use crate::interrupt::Interrupt;
use crate::plan::{Length, Metric, Plan, Role};
use crate::rdmacm::Visitor;
use crate::report::{Bandwidth, FORMAT, Report, Row};
use crate::run::{Interrupted, Outcome, Shared};
use crate::stats::{Latencies, perftest};

/// How long the server may take to make its objects ready: registering memory takes a second for some gigabytes.
const SETUP_LIMIT: Duration = Duration::from_secs(120);

/// How much longer than a completion its answer may take: it compares gigabytes, perhaps.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// Who is told how it goes.
pub(crate) trait Observer {
    /// Both ends are connected. The report has no rows yet.
    fn connected(&mut self, report: &Report);

    /// How much of the run of one size is done, 0 to 1, and messages so far.
    fn progress(&mut self, size: u64, share: f64, messages: u64);

    /// One size is done.
    fn row(&mut self, report: &Report, row: &Row);

    /// Whether to be told of progress at all.
    fn wants_progress(&self) -> bool;
}

/// Everything but the plan that a client needs.
pub(crate) struct Client<'c> {
    pub(crate) opened: &'c Opened,
    pub(crate) clock: Clock,
    pub(crate) label: String,
    pub(crate) percents: Vec<f64>,
    /// The sizes are none that the user has asked for: those that no datagram can have are left out.
    pub(crate) any_size: bool,
    pub(crate) interrupt: &'c Interrupt,
}

impl Client<'_> {
    /// Runs the plan against the server; what was measured before a failure is in the report, too.
    pub(crate) fn run(
        &self,
        mut control: Control,
        plan: &Plan,
        observer: &mut dyn Observer,
    ) -> Result<(Report, Result<()>)> {
        let mut plan = plan.clone();
        let (mut crew, mut report) = match self.set_up(&mut control, &mut plan) {
            Ok(ready) => ready,
            Err(error) => {
                // It may have gone; then it knows.
                let _ = control.send(&Request::Failed { reason: format!("{error:#}") });
                return Err(error);
            }
        };
        let plan = &plan;
        if plan.compat {
            // perftest's loop does not look for it.
            self.interrupt.end_at_once();
        }
        observer.connected(&report);
        for index in 0..plan.sizes.len() {
            match self.size(&mut crew, &mut control, plan, index, observer) {
                Ok((row, interrupted)) => {
                    if row.messages > 0 {
                        observer.row(&report, &row);
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
        // The results are here: a server that is gone takes nothing away.
        let _ = control.send(&Request::Bye);
        Ok((report, Ok(())))
    }

    /// Everything that comes before the first message. Ctrl-C ends it.
    fn set_up(&self, control: &mut Control, plan: &mut Plan) -> Result<(Crew, Report)> {
        let check = || self.interrupt.check();
        if self.any_size {
            plan.cut_datagrams(mtu_of(self.opened.host.mtu));
        }
        plan.check_datagrams(mtu_of(self.opened.host.mtu))?;
        let mut crew = Crew::new(self.opened, plan, Role::Client, self.clock, &plan.pinning.client, &check)?;
        let mut host = self.opened.host.clone();
        (host.extended_post, host.extended_poll) = crew.interfaces();
        let hello = Request::Hello {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            plan: Box::new(plan.clone()),
            host: Box::new(host.clone()),
        };
        let Reply::Accepted { host: server, workers, meeting } = control.ask(&hello, SETUP_LIMIT)? else {
            bail!("the server does not answer as it should");
        };
        // The server knows sizes by their numbers: of a sweep, the first ones may be left.
        if self.any_size && plan.sizes.len() > 1 {
            plan.cut_datagrams(mtu_of(server.mtu));
        }
        plan.check_datagrams(mtu_of(server.mtu))?;
        crew.connect(&workers, plan, Role::Client, &check)?;
        control.send(&Request::Connect { workers: crew.addresses() })?;
        if plan.rdma_cm {
            let meeting = meeting.context("the server does not say where to connect to by rdmacm")?;
            let visitor = Visitor::new(meeting, self.opened.ip, self.opened.place())?;
            crew.visit(&visitor, &workers, plan, &check).map_err(|error| self.reason(error, control))?;
        }
        if !matches!(control.answer(SETUP_LIMIT)?, Reply::Connected) {
            bail!("the server does not answer as it should");
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
        Ok((crew, report))
    }

    /// One size; whether the user wants no more.
    fn size(
        &self,
        crew: &mut Crew,
        control: &mut Control,
        plan: &Plan,
        index: usize,
        observer: &mut dyn Observer,
    ) -> Result<(Row, bool)> {
        crew.prepare(plan, index)?;
        if !matches!(control.ask(&Request::Prepare { size: index }, SETUP_LIMIT)?, Reply::Prepared) {
            bail!("the server does not answer as it should");
        }
        let shared = Shared::default();
        let mut interrupted = false;
        let mut ours = Vec::new();
        let mut done = None;
        let size = plan.sizes[index];
        let started = Instant::now();
        let mut finished = None;
        let outcomes = crew.run(plan, index, &shared, |watch| {
            let mut ended = false;
            while !(ended && done.is_some()) {
                // Once is enough: the descriptor stays readable.
                let interrupt = (!interrupted).then_some(self.interrupt);
                match watch.next(control, interrupt, observer.wants_progress() || finished.is_some())? {
                    Happening::Sent(sent) => {
                        control.send(&Request::Finished { sent: sent.clone() })?;
                        ours = sent;
                        finished = Some(Instant::now());
                    }
                    Happening::Control => {
                        let Reply::Done { sent, reverse, validated, cpu } = control.reply(SETUP_LIMIT)? else {
                            bail!("the server does not answer as it should");
                        };
                        watch.expect(&sent);
                        done = Some((sent, reverse, validated, cpu));
                    }
                    Happening::Failed(error) => return Err(self.reason(error, control)),
                    Happening::Ended => ended = true,
                    Happening::Interrupted => {
                        interrupted = true;
                        watch.stop();
                    }
                    Happening::Tick => {
                        if done.is_none()
                            && finished.is_some_and(|since| since.elapsed() > plan.patience + ANSWER_LIMIT)
                        {
                            bail!("the server does not say that it is done: it hangs, or its host is gone");
                        }
                        let messages = shared.progress.load(Ordering::Relaxed);
                        observer.progress(size, share(plan, messages, started.elapsed()), messages);
                    }
                }
            }
            Ok(())
        })?;
        let (theirs, reverse, validated, cpu) = done.context("the server has not answered")?;
        let compared = crew.check(plan, index, &ours, &theirs)?;
        let mut row = self.row(plan, size, &outcomes)?;
        row.reverse = reverse;
        row.server_cpu = cpu;
        row.interrupted = interrupted;
        row.validated = row.validated.map(|received| received.saturating_add(compared).saturating_add(validated));
        Ok((row, interrupted))
    }

    /// What the server says of a failure is nearer to its cause.
    fn reason(&self, error: anyhow::Error, control: &mut Control) -> anyhow::Error {
        match control.reply(Duration::from_millis(200)) {
            Err(theirs) if theirs.to_string().starts_with("the server: ") => error.context(format!("{theirs:#}")),
            _ => error,
        }
    }

    fn row(&self, plan: &Plan, size: u64, outcomes: &[Outcome]) -> Result<Row> {
        let clock = self.clock;
        let mut latencies = Latencies::new();
        outcomes.iter().for_each(|outcome| latencies.add(&outcome.latencies));
        let received: u64 = outcomes.iter().map(|outcome| outcome.validated).sum();
        let messages: u64 = outcomes.iter().map(|outcome| outcome.messages).sum();
        let window = window(outcomes);
        let seconds = clock.nanos(window.1.saturating_sub(window.0)) / 1e9;
        let bandwidth = (plan.metric == Metric::Bw).then(|| bandwidth(size, outcomes, clock));
        let perftest = match (plan.compat, outcomes) {
            (true, [outcome]) => compat(plan, size, outcome, clock),
            _ => None,
        };
        Ok(Row {
            size,
            messages,
            interrupted: false,
            warm_up_messages: outcomes.iter().map(|outcome| outcome.warm_up).sum(),
            seconds,
            bandwidth,
            latency: latencies.summary(plan.latency_definition(), &self.percents),
            perftest,
            reverse: None,
            validated: plan.validate.then_some(received),
            peak_resident: peak_resident()?,
            client_cpu: spanned(outcomes.iter().filter_map(|outcome| outcome.usage)),
            server_cpu: None,
        })
    }
}

/// The MTU of a host's port, which need not say.
fn mtu_of(known: u32) -> u64 {
    if known == 0 { MAX_MTU } else { known.into() }
}

/// From the first post of any thread to the last completion of any.
fn window(outcomes: &[Outcome]) -> (u64, u64) {
    let start = outcomes.iter().map(|outcome| outcome.window.0).min();
    (start.unwrap_or(0), outcomes.iter().map(|outcome| outcome.window.1).max().unwrap_or(0))
}

/// What the threads of one end have sent together.
pub(super) fn bandwidth(size: u64, outcomes: &[Outcome], clock: Clock) -> Bandwidth {
    let messages: u64 = outcomes.iter().map(|outcome| outcome.messages).sum();
    let (start, end) = window(outcomes);
    let per_second = |messages_per_tick: f64| messages_per_tick * 1e9 / clock.nanos(1);
    let message_rate = per_second(messages as f64 / end.saturating_sub(start).max(1) as f64);
    let peak = match outcomes {
        // Fastest stretches of several threads do not fall together.
        [outcome] => outcome.peak.map(|peak| per_second(peak) * size as f64),
        _ => None,
    };
    Bandwidth { average: message_rate * size as f64, message_rate, peak }
}

fn compat(plan: &Plan, size: u64, outcome: &Outcome, clock: Clock) -> Option<crate::report::Perftest> {
    match plan.metric {
        Metric::Bw => {
            let moments = outcome.moments.as_ref();
            let window = moments
                .and_then(|moments| Some((*moments.posted.first()?, *moments.completed.last()?)))
                .unwrap_or(outcome.window);
            let columns =
                perftest::bandwidth(size, outcome.messages, window, moments, plan.post_list, plan.cq_mod, clock);
            Some(columns)
        }
        Metric::Lat => {
            let divisor = if plan.is_two_sided() { 2.0 } else { 1.0 };
            perftest::latency(&outcome.moments.as_ref()?.posted, divisor, clock)
        }
    }
}

fn share(plan: &Plan, messages: u64, elapsed: Duration) -> f64 {
    let share = match (plan.messages_of_lane(), plan.length, plan.warm_up) {
        (Some(of_lane), ..) => messages as f64 / (of_lane * u64::from(plan.queue_pairs())) as f64,
        (None, Length::Time(time), crate::plan::WarmUp::Time(warm_up)) => elapsed.div_duration_f64(time + warm_up),
        _ => 0.0,
    };
    share.clamp(0.0, 1.0)
}
