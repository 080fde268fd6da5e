//! Queue pairs, with the extended and the classic interface.

use std::ffi::{c_int, c_void};

use rdma_sys::*;

use crate::cq::{Cq, Cqe};
use crate::memory::next_number;
use crate::{free, new, null};

pub(crate) const MAX_SGE: u32 = 2;
const MAX_INLINE: u32 = 64;

/// A send queue entry: 64 bytes, followed by inline data.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Wqe {
    wr_id: u64,
    remote_addr: u64,
    rkey: u32,
    /// Immediate data, or a key to invalidate.
    extra: u32,
    opcode: u16,
    flags: u16,
    /// Total length of the elements or of the inline data.
    len: u32,
    sges: [(u64, u32, u32); MAX_SGE as usize],
    /// Inline data, or the operands of an atomic.
    inline: [u8; MAX_INLINE as usize],
}

/// A queue pair of either kind. The extended object begins with the classic one.
#[repr(C)]
struct Qp {
    ex: ibv_qp_ex,
    extended: bool,
    sq: Box<[Wqe]>,
    producer: u32,
    /// Index of the first entry of the current batch.
    batch: u32,
    rq: Box<[(u64, ibv_sge)]>,
    rq_producer: u32,
    receive_at_once: bool,
    signal_all: bool,
    cap: ibv_qp_cap,
    send_cq: *mut Cq,
    recv_cq: *mut Cq,
}

impl Qp {
    /// Adds an entry to the send queue and returns it.
    #[inline]
    fn next(&mut self, wr_id: u64, flags: u32, opcode: ibv_wr_opcode) -> &mut Wqe {
        let mask = self.sq.len() as u32 - 1;
        let wqe = &mut self.sq[(self.producer & mask) as usize];
        self.producer = self.producer.wrapping_add(1);
        wqe.wr_id = wr_id;
        wqe.flags = flags as u16;
        wqe.opcode = opcode.0 as u16;
        wqe.len = 0;
        wqe
    }

    /// [`Qp::next`] for the extended interface.
    #[inline]
    fn begin(&mut self, opcode: ibv_wr_opcode) -> &mut Wqe {
        self.next(self.ex.wr_id, self.ex.wr_flags, opcode)
    }

    /// The latest entry of the send queue.
    #[inline]
    fn last(&mut self) -> &mut Wqe {
        let mask = self.sq.len() as u32 - 1;
        &mut self.sq[(self.producer.wrapping_sub(1) & mask) as usize]
    }

    /// Executes the entries from index `from` on.
    #[inline]
    fn ring_doorbell(&mut self, from: u32) {
        let (mask, qp_num) = (self.sq.len() as u32 - 1, self.ex.qp_base.qp_num);
        let mut index = from;
        while index != self.producer {
            let wqe = &self.sq[(index & mask) as usize];
            if self.signal_all || u32::from(wqe.flags) & IBV_SEND_SIGNALED.0 != 0 {
                let opcode = completes_as(ibv_wr_opcode(wqe.opcode.into())).0;
                let cqe = Cqe { wr_id: wqe.wr_id, opcode, byte_len: wqe.len, imm: 0, qp_num, flags: 0 };
                unsafe { (*self.send_cq).push(cqe) };
            }
            index = index.wrapping_add(1);
        }
    }
}

impl Wqe {
    #[inline]
    fn set_atomic(&mut self, rkey: u32, remote_addr: u64, first: u64, second: u64) {
        (self.rkey, self.remote_addr) = (rkey, remote_addr);
        self.inline[..8].copy_from_slice(&first.to_ne_bytes());
        self.inline[8..16].copy_from_slice(&second.to_ne_bytes());
    }

    #[inline]
    fn set_inline(&mut self, data: &[u8]) {
        let at = self.len as usize;
        self.inline[at..][..data.len()].copy_from_slice(data);
        self.len += data.len() as u32;
    }

    #[inline]
    fn set_sge(&mut self, index: usize, sge: ibv_sge) {
        self.sges[index] = (sge.addr, sge.length, sge.lkey);
        self.len += sge.length;
    }
}

