//! Posting work with `ibv_wr_*`: from `ibv_wr_start` to `ibv_wr_complete`.

use core::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use rdma_sys::*;

use super::ah::AhObject;
use super::lock;
use super::post::{binding, parts, posted, sending, total};
use super::qp_object::{Builder, QpObject};
use crate::device::{Destination, Job, Task, device};
use crate::transport::Request;
use crate::wire::{Atomic, Trailer};

pub(crate) fn set_operations(qp: &mut ibv_qp_ex, kind: ibv_qp_type, ops: u64) {
    let wants = |flag: ibv_qp_create_send_ops_flags| ops & u64::from(flag.0) != 0;
    qp.wr_start = Some(wr_start);
    qp.wr_complete = Some(wr_complete);
    qp.wr_abort = Some(wr_abort);
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    if kind == IBV_QPT_UD {
        qp.wr_set_ud_addr = Some(wr_set_ud_addr);
    }
    qp.wr_send = wants(IBV_QP_EX_WITH_SEND).then_some(wr_send);
    qp.wr_send_imm = wants(IBV_QP_EX_WITH_SEND_WITH_IMM).then_some(wr_send_imm);
    qp.wr_send_inv = wants(IBV_QP_EX_WITH_SEND_WITH_INV).then_some(wr_send_inv);
    qp.wr_rdma_write = wants(IBV_QP_EX_WITH_RDMA_WRITE).then_some(wr_rdma_write);
    qp.wr_rdma_write_imm = wants(IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM).then_some(wr_rdma_write_imm);
    qp.wr_rdma_read = wants(IBV_QP_EX_WITH_RDMA_READ).then_some(wr_rdma_read);
    qp.wr_atomic_cmp_swp = wants(IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP).then_some(wr_atomic_cmp_swp);
    qp.wr_atomic_fetch_add = wants(IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD).then_some(wr_atomic_fetch_add);
    qp.wr_bind_mw = wants(IBV_QP_EX_WITH_BIND_MW).then_some(wr_bind_mw);
    qp.wr_local_inv = wants(IBV_QP_EX_WITH_LOCAL_INV).then_some(wr_local_inv);
}

/// The builder, between its start and its end, when it is the caller's alone.
///
/// # Safety
/// The queue pair exists, and the caller has started.
unsafe fn builder<'a>(qp: *mut ibv_qp_ex) -> &'a mut Builder {
    // SAFETY: the caller's promise.
    unsafe { &mut (*qp.cast::<QpObject>()).builder }
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller's queue pair. Of what is behind the flag nothing is looked at before it is taken.
    lock::acquire(unsafe { &(*qp.cast::<QpObject>()).is_started });
    // SAFETY: it is started.
    let builder = unsafe { builder(qp) };
    (builder.count, builder.error) = (0, 0);
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller has started.
    unsafe { end(qp) };
}

/// # Safety
/// The caller has started, and has nothing of the builder any more.
unsafe fn end(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller's queue pair.
    unsafe { &(*qp.cast::<QpObject>()).is_started }.store(false, Ordering::Release);
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the caller has started.
    let (builder, number) = unsafe { (builder(qp), (*qp).qp_base.qp_num) };
    let result = if builder.error == 0 { post(builder, number) } else { builder.error };
    // SAFETY: as above.
    unsafe { end(qp) };
    result
}

/// Posts all, or nothing.
fn post(builder: &mut Builder, number: u32) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    if builder.count == 0 {
        return 0;
    }
    let mut core = device.lock();
    match sending(&mut core, number, builder.count) {
        Ok(found) => {
            for job in &mut builder.jobs[..builder.count] {
                // What was in the place is built upon next time.
                found.queues.send.push(|place| core::mem::swap(place, job));
            }
        }
        Err(errno) => return errno,
    }
    posted(device, core, number);
    0
}

/// Begins a work request.
///
/// # Safety
/// The caller has started.
unsafe fn begin(qp: *mut ibv_qp_ex, task: Result<Task, c_int>) {
    // SAFETY: the caller's promise.
    let (builder, limits, wr_id, flags) =
        unsafe { (builder(qp), (*qp.cast::<QpObject>()).limits, (*qp).wr_id, (*qp).wr_flags) };
    let task = match task {
        Ok(task) => task,
        Err(errno) => {
            builder.error = errno;
            return;
        }
    };
    if builder.count == builder.jobs.len() {
        builder.jobs.push(Job::blank(limits.cap.max_send_sge, limits.cap.max_inline_data));
    }
    builder.jobs[builder.count].begin(wr_id, task, flags, limits.is_all_signaled);
    builder.count += 1;
}

/// The work request that was begun last.
///
/// # Safety
/// The caller has started.
unsafe fn last<'a>(qp: *mut ibv_qp_ex) -> Option<&'a mut Job> {
    // SAFETY: the caller's promise.
    let builder = unsafe { builder(qp) };
    if builder.error != 0 {
        return None;
    }
    builder.count.checked_sub(1).map(|last| &mut builder.jobs[last])
}

unsafe fn request(qp: *mut ibv_qp_ex, request: Request) {
    // SAFETY: the caller has started. Where a datagram goes is set afterwards.
    unsafe {
        let task = match ((*qp).qp_base.qp_type, request) {
            (IBV_QPT_UD, Request::Send(trailer)) => {
                let nowhere = Destination::nowhere();
                let imm = if let Trailer::Immediate(imm) = trailer { Some(imm) } else { None };
                Task::Datagram { to: nowhere, qp: 0, qkey: 0, imm }
            }
            _ => Task::Request(request),
        };
        begin(qp, Ok(task));
    }
}

