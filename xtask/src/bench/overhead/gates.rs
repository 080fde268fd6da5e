//! Limits on the measured instructions, and checks of checksums, allocations and panics.

use std::fmt;

use super::{CONTROL, REFERENCE, Row};
use crate::bench::result::Gate;

/// A gate with its outcome.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(crate) gate: Gate,
    /// Why the gate is not met, if it is not.
    pub(crate) complaint: Option<String>,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Gate { name, limit, measured, met } = &self.gate;
        write!(f, "{} {name}: {measured}, limit {limit}", if *met { "met    " } else { "NOT MET" })?;
        match &self.complaint {
            Some(complaint) => write!(f, ": FAILED: {complaint}"),
            None => Ok(()),
        }
    }
}

/// Limit relative to the instructions of the same loop in C: `factor * C + extra`.
struct Limit {
    variant: &'static str,
    rows: &'static [&'static str],
    factor: f64,
    extra: f64,
}

const LIMITS: &[Limit] = &[
    // Posting and polling through the raw API, one operation at a time and in batches of sixteen.
    Limit { variant: "raw", rows: &["ex1", "cl1", "ex16", "cl16"], factor: 1.0, extra: 0.0 },
    Limit { variant: "raw", rows: &["ud_send", "ud_send_cl"], factor: 1.0, extra: 0.0 },
    Limit { variant: "raw", rows: &["rv1", "rv16", "srq_rv1", "srq_rv16"], factor: 1.0, extra: 2.0 },
    Limit { variant: "raw", rows: &["read", "write_imm", "send_inv", "fetch_add"], factor: 1.0, extra: 0.0 },
    Limit { variant: "raw", rows: &["poll_ex", "poll_cl", "all_ex", "all_cl"], factor: 1.0, extra: 3.0 },
    Limit { variant: "raw", rows: &["em_ex"], factor: 1.0, extra: 0.0 },
    Limit { variant: "raw", rows: &["em_cl"], factor: 1.0, extra: 3.0 },
    // Posting an owned buffer and getting it back with its completion.
    Limit { variant: "owned", rows: &["send_ex1", "send_cl1", "recv_ex1", "recv_cl1"], factor: 1.0, extra: 25.0 },
    // `send_many`.
    Limit { variant: "owned", rows: &["send_ex16"], factor: 1.0, extra: 25.0 },
    // Creating and destroying.
    Limit { variant: "raw", rows: &["mr"], factor: 2.0, extra: 0.0 },
    Limit { variant: "raw", rows: &["qp"], factor: 1.5, extra: 0.0 },
    Limit {
        variant: "sys",
        rows: &[
            "ex1",
            "ex16",
            "cl1",
            "cl16",
            "rv1",
            "rv16",
            "srq_rv1",
            "srq_rv16",
            "in1",
            "em_ex",
            "em_cl",
            "poll_ex",
            "poll_cl",
            "all_ex",
            "all_cl",
            "read",
            "write_imm",
            "send_inv",
            "fetch_add",
            "bind_mw",
            "ud_send",
            "ud_send_cl",
        ],
        factor: 1.0,
        extra: 3.0,
    },
];

/// Absolute limits of loops that are not compared with C. They prevent regressions: lower them with every improvement.
///
/// The loops `any` check the interface of an object on each call, while the handles of the raw API check it once before the
/// loop.
const CEILINGS: &[Ceiling] = &[
    Ceiling { variant: "any", row: "ex1", at_most: 93.0 },
    Ceiling { variant: "any", row: "ex16", at_most: 37.62 },
    Ceiling { variant: "any", row: "cl1", at_most: 95.0 },
    Ceiling { variant: "any", row: "cl16", at_most: 44.88 },
    Ceiling { variant: "any", row: "em_ex", at_most: 14.0 },
    Ceiling { variant: "any", row: "em_cl", at_most: 18.0 },
    // `send_many` on a classic queue pair.
    Ceiling { variant: "owned", row: "send_cl16", at_most: 70.0 },
    // A batch with a completion queue entry for each send.
    Ceiling { variant: "batch", row: "send_ex16", at_most: 92.2 },
    Ceiling { variant: "batch", row: "send_cl16", at_most: 95.8 },
    // An awaited send whose task finds its completion. The goals are the owned API + 80 on one thread, and + 200 shared.
    Ceiling { variant: "local", row: "send_ex1", at_most: 139.0 },
    Ceiling { variant: "shared", row: "send_ex1", at_most: 160.5 },
    // The same if the driver takes the completion, and wakes the task.
    Ceiling { variant: "local driven", row: "send_ex1", at_most: 387.0 },
    Ceiling { variant: "shared driven", row: "send_ex1", at_most: 460.5 },
];

struct Ceiling {
    variant: &'static str,
    row: &'static str,
    at_most: f64,
}

/// Tolerance for the counting error when a ring wraps at a different place.
const TOLERANCE: f64 = 0.05;

/// Evaluates all gates. `panics` lists the loops that can panic, each with the call path.
pub(super) fn evaluate(rows: &[Row], panics: Vec<String>) -> Vec<Verdict> {
    let mut verdicts: Vec<Verdict> =
        LIMITS.iter().flat_map(|limit| limit.rows.iter().map(|row| limit.evaluate(rows, row))).collect();
    verdicts.extend(CEILINGS.iter().map(|ceiling| ceiling.evaluate(rows)));
    let checksums: Vec<String> = rows
        .iter()
        .filter(|row| !checksums_agree(row))
        .map(|row| format!("{} {:?}", row.name, row.checksums))
        .collect();
    verdicts.push(expect_none("loops whose checksum differs from C's", checksums));
    let allocating = rows.iter().filter(|row| !CONTROL.contains(&row.name.as_str())).flat_map(|row| {
        let some = row.allocations.iter().filter(|(_, calls)| **calls > 0);
        some.map(|(variant, calls)| format!("{} over {variant}: {calls}", row.name))
    });
    verdicts.push(expect_none("loops of the data path that allocate", allocating.collect()));
    verdicts.push(expect_none("loops of the data path that can panic", panics));
    verdicts
}