fn completes_as(opcode: ibv_wr_opcode) -> ibv_wc_opcode {
    match opcode {
        IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => IBV_WC_RDMA_WRITE,
        IBV_WR_RDMA_READ => IBV_WC_RDMA_READ,
        IBV_WR_ATOMIC_CMP_AND_SWP => IBV_WC_COMP_SWAP,
        IBV_WR_ATOMIC_FETCH_AND_ADD => IBV_WC_FETCH_ADD,
        IBV_WR_BIND_MW => IBV_WC_BIND_MW,
        _ => IBV_WC_SEND,
    }
}

/// Sets whether a posted receive completes immediately or never.
///
/// The completion has the length of the first element, and immediate data.
///
/// # Safety
/// The queue pair must belong to this provider.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_stub_receive_at_once(qp: *mut ibv_qp, at_once: bool) {
    unsafe { (*qp.cast::<Qp>()).receive_at_once = at_once };
}

fn create(pd: *mut ibv_pd, attr: &mut ibv_qp_init_attr, ops: Option<u64>) -> *mut ibv_qp {
    if attr.cap.max_inline_data > MAX_INLINE || attr.cap.max_send_sge > MAX_SGE || attr.cap.max_recv_sge > MAX_SGE {
        return null(libc::EINVAL);
    }
    let mut ex = ibv_qp_ex::zeroed();
    ex.qp_base = ibv_qp {
        context: unsafe { (*pd).context },
        qp_context: attr.qp_context,
        pd,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        handle: next_number(),
        // Queue pair numbers have 24 bits.
        qp_num: next_number() & 0xff_ffff,
        state: IBV_QPS_RESET,
        qp_type: attr.qp_type,
        ..ibv_qp::zeroed()
    };
    set_operations(&mut ex, ops.unwrap_or(0));
    ex.wr_set_ud_addr = (attr.qp_type == IBV_QPT_UD).then_some(wr_set_ud_addr as _);
    let empty = Wqe {
        wr_id: 0,
        remote_addr: 0,
        rkey: 0,
        extra: 0,
        opcode: 0,
        flags: 0,
        len: 0,
        sges: [(0, 0, 0); MAX_SGE as usize],
        inline: [0; MAX_INLINE as usize],
    };
    let length = |entries: u32| entries.max(1).next_power_of_two() as usize;
    let receive = (0, ibv_sge { addr: 0, length: 0, lkey: 0 });
    new(Qp {
        ex,
        extended: ops.is_some(),
        sq: vec![empty; length(attr.cap.max_send_wr)].into_boxed_slice(),
        producer: 0,
        batch: 0,
        rq: vec![receive; length(attr.cap.max_recv_wr)].into_boxed_slice(),
        rq_producer: 0,
        receive_at_once: false,
        signal_all: attr.sq_sig_all != 0,
        cap: attr.cap,
        send_cq: attr.send_cq.cast(),
        recv_cq: attr.recv_cq.cast(),
    })
    .cast()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    create(pd, unsafe { &mut *attr }, None)
}

