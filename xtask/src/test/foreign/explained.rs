//! Reports of the checker about other programs, with their explanations.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Kinds of reports about a program, which are true and harmless there.
struct Explained {
    /// The beginning of the command line.
    program: &'static str,
    kinds: &'static [&'static str],
}

/// docs/soft.md has the explanations.
const EXPLAINED: &[Explained] = &[
    Explained { program: "ib_", kinds: &["overlap", "receive-written", "leaked"] },
    Explained { program: "ibv_", kinds: &["overlap", "receive-written"] },
    Explained { program: "ucmatose", kinds: &["overlap"] },
    Explained { program: "udaddy", kinds: &["overlap", "unsignaled-full"] },
    Explained { program: "mckey", kinds: &["overlap", "unsignaled-full", "receiver-not-ready"] },
    Explained { program: "fi_pingpong -c -p verbs -e dgram", kinds: &["overlap", "receive-written"] },
    Explained { program: "fio", kinds: &["leaked", "unacked-events"] },
    Explained { program: "ucx_perftest", kinds: &["receive-written", "overlap", "send-changed"] },
    Explained { program: "orterun", kinds: &["receive-written"] },
    Explained { program: "io_demo", kinds: &["receive-written"] },
    Explained {
        program: "pyverbs",
        kinds: &[
            "overlap",
            "receive-written",
            "deregistered",
            "receiver-not-ready",
            "unknown-key",
            "key-access",
            "key-range",
            "key-domain",
        ],
    },
];

/// Fails if one of the reports, each a line of JSON, is not explained for the program.
pub(super) fn check(program: &str, reports: &str) -> Result<()> {
    let kinds = || EXPLAINED.iter().filter(|entry| program.starts_with(entry.program)).flat_map(|entry| entry.kinds);
    let mut others = BTreeMap::new();
    for line in reports.lines() {
        let report: Value = serde_json::from_str(line).with_context(|| format!("a report is no JSON: {line}"))?;
        let kind = report["kind"].as_str().unwrap_or_default();
        if !kinds().any(|explained| *explained == kind) {
            others.entry(kind.to_owned()).or_insert_with(|| line.to_owned());
        }
    }
    if !others.is_empty() {
        let lines: Vec<String> = others.into_values().collect();
        bail!("unexplained reports of the checker:\n{}", lines.join("\n"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_without_an_explanation_fails() {
        let report = |kind: &str| format!("{{\"kind\":\"{kind}\",\"text\":\"what happened\"}}\n");
        check("udaddy -s 127.0.0.1", &(report("overlap") + &report("unsignaled-full"))).unwrap();
        let error = check("udaddy -s 127.0.0.1", &(report("overlap") + &report("leaked"))).unwrap_err();
        assert!(error.to_string().contains("what happened"), "{error}");
        assert!(check("rping", &report("overlap")).is_err());
        check("rping", "").unwrap();
    }

    #[test]
    fn the_documentation_explains_each_kind_as_often_as_it_is_expected() {
        let text = std::fs::read_to_string(crate::workspace::root().join("docs/soft.md")).unwrap();
        let (_, table) = text.split_once("### What it has found in other programs").unwrap();
        for kind in EXPLAINED.iter().flat_map(|entry| entry.kinds) {
            let expected = EXPLAINED.iter().filter(|entry| entry.kinds.contains(kind)).count();
            let rows = table.lines().filter(|line| line.split('|').nth(2).is_some_and(|cell| cell.contains(kind)));
            assert_eq!(rows.count(), expected, "rows of `{kind}` in docs/soft.md");
        }
    }
}
