//! The work of a device: executes work requests in order and completes them.

use rdma_sys::*;

use super::memory::{read, write};
use super::operations::{Extra, packets};
use super::state::{Qp, State};

/// A completion.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cqe {
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) opcode: u32,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    /// Immediate data in network byte order, or the invalidated key.
    pub(crate) imm_data: u32,
    pub(crate) wc_flags: u32,
    pub(crate) qp_num: u32,
    /// Source of a datagram.
    pub(crate) origin: Option<Origin>,
    /// Tag of the message, and the application data of its header.
    pub(crate) tag: (u64, u32),
    pub(crate) release: Option<Release>,
}

/// The source of a datagram.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    pub(crate) src_qp: u32,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
}

/// The destination of a datagram.
#[derive(Clone, Copy, Debug)]
pub(super) struct Destination {
    pub(super) ah: usize,
    pub(super) number: u32,
    pub(super) qkey: u32,
}

/// Space in a work queue that becomes free when the completion is polled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Release {
    number: u32,
    receive: bool,
    upto: u64,
}

impl Cqe {
    pub(super) fn to_wc(self) -> ibv_wc {
        ibv_wc {
            wr_id: self.wr_id,
            status: ibv_wc_status(self.status),
            opcode: ibv_wc_opcode(self.opcode),
            vendor_err: self.vendor_err,
            byte_len: self.byte_len,
            __bindgen_anon_1: ibv_wc__bindgen_ty_1 { imm_data: self.imm_data },
            qp_num: self.qp_num,
            wc_flags: self.wc_flags,
            src_qp: self.origin.map_or(0, |origin| origin.src_qp),
            slid: self.origin.map_or(0, |origin| origin.slid),
            sl: self.origin.map_or(0, |origin| origin.sl),
            dlid_path_bits: self.origin.map_or(0, |origin| origin.dlid_path_bits),
            ..ibv_wc::zeroed()
        }
    }
}

pub(super) enum Data {
    Sges(Vec<ibv_sge>),
    Inline(Vec<u8>),
}

pub(super) struct SendWr {
    pub(super) sequence: u64,
    pub(super) wr_id: u64,
    pub(super) opcode: ibv_wr_opcode,
    pub(super) flags: u32,
    /// Immediate data in network byte order, or the key to invalidate.
    pub(super) imm_data: u32,
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
    pub(super) compare_add: u64,
    pub(super) swap: u64,
    pub(super) destination: Option<Destination>,
    pub(super) extra: Extra,
    /// Number of the destination shared receive queue.
    pub(super) srq_number: Option<u32>,
    pub(super) data: Data,
}

pub(super) struct RecvWr {
    pub(super) sequence: u64,
    pub(super) wr_id: u64,
    pub(super) sges: Vec<ibv_sge>,
}

impl RecvWr {
    pub(super) fn names(&self, lkey: u32) -> bool {
        self.sges.iter().any(|sge| sge.length > 0 && sge.lkey == lkey)
    }
}

impl Qp {
    pub(super) fn uses(&self, lkey: u32) -> bool {
        let names = |sges: &[ibv_sge]| sges.iter().any(|sge| sge.length > 0 && sge.lkey == lkey);
        let in_send = |wr: &SendWr| matches!(&wr.data, Data::Sges(sges) if names(sges));
        self.sq.iter().any(in_send) || self.rq.iter().any(|wr| wr.names(lkey))
    }
}

/// The result of executing a work request.
pub(super) enum End {
    /// The peer is not ready: retry later.
    Wait,
    Done {
        byte_len: u32,
    },
    Failed {
        status: ibv_wc_status,
    },
}

impl State {
    /// Executes all work that is ready.
    pub(super) fn run(&mut self) {
        loop {
            let has_work = |qp: &Qp| !qp.sq.is_empty() && qp.state == IBV_QPS_RTS;
            let ready: Vec<usize> =
                self.qps.iter().filter(|(_, qp)| has_work(qp)).map(|(address, _)| *address).collect();
            if !ready.into_iter().any(|qp| self.step(qp)) {
                return;
            }
        }
    }

