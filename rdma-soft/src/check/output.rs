//! The files and the stream that reports are written to.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::{Options, Report};

/// Where reports go.
pub(super) struct Output {
    text: Target,
    json: Target,
}

/// Destination of one form of the reports.
enum Target {
    Nowhere,
    Stderr,
    File(PathBuf),
}

impl Output {
    /// The reports of a session are written to files only.
    pub(super) fn new(options: &Options, is_session: bool) -> Output {
        let file = |file: &Option<PathBuf>| file.clone().map(Target::File);
        let text = if is_session { Target::Nowhere } else { Target::Stderr };
        Output { text: file(&options.text).unwrap_or(text), json: file(&options.json).unwrap_or(Target::Nowhere) }
    }

    /// Writes a report in each form.
    pub(super) fn write(&mut self, report: &Report) {
        self.write_line(&report.to_string());
        if !matches!(self.json, Target::Nowhere) {
            self.json.write(&report.to_json());
        }
    }

    /// Writes a line of text.
    pub(super) fn write_line(&mut self, line: &str) {
        self.text.write(line);
    }
}

impl Target {
    /// Writes lines. If the file cannot be written, these and all later ones go to standard error.
    fn write(&mut self, lines: &str) {
        let text = format!("{lines}\n");
        if let Target::File(file) = self {
            let Err(error) = append(file, &text) else { return };
            let file = file.display();
            to_stderr(&format!(
                "rdma-soft: RDMA_SOFT_CHECK: cannot write to {file}: {error}. Its reports follow here\n"
            ));
            *self = Target::Stderr;
        }
        if let Target::Stderr = self {
            to_stderr(&text);
        }
    }
}

/// Appends to a file with one write, so that processes may share it.
fn append(file: &Path, text: &str) -> std::io::Result<()> {
    File::options().append(true).create(true).open(file)?.write_all(text.as_bytes())
}

/// A program that has closed standard error still gets its exit status.
fn to_stderr(text: &str) {
    _ = std::io::stderr().write_all(text.as_bytes());
}
