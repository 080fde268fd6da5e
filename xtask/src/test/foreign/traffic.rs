//! The traffic counters of soft0, which prove that data went over it.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};

use super::packages::Root;

/// The file of soft0's traffic counters: `RDMA_SOFT_STATS`.
pub(super) struct Traffic(PathBuf);

impl Traffic {
    pub(super) fn new(root: &Root) -> Result<Traffic> {
        let file = root.file("traffic");
        fs::write(&file, "")?;
        Ok(Traffic(file))
    }

    pub(super) fn of(&self, command: &mut Command) {
        command.env("RDMA_SOFT_STATS", &self.0);
    }

    /// Checks that `processes` have reported counters, and that one of them has sent at least `bytes`.
    pub(super) fn check(&self, processes: usize, bytes: u64) -> Result<()> {
        let text = fs::read_to_string(&self.0)?;
        let sent: Vec<u64> = text.lines().filter_map(sent_bytes).collect();
        ensure!(sent.len() == processes, "counters of {processes} processes:\n{text}");
        ensure!(sent.iter().any(|sent| *sent >= bytes), "no process has sent {bytes} bytes over soft0:\n{text}");
        Ok(())
    }
}

fn sent_bytes(line: &str) -> Option<u64> {
    line.split(' ').find_map(|field| field.strip_prefix("sent_bytes="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_from_a_line() {
        assert_eq!(sent_bytes("pid=7 sent_packets=1 sent_bytes=28 received_packets=0 received_bytes=0"), Some(28));
        assert_eq!(sent_bytes("pid=7"), None);
    }
}
