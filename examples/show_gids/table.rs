//! A table of text.

use std::fmt;

/// Rows of text below a header.
#[derive(Debug)]
pub(crate) struct Table<const COLUMNS: usize> {
    header: [&'static str; COLUMNS],
    rows: Vec<[String; COLUMNS]>,
}

impl<const COLUMNS: usize> Table<COLUMNS> {
    pub(crate) fn new(header: [&'static str; COLUMNS]) -> Self {
        Table { header, rows: Vec::new() }
    }

    pub(crate) fn push(&mut self, row: [String; COLUMNS]) {
        self.rows.push(row);
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }
}

impl<const COLUMNS: usize> fmt::Display for Table<COLUMNS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths: [usize; COLUMNS] = std::array::from_fn(|column| {
            self.rows.iter().map(|row| row[column].len()).chain([self.header[column].len()]).max().unwrap_or(0)
        });
        let dashes = self.header.map(|name| "-".repeat(name.len()));
        let rows = self.rows.iter().map(|row| row.each_ref().map(String::as_str));
        for row in [self.header, dashes.each_ref().map(String::as_str)].into_iter().chain(rows) {
            let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
            writeln!(f, "{}", cells.join("  ").trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Table;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(["DEV", "PORT"]);
        table.push(["rxe0".into(), "1".into()]);
        table.push([String::new(), "200".into()]);
        assert_eq!(table.to_string(), "DEV   PORT\n---   ----\nrxe0  1\n      200\n");
        assert_eq!(table.len(), 2);
    }
}
