//! Help for each test: only the options that apply to it.

use clap::Command;

use crate::plan::{Metric, Verb};

/// The command line with the help of each test made to fit it. It parses as it did: what does not apply is refused with a
/// reason.
pub(super) fn tailored(command: Command) -> Command {
    let command = command
        .after_long_help(EXAMPLES)
        .mut_subcommand("server", |server| server.after_help(SERVER_EXAMPLES))
        .mut_subcommand("plot", |plot| plot.after_help(PLOT_EXAMPLES));
    [Verb::Send, Verb::Write, Verb::Read, Verb::Atomic].into_iter().fold(command, |command, verb| {
        command.mut_subcommand(verb.name(), |command| {
            [("bw", Metric::Bw), ("lat", Metric::Lat)]
                .into_iter()
                .fold(command, |command, (name, metric)| command.mut_subcommand(name, |test| one(test, verb, metric)))
        })
    })
}

fn one(mut test: Command, verb: Verb, metric: Metric) -> Command {
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
    test = test.mut_arg("iters", |arg| with_default(arg, if is_long(verb, metric) { "5000" } else { "1000" }));
    test.after_help("--help says more, with examples").after_long_help(examples(verb, metric))
}

/// Whether a run has 5000 messages, as perftest's.
pub(super) fn is_long(verb: Verb, metric: Metric) -> bool {
    verb == Verb::Write && metric == Metric::Bw
}

/// One that clap does not know of: the plan has it.
fn with_default(arg: clap::Arg, default: &str) -> clap::Arg {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    arg.help(format!("{help} [default: {default}]"))
}

/// Options that a test has no use for.
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
  rdma-perf write bw HOST --all -O before.json      on the other: all sizes, results kept
  rdma-perf send lat HOST --help                    what applies to a test
  rdma-perf plot before.json after.json -O two.svg  both on one chart";

const SERVER_EXAMPLES: &str = "\
Examples:
  rdma-perf server                              for any client, on the first device with an active port
  rdma-perf server --once -d mlx5_1 --cpu 0-7   for one client, on processors of that device's node";

const PLOT_EXAMPLES: &str = "\
Examples:
  rdma-perf plot run.json                                a chart in rdma-perf.svg
  rdma-perf plot before.json after.json -O compare.svg   both on one";

fn examples(verb: Verb, metric: Metric) -> String {
    let test = format!("  rdma-perf {} {}", verb.name(), if metric == Metric::Bw { "bw" } else { "lat" });
    let mut lines = vec!["Examples, with `rdma-perf server` on HOST:".to_owned()];
    let mut add = |options: &str, what: &str| lines.push(format!("{test} {options:<38}{what}"));
    match (metric, verb) {
        (Metric::Bw, Verb::Atomic) => add("HOST -D 5s", "for five seconds"),
        (Metric::Bw, _) => {
            add("HOST -a -D 1s -O run.json", "all sizes, a second each, results kept");
            add("HOST -s 64 -q 8 -l 16", "small messages over 8 queue pairs, 16 a doorbell");
        }
        (Metric::Lat, Verb::Atomic) => add("HOST -A compare-swap", "the other operation"),
        (Metric::Lat, _) => add("HOST -s 2,64,4K -n 100000", "three sizes"),
    }
    match (metric, verb) {
        (Metric::Lat, Verb::Write) => add("HOST --ack", "a whole round trip"),
        (Metric::Lat, _) => add("HOST --events", "asleep until a completion comes"),
        (Metric::Bw, _) => add("HOST -T 2 --cpu 2,3 --server-cpu 2,3", "two threads at each end, pinned"),
    }
    match metric {
        Metric::Bw => add("HOST --tclass 0x68 --sl 3", "of DSCP 26 and priority 3"),
        Metric::Lat => add("HOST --max-latency p99=10us --quiet", "exit status 3 when it takes longer"),
    }
    add("--loopback --validate", "both ends here, bytes compared");
    lines.join("\n")
}
