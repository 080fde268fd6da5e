//! Output of the command, passed through.

use std::io::{self, Write};

use super::supervise::Sink;

/// Passes output through as it comes.
#[derive(Debug)]
pub(crate) struct Passthrough;

impl Sink for Passthrough {}

/// Passes the output of several guests through line by line, with the number of the guest before each.
#[derive(Debug, Default)]
pub(crate) struct Prefixed {
    stdout: [Vec<u8>; 2],
    stderr: [Vec<u8>; 2],
}

impl Prefixed {
    /// Writes lines that never got their newline.
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

/// Writes `bytes` to standard output at once, also when they end within a line.
pub(crate) fn to_stdout(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

/// Writes `bytes` to standard error.
pub(crate) fn to_stderr(bytes: &[u8]) -> io::Result<()> {
    io::stderr().lock().write_all(bytes)
}

/// The complete lines of `pending` and `bytes`, prefixed; the rest stays in `pending`.
fn prefix(runner: usize, pending: &mut Vec<u8>, bytes: &[u8]) -> Vec<u8> {
    pending.extend_from_slice(bytes);
    let Some(end) = pending.iter().rposition(|byte| *byte == b'\n') else {
        return Vec::new();
    };
    let rest = pending.split_off(end + 1);
    let mut lines = Vec::with_capacity(pending.len() + 64);
    for line in pending.split_inclusive(|byte| *byte == b'\n') {
        lines.extend_from_slice(format!("[{runner}] ").as_bytes());
        lines.extend_from_slice(line);
    }
    *pending = rest;
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lines_are_prefixed_and_written() {
        let mut pending = Vec::new();
        assert_eq!(prefix(1, &mut pending, b"a\nb"), b"[1] a\n");
        assert_eq!(prefix(1, &mut pending, b"c"), b"");
        assert_eq!(prefix(1, &mut pending, b"\n\nd"), b"[1] bc\n[1] \n");
        assert_eq!(pending, b"d");
    }
}
