//! Building the packets of queue pairs, and putting them into the outbox of a link.

#![allow(unsafe_code)]

use rdma_sys::{IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR};

use super::host::Shared;
use super::link::Link;
use super::memory::Memory;
use super::net_address::{self, Destination};
use super::observe;
use super::qp::{PKEY, Qp};
use super::queues::Task;
use super::state::MULTICAST_QP;
use super::traffic::SENT;
use crate::net::{Origin, Part, Run, To};
use crate::transport::{Outgoing, Payload, Time};
use crate::wire::{Encoded, Header, Operation, Psn, Trailer, Transport};

/// The payload of one or more packets, in parts: registered memory or inline data.
///
/// The parts may be read while the device is locked. [`Keys`](super::keys::Keys) has checked the memory under the same lock, and
/// deregistering takes the lock, so the memory stays registered. The program keeps registered memory mapped. Inline data stays in
/// the send queue.
pub(super) struct PayloadParts(Vec<Part>);

// SAFETY: the addresses are valid in every thread. `clear` removes the addresses of a packet before the next packet is added.
unsafe impl Send for PayloadParts {}

impl PayloadParts {
    pub(super) fn new() -> PayloadParts {
        PayloadParts(Vec::new())
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

    /// Sends the parts as a run of `count` packets with `len` bytes each.
    fn send(&self, link: &mut Link, to: To, mut headers: Encoded, (len, count): (usize, u32), now: Time) {
        let Link { socket, outbox, .. } = link;
        let run = Run::new(&mut headers, &self.0, len, count);
        SENT.add(count as usize, count as usize * run.packet_len());
        // SAFETY: the parts may be read while the device is locked, as it is during this call. The outbox does not keep their
        // addresses.
        unsafe { outbox.push(socket, to, run, now) };
    }

    /// Sends bytes of the device as a packet.
    pub(super) fn send_bytes(&mut self, link: &mut Link, to: To, headers: &Encoded, bytes: &[u8], now: Time) {
        self.clear();
        self.push_inline(bytes);
        self.send(link, to, *headers, (bytes.len(), 1), now);
        self.clear();
    }

    /// Appends a copy of the parts.
    fn copy_to(&self, to: &mut Vec<u8>) {
        for part in &self.0 {
            // SAFETY: the part may be read, as `PayloadParts` says. It is not in the memory of the vector.
            unsafe { part.append_to(to) };
        }
    }
}

/// A multicast datagram for the members in this process.
pub(super) struct Loopback {
    pub(super) from: Origin,
    pub(super) group: [u8; 16],
    pub(super) datagram: Vec<u8>,
}

/// Sends a run of packets to the connected peer. `first` is the first of `count` packets.
pub(super) fn send_packets(
    qp: &mut Qp,
    shared: &mut Shared,
    links: &mut [Link],
    parts: &mut PayloadParts,
    (transport, first, count): (Transport, &Outgoing, u32),
    now: Time,
) {
    let Some(Destination { link, address, class }) = qp.peer else { return };
    let Outgoing { operation, psn, ack_request, solicited, payload } = *first;
    parts.clear();
    let len = match payload {
        Payload::None => 0,
        Payload::Remote { place, len } => {
            let all = count * len;
            if !observe::may_read(qp.id.number, place, all.into()) {
                return;
            }
            parts.push(Memory { place, is_exposed: true }, all as usize);
            len
        }
        Payload::Work { id, offset, len } => {
            if !gather(qp, shared, parts, id, offset, count * len) {
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
    parts.send(&mut links[link], To { address, class }, header.encode(len as usize), (len as usize, count), now);
    shared.packets = shared.packets.wrapping_add(count);
    qp.packet_built(shared);
}

/// Collects a range of a work request's data. Returns `false` if it may not be read.
fn gather(qp: &Qp, shared: &Shared, parts: &mut PayloadParts, work: u64, offset: u32, len: u32) -> bool {
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
        let Some(memory) = shared.keys.local(qp.id.pd, sge, false) else {
            observe::refused_send(qp, &shared.keys, work);
            return false;
        };
        let part = (size - offset).min(len);
        if !observe::may_read(qp.id.number, memory.at(offset as u64).place, part as u64) {
            return false;
        }
        parts.push(memory.at(offset as u64), part);
        (offset, len) = (0, len - part);
    }
    len == 0
}

/// Sends the oldest work request, a datagram. Returns a copy of it if its destination is a multicast group.
pub(super) fn send_datagram(
    qp: &mut Qp,
    shared: &mut Shared,
    links: &mut [Link],
    parts: &mut PayloadParts,
    has_sent_to_self: &mut bool,
    psn: Psn,
    now: Time,
) -> Option<Loopback> {
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
    *has_sent_to_self |= to.address == link.socket.address();
    let header = Header {
        // If the highest bit of the Q_Key is set, the Q_Key of the queue pair is used instead.
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
    parts.send(link, To { address: to.address, class: to.class }, headers, (len as usize, 1), now);
    shared.packets = shared.packets.wrapping_add(1);
    let loopback = is_group.then(|| {
        let mut datagram = headers.to_vec();
        parts.copy_to(&mut datagram);
        // Padding, and four zeros as the invariant CRC, which is not checked here.
        datagram.resize(datagram.len() + Header::padding(len as usize) + 4, 0);
        let from = Origin { address: link.socket.address(), class: to.class, hops: Origin::HOPS };
        Loopback { from, group: net_address::gid(to.address), datagram }
    });
    qp.datagram_sent(shared);
    loopback
}
