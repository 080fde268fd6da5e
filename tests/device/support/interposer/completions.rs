//! Completion queues: both interfaces for polling, over one list of completions that the interposer has taken from soft0.

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint};
use std::thread::{ThreadId, current};

use rdma_safe::sys::*;

use super::control::{known_state, operations};
use super::state::Inner;

/// A function that replaces a true completion by others.
pub(super) type Change = Box<dyn FnMut(ibv_wc) -> Vec<ibv_wc> + Send>;

/// A completion that the queue will report.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) wc: ibv_wc,
    /// Whether soft0 has reported it, and it is neither changed nor repeated.
    pub(super) is_true: bool,
}

#[derive(Default)]
pub(super) struct Cq {
    ready: VecDeque<Entry>,
    held: VecDeque<Entry>,
    /// Whether more completions were added than the queue holds.
    has_overrun: bool,
    /// The completion at the cursor of the extended interface.
    current: Option<Entry>,
    /// The thread between `start_poll` and `end_poll`.
    pub(super) polling: Option<ThreadId>,
}

impl Inner {
    /// Takes at most `most` completions from soft0.
    ///
    /// # Safety
    /// The queue exists.
    unsafe fn take_true(&mut self, cq: *mut ibv_cq, most: usize) -> Result<(), c_int> {
        let poll = self.soft.and_then(|soft| soft.ops.poll_cq).expect("poll_cq");
        for _ in 0..most {
            let mut wc = ibv_wc::zeroed();
            // SAFETY: the caller's promise, and there is room for one completion.
            match unsafe { poll(cq, 1, &raw mut wc) } {
                0 => return Ok(()),
                1 => {}
                error => return Err(error),
            }
            let entries = match &mut self.change {
                None => vec![Entry { wc, is_true: true }],
                Some(change) => {
                    let key = |wc: &ibv_wc| (wc.wr_id, wc.status, wc.opcode, wc.byte_len, wc.qp_num);
                    let changed = change(wc);
                    let truth = changed.iter().position(|changed| key(changed) == key(&wc));
                    let entry = |(at, wc)| Entry { wc, is_true: Some(at) == truth };
                    changed.into_iter().enumerate().map(entry).collect()
                }
            };
            let queue = self.cqs.get_mut(&cq.addr()).expect("a queue of this device");
            let to = if self.holds { &mut queue.held } else { &mut queue.ready };
            to.extend(entries);
            let true_ones = queue.ready.iter().chain(&queue.held).filter(|entry| entry.is_true).count();
            // SAFETY: the caller's promise.
            queue.has_overrun |= true_ones > unsafe { (*cq).cqe } as usize;
        }
        Ok(())
    }

    /// Removes and returns the next completion.
    ///
    /// # Safety
    /// The queue exists.
    unsafe fn next(&mut self, cq: *mut ibv_cq) -> Result<Option<Entry>, c_int> {
        if self.cqs[&cq.addr()].has_overrun {
            return Err(-libc::EIO);
        }
        if self.cqs[&cq.addr()].ready.is_empty() {
            // SAFETY: the caller's promise. One at a time, because soft0 raises no event for a completion that was taken.
            unsafe { self.take_true(cq, 1)? };
        }
        let entry = self.cqs.get_mut(&cq.addr()).expect("a queue of this device").ready.pop_front();
        if let Some(entry) = &entry {
            self.complete(entry);
        }
        Ok(entry)
    }

    /// Panics unless the queue exists and belongs to this device.
    ///
    /// It then exists while the state is locked, because a queue is forgotten before it is destroyed.
    fn needs_queue(&self, cq: *mut ibv_cq) {
        assert!(self.cqs.contains_key(&cq.addr()), "not a queue of this device");
    }

    pub(super) fn inject(&mut self, cq: *mut ibv_cq, wc: ibv_wc) {
        self.needs_queue(cq);
        // A false completion lets the program post more work than the queue of soft0 has room for.
        // SAFETY: the queue exists.
        let overran = unsafe { self.take_true(cq, usize::MAX) }.is_err();
        let queue = self.cqs.get_mut(&cq.addr()).expect("a queue of this device");
        queue.has_overrun |= overran;
        queue.ready.push_back(Entry { wc, is_true: false });
        // SAFETY: the queue exists.
        queue.has_overrun |= queue.ready.len() > unsafe { (*cq).cqe } as usize;
    }

