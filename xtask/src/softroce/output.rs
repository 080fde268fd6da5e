//! Output of the command, passed through.

use std::io::{self, Write};

use super::supervise::Sink;

/// Standard output to standard output, standard error to standard error; of several guests line by line, with the
/// number of the guest before each.
#[derive(Debug)]
pub(crate) struct Passthrough {
    prefixed: bool,
    stdout: [Vec<u8>; 2],
    stderr: [Vec<u8>; 2],
}

impl Passthrough {
    pub(crate) fn new(prefixed: bool) -> Self {
        Self { prefixed, stdout: Default::default(), stderr: Default::default() }
    }

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

impl Sink for Passthrough {
    fn stdout(&mut self, runner: usize, bytes: &[u8]) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if self.prefixed {
            out.write_all(&prefix(runner, &mut self.stdout[runner], bytes))?;
        } else {
            out.write_all(bytes)?;
        }
        out.flush()
    }

    fn stderr(&mut self, runner: usize, bytes: &[u8]) -> io::Result<()> {
        let mut out = io::stderr().lock();
        if self.prefixed {
            out.write_all(&prefix(runner, &mut self.stderr[runner], bytes))
        } else {
            out.write_all(bytes)
        }
    }
}

impl Drop for Passthrough {
    fn drop(&mut self) {
        let _ = self.flush();
    }
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
