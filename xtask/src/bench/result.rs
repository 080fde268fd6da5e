//! The result files in `target/bench`, from which `cargo xtask bench report` writes the report.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::workspace;

/// Result of a benchmark run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Benchmark {
    /// Heading of the section in the report.
    pub(crate) benchmark: String,
    /// Command that repeats the run.
    pub(crate) command: String,
    /// Date in UTC.
    pub(crate) date: String,
    /// Machine and tool versions, by name.
    pub(crate) environment: BTreeMap<String, String>,
    pub(crate) tables: Vec<Table>,
    pub(crate) gates: Vec<Gate>,
}

/// A table of results.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Table {
    pub(crate) title: String,
    pub(crate) columns: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
    /// Notes that explain the table.
    #[serde(default)]
    pub(crate) notes: Vec<String>,
}

/// A limit and the measured value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gate {
    pub(crate) name: String,
    /// Limit with its comparison operator, such as `≤ 1.005`.
    pub(crate) limit: String,
    pub(crate) measured: String,
    pub(crate) met: bool,
}

impl Benchmark {
    /// Writes the result to `file`.
    pub(crate) fn save(&self, file: &Path) -> Result<()> {
        if let Some(directory) = file.parent() {
            fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
        }
        let text = serde_json::to_string_pretty(self)? + "\n";
        fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
    }

    /// Writes the result to the given file, or to the file of the benchmark `name`, and says where.
    pub(crate) fn write(&self, given: Option<&Path>, name: &str) -> Result<()> {
        let file = given.map_or_else(|| file(name), |given| Ok(given.to_owned()))?;
        self.save(&file)?;
        println!("written to {}", file.display());
        Ok(())
    }

    /// Reads a file that [`Benchmark::save`] has written.
    pub(crate) fn load(file: &Path) -> Result<Self> {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is not a benchmark result", file.display()))
    }
}

/// Directory of the result files.
pub(crate) fn directory() -> Result<PathBuf> {
    Ok(workspace::target_dir()?.join("bench"))
}

/// Path of the result of the benchmark `name`.
pub(crate) fn file(name: &str) -> Result<PathBuf> {
    Ok(directory()?.join(name).with_extension("json"))
}

impl Table {
    /// Formats the table for a terminal, with aligned columns.
    pub(crate) fn to_text(&self) -> String {
        let mut text = format!("{}\n", self.title);
        let width = |column: usize| {
            let cells = std::iter::once(&self.columns).chain(&self.rows).filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let layout: Vec<(usize, bool)> =
            (0..self.columns.len()).map(|column| (width(column), self.is_numeric(column))).collect();
        for row in std::iter::once(&self.columns).chain(&self.rows) {
            let mut line = String::new();
            for (cell, (width, numeric)) in row.iter().zip(&layout) {
                line.push_str(&if *numeric { format!("  {cell:>width$}") } else { format!("  {cell:width$}") });
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        for note in &self.notes {
            text.push_str(note);
            text.push('\n');
        }
        text
    }

    /// Formats the table as Markdown, with the notes as paragraphs.
    pub(crate) fn to_markdown(&self) -> String {
        let row = |cells: &[String]| {
            let cells: String = cells.iter().map(|cell| format!(" {} |", cell.replace('|', "\\|"))).collect();
            format!("|{cells}\n")
        };
        let rule = |column| if self.is_numeric(column) { "---:|" } else { "---|" };
        let rules: String = (0..self.columns.len()).map(rule).collect();
        let mut text = format!("{}|{rules}\n", row(&self.columns));
        text.extend(self.rows.iter().map(|cells| row(cells)));
        for note in &self.notes {
            text.push('\n');
            text.push_str(note);
            text.push('\n');
        }
        text
    }

    /// Whether no cell of `column` begins with a letter. Such columns are aligned to the right.
    fn is_numeric(&self, column: usize) -> bool {
        let mut cells = self.rows.iter().filter_map(|row| row.get(column)).filter(|cell| !cell.is_empty());
        cells.all(|cell| !cell.starts_with(|first: char| first.is_alphabetic() || first == '*'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        Table {
            title: "Times".into(),
            columns: vec!["case".into(), "µs".into()],
            rows: vec![vec!["a|b".into(), "1.5".into()], vec!["long".into(), "10.25".into()]],
            notes: vec!["Of one run.".into()],
        }
    }

    #[test]
    fn text_is_aligned_by_characters() {
        assert_eq!(table().to_text(), "Times\n  case     µs\n  a|b     1.5\n  long  10.25\nOf one run.\n");
    }

    #[test]
    fn a_bar_in_a_cell_is_escaped() {
        let markdown = table().to_markdown();
        assert_eq!(markdown, "| case | µs |\n|---|---:|\n| a\\|b | 1.5 |\n| long | 10.25 |\n\nOf one run.\n");
    }

    #[test]
    fn a_saved_result_is_read_back() {
        let gate = Gate { name: "ratio".into(), limit: "≤ 1.005".into(), measured: "1.006".into(), met: false };
        let benchmark = Benchmark {
            benchmark: "x".into(),
            command: "cargo xtask bench x".into(),
            date: "2026-11-21".into(),
            environment: BTreeMap::from([("rustc".into(), "1.95".into())]),
            tables: vec![table()],
            gates: vec![gate],
        };
        let file = std::env::temp_dir().join(format!("xtask-result-{}/a/x.json", std::process::id()));
        benchmark.save(&file).unwrap();
        let loaded = Benchmark::load(&file).unwrap();
        fs::remove_dir_all(file.ancestors().nth(2).unwrap()).unwrap();
        assert_eq!(loaded, benchmark);
    }
}
