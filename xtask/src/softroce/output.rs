//! Passes the output of the command through.

use std::io::{self, Write};

use super::supervise::Sink;

/// Passes output through immediately.
#[derive(Debug)]
pub(crate) struct Passthrough;

impl Sink for Passthrough {}

/// Collects standard output. Standard error passes through.
#[derive(Debug, Default)]
pub(crate) struct Collected(pub(crate) Vec<u8>);

impl Sink for Collected {
    fn stdout(&mut self, _: usize, bytes: &[u8]) -> io::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
}

/// Passes the output of two guests through by line, prefixed with the number of the guest.
#[derive(Debug, Default)]
pub(crate) struct Prefixed {
    stdout: [Vec<u8>; 2],
    stderr: [Vec<u8>; 2],
}

impl Prefixed {
    /// Writes pending lines that lack a newline.
    fn flush(&mut self) -> io::Result<()> {
        for runner in 0..2 {
            if !self.stdout[runner].is_empty() {
                self.stdout(runner, b"\n")?;
            }
            if !self.stderr[runner].is_empty() {
                self.stderr(runner, b"\n")?;
            }
        }
        Ok(())
    }
}

impl Sink for Prefixed {
    fn stdout(&mut self, runner: usize, bytes: &[u8]) -> io::Result<()> {
        to_stdout(&prefix(runner, &mut self.stdout[runner], bytes))
    }

    fn stderr(&mut self, runner: usize, bytes: &[u8]) -> io::Result<()> {
        to_stderr(&prefix(runner, &mut self.stderr[runner], bytes))
    }
}

impl Drop for Prefixed {
    fn drop(&mut self) {
        let _ = self.flush();
    }
}

/// Writes `bytes` to standard output and flushes it, even within a line.
pub(crate) fn to_stdout(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

/// Writes `bytes` to standard error.
pub(crate) fn to_stderr(bytes: &[u8]) -> io::Result<()> {
    io::stderr().lock().write_all(bytes)
}

/// Appends `bytes` to `pending`, and removes and returns its complete lines with a prefix.
fn prefix(runner: usize, pending: &mut Vec<u8>, bytes: &[u8]) -> Vec<u8> {
    pending.extend_from_slice(bytes);
    let Some(end) = pending.iter().rposition(|byte| *byte == b'\n') else {
        return Vec::new();
    };
    let incomplete = pending.split_off(end + 1);
    let mut lines = Vec::with_capacity(pending.len() + 64);
    for line in pending.split_inclusive(|byte| *byte == b'\n') {
        lines.extend_from_slice(format!("[{runner}] ").as_bytes());
        lines.extend_from_slice(line);
    }
    *pending = incomplete;
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_complete_lines_are_prefixed_and_written() {
        let mut pending = Vec::new();
        assert_eq!(prefix(1, &mut pending, b"a\nb"), b"[1] a\n");
        assert_eq!(prefix(1, &mut pending, b"c"), b"");
        assert_eq!(prefix(1, &mut pending, b"\n\nd"), b"[1] bc\n[1] \n");
        assert_eq!(pending, b"d");
    }
}
