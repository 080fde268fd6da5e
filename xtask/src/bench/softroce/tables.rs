//! Tables and gates of all cases.

use super::compare::{Column, Comparison, TOLERANCE};
use super::{LIMIT, Outcome};
use crate::bench::result::{Gate, Table};

/// The table of ratios, and a table of columns for each group of cases that print the same columns.
pub(super) fn all(outcomes: &[Outcome<'_>], other: &str, launches: u32) -> Vec<Table> {
    let mut tables = vec![ratios(outcomes, other, launches)];
    let mut printed: Vec<(Vec<&str>, Table)> = Vec::new();
    for outcome in outcomes.iter().filter(|outcome| outcome.case.has_columns()) {
        let Ok(Comparison { columns: Ok(columns), .. }) = &outcome.comparison else { continue };
        let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
        let known = printed.iter().position(|(columns, _)| *columns == names);
        let index = known.unwrap_or(printed.len());
        if known.is_none() {
            printed.push((names.clone(), head(&names)));
        }
        let mut add = |case: &str, program: &str, cells: Vec<String>| {
            printed[index].1.rows.push([case.to_owned(), program.to_owned()].into_iter().chain(cells).collect());
        };
        let best = |side: usize| columns.iter().map(|column| column.best[side].to_string()).collect();
        add(&outcome.case.title(), "C", best(0));
        add("", other, best(1));
        add("", "deviation", columns.iter().map(deviation).collect());
    }
    tables.extend(printed.into_iter().map(|(_, table)| table));
    tables
}

/// Cell with the deviation of a column, marked with `!` if too large. Empty for a requested count that is equal.
fn deviation(column: &Column) -> String {
    match (column.met(), column.best[0].is_whole()) {
        (true, true) => String::new(),
        (true, false) => percent(column.deviation()),
        (false, _) => format!("{} !", percent(column.deviation())),
    }
}

/// The table of instructions per message.
fn ratios(outcomes: &[Outcome<'_>], other: &str, launches: u32) -> Table {
    let headings = ["case", "C", other, "ratio", "gate", "spread of C", &format!("spread of {other}")];
    let row = |outcome: &Outcome<'_>| {
        let gate = if outcome.met() { "met" } else { "not met" }.to_owned();
        let [c, ours, ratio, spread_of_c, spread] = match &outcome.comparison {
            Ok(comparison) => {
                let [c, ours] = comparison.best.map(|count| format!("{count:.0}"));
                let [spread_of_c, spread] = comparison.spread.map(percent);
                [c, ours, format!("{:.4}", comparison.ratio()), spread_of_c, spread]
            }
            Err(_) => [(); 5].map(|()| "-".to_owned()),
        };
        vec![outcome.case.title(), c, ours, ratio, gate, spread_of_c, spread]
    };
    let note = format!(
        "Guest instructions per message, of both ends and the kernel: the fewest of {launches} launches, with one boot for \
         each side. The gate is a ratio of at most {LIMIT}. The spread is the excess of the worst launch over the best."
    );
    Table {
        title: "Instructions per message".to_owned(),
        columns: headings.map(str::to_owned).to_vec(),
        rows: outcomes.iter().map(row).collect(),
        notes: vec![note],
    }
}

/// An empty table for columns that both programs print.
fn head(names: &[&str]) -> Table {
    let kind = if names.contains(&"t_avg") { "Latency" } else { "Bandwidth" };
    let note = format!(
        "Times in µs, and rates in MiB/s and millions of messages per second, on the guest's clock: the best launch in each \
         column. A deviation is marked with ! if every launch is more than {} % outside the range of C's launches.",
        TOLERANCE * 100.0
    );
    let columns = ["case", "program"].iter().chain(names).map(|name| (*name).to_owned()).collect();
    Table { title: format!("{kind} as printed"), columns, rows: Vec::new(), notes: vec![note] }
}

/// For each case a gate on instructions, and a gate on columns if both programs have to print the same.
pub(super) fn gates(outcomes: &[Outcome<'_>], other: &str) -> Vec<Gate> {
    let mut gates = Vec::new();
    for outcome in outcomes {
        let title = outcome.case.title();
        let ratio = outcome.comparison.as_ref().map(|comparison| format!("{:.4}", comparison.ratio()));
        gates.push(Gate {
            name: format!("{title}: instructions, {other} / C"),
            limit: format!("≤ {LIMIT}"),
            measured: ratio.unwrap_or_else(|_| "failed".to_owned()),
            met: outcome.met(),
        });
        if !outcome.case.has_columns() {
            continue;
        }
        let (measured, met) = match outcome.comparison.as_ref().map(|comparison| &comparison.columns) {
            Ok(Ok(columns)) => {
                let worst = columns.iter().max_by(|a, b| a.excess().abs().total_cmp(&b.excess().abs()));
                let shown = match worst.filter(|column| column.excess() != 0.0) {
                    Some(column) => format!("{} {}", column.name, percent(column.excess())),
                    None => "none".to_owned(),
                };
                (shown, columns.iter().all(Column::met))
            }
            Ok(Err(difference)) => (difference.clone(), false),
            Err(_) => ("failed".to_owned(), false),
        };
        let name = format!("{title}: all columns, deviation from C");
        gates.push(Gate { name, limit: format!("± {} %", TOLERANCE * 100.0), measured, met });
    }
    gates
}

fn percent(fraction: f64) -> String {
    // Rounding may produce -0.00.
    format!("{:+.2} %", fraction * 100.0).replace("-0.00", "+0.00")
}

#[cfg(test)]
mod tests {
    use super::super::cases::CASES;
    use super::super::columns::Columns;
    use super::*;

    fn outcome(c: &str, ours: Result<&str, &str>) -> Outcome<'static> {
        let header = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]";
        let columns = |row: &str| Columns::perftest(&[header.to_owned(), row.to_owned()]).unwrap();
        let case = CASES.iter().find(|case| case.name == "write-bw").unwrap();
        let comparison = ours.map(|ours| Comparison::new([&[columns(c)], &[columns(ours)]]).unwrap());
        Outcome { case, comparison: comparison.map_err(str::to_owned) }
    }

    #[test]
    fn a_table_lists_both_programs_and_their_deviation() {
        let outcomes = [outcome("64 5000 4.13 4.13 0.067632", Ok("64 5000 4.13 3.90 0.067600"))];
        let tables = all(&outcomes, "rdma-safe", 5);
        assert_eq!(tables.len(), 2);
        assert_eq!(tables[0].rows[0][..5], ["ib_write_bw -s 64", "14786", "14793", "1.0005", "met"]);
        let rows: Vec<String> = tables[1].rows.iter().map(|row| row.join("|")).collect();
        assert_eq!(rows[0], "ib_write_bw -s 64|C|64|5000|4.13|4.13|0.067632");
        assert_eq!(rows[1], "|rdma-safe|64|5000|4.13|3.90|0.067600");
        assert_eq!(rows[2], "|deviation|||+0.00 %|-5.57 % !|-0.05 %");
    }

    fn shown(outcome: Outcome<'_>) -> Vec<(String, bool)> {
        gates(&[outcome], "rdma-safe").into_iter().map(|gate| (gate.measured, gate.met)).collect()
    }

    #[test]
    fn a_gate_shows_the_worst_column() {
        let unmet = shown(outcome("64 5000 4.13 4.13 0.067632", Ok("64 5000 4.13 3.90 0.067000")));
        assert_eq!(unmet, [("1.0094".to_owned(), false), ("BW average -5.57 %".to_owned(), false)]);
        let same = shown(outcome("64 5000 4.13 4.13 0.067632", Ok("64 5000 4.13 4.14 0.067632")));
        assert_eq!(same, [("1.0000".to_owned(), true), ("none".to_owned(), true)]);
    }

    #[test]
    fn a_failed_case_fails_its_gates() {
        let failed = || outcome("64 5000 4.13 4.13 0.067632", Err("status 1"));
        assert!(shown(failed()).iter().all(|(measured, met)| measured == "failed" && !met));
        let tables = all(&[failed()], "rdma-safe", 5);
        assert_eq!(tables.len(), 1);
        assert_eq!(tables[0].rows[0].join(" "), "ib_write_bw -s 64 - - - not met - -");
    }

    #[test]
    fn rounding_produces_no_negative_zero() {
        assert_eq!([percent(-0.000_01), percent(-0.01)], ["+0.00 %", "-1.00 %"]);
    }
}