    fn step(&mut self, address: usize) -> bool {
        let Some(wr) = self.qps.get_mut(&address).unwrap().sq.pop_front() else { return false };
        match self.execute(address, &wr) {
            End::Wait => {
                self.qps.get_mut(&address).unwrap().sq.push_front(wr);
                false
            }
            End::Done { byte_len } => {
                self.count(address, wr.opcode, Some(byte_len));
                if wr.flags & IBV_SEND_SIGNALED.0 != 0 {
                    self.complete_send(address, &wr, IBV_WC_SUCCESS, byte_len);
                }
                true
            }
            End::Failed { status } => {
                self.count(address, wr.opcode, None);
                self.complete_send(address, &wr, status, 0);
                self.enter_error(address);
                true
            }
        }
    }

    fn execute(&mut self, address: usize, wr: &SendWr) -> End {
        let qp = &self.qps[&address];
        if !matches!(qp.qp_type, IBV_QPT_RC | IBV_QPT_XRC_SEND) {
            return self.execute_unreliably(address, wr);
        }
        let (pd, destination) = (qp.pd, qp.attr.dest_qp_num);
        let Some(bytes) = (match &wr.data {
            Data::Sges(sges) => self.gather(pd, sges),
            Data::Inline(bytes) => Some(bytes.clone()),
        }) else {
            return End::Failed { status: IBV_WC_LOC_PROT_ERR };
        };
        if self.qps[&address].qp_type == IBV_QPT_XRC_SEND {
            return self.execute_xrc(address, wr, &bytes);
        }
        let peer = self.qps.iter().find(|(_, peer)| peer.number == destination).map(|(address, _)| *address);
        let Some(peer) = peer else { return End::Failed { status: IBV_WC_RETRY_EXC_ERR } };
        match self.qps[&peer].state {
            IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQD => {}
            IBV_QPS_RESET | IBV_QPS_INIT => return End::Wait,
            _ => return End::Failed { status: IBV_WC_RETRY_EXC_ERR },
        }
        self.perform(address, peer, wr, &bytes)
    }

    /// Performs the operation at a peer that is ready.
    pub(super) fn perform(&mut self, address: usize, peer: usize, wr: &SendWr, bytes: &[u8]) -> End {
        match wr.opcode {
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM | IBV_WR_SEND_WITH_INV => self.deliver(peer, wr, bytes),
            IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => self.write_remote(peer, wr, bytes),
            IBV_WR_RDMA_READ => self.read_remote(address, peer, wr),
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => self.atomic(address, peer, wr),
            IBV_WR_ATOMIC_WRITE => self.atomic_write(peer, wr),
            IBV_WR_FLUSH => self.flush_writes(peer, wr),
            _ => End::Failed { status: IBV_WC_LOC_QP_OP_ERR },
        }
    }

    /// Executes work of an unreliable transport. A message that the peer cannot receive is lost, and the sender does not
    /// notice.
    fn execute_unreliably(&mut self, address: usize, wr: &SendWr) -> End {
        let (pd, is_datagram) = (self.qps[&address].pd, self.qps[&address].qp_type == IBV_QPT_UD);
        let Some(bytes) = (match &wr.data {
            Data::Sges(sges) => self.gather(pd, sges),
            Data::Inline(bytes) => Some(bytes.clone()),
        }) else {
            return End::Failed { status: IBV_WC_LOC_PROT_ERR };
        };
        let done = End::Done { byte_len: bytes.len() as u32 };
        if self.qps[&address].qp_type == IBV_QPT_RAW_PACKET {
            for packet in packets(wr, &bytes) {
                self.deliver_packet(address, wr, &packet);
            }
            return done;
        }
        if is_datagram {
            for packet in packets(wr, &bytes) {
                self.deliver_datagram(address, wr, &packet);
            }
            return done;
        }
        let number = self.qps[&address].attr.dest_qp_num;
        let Some(peer) = self.receiver(number, IBV_QPT_UC) else { return done };
        match wr.opcode {
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM => drop(self.deliver(peer, wr, &bytes)),
            _ => drop(self.write_remote(peer, wr, &bytes)),
        }
        done
    }

