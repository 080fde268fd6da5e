//! The device as the protocol state machine of a queue pair sees it.

use rdma_sys::*;

use super::cq::Cq;
use super::events::Events;
use super::keys::{self, Keys};
use super::memory::{self, Memory};
use super::observe;
use super::queues::{ActiveReceives, Receive, ReceiveQueue, SendQueue, Srq};
use super::slab::Slab;
use crate::check;
use crate::transport::{Access, Completion, Host, Place, ReceiveId, Status};
use crate::wire::{Data, RemoteRange};

/// Objects that queue pairs share.
pub(crate) struct Shared {
    pub(crate) keys: Keys,
    pub(crate) cqs: Slab<Cq>,
    pub(crate) srqs: Slab<Srq>,
    pub(crate) events: Events,
    /// Packets sent and received.
    pub(crate) packets: u32,
}

/// The properties of a queue pair that never change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub(crate) number: u32,
    pub(crate) pd: u32,
    pub(crate) context: u32,
    /// Address of the `ibv_qp`.
    pub(crate) object: usize,
    pub(crate) kind: ibv_qp_type,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) srq: Option<u32>,
    pub(crate) is_all_signaled: bool,
    pub(crate) cap: ibv_qp_cap,
}

/// Work that was posted to a queue pair.
#[derive(Debug)]
pub(crate) struct Queues {
    pub(crate) send: SendQueue,
    pub(crate) receive: ReceiveQueue,
    pub(crate) active: ActiveReceives,
}

/// A queue pair and the shared objects, without the state machine, which borrows this as its [`Host`].
pub(crate) struct QpHost<'a> {
    pub(crate) id: &'a Identity,
    /// Access flags that the peer has.
    pub(crate) access: u32,
    /// Queue pair number of the peer, or of the sender of a datagram.
    pub(crate) source_qp: u32,
    pub(crate) queues: &'a mut Queues,
    pub(crate) shared: &'a mut Shared,
}

/// Fields of a datagram's completion besides its length and immediate data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Datagram {
    pub(crate) is_solicited: bool,
    /// See [`packet_type`](super::net_address::packet_type).
    pub(crate) packet_type: u8,
}

fn with_immediate(mut wc: ibv_wc, imm: Option<u32>) -> ibv_wc {
    if let Some(imm) = imm {
        wc.wc_flags |= IBV_WC_WITH_IMM.0;
        wc.__bindgen_anon_1.imm_data = imm.to_be();
    }
    wc
}

/// Converts a status of the transport to one of verbs.
fn status_of(status: Status, is_send: bool) -> ibv_wc_status {
    match status {
        Status::Success => IBV_WC_SUCCESS,
        Status::LocalLength => IBV_WC_LOC_LEN_ERR,
        Status::LocalProtection => IBV_WC_LOC_PROT_ERR,
        Status::Flushed => IBV_WC_WR_FLUSH_ERR,
        Status::RemoteInvalidRequest => IBV_WC_REM_INV_REQ_ERR,
        Status::RemoteAccess if is_send => IBV_WC_REM_ACCESS_ERR,
        Status::RemoteAccess => IBV_WC_LOC_ACCESS_ERR,
        Status::RemoteOperation => IBV_WC_REM_OP_ERR,
        Status::RetryExceeded => IBV_WC_RETRY_EXC_ERR,
        Status::ReceiverNotReadyExceeded => IBV_WC_RNR_RETRY_EXC_ERR,
        Status::BadResponse => IBV_WC_BAD_RESP_ERR,
    }
}