unsafe extern "C" fn wr_send(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller has started.
    unsafe { request(qp, Request::Send(Trailer::None)) }
}

unsafe extern "C" fn wr_send_imm(qp: *mut ibv_qp_ex, imm: __be32) {
    // SAFETY: the caller has started.
    unsafe { request(qp, Request::Send(Trailer::Immediate(u32::from_be(imm)))) }
}

unsafe extern "C" fn wr_send_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: the caller has started.
    unsafe { request(qp, Request::Send(Trailer::Invalidate(rkey))) }
}

unsafe extern "C" fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, address: u64) {
    // SAFETY: the caller has started.
    unsafe { request(qp, Request::Write { address, rkey, imm: None }) }
}

unsafe extern "C" fn wr_rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, address: u64, imm: __be32) {
    let write = Request::Write { address, rkey, imm: Some(u32::from_be(imm)) };
    // SAFETY: the caller has started.
    unsafe { request(qp, write) }
}

unsafe extern "C" fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, address: u64) {
    // SAFETY: the caller has started.
    unsafe { request(qp, Request::Read { address, rkey }) }
}

unsafe extern "C" fn wr_atomic_cmp_swp(qp: *mut ibv_qp_ex, rkey: u32, address: u64, compare: u64, swap: u64) {
    let atomic = Atomic { address, rkey, swap, compare };
    // SAFETY: the caller has started.
    unsafe { request(qp, Request::CompareSwap(atomic)) }
}

unsafe extern "C" fn wr_atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, address: u64, add: u64) {
    let atomic = Atomic { address, rkey, swap: add, compare: 0 };
    // SAFETY: the caller has started.
    unsafe { request(qp, Request::FetchAdd(atomic)) }
}

unsafe extern "C" fn wr_bind_mw(qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) {
    // SAFETY: the caller has started; its structures.
    unsafe { begin(qp, binding(mw, rkey, &*info).map(|binding| Task::Bind(2, binding))) }
}

unsafe extern "C" fn wr_local_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: the caller has started.
    unsafe { begin(qp, Ok(Task::Invalidate(rkey))) }
}

unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, remote_qp: u32, remote_qkey: u32) {
    // SAFETY: the caller has started; its address handle.
    unsafe {
        if let Some(Job { task: Task::Datagram { to, qp, qkey, .. }, .. }) = last(qp) {
            (*to, *qp, *qkey) = ((*ah.cast::<AhObject>()).to, remote_qp, remote_qkey);
        }
    }
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: the caller has started.
    unsafe { set_parts(qp, &[ibv_sge { addr, length, lkey }]) }
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: the caller has started; its array.
    unsafe {
        match parts(list, count as c_int) {
            Ok(sges) => set_parts(qp, sges),
            Err(errno) => builder(qp).error = errno,
        }
    }
}

unsafe fn set_parts(qp: *mut ibv_qp_ex, sges: &[ibv_sge]) {
    // SAFETY: the caller has started.
    let most = unsafe { (*qp.cast::<QpObject>()).limits.cap.max_send_sge } as usize;
    // SAFETY: as above.
    let Some(job) = (unsafe { last(qp) }) else { return };
    match total(sges) {
        Ok(len) if sges.len() <= most => {
            job.len = len;
            job.sges.clear();
            job.sges.extend_from_slice(sges);
        }
        // SAFETY: as above.
        _ => unsafe { builder(qp) }.error = libc::EINVAL,
    }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let one = ibv_data_buf { addr, length };
    // SAFETY: the caller has started; its memory.
    unsafe { wr_set_inline_data_list(qp, 1, &raw const one) }
}

unsafe extern "C" fn wr_set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    // SAFETY: the caller has started.
    let most = unsafe { (*qp.cast::<QpObject>()).limits.cap.max_inline_data } as usize;
    // SAFETY: as above.
    let Some(job) = (unsafe { last(qp) }) else { return };
    job.inline.clear();
    for index in 0..count {
        // SAFETY: the caller's array.
        let ibv_data_buf { addr, length } = unsafe { *list.add(index) };
        if length > most - job.inline.len() {
            // SAFETY: as above.
            unsafe { builder(qp) }.error = libc::EINVAL;
            return;
        }
        if length > 0 {
            // SAFETY: the caller's memory, which inline data is copied from at once.
            job.inline.extend_from_slice(unsafe { core::slice::from_raw_parts(addr.cast::<u8>(), length) });
        }
    }
    job.len = job.inline.len() as u32;
    job.is_inline = true;
}

/// Binds a window of type 1, by `ibv_bind_mw`.
pub(crate) unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller's objects.
    let (number, limits, wanted) = unsafe { ((*qp).qp_num, (*qp.cast::<QpObject>()).limits, *bind) };
    // SAFETY: as above.
    let binding = match unsafe { binding(mw, 0, &wanted.bind_info) } {
        // SAFETY: as above.
        Ok(binding) if unsafe { (*mw).type_ } == IBV_MW_TYPE_1 && limits.kind != IBV_QPT_UD => binding,
        _ => return libc::EINVAL,
    };
    let mut core = device.lock();
    match sending(&mut core, number, 1) {
        Ok(found) => found.queues.send.push(|job| {
            job.begin(wanted.wr_id, Task::Bind(1, binding), wanted.send_flags, limits.is_all_signaled);
        }),
        Err(errno) => return errno,
    }
    posted(device, core, number);
    // SAFETY: the caller's window. The key that it will have; libibverbs does the same.
    unsafe { (*mw).rkey = ibv_inc_rkey((*mw).rkey) };
    0
}
