//! Reports of the checker about other programs, with their explanations.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// A kind of report that is true of some programs.
struct Explained {
    /// Each is the name of a program and some of its arguments. A name may end in `*`.
    programs: &'static [&'static str],
    kind: &'static str,
    appears: Appears,
    /// The explanation, as docs/foreign-programs.md gives it.
    reason: &'static str,
}

/// When a report appears.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Appears {
    /// In each run. A run without it fails the test.
    Always,
    /// In some runs: timing decides.
    Sometimes,
}
use Appears::{Always, Sometimes};

const fn explained(
    programs: &'static [&'static str],
    kind: &'static str,
    appears: Appears,
    reason: &'static str,
) -> Explained {
    Explained { programs, kind, appears, reason }
}

/// Modules of pyverbs that send between two queue pairs.
const WITH_TRAFFIC: &[&str] = &[
    "pyverbs test_cq_events",
    "pyverbs test_cqex",
    "pyverbs test_mr",
    "pyverbs test_qpex",
    "pyverbs test_relaxed_ordering",
];

/// What the checker has found. docs/foreign-programs.md has a row for each.
const EXPLAINED: &[Explained] = &[
    explained(
        &["ib_send_bw", "ib_send_lat"],
        "overlap",
        Always,
        "all receives use the same memory, and the program does not look at the data",
    ),
    explained(
        &["ib_read_bw", "ib_atomic_bw"],
        "overlap",
        Sometimes,
        "reads or atomic operations in flight at the same time write to the same memory. The program does not look at it",
    ),
    explained(
        &["ib_send_bw"],
        "leaked",
        Always,
        "the client does not destroy the completion queue of its receives, unless it runs with `-b` or `-e`",
    ),
    explained(&["ib_atomic_lat"], "leaked", Always, "the server ends without destroying anything"),
    explained(
        &["ib_* -R"],
        "overlap",
        Always,
        "the ends exchange their parameters through one buffer, which has a receive posted when it is sent",
    ),
    explained(&["ib_* -R"], "receive-written", Always, "the program writes its parameters to that buffer"),
    explained(
        &["ib_* -R"],
        "leaked",
        Always,
        "it ends without destroying the event channel and an id of the control connection",
    ),
    explained(
        &["ibv_*"],
        "overlap",
        Always,
        "all receives and sends use the same memory. One message is in flight at a time",
    ),
    explained(
        &["ibv_rc_pingpong -c", "ibv_uc_pingpong -c", "ibv_ud_pingpong -c"],
        "receive-written",
        Always,
        "the client prepares the data that it sends in that memory, which has receives posted",
    ),
    explained(
        &["ucmatose", "udaddy", "mckey", "fi_pingpong dgram"],
        "overlap",
        Always,
        "all receives use the same memory",
    ),
    explained(
        &["udaddy", "mckey"],
        "unsignaled-full",
        Always,
        "it fills the send queue with unsignaled work, posts nothing more, and destroys the queue pair",
    ),
    explained(
        &["mckey"],
        "receiver-not-ready",
        Always,
        "the sender is a member of the group, and posts no receives for its own messages",
    ),
    explained(
        &["fi_pingpong dgram"],
        "receive-written",
        Always,
        "the last 40 bytes of a receive, for the header, are the first bytes of the buffer of sends",
    ),
    explained(
        &["fi_pingpong verbs;ofi_rxd"],
        "receiver-not-ready",
        Sometimes,
        "it repeats up to 128 datagrams after each millisecond without an acknowledgement. A peer that does not run then \
         has 384 receives. Datagrams that find none are repeated",
    ),
    explained(
        &["fio"],
        "leaked",
        Always,
        "it destroys the completion queue before its queue pair, which fails, and deregisters no memory",
    ),
    explained(
        &["fio"],
        "unacked-events",
        Sometimes,
        "it acknowledges an event for each completion. It takes only one event for completions that come together",
    ),
    explained(
        &["ucx_perftest tag_lat", "ucx_perftest ucp_am_lat"],
        "receive-written",
        Always,
        "the receives of UCX are longer than their elements of the pool, by the offset of a packet in an element, before \
         UCX 1.14. They reach into the next element, which UCX uses meanwhile. No message is this long",
    ),
    explained(
        &["ucx_perftest", "io_demo", "orterun"],
        "receive-written",
        Sometimes,
        "the same, if UCX uses the next element before the receive completes",
    ),
    explained(
        &["ucx_perftest tag_bw", "ucx_perftest stream_bw"],
        "overlap",
        Sometimes,
        "several large messages are received into one buffer, if they are in flight at the same time",
    ),
    explained(
        &["ucx_perftest ucp_put_bw", "ucx_perftest ucp_put_lat"],
        "send-changed",
        Sometimes,
        "the last byte of the buffer counts the puts, and an earlier put may still be in flight",
    ),
    explained(WITH_TRAFFIC, "overlap", Always, "each end has one region, for sends and receives"),
    explained(
        WITH_TRAFFIC,
        "receive-written",
        Always,
        "a test writes what it sends to that region, which has receives posted",
    ),
    explained(
        &["pyverbs test_cq_events", "pyverbs test_cqex", "pyverbs test_relaxed_ordering"],
        "deregistered",
        Always,
        "Python deletes the region before the queue pair, which has a receive posted",
    ),
    explained(&["pyverbs test_mr"], "deregistered", Always, "the tests change regions that have a receive posted"),
    explained(&["pyverbs test_mr"], "key-range", Always, "a test moves a region away from the memory of a receive"),
    explained(&["pyverbs test_mr"], "key-domain", Always, "a test moves a region to a domain without queue pairs"),
    explained(
        &["pyverbs test_atomic", "pyverbs test_mr"],
        "key-access",
        Always,
        "the tests expect the error: a region or a queue pair does not permit an access",
    ),
    explained(
        &["pyverbs test_atomic", "pyverbs test_mr", "pyverbs test_qpex"],
        "unknown-key",
        Always,
        "the tests expect the error: a key is wrong, or that of a window that was invalidated",
    ),
    explained(
        &["pyverbs test_cq"],
        "receiver-not-ready",
        Always,
        "the test of resizing sends to its own queue pair, only to fill the completion queue",
    ),
];