impl QpHost<'_> {
    fn new_completion(&self, wr_id: u64, status: ibv_wc_status, opcode: ibv_wc_opcode) -> ibv_wc {
        ibv_wc { wr_id, status, opcode, qp_num: self.id.number, ..ibv_wc::zeroed() }
    }

    /// Completes the oldest send work request.
    pub(crate) fn complete_send(&mut self, status: Status) {
        self.complete_send_with(status_of(status, true));
    }

    pub(crate) fn complete_send_with(&mut self, status: ibv_wc_status) {
        check::with(|check| check.sent(self.id.number, self.queues.send.head()));
        let Some(job) = self.queues.send.pop() else { return };
        if !job.is_signaled && status == IBV_WC_SUCCESS {
            return;
        }
        let (wr_id, opcode) = (job.wr_id, job.task.opcode());
        let byte_len = if opcode == IBV_WC_COMP_SWAP || opcode == IBV_WC_FETCH_ADD { 8 } else { job.len };
        let wc = ibv_wc { byte_len, ..self.new_completion(wr_id, status, opcode) };
        if let Some(cq) = self.shared.cqs.get_mut(self.id.send_cq) {
            cq.push(self.id.send_cq, wc, false, &mut self.shared.events);
        }
        observe::completed(self.shared, self.id.send_cq);
    }

    fn push_receive(&mut self, wc: ibv_wc, is_solicited: bool) {
        if let Some(cq) = self.shared.cqs.get_mut(self.id.recv_cq) {
            cq.push(self.id.recv_cq, wc, is_solicited, &mut self.shared.events);
        }
        observe::completed(self.shared, self.id.recv_cq);
    }

    /// Completes the receive of a datagram. The payload follows the route header.
    pub(crate) fn complete_datagram(
        &mut self,
        id: ReceiveId,
        status: Status,
        len: u32,
        imm: Option<u32>,
        of: Datagram,
    ) {
        let flags = if status == Status::Success { IBV_WC_GRH } else { ibv_wc_flags(0) };
        let wc = ibv_wc {
            status: status_of(status, false),
            opcode: IBV_WC_RECV,
            byte_len: len,
            wc_flags: flags.0,
            sl: of.packet_type,
            ..ibv_wc::zeroed()
        };
        self.complete_receive(id, with_immediate(wc, imm), of.is_solicited);
    }

    /// Completes a receive. `wc` has the fields that describe the message.
    fn complete_receive(&mut self, id: ReceiveId, wc: ibv_wc, is_solicited: bool) {
        let Some(receive) = self.queues.active.remove(id) else { return };
        observe::received(&receive);
        let wc = ibv_wc { wr_id: receive.wr_id, qp_num: self.id.number, src_qp: self.source_qp, ..wc };
        self.push_receive(wc, is_solicited);
        match self.id.srq.and_then(|srq| self.shared.srqs.get_mut(srq)) {
            Some(srq) => srq.queue.recycle(receive),
            None => self.queues.receive.recycle(receive),
        }
    }

    /// Flushes the receives of this queue pair, including the active one.
    pub(crate) fn flush_receives(&mut self, active: Option<ReceiveId>) {
        if let Some(receive) = active.and_then(|id| self.queues.active.remove(id)) {
            self.flush_receive(receive);
        }
        while let Some(receive) = self.queues.receive.posted.pop_front() {
            self.flush_receive(receive);
        }
    }

    fn flush_receive(&mut self, receive: Receive) {
        observe::received(&receive);
        let wc = self.new_completion(receive.wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV);
        self.push_receive(wc, true);
        self.queues.receive.recycle(receive);
    }

    /// Takes the next receive from the queue, if there is one.
    fn take_receive(&mut self) -> Option<ReceiveId> {
        let receive = match self.id.srq {
            None => self.queues.receive.posted.pop_front()?,
            Some(number) => {
                let srq = self.shared.srqs.get_mut(number)?;
                let receive = srq.queue.posted.pop_front()?;
                if srq.queue.posted.len() < srq.limit as usize {
                    srq.limit = 0;
                    self.shared.events.raise(srq.context, IBV_EVENT_SRQ_LIMIT_REACHED, srq.object);
                }
                receive
            }
        };
        Some(self.queues.active.add(receive))
    }

    /// Writes to the buffers of a receive.
    fn fill_memory(&mut self, receive: ReceiveId, offset: u32, data: Data<'_>) -> Result<(), Status> {
        // The length in a completion has 32 bits.
        if data.len() > (u32::MAX - offset) as usize {
            return Err(Status::LocalLength);
        }
        let sges = &self.queues.active.get(receive).ok_or(Status::LocalProtection)?.sges;
        // The memory of shared receives is in the protection domain of the shared receive queue.
        match self.id.srq.and_then(|srq| self.shared.srqs.get(srq)) {
            Some(srq) if srq.pd != self.id.pd => {
                let of_srq = Identity { pd: srq.pd, ..*self.id };
                let sges = sges.clone();
                let QpHost { access, source_qp, .. } = *self;
                let side =
                    QpHost { id: &of_srq, access, source_qp, queues: &mut *self.queues, shared: &mut *self.shared };
                side.scatter(&sges, offset, data)
            }
            _ => self.scatter(sges, offset, data),
        }
    }

    /// Writes `data` to scatter/gather elements, starting at `offset`.
    fn scatter(&self, sges: &[ibv_sge], mut offset: u32, mut data: Data<'_>) -> Result<(), Status> {
        for sge in sges {
            if data.is_empty() {
                break;
            }
            if offset >= sge.length {
                offset -= sge.length;
                continue;
            }
            let len = ((sge.length - offset) as usize).min(data.len());
            let memory = self.shared.keys.local(self.id.pd, sge, true).ok_or(Status::LocalProtection)?;
            let memory = memory.at(offset.into());
            let (now, later) = data.split_at(len).ok_or(Status::LocalLength)?;
            if !observe::may_write(self.id.number, memory.place, now) {
                return Err(Status::LocalProtection);
            }
            memory.write(now);
            (data, offset) = (later, 0);
        }
        if data.is_empty() { Ok(()) } else { Err(Status::LocalLength) }
    }
}

