//! Computes the results of one size from the outcomes of one end's threads.

use anyhow::Result;

use super::device::peak_resident;
use crate::clock::Clock;
use crate::cpu::combined;
use crate::plan::{Metric, Plan};
use crate::report::Row;
use crate::run::Outcome;
use crate::stats::{Bandwidth, Latencies, Perftest, perftest};

pub(super) fn row(plan: &Plan, size: u64, outcomes: &[Outcome], percents: &[f64], clock: Clock) -> Result<Row> {
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
        latency: latencies.summary(plan.latency_definition(), percents),
        perftest,
        reverse: None,
        validated: plan.validate.then_some(received),
        peak_resident: peak_resident()?,
        client_cpu: combined(outcomes.iter().filter_map(|outcome| outcome.usage)),
        server_cpu: None,
    })
}

/// From the first post to the last completion of all threads.
fn window(outcomes: &[Outcome]) -> (u64, u64) {
    let start = outcomes.iter().map(|outcome| outcome.window.0).min();
    (start.unwrap_or(0), outcomes.iter().map(|outcome| outcome.window.1).max().unwrap_or(0))
}

/// Bandwidth of all threads of one end together.
pub(super) fn bandwidth(size: u64, outcomes: &[Outcome], clock: Clock) -> Bandwidth {
    let messages: u64 = outcomes.iter().map(|outcome| outcome.messages).sum();
    let (start, end) = window(outcomes);
    let per_second = |messages_per_tick: f64| messages_per_tick * 1e9 / clock.nanos(1);
    let message_rate = per_second(messages as f64 / end.saturating_sub(start).max(1) as f64);
    let peak = match outcomes {
        // The peaks of several threads are not at the same time, so their sum is meaningless.
        [outcome] => outcome.peak.map(|peak| per_second(peak) * size as f64),
        _ => None,
    };
    Bandwidth { average: message_rate * size as f64, message_rate, peak }
}

fn compat(plan: &Plan, size: u64, outcome: &Outcome, clock: Clock) -> Option<Perftest> {
    match plan.metric {
        Metric::Bw => {
            let timestamps = outcome.timestamps.as_ref();
            let window = timestamps
                .and_then(|timestamps| Some((*timestamps.posted.first()?, *timestamps.completed.last()?)))
                .unwrap_or(outcome.window);
            let columns =
                perftest::bandwidth(size, outcome.messages, window, timestamps, plan.post_list, plan.cq_mod, clock);
            Some(columns)
        }
        Metric::Lat => {
            let divisor = if plan.is_two_sided() { 2.0 } else { 1.0 };
            perftest::latency(&outcome.timestamps.as_ref()?.posted, divisor, clock)
        }
    }
}
