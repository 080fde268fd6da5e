//! `cargo xtask bench report`: writes the results of the benchmarks into the documentation.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::result::{self, Benchmark, Table};
use crate::workspace;

/// Write the results of the benchmarks into docs/benchmarks.md
///
/// Each result in target/bench, which is from the last complete run of its benchmark, replaces the section of that
/// benchmark. Other sections are left alone. A new section is appended.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Document to update [default: docs/benchmarks.md of the workspace]
    #[arg(value_name = "FILE")]
    document: Option<PathBuf>,
    /// Print the sections and write nothing
    #[arg(long)]
    print: bool,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let results = results()?;
    if results.is_empty() {
        bail!("no results in {}; run the other benchmarks first", result::directory()?.display());
    }
    if args.print {
        results.iter().for_each(|(_, result)| print!("{}", section(result)));
        return Ok(0);
    }
    let document = args.document.clone().unwrap_or_else(|| workspace::root().join("docs/benchmarks.md"));
    let before = fs::read_to_string(&document).with_context(|| format!("cannot read {}", document.display()))?;
    let mut after = before.clone();
    for (name, result) in &results {
        after = replace_section(&after, name, &section(result)).with_context(|| document.display().to_string())?;
    }
    if after == before {
        println!("{} is up to date", document.display());
    } else {
        fs::write(&document, after).with_context(|| format!("cannot write {}", document.display()))?;
        println!("{} written", document.display());
    }
    Ok(0)
}

/// All results with their names, sorted. The name is the stem of the result file.
fn results() -> Result<Vec<(String, Benchmark)>> {
    let directory = result::directory()?;
    let Ok(entries) = fs::read_dir(&directory) else { return Ok(Vec::new()) };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    let named = |file: &PathBuf| {
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Benchmark::load(file).map(|result| (name, result))
    };
    files.iter().map(named).collect()
}

/// Section of a benchmark: command, date, environment, gates and tables.
fn section(result: &Benchmark) -> String {
    let mut text = format!("## {}\n\n```sh\n{}\n```\n\n", result.benchmark, result.command);
    text.push_str(&format!("{}, with\n\n", result.date));
    for (name, value) in &result.environment {
        text.push_str(&format!("- {name}: {value}\n"));
    }
    let row = |gate: &result::Gate| {
        let met = if gate.met { "yes" } else { "**no**" };
        vec![gate.name.clone(), gate.limit.clone(), gate.measured.clone(), met.to_owned()]
    };
    let gates = Table {
        title: "Gates".to_owned(),
        columns: ["gate", "limit", "measured", "met"].map(str::to_owned).to_vec(),
        rows: result.gates.iter().map(row).collect(),
        notes: Vec::new(),
    };
    let gates = Some(&gates).filter(|gates| !gates.rows.is_empty());
    for table in gates.into_iter().chain(&result.tables) {
        text.push_str(&format!("\n### {}\n\n{}", table.title, table.to_markdown()));
    }
    text
}

/// The comments that enclose a section. Rendered Markdown does not show them.
fn markers(name: &str) -> [String; 2] {
    ["from", "to"].map(|end| format!("<!-- bench {name}: written by `cargo xtask bench report`, {end} here -->"))
}

/// Returns `document` with `section` between its markers, which are appended if the document has none.
fn replace_section(document: &str, name: &str, section: &str) -> Result<String> {
    let [begin, end] = markers(name);
    let (before, after) = match (document.split_once(&begin), document.contains(&end)) {
        (Some((before, rest)), true) => {
            let (_, after) = rest.split_once(&end).context("its closing comment precedes the opening one")?;
            (before.to_owned(), after)
        }
        (None, false) => (format!("{}\n\n", document.trim_end()), "\n"),
        _ => bail!("it has only one of the comments `{begin}` and `{end}`"),
    };
    Ok(format!("{before}{begin}\n\n{section}\n{end}{after}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::result::Gate;
    use super::*;

    fn benchmark(measured: &str, met: bool) -> Benchmark {
        Benchmark {
            benchmark: "Instructions".into(),
            command: "cargo xtask bench softroce".into(),
            date: "2026-11-21".into(),
            environment: BTreeMap::from([("machine".into(), "Some CPU, 2 processors, virtual".into())]),
            tables: vec![Table {
                title: "Ratios".into(),
                columns: vec!["case".into(), "ratio".into()],
                rows: vec![vec!["write".into(), measured.into()]],
                notes: vec!["The fewest of five.".into()],
            }],
            gates: vec![Gate { name: "write".into(), limit: "≤ 1.005".into(), measured: measured.into(), met }],
        }
    }

    #[test]
    fn a_section_lists_the_machine_the_gates_and_the_tables() {
        let expected = "\
## Instructions

```sh
cargo xtask bench softroce
```

2026-11-21, with

- machine: Some CPU, 2 processors, virtual

### Gates

| gate | limit | measured | met |
|---|---:|---:|---|
| write | ≤ 1.005 | 1.006 | **no** |

### Ratios

| case | ratio |
|---|---:|
| write | 1.006 |

The fewest of five.
";
        assert_eq!(section(&benchmark("1.006", false)), expected);
    }

    #[test]
    fn text_around_a_section_is_kept() {
        let ([begin, end], [other, its_end]) = (markers("lat"), markers("bw"));
        let around = format!("{other}\n\nother\n\n{its_end}\n\nMore by hand.\n");
        let first =
            replace_section(&format!("# Benchmarks\n\nBy hand.\n\n{begin}\nold\n{end}\n\n{around}"), "lat", "new\n")
                .unwrap();
        assert_eq!(first, format!("# Benchmarks\n\nBy hand.\n\n{begin}\n\nnew\n\n{end}\n\n{around}"));
        assert_eq!(replace_section(&first, "lat", "new\n").unwrap(), first);
    }

    #[test]
    fn a_new_section_is_appended() {
        let [begin, end] = markers("lat");
        let first = replace_section("# Benchmarks\n", "lat", "new\n").unwrap();
        assert_eq!(first, format!("# Benchmarks\n\n{begin}\n\nnew\n\n{end}\n"));
        assert_eq!(replace_section(&first, "lat", "new\n").unwrap(), first);
    }

    #[test]
    fn a_document_with_a_single_marker_is_refused() {
        let [begin, end] = markers("lat");
        assert!(replace_section(&begin, "lat", "new").is_err());
        assert!(replace_section(&end, "lat", "new").is_err());
        assert!(replace_section(&format!("{end}\n{begin}"), "lat", "new").is_err());
    }
}