    /// Returns the queue pair with this number and type if its state permits receiving.
    pub(super) fn receiver(&self, number: u32, qp_type: ibv_qp_type) -> Option<usize> {
        let takes = |state| matches!(state, IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQD);
        let found = self.qps.iter().find(|(_, qp)| qp.number == number && qp.qp_type == qp_type && takes(qp.state));
        found.map(|(address, _)| *address)
    }

    fn deliver_datagram(&mut self, address: usize, wr: &SendWr, bytes: &[u8]) {
        let Some(Destination { ah, number, qkey }) = wr.destination else { return };
        let Some(attr) = self.ah(ah, "the execution of a datagram").map(|ah| ah.attr) else { return };
        let sender = &self.qps[&address];
        let qkey = if qkey >> 31 == 1 { sender.attr.qkey } else { qkey };
        let port = &self.config.ports[usize::from(attr.port_num) - 1];
        if bytes.len() > 128 << port.active_mtu.0 {
            self.violations.push(format!("a datagram of {} bytes is longer than the MTU", bytes.len()));
            return;
        }
        let origin = Origin { src_qp: sender.number, slid: port.lid, sl: attr.sl, dlid_path_bits: 0 };
        let header = self.header(&attr, bytes.len());
        for peer in self.receivers(&attr, number) {
            if self.qps[&peer].attr.qkey == qkey {
                self.take_datagram(peer, origin, header, wr, bytes);
            }
        }
    }

    fn take_datagram(&mut self, peer: usize, origin: Origin, header: Option<[u8; 40]>, wr: &SendWr, bytes: &[u8]) {
        let Some(receive) = self.qps.get_mut(&peer).unwrap().rq.pop_front() else { return };
        let all = [&header.unwrap_or([0; 40])[..], bytes].concat();
        let room: u64 = receive.sges.iter().map(|sge| u64::from(sge.length)).sum();
        let pd = self.qps[&peer].pd;
        let status = if room < all.len() as u64 {
            IBV_WC_LOC_LEN_ERR
        } else if self.scatter(pd, &receive.sges, &all).is_none() {
            IBV_WC_LOC_PROT_ERR
        } else {
            IBV_WC_SUCCESS
        };
        let wc_flags = if header.is_some() { IBV_WC_GRH.0 } else { 0 };
        let cqe =
            Cqe { status: status.0, opcode: IBV_WC_RECV.0, byte_len: all.len() as u32, wc_flags, ..Cqe::default() };
        self.complete_recv(peer, &receive, Cqe { origin: Some(origin), ..cqe }, wr);
        if status != IBV_WC_SUCCESS {
            self.enter_error(peer);
        }
    }

    fn deliver(&mut self, peer: usize, wr: &SendWr, bytes: &[u8]) -> End {
        if let Some(srq) = self.qps[&peer].srq.filter(|srq| self.srqs[srq].tags.is_some()) {
            return self.deliver_by_tag(peer, srq, bytes);
        }
        let Some(receive) = self.take_receive(peer) else { return End::Wait };
        let pd = self.qps[&peer].pd;
        let memory = self.receive_domain(peer);
        let room: u64 = receive.sges.iter().map(|sge| u64::from(sge.length)).sum();
        if room < bytes.len() as u64 {
            self.complete_recv(peer, &receive, Cqe { status: IBV_WC_LOC_LEN_ERR.0, ..Cqe::default() }, wr);
            self.enter_error(peer);
            return End::Failed { status: IBV_WC_REM_INV_REQ_ERR };
        }
        if self.scatter(memory, &receive.sges, bytes).is_none() {
            self.complete_recv(peer, &receive, Cqe { status: IBV_WC_LOC_PROT_ERR.0, ..Cqe::default() }, wr);
            self.enter_error(peer);
            return End::Failed { status: IBV_WC_REM_OP_ERR };
        }
        if wr.opcode == IBV_WR_SEND_WITH_INV && !self.invalidate(pd, wr.imm_data) {
            self.enter_error(peer);
            return End::Failed { status: IBV_WC_REM_ACCESS_ERR };
        }
        let byte_len = bytes.len() as u32;
        self.complete_recv(peer, &receive, Cqe { opcode: IBV_WC_RECV.0, byte_len, ..Cqe::default() }, wr);
        End::Done { byte_len }
    }

