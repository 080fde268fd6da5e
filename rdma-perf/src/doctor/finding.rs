//! Findings of the checks, and their output.

use std::fmt::Write;

use serde::Serialize;

/// Version of the JSON format. It changes when its readers have to change.
const FORMAT: u32 = 1;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Level {
    /// No change needed.
    Ok,
    /// Information; no change needed.
    Note,
    /// Works, but slower than possible or not in all cases.
    Warning,
    /// RDMA does not work.
    Problem,
}

impl Level {
    fn sign(self) -> (char, &'static str) {
        match self {
            Level::Ok => ('✓', "ok"),
            Level::Note => ('i', "note"),
            Level::Warning => ('!', "warning"),
            Level::Problem => ('✗', "problem"),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Finding {
    pub(crate) level: Level,
    pub(crate) topic: Topic,
    pub(crate) what: String,
    /// Why it matters.
    pub(crate) why: Option<String>,
    /// A command or another remedy.
    pub(crate) fix: Option<String>,
}

/// Subject of a check. Findings are printed in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Topic {
    Library,
    Modules,
    Devices,
    Ports,
    Addresses,
    Memory,
    Cgroup,
    Firewall,
    Pcie,
    Processors,
}

impl Topic {
    fn name(self) -> &'static str {
        match self {
            Topic::Library => "Library",
            Topic::Modules => "Kernel modules",
            Topic::Devices => "Devices",
            Topic::Ports => "Ports",
            Topic::Addresses => "Addresses (GIDs)",
            Topic::Memory => "Memory",
            Topic::Cgroup => "Control group",
            Topic::Firewall => "Firewall",
            Topic::Pcie => "PCI Express",
            Topic::Processors => "Processors",
        }
    }

    pub(crate) fn ok(self, what: impl Into<String>) -> Finding {
        self.finding(Level::Ok, what)
    }

    pub(crate) fn note(self, what: impl Into<String>) -> Finding {
        self.finding(Level::Note, what)
    }

    pub(crate) fn warning(self, what: impl Into<String>) -> Finding {
        self.finding(Level::Warning, what)
    }

    pub(crate) fn problem(self, what: impl Into<String>) -> Finding {
        self.finding(Level::Problem, what)
    }

    fn finding(self, level: Level, what: impl Into<String>) -> Finding {
        Finding { level, topic: self, what: what.into(), why: None, fix: None }
    }
}

impl Finding {
    pub(crate) fn why(self, why: impl Into<String>) -> Finding {
        Finding { why: Some(why.into()), ..self }
    }

    pub(crate) fn fix(self, fix: impl Into<String>) -> Finding {
        Finding { fix: Some(fix.into()), ..self }
    }
}

/// Findings in the order of their topics.
#[derive(Debug, Serialize)]
pub(crate) struct Diagnosis {
    format: u32,
    version: &'static str,
    problems: usize,
    warnings: usize,
    findings: Vec<Finding>,
}

impl Diagnosis {
    pub(crate) fn new(mut findings: Vec<Finding>) -> Diagnosis {
        findings.sort_by_key(|finding| finding.topic);
        let count = |level: Level| findings.iter().filter(|finding| finding.level == level).count();
        let (problems, warnings) = (count(Level::Problem), count(Level::Warning));
        Diagnosis { format: FORMAT, version: env!("CARGO_PKG_VERSION"), problems, warnings, findings }
    }

    pub(crate) fn has_problems(&self) -> bool {
        self.problems > 0
    }

    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        let mut topic = None;
        for finding in &self.findings {
            if topic != Some(finding.topic) {
                _ = writeln!(out, "{}{}", if topic.is_some() { "\n" } else { "" }, finding.topic.name());
                topic = Some(finding.topic);
            }
            let (sign, word) = finding.level.sign();
            wrap(&mut out, &format!("  {sign} {word:<8} "), &finding.what);
            if let Some(why) = &finding.why {
                wrap(&mut out, INDENT, why);
            }
            if let Some(fix) = &finding.fix {
                // Not wrapped, so that it can be copied.
                _ = writeln!(out, "{INDENT}fix: {fix}");
            }
        }
        _ = writeln!(out, "\n{}", self.summary());
        out
    }

    fn summary(&self) -> String {
        let counted = |count: usize, what: &str| match count {
            0 => format!("no {what}s"),
            1 => format!("1 {what}"),
            count => format!("{count} {what}s"),
        };
        let end = if self.problems > 0 {
            ": RDMA does not work until the items marked ✗ are fixed.\nTests still run on soft0, the software RNIC: -d soft0"
        } else {
            ""
        };
        format!("{}, {}{end}", counted(self.problems, "problem"), counted(self.warnings, "warning"))
    }
}

/// Width of a sign and its word.
const INDENT: &str = "             ";
const WIDTH: usize = 110;

/// Wraps `text` into aligned lines, the first of which begins with `start`.
fn wrap(out: &mut String, start: &str, text: &str) {
    let mut line = start.to_owned();
    let mut is_empty = true;
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            _ = writeln!(out, "{line}");
            line = INDENT.to_owned();
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    _ = writeln!(out, "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_print_by_topic_with_sign_word_reason_and_fix() {
        let diagnosis = Diagnosis::new(vec![
            Topic::Memory.warning("64 KiB may be locked").why("Buffers are locked.").fix("ulimit -l unlimited"),
            Topic::Library.ok("libibverbs of rdma-core 44"),
            Topic::Library.problem("no provider"),
            Topic::Memory.note("a ".repeat(80)),
        ]);
        let text = diagnosis.text();
        assert!(
            text.starts_with(
                "Library\n  ✓ ok       libibverbs of rdma-core 44\n  ✗ problem  no provider\n\nMemory\n  \
                 ! warning  64 KiB may be locked\n             Buffers are locked.\n             \
                 fix: ulimit -l unlimited\n  i note     a a"
            ),
            "{text}"
        );
        assert!(text.contains(
            "\n\n1 problem, 1 warning: RDMA does not work until the items marked ✗ are fixed.\nTests still run"
        ));
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(diagnosis.has_problems());
        assert!(Diagnosis::new(Vec::new()).text().contains("no problems, no warnings"));
    }

    #[test]
    fn json_has_levels_and_counts() {
        let diagnosis = Diagnosis::new(vec![Topic::Pcie.warning("x8 of x16").fix("another slot")]);
        let value = serde_json::to_value(&diagnosis).unwrap();
        assert_eq!((value["problems"].as_u64(), value["warnings"].as_u64()), (Some(0), Some(1)));
        assert_eq!(value["findings"][0]["level"], "warning");
        assert_eq!(value["findings"][0]["topic"], "pcie");
        assert!(value["findings"][0]["why"].is_null());
    }
}