pub(crate) unsafe extern "C" fn create_qp_ex(_: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    let attr = unsafe { &mut *attr };
    let has_ops = attr.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0 != 0;
    let ops = has_ops.then_some(attr.send_ops_flags);
    if ops.unwrap_or(0) & !OPERATIONS != 0 {
        return null(libc::EOPNOTSUPP);
    }
    // The extended attributes begin with the classic ones.
    create(attr.pd, unsafe { &mut *std::ptr::from_mut(attr).cast() }, ops)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    if unsafe { (*qp.cast::<Qp>()).extended } { qp.cast() } else { std::ptr::null_mut() }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    unsafe { free(qp.cast::<Qp>()) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    unsafe {
        if mask as u32 & IBV_QP_STATE.0 != 0 {
            (*qp).state = (*attr).qp_state;
        }
    }
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    unsafe {
        let cap = (*qp.cast::<Qp>()).cap;
        attr.write(ibv_qp_attr { qp_state: (*qp).state, cur_qp_state: (*qp).state, cap, ..ibv_qp_attr::zeroed() });
        init.write(ibv_qp_init_attr {
            send_cq: (*qp).send_cq,
            recv_cq: (*qp).recv_cq,
            cap,
            qp_type: (*qp).qp_type,
            ..ibv_qp_init_attr::zeroed()
        });
    }
    0
}

pub(crate) unsafe extern "C" fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, _: *mut *mut ibv_send_wr) -> c_int {
    let qp = unsafe { &mut *qp.cast::<Qp>() };
    let first = qp.producer;
    let mut next = wr;
    while let Some(wr) = unsafe { next.as_ref() } {
        let wqe = qp.next(wr.wr_id, wr.send_flags, wr.opcode);
        unsafe {
            wqe.extra = wr.__bindgen_anon_1.imm_data;
            match wr.opcode {
                IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
                    let ibv_send_wr__bindgen_ty_2__bindgen_ty_2 { remote_addr, compare_add, swap, rkey } = wr.wr.atomic;
                    wqe.set_atomic(rkey, remote_addr, compare_add, swap);
                }
                _ => (wqe.remote_addr, wqe.rkey) = (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey),
            }
            for index in 0..wr.num_sge as usize {
                let sge = *wr.sg_list.add(index);
                if wr.send_flags & IBV_SEND_INLINE.0 != 0 {
                    let data = std::ptr::with_exposed_provenance(sge.addr as usize);
                    wqe.set_inline(std::slice::from_raw_parts(data, sge.length as usize));
                } else {
                    wqe.set_sge(index, sge);
                }
            }
        }
        next = wr.next;
    }
    qp.ring_doorbell(first);
    0
}

pub(crate) unsafe extern "C" fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, _: *mut *mut ibv_recv_wr) -> c_int {
    let qp = unsafe { &mut *qp.cast::<Qp>() };
    let mask = qp.rq.len() as u32 - 1;
    let mut next = wr;
    while let Some(wr) = unsafe { next.as_ref() } {
        let sge = if wr.num_sge > 0 { unsafe { *wr.sg_list } } else { ibv_sge { addr: 0, length: 0, lkey: 0 } };
        qp.rq[(qp.rq_producer & mask) as usize] = (wr.wr_id, sge);
        qp.rq_producer = qp.rq_producer.wrapping_add(1);
        if qp.receive_at_once {
            let (opcode, flags, imm) = (IBV_WC_RECV.0, IBV_WC_WITH_IMM.0, 7_u32.to_be());
            let qp_num = qp.ex.qp_base.qp_num;
            let cqe = Cqe { wr_id: wr.wr_id, opcode, byte_len: sge.length, imm, qp_num, flags };
            unsafe { (*qp.recv_cq).push(cqe) };
        }
        next = wr.next;
    }
    0
}

/// Operations of the extended interface: flag, function pointer with its arguments, opcode, and fields to set.
macro_rules! operations {
    ($($flag:ident: $pointer:ident($($argument:ident: $ty:ty),*) = $opcode:ident |$wqe:ident| $set:block)+) => {
        const OPERATIONS: u64 = 0 $(| $flag.0 as u64)+;

        fn set_operations(ex: &mut ibv_qp_ex, ops: u64) {
            ex.wr_start = Some(wr_start);
            ex.wr_complete = Some(wr_complete);
            ex.wr_abort = Some(wr_abort);
            // Always set: the device reports no windows, so rdma-safe does not request the operation, but some loops use it.
            ex.wr_bind_mw = Some(wr_bind_mw);
            ex.wr_set_sge = Some(wr_set_sge);
            ex.wr_set_sge_list = Some(wr_set_sge_list);
            ex.wr_set_inline_data = Some(wr_set_inline_data);
            ex.wr_set_inline_data_list = Some(wr_set_inline_data_list);
            $(ex.$pointer = (ops & u64::from($flag.0) != 0).then_some($pointer as _);)+
        }

        $(unsafe extern "C" fn $pointer(qp: *mut ibv_qp_ex, $($argument: $ty),*) {
            let $wqe = unsafe { &mut *qp.cast::<Qp>() }.begin($opcode);
            $set
        })+
    };
}

