//! Connections by IP address, as rdma_cm offers them: ids, ports, addresses, and the events of ids.
//!
//! An id corresponds to an `rdma_cm_id`. Its connection is in the [`Manager`], which knows neither ports nor event channels. This
//! module turns calls on ids into calls of the manager, and the manager's events into events of ids.
//!
//! The behaviour follows Linux (`drivers/infiniband/core/cma.c` and `ucma.c`). The IP addresses of a connection are those that the
//! programs use. The packets use the address of the device of each process.

mod attributes;
mod connect;
mod event;
mod finding;
mod id;
mod incoming;
mod multicast;
mod ports;
mod presence;
mod removal;
mod resolve;
mod wire;

pub(crate) use event::{CmEvent, ConnectionParameters, EventChannel, Parameters};
pub(crate) use id::{Id, IdState};

use std::collections::HashMap;
use std::os::fd::BorrowedFd;

use super::slab::Slab;
use crate::cm::{Config, ConnectionId, ListenerId, Manager, Peer};
use crate::net::directory::Directory;
use crate::net::presence::Presence;
use crate::random::Random;
use finding::Findings;
use ports::Ports;

/// The ids of a device and their connections.
pub(crate) struct Cma {
    pub(super) manager: Manager,
    pub(crate) ids: Slab<Id>,
    pub(crate) channels: Slab<EventChannel>,
    /// Ids by connection or lookup.
    by_connection: HashMap<ConnectionId, u32>,
    /// Ids by listener.
    by_listener: HashMap<ListenerId, u32>,
    /// The listeners of this host. `None` if it cannot be opened, and under Miri.
    directory: Option<Directory>,
    /// Processes of peers on this host. `None` until the first id is created, and under Miri.
    presence: Option<Presence>,
    ports: Ports,
    findings: Findings,
    host_addresses: wire::HostAddresses,
    /// MADs that have arrived and were not handled yet, with their sources.
    arrived: Vec<(Peer, [u8; crate::wire::cm::MAD_LEN])>,
    /// Whether MADs have arrived, or the manager has events.
    has_work: bool,
    /// Packet sequence number of the next MAD.
    psn: u32,
    /// GUID of this incarnation of the device.
    guid: u64,
    random: Random,
}

impl Cma {
    /// An empty set of ids. Both numbers are unpredictable. This incarnation of the device gets its GUID from the first one.
    pub(super) fn new(guid: u64, random: u64) -> Cma {
        let guid = presence::device_guid(guid);
        Cma {
            manager: Manager::new(Config::new(guid, random)),
            ids: Slab::new(1),
            channels: Slab::new(1),
            by_connection: HashMap::new(),
            by_listener: HashMap::new(),
            directory: if cfg!(miri) { None } else { Directory::new(guid).ok() },
            presence: None,
            ports: Ports::default(),
            findings: Findings::default(),
            host_addresses: wire::HostAddresses::default(),
            arrived: Vec::new(),
            has_work: false,
            psn: 0,
            guid,
            random: Random(random.rotate_left(32)),
        }
    }

    /// Descriptors that are readable when [`Core::handle_host_events`](super::Core::handle_host_events) has something to do.
    pub(super) fn host_fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [self.directory.as_ref().map(Directory::fd), self.presence.as_ref().map(Presence::fd)]
    }

    /// Number of connections, including those in timewait.
    pub(crate) fn connections(&self) -> usize {
        let (in_timewait, others) = self.manager.counts();
        in_timewait + others
    }

    /// Whether a connection uses a queue pair number, also one in timewait. A new queue pair must not get it.
    pub(super) fn uses_qpn(&self, number: u32) -> bool {
        self.manager.uses_qpn(number)
    }

    /// The first packet has arrived for a queue pair whose connection waits for an RTU.
    pub(super) fn establish_by_data(&mut self, number: u32) {
        self.manager.establish_by_data(number);
        self.has_work = true;
    }

    /// Returns an id.
    ///
    /// # Errors
    /// `EINVAL` if it does not exist.
    pub(crate) fn id(&self, number: u32) -> Result<&Id, i32> {
        self.ids.get(number).ok_or(libc::EINVAL)
    }

    /// Returns an id to change.
    ///
    /// # Errors
    /// `EINVAL` if it does not exist.
    pub(crate) fn id_mut(&mut self, number: u32) -> Result<&mut Id, i32> {
        self.ids.get_mut(number).ok_or(libc::EINVAL)
    }

    /// Adds an id, and chooses the packet sequence number at which its peer starts.
    pub(crate) fn add_id(&mut self, id: Id) -> u32 {
        let psn = self.draw_psn();
        self.ids.insert(Id { psn, ..id })
    }

    /// Draws the first packet sequence number of a connection.
    fn draw_psn(&mut self) -> u32 {
        (self.random.next() >> 40) as u32
    }
}