impl Host for QpHost<'_> {
    fn allows(&self, access: Access) -> bool {
        self.access & keys::access_flag(access) != 0
    }

    fn open(&self, range: &RemoteRange, access: Access) -> Option<Place> {
        let is_allowed = self.allows(access);
        let opened = if is_allowed { self.shared.keys.remote(self.id.pd, self.id.number, range, access) } else { None };
        observe::opened(self.id, range, access, is_allowed, opened)
    }

    fn store(&mut self, place: Place, data: Data<'_>) {
        if observe::may_write(self.id.number, place, data) {
            Memory { place, is_exposed: true }.write(data);
        }
    }

    fn update(&mut self, place: Place, change: &dyn Fn(u64) -> u64) -> u64 {
        let old = memory::update(place, change);
        check::with(|check| check.device_updated(place.0, 8));
        old
    }

    fn receive(&mut self) -> Option<ReceiveId> {
        let taken = self.take_receive();
        if taken.is_none() {
            check::with(|check| check.receiver_not_ready(self.id.number));
        }
        taken
    }

    fn fill(&mut self, receive: ReceiveId, offset: u32, data: Data<'_>) -> Result<(), Status> {
        let filled = self.fill_memory(receive, offset, data);
        match (filled, self.queues.active.get(receive)) {
            (Err(Status::LocalProtection), Some(Receive { wr_id, sges, .. })) => {
                let srq = self.id.srq.and_then(|srq| self.shared.srqs.get(srq));
                let id = Identity { pd: srq.map_or(self.id.pd, |srq| srq.pd), ..*self.id };
                observe::refused(&id, &self.shared.keys, *wr_id, "receive", sges, true);
            }
            (Err(Status::LocalLength), Some(receive)) => {
                observe::too_long(self.id, receive, u64::from(offset) + data.len() as u64);
            }
            _ => {}
        }
        filled
    }

    fn invalidate(&mut self, rkey: u32) -> bool {
        self.shared.keys.invalidate(self.id.pd, self.id.number, rkey)
    }

    fn returned(&mut self, work: u64, offset: u32, data: Data<'_>) -> Result<(), Status> {
        let job = self.queues.send.get(work).ok_or(Status::LocalProtection)?;
        self.scatter(&job.sges, offset, data)
    }

    fn complete(&mut self, completion: Completion) {
        match completion {
            Completion::Sent { status, .. } => self.complete_send(status),
            Completion::Received { id, status, len, is_write, imm, invalidated, solicited } => {
                let opcode = if is_write { IBV_WC_RECV_RDMA_WITH_IMM } else { IBV_WC_RECV };
                let wc = ibv_wc { status: status_of(status, false), opcode, byte_len: len, ..ibv_wc::zeroed() };
                let mut wc = with_immediate(wc, imm);
                if let Some(rkey) = invalidated {
                    wc.wc_flags |= IBV_WC_WITH_INV.0;
                    wc.__bindgen_anon_1.invalidated_rkey = rkey;
                }
                self.complete_receive(id, wc, solicited);
            }
        }
    }
}