    /// Number of completions that the queue has.
    pub(super) fn count(&mut self, cq: *mut ibv_cq) -> usize {
        self.needs_queue(cq);
        // SAFETY: the queue exists.
        unsafe { self.take_true(cq, usize::MAX) }.expect("a queue that can be polled");
        let queue = &self.cqs[&cq.addr()];
        queue.ready.len() + queue.held.len()
    }

    pub(super) fn release(&mut self) {
        self.holds = false;
        for cq in self.cqs.values_mut() {
            cq.ready.append(&mut cq.held);
        }
    }
}

pub(super) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: the caller keeps the contract of the verb. The queue was just created when its functions are replaced.
    unsafe {
        let (state, soft) = operations(context);
        let config = state.config;
        let wanted = (*attr).wc_flags;
        (*attr).wc_flags = wanted & !config.further_fields;
        let cq = state.run("create_cq_ex", context.addr(), || (soft.create_cq_ex)(context, attr));
        (*attr).wc_flags = wanted;
        if cq.is_null() {
            return cq;
        }
        (*cq).start_poll = Some(start_poll);
        (*cq).next_poll = Some(next_poll);
        (*cq).end_poll = (!config.no_end_poll).then_some(end_poll as _);
        set_accessors(cq, wanted & !config.hollow_fields);
        cq
    }
}

pub(super) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, room: c_int, to: *mut ibv_wc) -> c_int {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let state = known_state(cq);
        let mut inner = state.lock();
        inner.needs_no_batch(cq.addr(), "polling");
        if inner.cqs[&cq.addr()].polling.is_some() {
            inner.violation("deadlock: ibv_poll_cq between start_poll and end_poll");
        }
        if inner.call("ibv_poll_cq").is_some() {
            // mlx5 returns this value. The manual page promises no errno.
            return -2;
        }
        for taken in 0..room {
            match inner.next(cq) {
                Ok(Some(entry)) => to.add(taken as usize).write(entry.wc),
                Ok(None) => return taken,
                Err(error) => return if taken > 0 { taken } else { error },
            }
        }
        room
    }
}

/// Moves the cursor to the next completion. Returns the result of `start_poll` and `next_poll`.
///
/// # Safety
/// The queue exists.
unsafe fn advance(inner: &mut Inner, cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the caller's promise.
    let next = unsafe { inner.next(cq.cast()) };
    let queue = inner.cqs.get_mut(&cq.addr()).expect("a queue of this device");
    match next {
        Ok(Some(entry)) => {
            queue.current = Some(entry);
            // SAFETY: as above.
            unsafe { ((*cq).wr_id, (*cq).status) = (entry.wc.wr_id, entry.wc.status) };
            0
        }
        Ok(None) => libc::ENOENT,
        Err(_) => libc::EIO,
    }
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let state = known_state(cq);
        let mut inner = state.lock();
        inner.needs_no_batch(cq.addr(), "polling");
        if (*attr).comp_mask != 0 {
            inner.violation("start_poll with a comp_mask that is not defined");
        }
        if inner.cqs[&cq.addr()].polling.is_some() {
            inner.violation("deadlock: start_poll between start_poll and end_poll");
            return libc::EINVAL;
        }
        if let Some(errno) = inner.call("start_poll") {
            return errno;
        }
        let result = advance(&mut inner, cq);
        if result == 0 {
            inner.cqs.get_mut(&cq.addr()).expect("a queue of this device").polling = Some(current().id());
        }
        result
    }
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe {
        let state = known_state(cq);
        let mut inner = state.lock();
        inner.needs_no_batch(cq.addr(), "polling");
        let queue = inner.cqs.get_mut(&cq.addr()).expect("a queue of this device");
        queue.current = None;
        if queue.polling.is_none() {
            inner.violation("next_poll outside of start_poll and end_poll");
            return libc::EINVAL;
        }
        match inner.call("next_poll") {
            Some(errno) => errno,
            None => advance(&mut inner, cq),
        }
    }
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: the caller keeps the contract of the verb.
    let state = unsafe { known_state(cq) };
    let mut inner = state.lock();
    _ = inner.call("end_poll");
    let queue = inner.cqs.get_mut(&cq.addr()).expect("a queue of this device");
    queue.current = None;
    if queue.polling.take().is_none() {
        inner.violation("end_poll without start_poll");
    }
}

