//! Polling completion queues with `ibv_poll_cq` and with a cursor.

use std::ffi::{c_int, c_uint};

use rdma_sys::*;

use crate::fake::config::Mode;
use crate::fake::state::{State, enter};

/// Sets the mandatory functions and the requested accessors. The others stay NULL.
pub(super) fn set_accessors(cq: &mut ibv_cq_ex, fields: u64) {
    cq.start_poll = Some(start_poll);
    cq.next_poll = Some(next_poll);
    cq.end_poll = Some(end_poll);
    cq.read_opcode = Some(read_opcode);
    cq.read_vendor_err = Some(read_vendor_err);
    cq.read_wc_flags = Some(read_wc_flags);
    let wants = |flag: ibv_create_cq_wc_flags| fields & u64::from(flag.0) != 0;
    cq.read_byte_len = wants(IBV_WC_EX_WITH_BYTE_LEN).then_some(read_byte_len as _);
    cq.read_imm_data = wants(IBV_WC_EX_WITH_IMM).then_some(read_imm_data as _);
    cq.read_qp_num = wants(IBV_WC_EX_WITH_QP_NUM).then_some(read_qp_num as _);
    cq.read_src_qp = wants(IBV_WC_EX_WITH_SRC_QP).then_some(read_src_qp as _);
    cq.read_slid = wants(IBV_WC_EX_WITH_SLID).then_some(read_slid as _);
    cq.read_sl = wants(IBV_WC_EX_WITH_SL).then_some(read_sl as _);
    cq.read_dlid_path_bits = wants(IBV_WC_EX_WITH_DLID_PATH_BITS).then_some(read_dlid_path_bits as _);
    cq.read_tm_info = wants(IBV_WC_EX_WITH_TM_INFO).then_some(read_tm_info as _);
    cq.read_completion_ts = wants(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP).then_some(read_completion_ts as _);
}

impl State {
    /// Executes work that waits for a poll.
    fn before_poll(&mut self, cq: usize) {
        self.needs_no_batch([cq, cq], "polling");
        if self.mode == Mode::AtPoll {
            self.run();
        }
    }
}

pub(in crate::fake) unsafe extern "C" fn poll_cq(raw: *mut ibv_cq, room: c_int, wcs: *mut ibv_wc) -> c_int {
    enter(raw, "ibv_poll_cq", |state, _| {
        state.before_poll(raw.addr());
        if state.fault("ibv_poll_cq").is_some() {
            // mlx5 returns this value. The manual page promises no errno.
            return -2;
        }
        let Some(cq) = state.cq(raw.addr(), "ibv_poll_cq") else { return -1 };
        if cq.overrun {
            return -1;
        }
        if cq.polling.is_some() {
            state.violation("deadlock: ibv_poll_cq between start_poll and end_poll");
            return -1;
        }
        let mut taken = 0;
        let mut releases = Vec::new();
        while taken < room && cq.consumer != cq.producer {
            let entry = cq.ring[cq.consumer as usize];
            cq.consumer = cq.after(cq.consumer);
            unsafe { wcs.add(taken as usize).write(entry.to_wc()) };
            releases.extend(entry.release);
            taken += 1;
        }
        releases.into_iter().for_each(|release| state.release(release));
        taken
    })
}

unsafe extern "C" fn start_poll(raw: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    enter(raw, "start_poll", |state, _| {
        state.before_poll(raw.addr());
        if unsafe { (*attr).comp_mask } != 0 {
            state.violation("start_poll with a comp_mask that is not defined");
        }
        let fault = state.fault("start_poll");
        let Some(cq) = state.cq(raw.addr(), "start_poll") else { return libc::EINVAL };
        if cq.polling.is_some() {
            state.violation("deadlock: start_poll between start_poll and end_poll");
            return libc::EINVAL;
        }
        if let Some(errno) = fault {
            return errno;
        }
        if cq.overrun {
            return libc::EIO;
        }
        cq.current = cq.consumer;
        if cq.current == cq.producer {
            return libc::ENOENT;
        }
        cq.polling = Some(std::thread::current().id());
        let release = cq.load_entry();
        release.into_iter().for_each(|release| state.release(release));
        0
    })
}

