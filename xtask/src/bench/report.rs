//! `cargo xtask bench report`: what the benchmarks have measured, in the documentation.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::result::{self, Benchmark, Table};
use crate::workspace;

/// Enclose what this program writes. In Markdown they are not shown.
const BEGIN: &str = "<!-- written by `cargo xtask bench report`, from here -->";
const END: &str = "<!-- written by `cargo xtask bench report`, to here -->";

/// Writes the results of the benchmarks that have been run into docs/benchmarks.md
///
/// Replaces what stands between its two comments, or appends it. A benchmark's result, in target/bench, is that of its
/// last complete run.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The document [default: docs/benchmarks.md of the workspace]
    #[arg(value_name = "FILE")]
    document: Option<PathBuf>,
    /// Show the section and write nothing
    #[arg(long)]
    print: bool,
}

pub(crate) fn main(args: &Args) -> Result<i32> {
    let results = results()?;
    if results.is_empty() {
        bail!("there is no result in {}; the other benchmarks leave them there", result::directory()?.display());
    }
    let section = section(&results);
    if args.print {
        print!("{section}");
        return Ok(0);
    }
    let document = args.document.clone().unwrap_or_else(|| workspace::root().join("docs/benchmarks.md"));
    let before = fs::read_to_string(&document).with_context(|| format!("cannot read {}", document.display()))?;
    let after = replaced(&before, &section).with_context(|| document.display().to_string())?;
    if after == before {
        println!("{} is up to date", document.display());
    } else {
        fs::write(&document, after).with_context(|| format!("cannot write {}", document.display()))?;
        println!("{} written", document.display());
    }
    Ok(0)
}

/// All results, in the order of their files' names.
fn results() -> Result<Vec<Benchmark>> {
    let directory = result::directory()?;
    let Ok(entries) = fs::read_dir(&directory) else { return Ok(Vec::new()) };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    files.iter().map(|file| Benchmark::load(file)).collect()
}

/// The section: a table of all gates, then each benchmark.
fn section(results: &[Benchmark]) -> String {
    let gates = results.iter().flat_map(|result| result.gates.iter().map(move |gate| (result, gate)));
    let row = |(result, gate): (&Benchmark, &result::Gate)| {
        let met = if gate.met { "yes" } else { "**no**" };
        vec![result.benchmark.clone(), gate.name.clone(), gate.limit.clone(), gate.measured.clone(), met.to_owned()]
    };
    let table = Table {
        title: "Gates".to_owned(),
        columns: ["benchmark", "gate", "limit", "measured", "met"].map(str::to_owned).to_vec(),
        rows: gates.map(row).collect(),
        notes: Vec::new(),
    };
    let mut text = markdown("## ", &table);
    for result in results {
        text.push_str(&format!("\n## {}\n\n```sh\n{}\n```\n\n", result.benchmark, result.command));
        text.push_str(&format!("{}, with\n\n", result.date));
        for (name, value) in &result.environment {
            text.push_str(&format!("- {name}: {value}\n"));
        }
        for table in &result.tables {
            text.push('\n');
            text.push_str(&markdown("### ", table));
        }
    }
    text
}

fn markdown(level: &str, table: &Table) -> String {
    format!("{level}{}\n\n{}", table.title, table.to_markdown())
}

/// `document` with `section` between the comments, which are appended if it has none.
fn replaced(document: &str, section: &str) -> Result<String> {
    let (before, after) = match (document.split_once(BEGIN), document.contains(END)) {
        (Some((before, rest)), true) => {
            let (_, after) = rest.split_once(END).context("its comments are the wrong way round")?;
            (before.to_owned(), after)
        }
        (None, false) => (format!("{}\n\n", document.trim_end()), "\n"),
        _ => bail!("it has only one of the comments `{BEGIN}` and `{END}`"),
    };
    Ok(format!("{before}{BEGIN}\n\n{section}\n{END}{after}"))
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
    fn a_section_has_the_gates_the_machine_and_the_tables() {
        let expected = "\
## Gates

| benchmark | gate | limit | measured | met |
|---|---|---:|---:|---|
| Instructions | write | ≤ 1.005 | 1.006 | **no** |

## Instructions

```sh
cargo xtask bench softroce
```

2026-11-21, with

- machine: Some CPU, 2 processors, virtual

### Ratios

| case | ratio |
|---|---:|
| write | 1.006 |

The fewest of five.
";
        assert_eq!(section(&[benchmark("1.006", false)]), expected);
    }

    #[test]
    fn what_is_around_the_section_stays() {
        let document = format!("# Benchmarks\n\nBy hand.\n\n{BEGIN}\nold\n{END}\n\nMore by hand.\n");
        let first = replaced(&document, "new\n").unwrap();
        assert_eq!(first, format!("# Benchmarks\n\nBy hand.\n\n{BEGIN}\n\nnew\n\n{END}\n\nMore by hand.\n"));
        assert_eq!(replaced(&first, "new\n").unwrap(), first);
    }

    #[test]
    fn a_document_without_a_section_gets_one_at_its_end() {
        let first = replaced("# Benchmarks\n", "new\n").unwrap();
        assert_eq!(first, format!("# Benchmarks\n\n{BEGIN}\n\nnew\n\n{END}\n"));
        assert_eq!(replaced(&first, "new\n").unwrap(), first);
    }

    #[test]
    fn a_document_with_half_a_section_is_left_alone() {
        assert!(replaced(BEGIN, "new").is_err());
        assert!(replaced(END, "new").is_err());
        assert!(replaced(&format!("{END}\n{BEGIN}"), "new").is_err());
    }
}