    fn write_remote(&mut self, peer: usize, wr: &SendWr, bytes: &[u8]) -> End {
        let with_imm = wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
        if with_imm && !self.has_receive(peer) {
            return End::Wait;
        }
        if !bytes.is_empty() {
            match self.reach(peer, wr, bytes.len() as u64, IBV_ACCESS_REMOTE_WRITE) {
                Some(to) => unsafe { write(to, bytes) },
                None => return self.refuse(peer),
            }
        }
        let byte_len = bytes.len() as u32;
        if with_imm {
            let receive = self.take_receive(peer).unwrap();
            let cqe = Cqe { opcode: IBV_WC_RECV_RDMA_WITH_IMM.0, byte_len, ..Cqe::default() };
            self.complete_recv(peer, &receive, cqe, wr);
        }
        End::Done { byte_len }
    }

    fn read_remote(&mut self, address: usize, peer: usize, wr: &SendWr) -> End {
        let Data::Sges(sges) = &wr.data else { return End::Failed { status: IBV_WC_LOC_QP_OP_ERR } };
        let len: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
        let bytes = match self.reach(peer, wr, len, IBV_ACCESS_REMOTE_READ) {
            Some(from) => unsafe { read(from, len as usize) },
            None if len == 0 => Vec::new(),
            None => return self.refuse(peer),
        };
        match self.scatter(self.qps[&address].pd, sges, &bytes) {
            Some(()) => End::Done { byte_len: len as u32 },
            None => End::Failed { status: IBV_WC_LOC_PROT_ERR },
        }
    }

    fn atomic(&mut self, address: usize, peer: usize, wr: &SendWr) -> End {
        let Data::Sges(sges) = &wr.data else { return End::Failed { status: IBV_WC_LOC_QP_OP_ERR } };
        let Some(word) = self.reach(peer, wr, 8, IBV_ACCESS_REMOTE_ATOMIC) else { return self.refuse(peer) };
        if wr.remote_addr % 8 != 0 {
            return End::Failed { status: IBV_WC_REM_INV_REQ_ERR };
        }
        let old = u64::from_ne_bytes(unsafe { read(word, 8) }.try_into().unwrap());
        let new = match wr.opcode {
            IBV_WR_ATOMIC_FETCH_AND_ADD => old.wrapping_add(wr.compare_add),
            _ if old == wr.compare_add => wr.swap,
            _ => old,
        };
        unsafe { write(word, &new.to_ne_bytes()) };
        match self.scatter(self.qps[&address].pd, sges, &old.to_ne_bytes()) {
            Some(()) => End::Done { byte_len: 8 },
            None => End::Failed { status: IBV_WC_LOC_PROT_ERR },
        }
    }

    /// Returns the peer's memory if both the queue pair and the region permit the access.
    pub(super) fn reach(&self, peer: usize, wr: &SendWr, len: u64, access: ibv_access_flags) -> Option<*mut u8> {
        let peer = &self.qps[&peer];
        let allowed = peer.attr.qp_access_flags & access.0 == access.0;
        self.remote(peer.pd, wr.rkey, wr.remote_addr, len, access).filter(|_| allowed)
    }

    pub(super) fn refuse(&mut self, peer: usize) -> End {
        // An unreliable transport has no NAKs, so the request is dropped.
        if matches!(self.qps[&peer].qp_type, IBV_QPT_RC | IBV_QPT_XRC_RECV) {
            self.enter_error(peer);
        }
        End::Failed { status: IBV_WC_REM_ACCESS_ERR }
    }

