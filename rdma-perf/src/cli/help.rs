//! Help texts of the tests: each lists only the options that apply to it.

use clap::Command;

use crate::plan::{Metric, Verb};

/// Adapts the help of each test to the options that apply to it. Parsing is unchanged: an option that does not apply is
/// refused with a reason.
pub(super) fn hide_inapplicable(command: Command) -> Command {
    let command = command
        .after_long_help(EXAMPLES)
        .mut_subcommand("server", |server| server.after_help(SERVER_EXAMPLES))
        .mut_subcommand("plot", |plot| plot.after_help(PLOT_EXAMPLES));
    [Verb::Send, Verb::Write, Verb::Read, Verb::Atomic].into_iter().fold(command, |command, verb| {
        command.mut_subcommand(verb.name(), |command| {
            [("bw", Metric::Bw), ("lat", Metric::Lat)]
                .into_iter()
                .fold(command, |command, (name, metric)| command.mut_subcommand(name, |test| adapt(test, verb, metric)))
        })
    })
}

fn adapt(mut test: Command, verb: Verb, metric: Metric) -> Command {
    for id in inapplicable(verb, metric) {
        test = test.mut_arg(id, |arg| arg.hide(true));
    }
    if verb != Verb::Atomic {
        let default = match (verb, metric) {
            (Verb::Send, Metric::Bw) => "64K, or over UD the path MTU",
            (_, Metric::Bw) => "64K",
            (_, Metric::Lat) => "2",
        };
        test = test.mut_arg("size", |arg| with_default(arg, default));
    }
    test =
        test.mut_arg("iters", |arg| with_default(arg, if has_5000_messages(verb, metric) { "5000" } else { "1000" }));
    test.after_help("--help shows all options and examples").after_long_help(examples(verb, metric))
}

/// Whether a run has 5000 messages by default, as in perftest.
pub(super) fn has_5000_messages(verb: Verb, metric: Metric) -> bool {
    verb == Verb::Write && metric == Metric::Bw
}

/// Shows a default that clap does not know, because the plan sets it.
fn with_default(arg: clap::Arg, default: &str) -> clap::Arg {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    arg.help(format!("{help} [default: {default}]"))
}

/// Options that do not apply to a test.
fn inapplicable(verb: Verb, metric: Metric) -> Vec<&'static str> {
    let mut ids = Vec::new();
    match verb {
        Verb::Send => ids.extend(["atomic", "outstanding"]),
        Verb::Write => ids.extend(["atomic", "outstanding", "use_srq"]),
        Verb::Read => ids.extend(["atomic", "imm", "inline", "rx_depth", "rnr_retry", "use_srq"]),
        Verb::Atomic => ids.extend(["size", "all", "imm", "inline", "rx_depth", "rnr_retry", "use_srq"]),
    }
    if (verb, metric) != (Verb::Write, Metric::Lat) {
        ids.push("ack");
    }
    if metric == Metric::Lat {
        ids.extend([
            "qps",
            "bidirectional",
            "rate",
            "tx_depth",
            "cq_mod",
            "post_list",
            "report_gbits",
            "min_bandwidth",
        ]);
    }
    ids
}

const EXAMPLES: &str = "\
Examples:
  rdma-perf doctor                                  is this host set up for RDMA?
  rdma-perf server                                  on one host
  rdma-perf write bw HOST --all -O before.json      on the other: all sizes, results in a file
  rdma-perf send lat HOST --help                    the options of a test
  rdma-perf plot before.json after.json -O two.svg  both on one chart";

const SERVER_EXAMPLES: &str = "\
Examples:
  rdma-perf server                              for any client, on the first device with an active port
  rdma-perf server --once -d mlx5_1 --cpu 0-7   for one client, on that device's NUMA node";

const PLOT_EXAMPLES: &str = "\
Examples:
  rdma-perf plot run.json                                a chart in rdma-perf.svg
  rdma-perf plot before.json after.json -O compare.svg   both on one chart";

fn examples(verb: Verb, metric: Metric) -> String {
    let test = format!("  rdma-perf {} {}", verb.name(), if metric == Metric::Bw { "bw" } else { "lat" });
    let mut lines = vec!["Examples, with `rdma-perf server` on HOST:".to_owned()];
    let mut add = |options: &str, what: &str| lines.push(format!("{test} {options:<38}{what}"));
    match (metric, verb) {
        (Metric::Bw, Verb::Atomic) => add("HOST -D 5s", "for five seconds"),
        (Metric::Bw, _) => {
            add("HOST -a -D 1s -O run.json", "all sizes, one second each, results in a file");
            add("HOST -s 64 -q 8 -l 16", "small messages over 8 queue pairs, 16 per doorbell");
        }
        (Metric::Lat, Verb::Atomic) => add("HOST -A compare-swap", "the other operation"),
        (Metric::Lat, _) => add("HOST -s 2,64,4K -n 100000", "three sizes"),
    }
    match (metric, verb) {
        (Metric::Lat, Verb::Write) => add("HOST --ack", "a whole round trip"),
        (Metric::Lat, _) => add("HOST --events", "sleeps until a completion event"),
        (Metric::Bw, _) => add("HOST -T 2 --cpu 2,3 --server-cpu 2,3", "two threads at each end, pinned"),
    }
    match metric {
        Metric::Bw => add("HOST --tclass 0x68 --sl 3", "with DSCP 26 and priority 3"),
        Metric::Lat => add("HOST --max-latency p99=10us --quiet", "exit status 3 if p99 is higher"),
    }
    add("--loopback --validate", "both ends on this host, bytes compared");
    lines.join("\n")
}