operations! {
    IBV_QP_EX_WITH_SEND: wr_send() = IBV_WR_SEND |_wqe| {}
    IBV_QP_EX_WITH_SEND_WITH_IMM: wr_send_imm(imm: __be32) = IBV_WR_SEND_WITH_IMM |wqe| { wqe.extra = imm }
    IBV_QP_EX_WITH_SEND_WITH_INV: wr_send_inv(rkey: u32) = IBV_WR_SEND_WITH_INV |wqe| { wqe.extra = rkey }
    IBV_QP_EX_WITH_RDMA_WRITE: wr_rdma_write(rkey: u32, remote_addr: u64) = IBV_WR_RDMA_WRITE
        |wqe| { (wqe.rkey, wqe.remote_addr) = (rkey, remote_addr) }
    IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM: wr_rdma_write_imm(rkey: u32, remote_addr: u64, imm: __be32) =
        IBV_WR_RDMA_WRITE_WITH_IMM
        |wqe| { (wqe.rkey, wqe.remote_addr, wqe.extra) = (rkey, remote_addr, imm) }
    IBV_QP_EX_WITH_RDMA_READ: wr_rdma_read(rkey: u32, remote_addr: u64) = IBV_WR_RDMA_READ
        |wqe| { (wqe.rkey, wqe.remote_addr) = (rkey, remote_addr) }
    IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP: wr_atomic_cmp_swp(rkey: u32, remote_addr: u64, compare: u64, swap: u64) =
        IBV_WR_ATOMIC_CMP_AND_SWP
        |wqe| { wqe.set_atomic(rkey, remote_addr, compare, swap) }
    IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD: wr_atomic_fetch_add(rkey: u32, remote_addr: u64, add: u64) =
        IBV_WR_ATOMIC_FETCH_AND_ADD
        |wqe| { wqe.set_atomic(rkey, remote_addr, add, 0) }
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    let qp = unsafe { &mut *qp.cast::<Qp>() };
    qp.batch = qp.producer;
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    let qp = unsafe { &mut *qp.cast::<Qp>() };
    qp.ring_doorbell(qp.batch);
    0
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    let qp = unsafe { &mut *qp.cast::<Qp>() };
    qp.producer = qp.batch;
}

unsafe extern "C" fn wr_bind_mw(qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) {
    let info = unsafe { &*info };
    let wqe = unsafe { &mut *qp.cast::<Qp>() }.begin(IBV_WR_BIND_MW);
    (wqe.remote_addr, wqe.rkey, wqe.extra) = (info.addr, rkey, info.mw_access_flags ^ mw.addr() as u32);
}

/// Stores the address in the fields for the remote address and key, as `post_send` does.
unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, number: u32, qkey: u32) {
    let wqe = unsafe { &mut *qp.cast::<Qp>() }.last();
    (wqe.remote_addr, wqe.rkey, wqe.extra) = (ah.addr() as u64, number, qkey);
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    unsafe { &mut *qp.cast::<Qp>() }.last().set_sge(0, ibv_sge { addr, length, lkey });
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    let wqe = unsafe { &mut *qp.cast::<Qp>() }.last();
    for (index, sge) in unsafe { std::slice::from_raw_parts(list, count) }.iter().enumerate() {
        wqe.set_sge(index, *sge);
    }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, data: *mut c_void, length: usize) {
    let data = unsafe { std::slice::from_raw_parts(data.cast_const().cast(), length) };
    unsafe { &mut *qp.cast::<Qp>() }.last().set_inline(data);
}

unsafe extern "C" fn wr_set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    for piece in unsafe { std::slice::from_raw_parts(list, count) } {
        unsafe { wr_set_inline_data(qp, piece.addr, piece.length) };
    }
}
