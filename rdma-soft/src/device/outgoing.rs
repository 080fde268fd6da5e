//! What queue pairs want sent, as packets in the outbox of a link.

#![allow(unsafe_code)]

use rdma_sys::{IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR};

use super::core::Link;
use super::host::Shared;
use super::memory::Memory;
use super::net_address::{self, Destination};
use super::qp::{PKEY, Qp};
use super::queues::Task;
use super::state::MULTICAST_QP;
use super::traffic::SENT;
use crate::net::{Origin, Part, To};
use crate::transport::{Outgoing, Payload, Time};
use crate::wire::{Encoded, Header, ICRC, Operation, Psn, Trailer, Transport};

/// Where the payload of a packet is: registered memory, or inline data of work.
///
/// A key has opened the memory ([`Keys`](super::keys::Keys)) since the device was locked, and the packet is made before it is
/// unlocked. Until then no region of it is deregistered, as that takes the lock, and so the memory stays, as whoever has registered
/// it promises; and until then the work stays in its queue.
pub(super) struct Parts(Vec<Part>);

// SAFETY: addresses are of all threads, and those of one packet are not followed when the next is made: `clear` comes first.
unsafe impl Send for Parts {}

impl Parts {
    pub(super) fn new() -> Parts {
        Parts(Vec::new())
    }

    fn clear(&mut self) {
        self.0.clear();
    }

    fn push(&mut self, memory: Memory, len: usize) {
        let Memory { place, is_exposed } = memory;
        self.0.push(Part { address: place.0 as usize as *const u8, len, is_exposed });
    }

    fn push_inline(&mut self, data: &[u8]) {
        self.0.push(Part { address: data.as_ptr(), len: data.len(), is_exposed: false });
    }

    /// Makes a packet of them.
    fn send(&self, link: &mut Link, to: To, headers: &Encoded, now: Time) {
        let Link { socket, outbox, .. } = link;
        let len = self.0.iter().map(|part| part.len).sum::<usize>();
        SENT.add(headers.len() + len + Header::padding(len) + ICRC);
        // SAFETY: as `Parts` says, they may be read as long as the device is locked; it is during this call, after which nobody
        // has their addresses.
        unsafe { outbox.push(socket, to, headers, &self.0, now) };
    }

    /// Adds a copy of them.
    fn copy_to(&self, to: &mut Vec<u8>) {
        for part in &self.0 {
            // SAFETY: `Parts` says that the part may be read. No part lies in the vector's memory.
            unsafe { part.append_to(to) };
        }
    }
}

/// A datagram to a group that this device may have members of.
pub(super) struct Looped {
    pub(super) from: Origin,
    pub(super) group: [u8; 16],
    pub(super) datagram: Vec<u8>,
}

/// Sends what a queue pair has just said that its peer is to be sent.
pub(super) fn packet(
    qp: &mut Qp,
    shared: &mut Shared,
    links: &mut [Link],
    parts: &mut Parts,
    transport: Transport,
    outgoing: &Outgoing,
    now: Time,
) {
    let Some(Destination { link, address, class }) = qp.peer else { return };
    let Outgoing { operation, psn, ack_request, solicited, payload } = *outgoing;
    parts.clear();
    let len = match payload {
        Payload::None => 0,
        Payload::Remote { place, len } => {
            parts.push(Memory { place, is_exposed: true }, len as usize);
            len
        }
        Payload::Work { id, offset, len } => {
            if !gather(qp, shared, parts, id, offset, len) {
                qp.fail_at(id, IBV_WC_LOC_PROT_ERR, shared);
                return;
            }
            len
        }
    };
    let header = Header {
        transport,
        operation,
        pkey: PKEY,
        dest_qp: qp.attr.dest_qp_num,
        psn,
        solicited,
        ack_request,
        migrated: true,
        congestion: (false, false),
    };
    parts.send(&mut links[link], To { address, class }, &header.encode(len as usize), now);
    shared.packets = shared.packets.wrapping_add(1);
    qp.taken(shared);
}

/// Where part of the data of a piece of work is; `false` when it may not be read.
fn gather(qp: &Qp, shared: &Shared, parts: &mut Parts, work: u64, offset: u32, len: u32) -> bool {
    let Some(job) = qp.queues.send.get(work) else { return false };
    let (mut offset, mut len) = (offset as usize, len as usize);
    if job.is_inline {
        let Some(data) = job.inline.get(offset..offset + len) else { return false };
        parts.push_inline(data);
        return true;
    }
    for sge in &job.sges {
        let size = sge.length as usize;
        if len == 0 {
            break;
        }
        if offset >= size {
            offset -= size;
            continue;
        }
        let Some(memory) = shared.keys.local(qp.id.pd, sge, false) else { return false };
        let part = (size - offset).min(len);
        parts.push(memory.at(offset as u64), part);
        (offset, len) = (0, len - part);
    }
    len == 0
}

/// Sends the datagram that is the earliest work of a queue pair.
pub(super) fn datagram(
    qp: &mut Qp,
    shared: &mut Shared,
    links: &mut [Link],
    parts: &mut Parts,
    is_own_peer: &mut bool,
    psn: Psn,
    now: Time,
) -> Option<Looped> {
    let number = qp.queues.send.head();
    let job = qp.queues.send.get(number)?;
    let (len, is_solicited) = (job.len, job.is_solicited);
    let Task::Datagram { to, qp: dest_qp, qkey, imm } = job.task else {
        qp.fail_at(number, IBV_WC_LOC_PROT_ERR, shared);
        return None;
    };
    let link = &mut links[to.link];
    parts.clear();
    if len > link.socket.mtu() {
        qp.fail_at(number, IBV_WC_LOC_LEN_ERR, shared);
        return None;
    }
    if !gather(qp, shared, parts, number, 0, len) {
        qp.fail_at(number, IBV_WC_LOC_PROT_ERR, shared);
        return None;
    }
    let is_group = to.address.is_multicast();
    *is_own_peer |= to.address == link.socket.address();
    let header = Header {
        // A controlled key, whose highest bit is set, stands for that of the queue pair.
        transport: Transport::Ud { qkey: if qkey >> 31 == 1 { qp.attr.qkey } else { qkey }, source_qp: qp.id.number },
        operation: Operation::SendOnly(imm.map_or(Trailer::None, Trailer::Immediate)),
        pkey: PKEY,
        dest_qp: if is_group { MULTICAST_QP } else { dest_qp },
        psn,
        solicited: is_solicited,
        ack_request: false,
        migrated: true,
        congestion: (false, false),
    };
    let headers = header.encode(len as usize);
    parts.send(link, To { address: to.address, class: to.class }, &headers, now);
    shared.packets = shared.packets.wrapping_add(1);
    let looped = is_group.then(|| {
        let mut datagram = headers.to_vec();
        parts.copy_to(&mut datagram);
        // The padding, and in place of an invariant CRC, which nobody looks at here, four more.
        datagram.resize(datagram.len() + Header::padding(len as usize) + 4, 0);
        let from = Origin { address: link.socket.address(), class: to.class, hops: Origin::HOPS };
        Looped { from, group: net_address::gid(to.address), datagram }
    });
    qp.datagram_sent(shared);
    looped
}
