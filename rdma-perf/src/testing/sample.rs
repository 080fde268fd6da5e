//! Sample plans and reports.

use clap::Parser;

use crate::cli::Cli;
use crate::cpu::CpuUse;
use crate::plan::{Metric, Plan};
use crate::report::{FORMAT, Host, Report, Row};
use crate::stats::values::Percentile;
use crate::stats::{Bandwidth, Latency, Perftest};

pub(crate) fn plan(arguments: &str) -> Plan {
    let words = std::iter::once("rdma-perf").chain(arguments.split_whitespace());
    let command = Cli::try_parse_from(words).unwrap().command;
    let (verb, metric, args) = command.as_test().unwrap();
    args.plan(verb, metric).unwrap()
}

/// A report of a link of 10 GB/s with a latency of 2 µs per message, with one row per size of the plan.
pub(crate) fn report(arguments: &str, label: &str) -> Report {
    let plan = plan(arguments);
    let rows = plan.sizes.iter().map(|size| row(&plan, *size)).collect();
    let host = Host { name: "node1".into(), device: "mlx5_0".into(), port: 1, mtu: 4096, ..Host::default() };
    let server = Host { name: "node2".into(), ..host.clone() };
    Report {
        format: FORMAT,
        version: "0.1.0".into(),
        unix_time: 1_700_000_000,
        label: label.into(),
        client: host,
        server,
        plan,
        rows,
    }
}

fn row(plan: &Plan, size: u64) -> Row {
    let one_way = 2000.0 + size as f64 / 10.0;
    let message_rate = 1e9 / (200.0 + size as f64 / 10.0);
    let average = message_rate * size as f64;
    let is_bw = plan.metric == Metric::Bw;
    let percentile = |percent: f64| Percentile { percent, nanoseconds: one_way * (1.0 + percent * percent / 5000.0) };
    let latency = Latency {
        definition: plan.latency_definition().into(),
        samples: 1000,
        min: one_way * 0.9,
        mean: one_way * 1.25,
        standard_deviation: one_way * 0.4,
        max: one_way * 8.0,
        percentiles: [50.0, 90.0, 99.0, 99.9, 99.99].map(percentile).into(),
    };
    let mib = f64::from(1 << 20);
    let perftest = match plan.metric {
        Metric::Bw => Perftest::Bandwidth {
            iterations: 5000,
            peak: average * 1.5 / mib,
            average: average / mib,
            message_rate: message_rate / 1e6,
        },
        Metric::Lat => Perftest::Latency {
            iterations: 1000,
            min: one_way * 0.0009,
            max: one_way * 0.004,
            typical: one_way * 0.0015,
            average: one_way * 0.00124,
            standard_deviation: 0.13,
            percentile_99: one_way * 0.003,
            percentile_99_9: one_way * 0.004,
        },
    };
    Row {
        interrupted: false,
        size,
        messages: 1000,
        warm_up_messages: 100,
        seconds: 1000.0 / message_rate,
        bandwidth: is_bw.then_some(Bandwidth { average, message_rate, peak: Some(average * 1.1) }),
        latency: Some(latency),
        perftest: plan.compat.then_some(perftest),
        reverse: plan.bidirectional.then_some(Bandwidth { average, message_rate, peak: None }),
        validated: plan.validate.then_some(1000),
        peak_resident: 12 << 20,
        client_cpu: (!plan.compat).then_some(CpuUse::new(0.75, 0.25, 1.0)),
        server_cpu: (!plan.compat).then_some(CpuUse::new(0.25, 0.25, 2.0)),
    }
}
