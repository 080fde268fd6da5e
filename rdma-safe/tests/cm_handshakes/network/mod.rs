//! A fake librdmacm: one network in this process, whose ids connect queue pairs of soft0.
//!
//! A test can make it lose messages and fail steps: [`Script`].

mod calls;

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::net::Ipv4Addr;
use std::sync::{Mutex, OnceLock, PoisonError};

use rdma_safe::address::GidEntry;
use rdma_safe::sys::*;
use rdma_safe::{Context, soft};

pub(crate) use calls::install;

/// The group that all ids join.
pub(crate) const GROUP: Ipv4Addr = Ipv4Addr::new(239, 1, 2, 3);

/// What the network does wrong.
#[derive(Default, Debug)]
pub(crate) struct Script {
    /// Number of address resolutions that fail with an event.
    pub(crate) address_errors: u32,
    /// Number of route resolutions that fail with an event.
    pub(crate) route_errors: u32,
    /// Number of ids that cannot move to another channel.
    pub(crate) migration_errors: u32,
    /// Whether addresses are never resolved.
    pub(crate) loses_addresses: bool,
    /// Whether requests are lost.
    pub(crate) loses_requests: bool,
    /// Whether confirmations (RTU) and disconnects are lost.
    pub(crate) loses_confirmations: bool,
    /// Whether a disconnect arrives only once the peer has disconnected, too.
    pub(crate) crosses_disconnects: bool,
}

#[derive(Default)]
struct Network {
    channels: HashMap<usize, Channel>,
    ids: HashMap<usize, IdState>,
    ports: u16,
    script: Script,
    calls: HashMap<&'static str, usize>,
}

struct Channel {
    /// An eventfd(2) that is readable while there are events.
    fd: c_int,
    events: VecDeque<Queued>,
}

struct Queued {
    owner: usize,
    event: rdma_cm_event_type,
    status: c_int,
    data: Vec<u8>,
    qp_num: u32,
    /// The new id of a request.
    request: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Idle,
    Listening,
    /// Has requested a connection.
    Requesting,
    /// Came with a request.
    Requested,
    /// Has accepted a request.
    Replied,
    /// Has received the reply.
    Answered,
    Established,
    Disconnecting,
    /// The peer has disconnected.
    Disconnected,
    Ended,
}

struct IdState {
    channel: usize,
    phase: Phase,
    peer: Option<usize>,
    port: u16,
    is_datagrams: bool,
    /// Number of the peer's queue pair, once it is known.
    remote: Option<u32>,
}

/// The device, and the GID of both ends.
struct Port {
    context: Context,
    gid: GidEntry,
}

static NETWORK: Mutex<Option<Network>> = Mutex::new(None);
static PORT: OnceLock<Port> = OnceLock::new();

fn with<R>(change: impl FnOnce(&mut Network) -> R) -> R {
    let mut network = NETWORK.lock().unwrap_or_else(PoisonError::into_inner);
    change(network.get_or_insert_default())
}

pub(crate) fn script(change: impl FnOnce(&mut Script)) {
    with(|network| change(&mut network.script));
}

/// Number of calls of a function of librdmacm since [`install`].
pub(crate) fn calls(function: &str) -> usize {
    with(|network| network.calls.get(function).copied().unwrap_or(0))
}

/// Numbers of channels, ids, queue pairs and completion queues. Ids of unread requests do not count.
pub(crate) fn objects() -> [usize; 4] {
    let soft = soft::objects();
    with(|network| {
        let unread = network.channels.values().flat_map(|channel| &channel.events);
        let ids = network.ids.len() - unread.filter(|event| event.request.is_some()).count();
        [network.channels.len(), ids, soft.queue_pairs, soft.completion_queues]
    })
}

/// Reports the removal of the device to the id of `channel`.
pub(crate) fn remove_device(channel: *mut rdma_event_channel) {
    with(|network| {
        let ids = network.ids.iter().filter(|(_, id)| id.channel == channel.addr()).map(|(id, _)| *id);
        for id in ids.collect::<Vec<_>>() {
            network.push(id, RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
        }
    });
}

impl Network {
    fn count(&mut self, function: &'static str) {
        *self.calls.entry(function).or_default() += 1;
    }

    fn id(&mut self, id: usize) -> &mut IdState {
        self.ids.get_mut(&id).expect("the id exists")
    }

    fn push(&mut self, owner: usize, event: rdma_cm_event_type, status: c_int) {
        self.push_event(Queued { owner, event, status, data: Vec::new(), qp_num: 0, request: None });
    }

    fn push_event(&mut self, event: Queued) {
        let channel = self.id(event.owner).channel;
        let channel = self.channels.get_mut(&channel).expect("the channel exists");
        channel.events.push_back(event);
        channel.signal();
    }

    /// Refuses the request of `id`, whose peer it was sent to.
    fn refuse(&mut self, id: usize, data: Vec<u8>) {
        let (event, status) = match self.id(id).is_datagrams {
            true => (RDMA_CM_EVENT_UNREACHABLE, 2),
            false => (RDMA_CM_EVENT_REJECTED, 28),
        };
        self.id(id).phase = Phase::Ended;
        self.push_event(Queued { owner: id, event, status, data, qp_num: 0, request: None });
    }

    /// Informs the peer of an id that is destroyed.
    fn sever(&mut self, id: usize) {
        let (phase, peer) = (self.id(id).phase, self.id(id).peer.take());
        let Some(peer) = peer else { return };
        self.id(peer).peer = None;
        match (phase, self.id(peer).phase) {
            (Phase::Requested, _) | (Phase::Replied, Phase::Answered) | (_, Phase::Replied) => {
                self.refuse(peer, Vec::new());
            }
            (_, Phase::Established | Phase::Disconnecting) => self.push(peer, RDMA_CM_EVENT_DISCONNECTED, 0),
            // The kernel reports nothing about a request that is not answered yet.
            _ => {}
        }
    }
}

impl Channel {
    /// Makes the descriptor readable if there are events.
    fn signal(&self) {
        let mut value = 1_u64;
        // SAFETY: the descriptor is an eventfd, and the value has the required length.
        unsafe {
            match self.events.is_empty() {
                true => libc::read(self.fd, (&raw mut value).cast(), 8),
                false => libc::write(self.fd, (&raw const value).cast(), 8),
            }
        };
    }
}
