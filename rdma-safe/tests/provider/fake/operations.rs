//! Operations that few devices support: atomic write, flush, segmentation.

use std::ffi::c_void;

use rdma_sys::*;

use super::engine::{Cqe, End, SendWr};
use super::memory::{read, write};
use super::post::{build, build_with};
use super::state::{State, enter};

/// Parameters that only some work requests have.
#[derive(Clone)]
pub(super) enum Extra {
    None,
    /// The data of an atomic write.
    Word([u8; 8]),
    Flush(Flush),
    Segments {
        header: Vec<u8>,
        mss: u16,
    },
}

impl Extra {
    pub(super) unsafe fn of_tso(raw: ibv_send_wr__bindgen_ty_4__bindgen_ty_2) -> Self {
        Extra::Segments { header: unsafe { read(raw.hdr.cast(), raw.hdr_sz.into()) }, mss: raw.mss }
    }
}

/// A flush as the provider received it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Flush {
    pub(crate) address: u64,
    pub(crate) len: usize,
    pub(crate) placement: u8,
    pub(crate) level: u8,
}

/// Splits a datagram into packets.
pub(super) fn packets(wr: &SendWr, bytes: &[u8]) -> Vec<Vec<u8>> {
    match &wr.extra {
        Extra::Segments { header, mss } => {
            bytes.chunks((*mss).into()).map(|segment| [&header[..], segment].concat()).collect()
        }
        _ => vec![bytes.to_vec()],
    }
}

pub(super) fn set_newer_builders(qp: &mut ibv_qp_ex, ops: u64) {
    let wants = |flag: ibv_qp_create_send_ops_flags| ops & u64::from(flag.0) != 0;
    qp.wr_atomic_write = wants(IBV_QP_EX_WITH_ATOMIC_WRITE).then_some(wr_atomic_write as _);
    qp.wr_flush = wants(IBV_QP_EX_WITH_FLUSH).then_some(wr_flush as _);
    qp.wr_send_tso = wants(IBV_QP_EX_WITH_TSO).then_some(wr_send_tso as _);
}

unsafe extern "C" fn wr_atomic_write(raw: *mut ibv_qp_ex, rkey: u32, remote: u64, bytes: *const c_void) {
    let bytes = unsafe { read(bytes.cast_mut().cast(), 8) }.try_into().unwrap();
    build_with(raw, "wr_atomic_write", IBV_WR_ATOMIC_WRITE, Some("nothing"), |wr| {
        (wr.rkey, wr.remote_addr, wr.extra) = (rkey, remote, Extra::Word(bytes));
    });
}

unsafe extern "C" fn wr_flush(raw: *mut ibv_qp_ex, rkey: u32, address: u64, len: usize, placement: u8, level: u8) {
    build_with(raw, "wr_flush", IBV_WR_FLUSH, Some("nothing"), |wr| {
        let flush = Flush { address, len, placement, level };
        (wr.rkey, wr.remote_addr, wr.extra) = (rkey, address, Extra::Flush(flush));
    });
}

unsafe extern "C" fn wr_send_tso(raw: *mut ibv_qp_ex, header: *mut c_void, len: u16, mss: u16) {
    enter(raw, "ibv_wr_send_tso", |state, _| {
        let most = state.qp(raw.addr(), "wr_send_tso").map_or(0, |qp| qp.max_tso_header);
        if len > most {
            state.violation(format!("wr_send_tso with a header of {len} bytes, of which {most} fit"));
        }
    });
    let tso = ibv_send_wr__bindgen_ty_4__bindgen_ty_2 { hdr: header, hdr_sz: len, mss };
    build(raw, "wr_send_tso", IBV_WR_TSO, |wr| wr.extra = unsafe { Extra::of_tso(tso) });
}

impl State {
    pub(super) fn atomic_write(&mut self, peer: usize, wr: &SendWr) -> End {
        let Extra::Word(bytes) = wr.extra else { return End::Failed { status: IBV_WC_LOC_QP_OP_ERR } };
        match self.reach(peer, wr, 8, IBV_ACCESS_REMOTE_WRITE) {
            Some(_) if wr.remote_addr % 8 != 0 => End::Failed { status: IBV_WC_REM_INV_REQ_ERR },
            Some(to) => {
                unsafe { write(to, &bytes) };
                End::Done { byte_len: 8 }
            }
            None => self.refuse(peer),
        }
    }

    pub(super) fn flush_writes(&mut self, peer: usize, wr: &SendWr) -> End {
        let Extra::Flush(flush) = wr.extra else { return End::Failed { status: IBV_WC_LOC_QP_OP_ERR } };
        let mut access = ibv_access_flags(0);
        if flush.placement & IBV_FLUSH_GLOBAL.0 as u8 != 0 {
            access |= IBV_ACCESS_FLUSH_GLOBAL;
        }
        if flush.placement & IBV_FLUSH_PERSISTENT.0 as u8 != 0 {
            access |= IBV_ACCESS_FLUSH_PERSISTENT;
        }
        let len = if flush.level == IBV_FLUSH_MR.0 as u8 { 0 } else { flush.len as u64 };
        if self.reach(peer, wr, len, access).is_none() {
            return self.refuse(peer);
        }
        self.flushes.push(flush);
        End::Done { byte_len: 0 }
    }

    /// Delivers a packet to every other raw packet queue pair of the port, like a hub. A queue pair without a receive drops it.
    pub(super) fn deliver_packet(&mut self, address: usize, wr: &SendWr, bytes: &[u8]) {
        let port = self.qps[&address].attr.port_num;
        let takes = |state| matches!(state, IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQD);
        let others = self.qps.iter().filter(|(other, qp)| {
            **other != address && qp.qp_type == IBV_QPT_RAW_PACKET && qp.attr.port_num == port && takes(qp.state)
        });
        let others: Vec<usize> = others.map(|(other, _)| *other).collect();
        for other in others {
            let Some(receive) = self.take_receive(other) else { continue };
            let memory = self.receive_domain(other);
            let room: u64 = receive.sges.iter().map(|sge| u64::from(sge.length)).sum();
            let status = if room < bytes.len() as u64 {
                IBV_WC_LOC_LEN_ERR
            } else if self.scatter(memory, &receive.sges, bytes).is_none() {
                IBV_WC_LOC_PROT_ERR
            } else {
                IBV_WC_SUCCESS
            };
            let byte_len = bytes.len() as u32;
            let cqe = Cqe { status: status.0, opcode: IBV_WC_RECV.0, byte_len, ..Cqe::default() };
            self.complete_recv(other, &receive, cqe, wr);
        }
    }
}
