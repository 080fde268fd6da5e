//! The processes of peers on this host, whose ends are noticed at once.

use std::io;

use crate::cm::ConnectionId;
use crate::device::Core;
use crate::device::core::Sources;
use crate::net::presence::{Presence, Process};
use crate::transport::Time;

/// Most scans for the last messages of a process that has ended.
const LAST_SCANS: u32 = 64;

/// First bytes of the GUIDs of soft0: a locally administered EUI-64 (IEEE 802, clause 8.2), and `s0`.
const SOFT: u64 = 0x02_73_30 << 40;

/// The GUID of a device, from a random number.
pub(super) fn device_guid(random: u64) -> u64 {
    SOFT | random >> 24
}

/// Whether a GUID is one of [`device_guid`]. Another RNIC of this host has no process that could be watched.
fn is_of_soft0(guid: u64) -> bool {
    guid >> 40 == SOFT >> 40
}

impl Core {
    /// Lets peers watch this process, from the first use of connections by address on. Returns whether this is the first time.
    ///
    /// # Errors
    /// The errno of a failed system call. Without a presence, peers would take this process for dead.
    pub(crate) fn open_presence(&mut self) -> Result<bool, i32> {
        let cma = &mut self.state.cma;
        if cma.presence.is_some() || cfg!(miri) {
            return Ok(false);
        }
        let presence = Presence::new(cma.guid).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        cma.presence = Some(presence);
        Ok(true)
    }

    /// Watches the process of a peer on this host, so that its end is noticed.
    ///
    /// # Errors
    /// `ECONNREFUSED` if it has ended already, and others if it cannot be watched.
    pub(super) fn watch(&mut self, process: Process) -> io::Result<()> {
        let cma = &mut self.state.cma;
        if process.guid == cma.guid || !is_of_soft0(process.guid) {
            return Ok(());
        }
        cma.presence.as_mut().map_or(Ok(()), |presence| presence.watch(process))
    }

    /// Watches the process of the peer of a connection or lookup, and ends this connection if the process has ended already.
    pub(super) fn watch_or_end(&mut self, now: Time, connection: ConnectionId, process: Process) {
        if self.watch(process).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
            self.state.cma.manager.end_gone(now, connection);
        }
    }

    /// Ends the connections of processes that have ended.
    pub(super) fn handle_presence(&mut self, now: Time) {
        let mut gone = Vec::new();
        if let Some(presence) = &mut self.state.cma.presence {
            presence.handle_events(|process| gone.push(process));
        }
        if !gone.is_empty() {
            // The last messages of the processes come before their end. Other peers may send all the time.
            _ = (0..LAST_SCANS).find(|_| !self.receive(now, Sources::All));
        }
        for Process { address, guid } in gone {
            self.state.cma.manager.handle_gone_peer(now, address, guid);
        }
    }

    /// Stops watching processes if no connection or lookup is left.
    pub(super) fn unwatch_unused(&mut self) {
        let cma = &mut self.state.cma;
        let (_, lookups) = cma.manager.lookup_counts();
        if cma.manager.counts() == (0, 0) && lookups == 0 {
            if let Some(presence) = &mut cma.presence {
                presence.unwatch_all();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guids_of_soft0_are_recognized() {
        assert!([0, 1, u64::MAX].into_iter().all(|random| is_of_soft0(device_guid(random))));
        assert_ne!(device_guid(1 << 24), device_guid(2 << 24));
        // Those of SoftRoCE contain a MAC address.
        assert!(!is_of_soft0(0x0273_30ff_fe12_3456 ^ 1 << 40) && !is_of_soft0(0x5054_00ff_fe12_3456));
    }
}
