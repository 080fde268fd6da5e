//! Removal of the device.

use rdma_sys::RDMA_CM_EVENT_DEVICE_REMOVAL;

use super::Cma;
use super::id::IdState;
use crate::device::Core;
use crate::transport::Time;

impl Cma {
    /// Fails with `ENXIO` if the device of an id was removed.
    pub(crate) fn check_device(&self, number: u32) -> Result<(), i32> {
        match self.ids.get(number) {
            Some(id) if id.state == IdState::Removed => Err(libc::ENXIO),
            _ => Ok(()),
        }
    }
}

impl Core {
    /// Ends the connections and lookups of all ids, and reports the removal to each id that uses the device.
    ///
    /// An id that listens at all addresses gets no event, as in Linux.
    pub(in crate::device) fn remove_ids(&mut self, now: Time) {
        // Requests that no program has read end with their listeners.
        let cma = &mut self.state.cma;
        let unread = cma.ids.iter().filter_map(|(number, id)| Some((number, id.listener_of?)));
        let unread: Vec<(u32, u32)> = unread.collect();
        for (_, listener) in &unread {
            cma.remove_events(*listener, |event| event.listener.is_some());
        }
        unread.into_iter().for_each(|(number, _)| self.cm_destroy(number, now));

        let cma = &mut self.state.cma;
        for (listener, _) in std::mem::take(&mut cma.by_listener) {
            cma.manager.close_listener(listener);
        }
        let ids: Vec<u32> = cma.ids.iter().map(|(number, _)| number).collect();
        for number in ids {
            cma.findings.remove(number);
            let Some(id) = cma.ids.get_mut(number) else { continue };
            id.listener = None;
            if id.link.is_none() {
                continue;
            }
            id.state = IdState::Removed;
            id.memberships.clear();
            let (connection, is_datagram) = (id.connection.take(), id.is_datagram());
            cma.release_connection(now, number, connection, is_datagram);
            cma.push_plain(number, RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
        }
        self.update_cm(now);
    }
}