unsafe extern "C" fn next_poll(raw: *mut ibv_cq_ex) -> c_int {
    enter(raw, "next_poll", |state, _| {
        state.before_poll(raw.addr());
        let (fault, rxe) = (state.fault("next_poll"), state.config.rxe);
        let Some(cq) = state.cq(raw.addr(), "next_poll") else { return libc::EINVAL };
        if cq.polling.is_none() {
            state.violation("next_poll outside of start_poll and end_poll");
            return libc::EINVAL;
        }
        cq.on_completion = false;
        if let Some(errno) = fault {
            return errno;
        }
        let next = cq.after(cq.current);
        if rxe {
            // rdma-core 44 moves the cursor before it checks for a completion, and end_poll moves it again.
            cq.current = next;
            if next == cq.producer {
                cq.consumer = next;
                return libc::ENOENT;
            }
        } else if next == cq.producer {
            return libc::ENOENT;
        }
        cq.current = next;
        let release = cq.load_entry();
        release.into_iter().for_each(|release| state.release(release));
        0
    })
}

unsafe extern "C" fn end_poll(raw: *mut ibv_cq_ex) {
    enter(raw, "end_poll", |state, _| {
        let Some(cq) = state.cq(raw.addr(), "end_poll") else { return };
        if cq.polling.is_none() {
            state.violation("end_poll without start_poll");
            return;
        }
        cq.polling = None;
        cq.on_completion = false;
        cq.consumer = cq.after(cq.current);
    });
}

/// An accessor: reads a field of the completion that the cursor is on.
macro_rules! accessors {
    ($($name:ident -> $ty:ty = |$cqe:ident| $value:expr;)+) => {
        $(unsafe extern "C" fn $name(raw: *mut ibv_cq_ex) -> $ty {
            enter(raw, stringify!($name), |state, _| {
                let found = state.cq(raw.addr(), stringify!($name)).filter(|cq| cq.on_completion);
                let $cqe = found.map(|cq| cq.ring[cq.current as usize]);
                if $cqe.is_none() {
                    state.violation(concat!(stringify!($name), " while the cursor is on no completion"));
                }
                let $cqe = $cqe.unwrap_or_default();
                $value
            })
        })+
    };
}

accessors! {
    read_opcode -> ibv_wc_opcode = |cqe| ibv_wc_opcode(cqe.opcode);
    read_vendor_err -> u32 = |cqe| cqe.vendor_err;
    read_wc_flags -> c_uint = |cqe| cqe.wc_flags;
    read_byte_len -> u32 = |cqe| cqe.byte_len;
    read_imm_data -> u32 = |cqe| cqe.imm_data;
    read_qp_num -> u32 = |cqe| cqe.qp_num;
    read_src_qp -> u32 = |cqe| cqe.origin.map_or(cqe.qp_num + 1, |origin| origin.src_qp);
    read_slid -> u32 = |cqe| cqe.origin.map_or(cqe.qp_num + 2, |origin| origin.slid.into());
    read_sl -> u8 = |cqe| cqe.origin.map_or(3, |origin| origin.sl);
    read_dlid_path_bits -> u8 = |cqe| cqe.origin.map_or(4, |origin| origin.dlid_path_bits);
    read_completion_ts -> u64 = |cqe| 1_000_000 + cqe.wr_id;
}

unsafe extern "C" fn read_tm_info(raw: *mut ibv_cq_ex, info: *mut ibv_wc_tm_info) {
    let (tag, priv_) = read_tag(raw);
    unsafe { info.write(ibv_wc_tm_info { tag, priv_ }) };
}

fn read_tag(raw: *mut ibv_cq_ex) -> (u64, u32) {
    enter(raw, "read_tm_info", |state, _| {
        let found = state.cq(raw.addr(), "read_tm_info").filter(|cq| cq.on_completion);
        let cqe = found.map(|cq| cq.ring[cq.current as usize]);
        if cqe.is_none() {
            state.violation("read_tm_info while the cursor is on no completion");
        }
        cqe.unwrap_or_default().tag
    })
}
