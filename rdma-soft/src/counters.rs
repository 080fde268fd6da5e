//! Traffic counters, and the file that they are appended to at exit.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::sync::OnceLock;

use crate::device::traffic::{RECEIVED, SENT};

/// Traffic of the device of this process since it started.
///
/// The size of a packet is counted from the base transport header to the invariant CRC, without the IP and UDP headers.
/// Retransmitted packets are counted again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PortCounters {
    /// Packets sent, including those that [`Faults`](crate::faults::Faults) dropped.
    pub sent_packets: u64,
    /// Bytes of the sent packets.
    pub sent_bytes: u64,
    /// Packets received with a valid invariant CRC.
    pub received_packets: u64,
    /// Bytes of the received packets.
    pub received_bytes: u64,
}

/// Reads the traffic counters of this process.
///
/// If `RDMA_SOFT_STATS` names a file, a process that has opened the device appends them to it as one line when it exits. A
/// process that is killed writes nothing.
#[must_use]
pub fn counters() -> PortCounters {
    let ((sent_packets, sent_bytes), (received_packets, received_bytes)) = (SENT.get(), RECEIVED.get());
    PortCounters { sent_packets, sent_bytes, received_packets, received_bytes }
}

/// Path of the file, and the process that writes to it. A child created by `fork` writes nothing.
static REPORT: OnceLock<(OsString, u32)> = OnceLock::new();

/// Registers the report at exit if `RDMA_SOFT_STATS` is set.
#[allow(unsafe_code)]
pub(crate) fn report_at_exit() {
    let Some(file) = std::env::var_os("RDMA_SOFT_STATS").filter(|file| !file.is_empty()) else { return };
    if REPORT.set((file, std::process::id())).is_ok() {
        // SAFETY: the function takes no arguments, does not unwind, and exists as long as this library is loaded.
        unsafe { libc::atexit(report) };
    }
}

extern "C" fn report() {
    let Some((file, _)) = REPORT.get().filter(|(_, process)| *process == std::process::id()) else { return };
    let PortCounters { sent_packets, sent_bytes, received_packets, received_bytes } = counters();
    let line = format!(
        "pid={} sent_packets={sent_packets} sent_bytes={sent_bytes} received_packets={received_packets} \
         received_bytes={received_bytes}\n",
        std::process::id()
    );
    let written = File::options().append(true).create(true).open(file).and_then(|mut to| to.write_all(line.as_bytes()));
    if let Err(error) = written {
        eprintln!("rdma-soft: RDMA_SOFT_STATS={}: {error}", std::path::Path::new(file).display());
    }
}