/// The completion at the cursor.
///
/// # Safety
/// The queue exists, and its device is interposed.
unsafe fn at_cursor(cq: *mut ibv_cq_ex, name: &str) -> ibv_wc {
    // SAFETY: the caller's promise.
    let state = unsafe { known_state(cq) };
    let mut inner = state.lock();
    if let Some(entry) = inner.cqs[&cq.addr()].current {
        return entry.wc;
    }
    inner.violation(format!("{name} while the cursor is on no completion"));
    ibv_wc::zeroed()
}

/// Defines accessors, each of which reads a field of the completion at the cursor.
macro_rules! accessors {
    ($($name:ident -> $type:ty = |$wc:ident| $value:expr;)+) => {
        $(unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $type {
            // SAFETY: the caller passes a queue with this accessor.
            let $wc = unsafe { at_cursor(cq, stringify!($name)) };
            $value
        })+
    };
}

accessors! {
    read_opcode -> ibv_wc_opcode = |wc| wc.opcode;
    read_vendor_err -> u32 = |wc| wc.vendor_err;
    read_wc_flags -> c_uint = |wc| wc.wc_flags;
    read_byte_len -> u32 = |wc| wc.byte_len;
    // SAFETY: both fields of the union are 32 bits.
    read_imm_data -> u32 = |wc| unsafe { wc.__bindgen_anon_1.imm_data };
    read_qp_num -> u32 = |wc| wc.qp_num;
    read_src_qp -> u32 = |wc| wc.src_qp;
    read_slid -> u32 = |wc| wc.slid.into();
    read_sl -> u8 = |wc| wc.sl;
    read_dlid_path_bits -> u8 = |wc| wc.dlid_path_bits;
    read_completion_ts -> u64 = |wc| TIMESTAMPS + wc.wr_id;
}

/// The timestamp of a completion whose `wr_id` is zero. The others add their `wr_id`.
const TIMESTAMPS: u64 = 1_000_000;

/// Sets the mandatory accessors and those of `fields`. The others are NULL.
///
/// # Safety
/// The queue exists, and no other thread uses it.
unsafe fn set_accessors(cq: *mut ibv_cq_ex, fields: u64) {
    let wants = |flag: ibv_create_cq_wc_flags| fields & u64::from(flag.0) != 0;
    // SAFETY: the caller's promise.
    unsafe {
        (*cq).read_opcode = Some(read_opcode);
        (*cq).read_vendor_err = Some(read_vendor_err);
        (*cq).read_wc_flags = Some(read_wc_flags);
        (*cq).read_byte_len = wants(IBV_WC_EX_WITH_BYTE_LEN).then_some(read_byte_len as _);
        (*cq).read_imm_data = wants(IBV_WC_EX_WITH_IMM).then_some(read_imm_data as _);
        (*cq).read_qp_num = wants(IBV_WC_EX_WITH_QP_NUM).then_some(read_qp_num as _);
        (*cq).read_src_qp = wants(IBV_WC_EX_WITH_SRC_QP).then_some(read_src_qp as _);
        (*cq).read_slid = wants(IBV_WC_EX_WITH_SLID).then_some(read_slid as _);
        (*cq).read_sl = wants(IBV_WC_EX_WITH_SL).then_some(read_sl as _);
        (*cq).read_dlid_path_bits = wants(IBV_WC_EX_WITH_DLID_PATH_BITS).then_some(read_dlid_path_bits as _);
        (*cq).read_completion_ts = wants(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP).then_some(read_completion_ts as _);
    }
}
