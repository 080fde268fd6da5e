use std::time::Duration;

use clap::CommandFactory;

use super::values::{Cpus, cpus, exponent, latency_limit};
use super::*;
use crate::plan::{Interface, Length, Pinning, Plan, WarmUp};
use crate::report::limits::LatencyLimit;

fn plan(arguments: &str) -> Result<Plan, String> {
    let words = std::iter::once("rdma-perf").chain(arguments.split_whitespace());
    let command = Cli::try_parse_from(words).map_err(|error| error.to_string())?.command;
    let (verb, metric, args) = command.as_test().ok_or("no test")?;
    args.plan(verb, metric)
}

#[test]
fn the_defaults_are_those_of_perftest() {
    Cli::command().debug_assert();
    let write = plan("write bw host").unwrap();
    assert_eq!((write.sizes.as_slice(), write.length), (&[65536][..], Length::Iterations(5000)));
    assert_eq!((write.tx_depth, write.cq_mod, write.post_list, write.queue_pairs()), (128, 1, 1, 1));
    let small = plan("write bw host -s 64").unwrap();
    assert_eq!((small.cq_mod, small.warm_up), (100, WarmUp::Iterations(500)));
    let send = plan("send lat host").unwrap();
    assert_eq!((send.sizes.as_slice(), send.length, send.tx_depth), (&[2][..], Length::Iterations(1000), 1));
    assert_eq!((send.cq_mod, send.rx_depth), (1, 512));
    assert_eq!(plan("write bw host -s 64 -l 16").unwrap().cq_mod, 16);
    assert_eq!(plan("write bw host -s 64 -n 50").unwrap().tx_depth, 50);
    assert_eq!(plan("write bw host -a").unwrap().cq_mod, 100);
    assert_eq!(plan("atomic lat host").unwrap().sizes, [8]);
}

#[test]
fn compat_is_classic_and_without_warm_up() {
    let plan = plan("send lat host --compat perftest -e").unwrap();
    assert!(plan.compat && plan.events);
    assert_eq!((plan.post, plan.poll, plan.warm_up), (Interface::Classic, Interface::Classic, WarmUp::Iterations(0)));
}

#[test]
fn timed_runs_warm_up_for_a_tenth_of_the_time() {
    let plan = plan("read bw --loopback -D 2s").unwrap();
    assert_eq!(plan.length, Length::Time(Duration::from_secs(2)));
    assert_eq!(plan.warm_up, WarmUp::Time(Duration::from_millis(200)));
}

#[test]
fn queue_pairs_are_spread_over_threads() {
    let plan = plan("write bw host -q 8 -T 2").unwrap();
    assert_eq!((plan.qps, plan.threads, plan.queue_pairs()), (4, 2, 8));
}

#[test]
fn a_datagram_is_at_most_one_packet() {
    let of = |options: &str| plan(&format!("send {options} host -c UD")).unwrap();
    let bw = of("bw");
    assert_eq!((bw.sizes.as_slice(), bw.cq_mod, bw.rx_depth), (&[4096][..], 100, 512));
    assert_eq!((of("lat").sizes.as_slice(), of("bw -m 1024").sizes.as_slice()), (&[2][..], &[1024][..]));
    let all: Vec<u64> = (1..=12).map(|shift| 1 << shift).collect();
    assert_eq!((of("bw -a").sizes, of("lat -a -m 512").sizes), (all.clone(), all[..9].to_vec()));
    assert!(of("bw --use-srq -q 4").shared_receives);
    for (arguments, reason) in [
        ("send bw host -c UD -s 8K", "at most"),
        ("send lat host -c UD -s 64,1025 -m 1024", "of 1025 bytes"),
        ("write bw host -c UD", "UD has no writes: give -c RC or UC"),
        ("read lat host -c UD", "UD has no reads: give -c RC,"),
    ] {
        let refused = plan(arguments).unwrap_err();
        assert!(refused.contains(reason), "{arguments}: {refused}");
    }
}

#[test]
fn a_latency_limit_names_a_percentile() {
    assert_eq!(latency_limit("p99.9=10us"), Ok(LatencyLimit { percent: 99.9, limit: Duration::from_micros(10) }));
    assert_eq!(latency_limit("max=1ms"), Ok(LatencyLimit { percent: 100.0, limit: Duration::from_millis(1) }));
    assert!(latency_limit("p101=1s").is_err() && latency_limit("p99").is_err());
}

#[test]
fn contradictory_options_are_a_usage_error() {
    for arguments in [
        "write bw",
        "write bw host --loopback",
        "write lat host -b",
        "send lat host -q 2",
        "write bw host -q 3 -T 2",
        "atomic bw host -s 16",
        "atomic bw host -a",
        "read bw host --imm",
        "read bw host -I 8",
        "send lat host --ack",
        "write lat host -e",
        "write bw host -n 4",
        "write bw host -n 100 -D 1",
        "write bw host -n 100 -l 3",
        "write bw host -t 8 -l 16",
        "write bw host --compat perftest -T 2",
        "write bw host --compat perftest -D 1",
        "write bw host --compat perftest --warm-up 3",
        "write bw host --compat other",
        "write bw host -c DC",
        "write bw host -s 0",
        "write bw host -m 1500",
        "write bw host --rate 5",
        "send lat host --rate 5msg/s",
        "send lat host --min-bandwidth 5Gb/s",
        "send lat host --max-latency p99=10",
        "write bw host --percentiles 101",
        "write bw host --atomic fetch-add",
        "send bw host --outstanding 4",
    ] {
        assert!(plan(arguments).is_err(), "{arguments}");
    }
}

