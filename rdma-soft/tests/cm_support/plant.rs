//! Planted faults, which the explorer must find.

use rdma_soft::wire::cm::{Drep, Dreq, Mad, Message};

use crate::support::host::{Content, Input, Packet};

/// A fault of all hosts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Plant {
    None,
    /// Timewait ends at once, so queue pair numbers are reused at once.
    NoTimewait,
    /// A duplicate REP is not answered with an RTU.
    NoRtuAgain,
    /// A DREQ is sent once.
    DreqOnce,
    /// A DREQ for a connection that waits for a REP is confirmed and forgotten.
    DreqForgotten,
    /// A restarted host has the GUID and draws the ids of its earlier incarnation.
    SameIdentity,
}

impl Plant {
    /// Changes what a host has sent in response to an input.
    pub(crate) fn change(self, input: Input, arrived: Option<&Packet>, sent: &mut Vec<Packet>) {
        let is_rep = matches!(arrived.and_then(message), Some(Message::Rep(_)));
        let is_timer = matches!(input, Input::Timer(_));
        sent.retain(|packet| match message(packet) {
            Some(Message::Rtu(_)) => self != Plant::NoRtuAgain || !is_rep,
            Some(Message::Dreq(_)) => self != Plant::DreqOnce || !is_timer,
            _ => true,
        });
    }

    /// The answer of the planted fault to a packet, in place of the manager's.
    pub(crate) fn answer(self, packet: &Packet, is_connecting: impl Fn(u32) -> bool) -> Option<Packet> {
        let Message::Dreq(Dreq { local_id, remote_id, .. }) = message(packet)? else { return None };
        if self != Plant::DreqForgotten || !is_connecting(remote_id) {
            return None;
        }
        let drep = Drep { local_id: remote_id, remote_id: local_id, private_data: [0; 224] };
        let mad = Mad { transaction: 0, message: Message::Drep(drep) }.encode();
        Some(Packet { from: packet.to, to: packet.from, content: Content::Mad(Box::new(mad)) })
    }
}

/// The message in a packet.
pub(crate) fn message(packet: &Packet) -> Option<Message> {
    match &packet.content {
        Content::Mad(mad) => Mad::decode(&mad[..]).ok().map(|mad| mad.message),
        Content::Data { .. } => None,
    }
}