    fn complete_send(&mut self, address: usize, wr: &SendWr, status: ibv_wc_status, byte_len: u32) {
        let qp = &self.qps[&address];
        let (cq, number) = (qp.send_cq, qp.number);
        let release = Some(Release { number, receive: false, upto: wr.sequence + 1 });
        let opcode = match wr.opcode {
            IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => IBV_WC_RDMA_WRITE,
            IBV_WR_RDMA_READ => IBV_WC_RDMA_READ,
            IBV_WR_ATOMIC_CMP_AND_SWP => IBV_WC_COMP_SWAP,
            IBV_WR_ATOMIC_FETCH_AND_ADD => IBV_WC_FETCH_ADD,
            IBV_WR_ATOMIC_WRITE => IBV_WC_ATOMIC_WRITE,
            IBV_WR_FLUSH => IBV_WC_FLUSH,
            IBV_WR_TSO => IBV_WC_TSO,
            _ => IBV_WC_SEND,
        };
        let cqe = Cqe { wr_id: wr.wr_id, byte_len, qp_num: number, release, ..Cqe::default() };
        let cqe = match status {
            IBV_WC_SUCCESS => Cqe { opcode: opcode.0, ..cqe },
            // On an error only these fields are valid. The others get wrong values on purpose.
            status => Cqe { status: status.0, vendor_err: 0x57, opcode: 0xff, byte_len: 0xdead_beef, ..cqe },
        };
        self.push_cqe(cq, cqe, false);
    }

    pub(super) fn complete_recv(&mut self, address: usize, receive: &RecvWr, cqe: Cqe, cause: &SendWr) {
        let mut cqe = cqe;
        if cqe.status == IBV_WC_SUCCESS.0 {
            match cause.opcode {
                IBV_WR_SEND_WITH_IMM | IBV_WR_RDMA_WRITE_WITH_IMM => cqe.wc_flags |= IBV_WC_WITH_IMM.0,
                IBV_WR_SEND_WITH_INV => cqe.wc_flags |= IBV_WC_WITH_INV.0,
                _ => {}
            }
            cqe.imm_data = cause.imm_data;
        }
        self.finish_recv(address, receive, cqe, cause.flags & IBV_SEND_SOLICITED.0 != 0);
    }

    pub(super) fn finish_recv(&mut self, address: usize, receive: &RecvWr, cqe: Cqe, solicited: bool) {
        self.count_receive(address, (cqe.status == IBV_WC_SUCCESS.0).then_some(cqe.byte_len));
        let qp = &self.qps[&address];
        let (cq, number) = (qp.srq.and_then(|srq| self.srqs[&srq].cq).unwrap_or(qp.recv_cq), qp.number);
        let own = qp.srq.is_none();
        let release = own.then_some(Release { number, receive: true, upto: receive.sequence + 1 });
        let mut cqe = Cqe { wr_id: receive.wr_id, qp_num: number, release, ..cqe };
        if cqe.status != IBV_WC_SUCCESS.0 {
            cqe = Cqe { vendor_err: 0x57, opcode: 0xff, byte_len: 0xdead_beef, ..cqe };
        }
        self.push_cqe(cq, cqe, solicited);
    }

    pub(super) fn release(&mut self, release: Release) {
        // Completions may outlive their queue pair.
        let Some(qp) = self.qps.values_mut().find(|qp| qp.number == release.number) else { return };
        let side = if release.receive { &mut qp.rq_reclaimed } else { &mut qp.sq_reclaimed };
        *side = (*side).max(release.upto);
    }

    pub(super) fn break_qp(&mut self, number: u32) {
        let found = self.qps.iter().find(|(_, qp)| qp.number == number).map(|(address, _)| *address);
        self.enter_error(found.expect("no such queue pair"));
    }

    /// Moves a queue pair to the error state and flushes all posted work.
    pub(super) fn enter_error(&mut self, address: usize) {
        let qp = self.qps.get_mut(&address).unwrap();
        qp.state = IBV_QPS_ERR;
        if qp.srq.is_some() && !self.config.rxe {
            let (context, raw) = (qp.context, qp.raw);
            self.raise_object(context, IBV_EVENT_QP_LAST_WQE_REACHED, raw.0.cast());
        }
        self.flush(address, true);
    }

    /// Completes all posted work with a flush error.
    pub(super) fn flush(&mut self, address: usize, receives: bool) {
        while let Some(wr) = self.qps.get_mut(&address).unwrap().sq.pop_front() {
            self.complete_send(address, &wr, IBV_WC_WR_FLUSH_ERR, 0);
        }
        if !receives {
            return;
        }
        while let Some(receive) = self.qps.get_mut(&address).unwrap().rq.pop_front() {
            let cqe = Cqe { status: IBV_WC_WR_FLUSH_ERR.0, ..Cqe::default() };
            self.finish_recv(address, &receive, cqe, false);
        }
    }
}