fn checksums_agree(row: &Row) -> bool {
    let mut checksums = row.checksums.values();
    let first = checksums.next();
    checksums.all(|checksum| Some(checksum) == first)
}

/// The gate `name`, which is met if `found` is empty.
pub(super) fn expect_none(name: &str, found: Vec<String>) -> Verdict {
    let met = found.is_empty();
    let measured = if met { "none".to_owned() } else { found.join("; ") };
    let complaint = (!met).then(|| measured.clone());
    Verdict { gate: Gate { name: name.to_owned(), limit: "none".to_owned(), measured, met }, complaint }
}

impl Ceiling {
    fn evaluate(&self, rows: &[Row]) -> Verdict {
        let Ceiling { variant, row: name, at_most } = *self;
        let found = rows.iter().find(|row| row.name == name).and_then(|row| row.instructions.get(variant));
        let met = found.is_some_and(|found| *found <= at_most + TOLERANCE);
        let gate = Gate {
            name: format!("{name} over {variant}"),
            limit: format!("≤ {at_most:.2} (absolute)"),
            measured: found.map_or_else(|| "not measured".to_owned(), |found| format!("{found:.2}")),
            met,
        };
        Verdict { gate, complaint: (!met).then(|| "exceeds its limit".to_owned()) }
    }
}

impl Limit {
    fn evaluate(&self, rows: &[Row], name: &str) -> Verdict {
        let row = rows.iter().find(|row| row.name == name);
        let figure = |variant: &str| row.and_then(|row| row.instructions.get(variant)).copied();
        let name = format!("{name} over {}", self.variant);
        let c_times = if self.factor > 1.0 { format!("{} C", self.factor) } else { "C".to_owned() };
        let rule = if self.extra > 0.0 { format!("{c_times} + {}", self.extra) } else { c_times };
        let (Some(c), Some(found)) = (figure(REFERENCE), figure(self.variant)) else {
            let gate = Gate { name, limit: format!("≤ {rule}"), measured: "not measured".to_owned(), met: false };
            return Verdict { gate, complaint: Some("it was not measured".to_owned()) };
        };
        let limit = c * self.factor + self.extra;
        let met = found <= limit + TOLERANCE;
        let complaint = (!met).then(|| "exceeds its limit".to_owned());
        let gate = Gate { name, limit: format!("≤ {limit:.2} ({rule})"), measured: format!("{found:.2}"), met };
        Verdict { gate, complaint }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn row(name: &str, figures: &[(&str, f64)]) -> Row {
        Row {
            name: name.to_owned(),
            instructions: figures.iter().map(|(variant, figure)| ((*variant).to_owned(), *figure)).collect(),
            allocations: figures.iter().map(|(variant, _)| ((*variant).to_owned(), 0)).collect(),
            allocations_per_op: BTreeMap::new(),
            checksums: figures.iter().map(|(variant, _)| ((*variant).to_owned(), 7)).collect(),
        }
    }

    /// Outcome of the gate of `variant` when only `row` was measured.
    fn verdict(row: Row, variant: &str) -> (bool, Option<String>) {
        let gate = format!("{} over {variant}", row.name);
        let verdict = evaluate(&[row], Vec::new()).into_iter().find(|verdict| verdict.gate.name == gate).unwrap();
        (verdict.gate.met, verdict.complaint)
    }

    #[test]
    fn a_gate_fails_beyond_its_limit() {
        assert_eq!(verdict(row("rv1", &[("clang", 18.0), ("raw", 20.0)]), "raw"), (true, None));
        let lost = verdict(row("rv1", &[("clang", 18.0), ("raw", 20.1)]), "raw");
        assert_eq!(lost, (false, Some("exceeds its limit".to_owned())));
    }

    #[test]
    fn a_ceiling_fails_above_its_absolute_limit() {
        let Ceiling { variant, row: name, at_most } = CEILINGS[0];
        let found = |found| verdict(row(name, &[(variant, found)]), variant);
        assert_eq!(found(at_most), (true, None));
        assert_eq!(found(at_most + 1.0), (false, Some("exceeds its limit".to_owned())));
    }

    #[test]
    fn a_loop_that_was_not_measured_fails_its_gate() {
        let rv1 = || row("rv1", &[("raw", 1.0), ("sys", 1.0)]);
        assert!(!verdict(rv1(), "raw").0 && !verdict(rv1(), "sys").0);
    }

    #[test]
    fn allocations_checksums_and_panics_are_gates() {
        let mut mr = row("mr", &[("raw", 1.0)]);
        mr.allocations.insert("raw".to_owned(), 9);
        let mut ex1 = row("ex1", &[("clang", 1.0), ("raw", 1.0)]);
        ex1.checksums.insert("raw".to_owned(), 8);
        ex1.allocations.insert("raw".to_owned(), 2);
        let verdicts = evaluate(&[mr, ex1], vec!["loop_raw_ex1: a, b".to_owned()]);
        let found: Vec<&str> = verdicts.iter().rev().take(3).map(|verdict| verdict.gate.measured.as_str()).collect();
        assert_eq!(found, ["loop_raw_ex1: a, b", "ex1 over raw: 2", "ex1 {\"clang\": 7, \"raw\": 8}"]);
        assert!(verdicts.iter().rev().take(3).all(|verdict| !verdict.gate.met && verdict.complaint.is_some()));
    }
}