#[test]
fn connection_defaults_are_those_of_rdma_safe() {
    let of = |options: &str| plan(&format!("write bw host {options}")).map(|plan| plan.connection);
    assert_eq!(of(""), Ok(crate::plan::Connection::DEFAULT));
    let set = of("--sl 3 --tclass 0x68 --qp-timeout 100ms --retry-count 1 --rnr-retry 0").unwrap();
    assert_eq!((set.service_level, set.traffic_class, set.timeout), (3, 104, 15));
    assert_eq!((set.retries, set.rnr_retries), (1, 0));
    for wrong in ["--sl 16", "--tclass 256", "--tclass 0x100", "--qp-timeout 32", "--retry-count 8", "--rnr-retry 8"] {
        assert!(of(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn timeouts_are_exponents_or_times() {
    assert_eq!((exponent("0"), exponent("14"), exponent("31")), (Ok(0), Ok(14), Ok(31)));
    assert_eq!((exponent("4us"), exponent("67ms"), exponent("1.1s")), (Ok(1), Ok(14), Ok(19)));
    assert!(exponent("32").unwrap_err().contains("unit") && exponent("3h").is_err() && exponent("x").is_err());
}

#[test]
fn processors_keep_the_order_of_the_list() {
    assert_eq!(cpus("2,4-6,0"), Ok(Cpus(vec![2, 4, 5, 6, 0])));
    for wrong in ["", "a", "1-", "3-2", "1,1", "0-3,2", "1024", "99999999999", "-1"] {
        assert!(cpus(wrong).is_err(), "{wrong}");
    }
    let plan = plan("write bw host -T 2 --cpu 0,1 --server-cpu 3").unwrap();
    assert_eq!(plan.pinning, Pinning { client: vec![0, 1], server: vec![3] });
}

fn help(words: &str) -> String {
    let words = std::iter::once("rdma-perf").chain(words.split_whitespace());
    help::hide_inapplicable(Cli::command()).try_get_matches_from(words).unwrap_err().to_string()
}

/// The options listed in a help text.
fn listed(help: &str) -> Vec<&str> {
    let lines = help.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
    lines.filter_map(|line| line.split_whitespace().find(|word| word.starts_with("--"))).collect()
}

#[test]
fn help_lists_only_options_that_apply() {
    help::hide_inapplicable(Cli::command()).debug_assert();
    for (test, shown, hidden, default) in [
        ("write bw", "--post-list --bidirectional --imm", "--atomic --ack --outstanding", "[default: 64K]"),
        ("write lat", "--ack --imm --inline", "--atomic --rate --post-list --qps --min-bandwidth", "[default: 2]"),
        ("send bw", "--rx-depth --imm --inline", "--atomic --ack --outstanding", "[default: 1000]"),
        ("read bw", "--outstanding", "--imm --inline --rx-depth --atomic --rnr-retry", "[default: 64K]"),
        ("atomic lat", "--atomic --outstanding", "--size --all --imm --rate", "[default: fetch-add]"),
    ] {
        let text = help(&format!("{test} --help"));
        for part in ["Load:", "Verbs:", "Processors:", "Connection:", "Device:", "Results:", "Examples", default] {
            assert!(text.contains(part), "{test}: {part} in {text}");
        }
        let listed = listed(&text);
        assert!(shown.split(' ').all(|option| listed.contains(&option)), "{test}: {listed:?}");
        assert!(!hidden.split(' ').any(|option| listed.contains(&option)), "{test}: {listed:?}");
    }
}

#[test]
fn the_short_help_leaves_out_rare_options() {
    let (short, long) = (help("send bw -h"), help("send bw --help"));
    for option in ["--compat", "--warm-up", "--rnr-retry"] {
        assert!(!listed(&short).contains(&option) && listed(&long).contains(&option), "{option}");
    }
    assert!(listed(&short).contains(&"--size") && !short.contains("Examples") && long.contains("Examples"), "{short}");
}

#[test]
fn examples_in_the_help_parse() {
    for words in ["--help", "server --help", "plot --help"] {
        let text = help(words);
        for line in text.lines().filter_map(|line| line.strip_prefix("  rdma-perf ")) {
            let line = line.split("  ").next().unwrap();
            let words = std::iter::once("rdma-perf").chain(line.split_whitespace());
            let parsed = Cli::try_parse_from(words).map_err(|error| error.kind());
            assert!(matches!(parsed, Ok(_) | Err(clap::error::ErrorKind::DisplayHelp)), "{line}");
        }
        assert!(text.contains("Examples"), "{text}");
    }
    for test in ["send bw", "send lat", "write bw", "write lat", "read bw", "read lat", "atomic bw", "atomic lat"] {
        let text = help(&format!("{test} --help"));
        let examples = text.lines().filter_map(|line| line.strip_prefix("  rdma-perf "));
        let lines: Vec<&str> = examples.map(|line| line.split("  ").next().unwrap()).collect();
        assert!(lines.len() >= 3, "{text}");
        lines.iter().for_each(|line| assert!(plan(line).is_ok(), "{line}"));
    }
}
