//! What the figures have to keep.

use super::{CONTROL, REFERENCE, Row};

/// A limit, and whether it is kept.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Gate {
    /// What is limited to what.
    pub(crate) name: String,
    /// What was measured.
    pub(crate) found: String,
    pub(crate) met: bool,
}

/// Beside the same loop in C.
struct Limit {
    variant: &'static str,
    rows: &'static [&'static str],
    /// Times C's instructions,
    factor: f64,
    /// and so many more.
    more: f64,
}

const LIMITS: &[Limit] = &[
    // Posting and polling by the raw door, one at a time and sixteen.
    Limit { variant: "raw", rows: &["ex1", "cl1", "ex16", "cl16"], factor: 1.0, more: 0.0 },
    Limit { variant: "raw", rows: &["rv1", "rv16"], factor: 1.0, more: 2.0 },
    Limit { variant: "raw", rows: &["em_ex"], factor: 1.0, more: 0.0 },
    Limit { variant: "raw", rows: &["em_cl"], factor: 1.0, more: 3.0 },
    // A buffer handed over and back.
    Limit { variant: "owned", rows: &["send_ex1", "send_cl1", "recv_ex1", "recv_cl1"], factor: 1.0, more: 25.0 },
    Limit {
        variant: "sys",
        rows: &[
            "ex1",
            "ex16",
            "cl1",
            "cl16",
            "rv1",
            "rv16",
            "in1",
            "em_ex",
            "em_cl",
            "poll_ex",
            "poll_cl",
            "read",
            "write_imm",
            "send_inv",
            "fetch_add",
        ],
        factor: 1.0,
        more: 3.0,
    },
];

/// Less than what the counting is off by where a ring wraps at another place.
const TOLERANCE: f64 = 0.05;

/// `panics` are the loops from which a panic can be reached, and how.
pub(super) fn judge(rows: &[Row], panics: Vec<String>) -> Vec<Gate> {
    let mut gates: Vec<Gate> =
        LIMITS.iter().flat_map(|limit| limit.rows.iter().map(|row| limit.judge(rows, row))).collect();
    let checksums: Vec<String> =
        rows.iter().filter(|row| !agree(row)).map(|row| format!("{} {:?}", row.name, row.checksums)).collect();
    gates.push(none("loops whose checksum differs from C's", checksums));
    let allocating = rows.iter().filter(|row| !CONTROL.contains(&row.name.as_str())).flat_map(|row| {
        let some = row.allocations.iter().filter(|(_, calls)| **calls > 0);
        some.map(|(variant, calls)| format!("{} over {variant}: {calls}", row.name))
    });
    gates.push(none("loops of the data path that allocate", allocating.collect()));
    gates.push(none("loops of the data path that can panic", panics));
    gates
}

fn agree(row: &Row) -> bool {
    let mut checksums = row.checksums.values();
    let first = checksums.next();
    checksums.all(|checksum| Some(checksum) == first)
}

fn none(name: &str, found: Vec<String>) -> Gate {
    let met = found.is_empty();
    Gate { name: name.to_owned(), found: if met { "none".to_owned() } else { found.join("; ") }, met }
}

impl Limit {
    fn judge(&self, rows: &[Row], name: &str) -> Gate {
        let row = rows.iter().find(|row| row.name == name);
        let figure = |variant: &str| row.and_then(|row| row.instructions.get(variant)).copied();
        let rule = if self.more > 0.0 { format!("C + {}", self.more) } else { "C".to_owned() };
        let gate = |found, met| Gate { name: format!("{name} over {} at most {rule}", self.variant), found, met };
        let (Some(c), Some(found)) = (figure(REFERENCE), figure(self.variant)) else {
            return gate("nothing".to_owned(), false);
        };
        gate(format!("{found:.2}, C {c:.2}"), found <= c * self.factor + self.more + TOLERANCE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, figures: &[(&str, f64)]) -> Row {
        Row {
            name: name.to_owned(),
            instructions: figures.iter().map(|(variant, figure)| ((*variant).to_owned(), *figure)).collect(),
            allocations: figures.iter().map(|(variant, _)| ((*variant).to_owned(), 0)).collect(),
            checksums: figures.iter().map(|(variant, _)| ((*variant).to_owned(), 7)).collect(),
        }
    }

    fn broken(rows: &[Row]) -> Vec<String> {
        let names = rows.iter().map(|row| format!("{} over", row.name)).collect::<Vec<_>>();
        let gates = judge(rows, Vec::new()).into_iter().filter(|gate| !gate.met);
        gates.map(|gate| gate.name).filter(|gate| names.iter().any(|name| gate.starts_with(name.as_str()))).collect()
    }

    #[test]
    fn a_gate_breaks_beyond_its_limit() {
        let kept = [("clang", 18.0), ("raw", 20.0), ("sys", 21.0)];
        assert_eq!(broken(&[row("rv1", &kept)]), [""; 0]);
        let lost = [("clang", 18.0), ("raw", 20.1), ("sys", 21.0)];
        assert_eq!(broken(&[row("rv1", &lost)]), ["rv1 over raw at most C + 2"]);
    }

    #[test]
    fn what_was_not_measured_breaks_its_gate() {
        assert_eq!(broken(&[row("rv1", &[("raw", 1.0), ("sys", 1.0)])]).len(), 2);
    }

    #[test]
    fn allocations_checksums_and_panics_are_gates() {
        let mut mr = row("mr", &[("raw", 1.0)]);
        mr.allocations.insert("raw".to_owned(), 9);
        let mut ex1 = row("ex1", &[("clang", 1.0), ("raw", 1.0)]);
        ex1.checksums.insert("raw".to_owned(), 8);
        ex1.allocations.insert("raw".to_owned(), 2);
        let gates = judge(&[mr, ex1], vec!["loop_raw_ex1: a, b".to_owned()]);
        let found: Vec<&str> = gates.iter().rev().take(3).map(|gate| gate.found.as_str()).collect();
        assert_eq!(found, ["loop_raw_ex1: a, b", "ex1 over raw: 2", "ex1 {\"clang\": 7, \"raw\": 8}"]);
        assert!(gates.iter().rev().take(3).all(|gate| !gate.met));
    }
}
