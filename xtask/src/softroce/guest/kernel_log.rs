//! Relays warnings of the guest's kernel.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::OFlags;

use super::port::Port;
use crate::softroce::frame::Frame;

/// Kernel log level of a warning. Lower levels are worse.
const WARNING: u32 = 4;

/// Kernel log records from `/dev/kmsg` since creation.
#[derive(Clone, Debug)]
pub(super) struct KernelLog {
    records: Arc<Mutex<File>>,
    port: Port,
}

impl KernelLog {
    /// Starts a thread that relays warnings to `port`.
    pub(super) fn relay(port: &Port) -> Result<Self> {
        // Skip messages of the boot, such as those of 9p and the network. The console also shows warnings, in case the
        // guest can no longer relay them.
        show_warnings_on_console();
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(i32::try_from(OFlags::NONBLOCK.bits())?)
            .open("/dev/kmsg")
            .context("cannot open /dev/kmsg")?;
        file.seek(SeekFrom::End(0))?;
        let waiting = file.try_clone()?;
        let log = Self { records: Arc::new(Mutex::new(file)), port: port.clone() };
        let relay = log.clone();
        std::thread::spawn(move || {
            let mut descriptors = [PollFd::new(&waiting, PollFlags::IN)];
            while poll(&mut descriptors, None).is_ok() {
                relay.drain();
            }
        });
        Ok(log)
    }

    /// Relays all pending records.
    pub(super) fn drain(&self) {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        // A read returns one record, which is at most this long.
        let mut buffer = [0; 8192];
        loop {
            match records.read(&mut buffer) {
                Ok(length) if length > 0 => {
                    if let Some(line) = warning(&String::from_utf8_lossy(&buffer[..length])) {
                        let _ = self.port.send(&Frame::Kernel(line));
                    }
                }
                // EPIPE: unread records were overwritten. The next read continues after them.
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
                _ => return,
            }
        }
    }
}

/// Raises the console log level to include warnings, if possible.
fn show_warnings_on_console() {
    const LEVEL: &str = "/proc/sys/kernel/printk";
    let levels = std::fs::read_to_string(LEVEL).unwrap_or_default();
    let current: u32 = levels.split_whitespace().next().and_then(|level| level.parse().ok()).unwrap_or(0);
    // The console shows messages below its level.
    if current <= WARNING {
        let _ = std::fs::write(LEVEL, (WARNING + 1).to_string());
    }
}

/// Text of a record `priority,sequence,microseconds,flags;text`, if its level is warning or worse.
fn warning(record: &str) -> Option<String> {
    let (header, text) = record.split_once(';')?;
    let mut fields = header.split(',');
    let priority: u32 = fields.next()?.parse().ok()?;
    let microseconds: u64 = fields.nth(1)?.parse().ok()?;
    let text = text.lines().next()?;
    let seconds = microseconds / 1_000_000;
    (priority & 7 <= WARNING).then(|| format!("[{seconds:5}.{:06}] {text}", microseconds % 1_000_000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_warnings_are_relayed() {
        let record = "4,339,5140900,-;rdma_rxe: qp#17 moved to error state\n SUBSYSTEM=rdma\n";
        assert_eq!(warning(record).as_deref(), Some("[    5.140900] rdma_rxe: qp#17 moved to error state"));
        assert_eq!(warning("6,340,5140901,-;rdma_rxe: loaded\n"), None);
        assert_eq!(warning("12,1,1,c;user warning").as_deref(), Some("[    0.000001] user warning"));
        assert_eq!(warning("nonsense"), None);
    }
}
