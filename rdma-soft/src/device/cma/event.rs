//! Events of ids, and the channels that report them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;

use rdma_sys::{ibv_ah_attr, rdma_cm_event_type};

use super::Cma;
use crate::device::signal::Signal;

/// An event channel. Its descriptor is readable while it has events.
pub(crate) struct EventChannel {
    signal: Signal,
    queue: VecDeque<CmEvent>,
}

/// An event of an id.
#[derive(Clone)]
pub(crate) struct CmEvent {
    /// The id, or the new id of a request.
    pub(crate) id: u32,
    /// The listening id of a request.
    pub(crate) listener: Option<u32>,
    pub(crate) kind: rdma_cm_event_type,
    /// A negative errno, or the reason of a rejection.
    pub(crate) status: i32,
    pub(crate) parameters: Parameters,
}

/// What an event says about the peer.
#[derive(Clone)]
pub(crate) enum Parameters {
    None,
    Connected(ConnectionParameters),
    Datagram(Box<Datagram>),
}

/// Parameters of a connection, of this side or of the peer: `struct rdma_conn_param`.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectionParameters {
    pub(crate) private_data: Vec<u8>,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: bool,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: bool,
    pub(crate) qp_num: u32,
}

/// Parameters of a datagram service or of a multicast group: `struct rdma_ud_param`.
#[derive(Clone)]
pub(crate) struct Datagram {
    pub(crate) private_data: Vec<u8>,
    pub(crate) ah_attr: ibv_ah_attr,
    pub(crate) qp_num: u32,
    pub(crate) qkey: u32,
    /// Number of the membership whose join the event reports.
    pub(crate) membership: Option<u32>,
}

impl EventChannel {
    pub(crate) fn new() -> io::Result<EventChannel> {
        Ok(EventChannel { signal: Signal::new()?, queue: VecDeque::new() })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.signal.fd()
    }
}

impl Cma {
    /// Queues an event on the channel of its id. A request is queued on the channel of its listener.
    pub(super) fn push(&mut self, event: CmEvent) {
        let reporter = event.listener.unwrap_or(event.id);
        let channel = self.ids.get(reporter).map(|id| id.channel);
        if let Some(channel) = channel.and_then(|channel| self.channels.get_mut(channel)) {
            channel.queue.push_back(event);
            channel.signal.raise();
        }
    }

    /// Queues an event without parameters.
    pub(super) fn push_plain(&mut self, id: u32, kind: rdma_cm_event_type, status: i32) {
        self.push(CmEvent { id, listener: None, kind, status, parameters: Parameters::None });
    }

    /// Takes the oldest event of a channel.
    pub(crate) fn take_event(&mut self, number: u32) -> Option<CmEvent> {
        let channel = self.channels.get_mut(number)?;
        let event = channel.queue.pop_front()?;
        channel.signal.lower();
        if let Some(id) = event.listener.and_then(|_| self.ids.get_mut(event.id)) {
            // The listener may have moved to another channel since the request arrived.
            id.channel = number;
            id.listener_of = None;
            if let Some(connection) = id.connection {
                self.manager.take_request(connection);
            }
        }
        Some(event)
    }

    /// Removes the pending events of an id that match. A request is an event of its listener.
    pub(super) fn remove_events(&mut self, id: u32, mut matches: impl FnMut(&CmEvent) -> bool) -> Vec<CmEvent> {
        let channel = self.ids.get(id).map(|id| id.channel);
        let Some(channel) = channel.and_then(|channel| self.channels.get_mut(channel)) else { return Vec::new() };
        let mut removed = Vec::new();
        channel.queue.retain(|event| {
            let is_removed = event.listener.unwrap_or(event.id) == id && matches(event);
            if is_removed {
                removed.push(event.clone());
            }
            !is_removed
        });
        removed.iter().for_each(|_| _ = channel.signal.lower());
        removed
    }

    /// Moves an id and its pending events to another channel.
    pub(crate) fn migrate(&mut self, id: u32, channel: u32) {
        let moved = self.remove_events(id, |_| true);
        if let Some(id) = self.ids.get_mut(id) {
            id.channel = channel;
        }
        moved.into_iter().for_each(|event| self.push(event));
    }
}
