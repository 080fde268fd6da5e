//! What soft0 tells about a run: its traffic counters, which prove that data went over it, and reports of its checker.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};

use super::explained;
use super::packages::Root;

/// The files of a run.
pub(super) struct Watch {
    /// Traffic counters: `RDMA_SOFT_STATS`.
    counters: PathBuf,
    /// Reports of the checker as JSON, if it checks the run: `RDMA_SOFT_CHECK`.
    reports: Option<PathBuf>,
}

impl Watch {
    pub(super) fn new(root: &Root) -> Result<Watch> {
        let watch = Watch { counters: root.file("traffic"), reports: root.is_checked().then(|| root.file("reports")) };
        for file in [Some(&watch.counters), watch.reports.as_ref()].into_iter().flatten() {
            fs::write(file, "")?;
        }
        Ok(watch)
    }

    pub(super) fn of(&self, command: &mut Command) {
        command.env("RDMA_SOFT_STATS", &self.counters);
        if let Some(file) = &self.reports {
            command.env("RDMA_SOFT_CHECK", format!("json={},exit=0,limit=3", file.display()));
        }
    }

    /// Checks that `processes` have reported counters, and that one of them has sent at least `bytes`. Then checks the reports.
    pub(super) fn check(&self, command: &str, processes: usize, bytes: u64) -> Result<()> {
        let text = fs::read_to_string(&self.counters)?;
        let sent: Vec<u64> = text.lines().filter_map(sent_bytes).collect();
        ensure!(sent.len() == processes, "counters of {processes} processes:\n{text}");
        ensure!(sent.iter().any(|sent| *sent >= bytes), "no process has sent {bytes} bytes over soft0:\n{text}");
        self.check_reports(command)
    }

    /// Compares the reports of the checker with those that are explained for a command.
    pub(super) fn check_reports(&self, command: &str) -> Result<()> {
        match &self.reports {
            Some(file) => explained::check(command, &fs::read_to_string(file)?),
            None => Ok(()),
        }
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