impl Explained {
    fn is_about(&self, command: &str) -> bool {
        self.programs.iter().any(|program| matches(program, command))
    }
}

/// Whether a command has the name and the arguments of `program`.
fn matches(program: &str, command: &str) -> bool {
    let (mut wanted, mut words) = (program.split(' '), command.split(' '));
    let name = wanted.next().unwrap_or_default();
    let is_named = |word: &str| name.strip_suffix('*').map_or(word == name, |start| word.starts_with(start));
    words.next().is_some_and(is_named) && wanted.all(|argument| command.split(' ').skip(1).any(|word| word == argument))
}

/// Fails if one of the reports, each a line of JSON, is not explained for a command, or if one is missing.
pub(super) fn check(command: &str, reports: &str) -> Result<()> {
    let mut found = BTreeMap::new();
    for line in reports.lines() {
        let report: Value = serde_json::from_str(line).with_context(|| format!("a report is no JSON: {line}"))?;
        let kind = report["kind"].as_str().unwrap_or_default();
        found.entry(kind.to_owned()).or_insert(line);
    }
    let mut unexplained = found.clone();
    for entry in EXPLAINED.iter().filter(|entry| entry.is_about(command)) {
        unexplained.remove(entry.kind);
        if entry.appears == Always && !found.contains_key(entry.kind) {
            bail!("the checker does not report `{}`, although {}", entry.kind, entry.reason);
        }
    }
    if !unexplained.is_empty() {
        let lines: Vec<&str> = unexplained.into_values().collect();
        bail!("unexplained reports of the checker:\n{}", lines.join("\n"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reports(kinds: &[&str]) -> String {
        kinds.iter().map(|kind| format!("{{\"kind\":\"{kind}\",\"text\":\"what happened\"}}\n")).collect()
    }

    #[test]
    fn a_report_without_an_explanation_fails() {
        check("udaddy -s 127.0.0.1", &reports(&["overlap", "unsignaled-full"])).unwrap();
        let error = check("udaddy -s 127.0.0.1", &reports(&["overlap", "unsignaled-full", "leaked"])).unwrap_err();
        assert!(error.to_string().contains("what happened"), "{error}");
        assert!(check("rping", &reports(&["overlap"])).is_err());
        check("rping", "").unwrap();
    }

    #[test]
    fn a_report_may_be_missing_only_if_timing_decides() {
        check("fio", &reports(&["leaked", "unacked-events"])).unwrap();
        check("fio", &reports(&["leaked"])).unwrap();
        let error = check("fio", &reports(&["unacked-events"])).unwrap_err();
        assert!(error.to_string().contains("does not report `leaked`"), "{error}");
    }

    #[test]
    fn a_program_is_matched_by_its_name_and_arguments() {
        assert!(matches("ib_* -R", "ib_send_bw -n 5 -R -p 7"));
        assert!(!matches("ib_* -R", "ib_send_bw -n 5 -p 7"));
        assert!(!matches("ib_*", "ibv_rc_pingpong"));
        assert!(!matches("pyverbs test_cq", "pyverbs test_cqex"));
        assert!(!matches("rping", "fio rping"));
    }

    #[test]
    fn the_documentation_has_each_explanation() {
        let text = std::fs::read_to_string(crate::workspace::root().join("docs/foreign-programs.md")).unwrap();
        let (_, section) = text.split_once("## What the checker finds").unwrap();
        let rows: Vec<&str> = section.lines().skip_while(|line| !line.starts_with('|')).skip(2).collect();
        let rows: Vec<&str> = rows.into_iter().take_while(|line| line.starts_with('|')).collect();
        let expected: Vec<String> = EXPLAINED.iter().map(row).collect();
        assert_eq!(rows, expected, "the table should be:\n{}", expected.join("\n"));
    }

    fn row(entry: &Explained) -> String {
        let programs: Vec<String> = entry.programs.iter().map(|program| format!("`{program}`")).collect();
        let when = if entry.appears == Always { "always" } else { "depends on timing" };
        format!("| {} | `{}` | {when} | {} |", programs.join(", "), entry.kind, entry.reason)
    }
}
