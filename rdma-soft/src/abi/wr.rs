//! Posting work requests with `ibv_wr_*`, from `ibv_wr_start` to `ibv_wr_complete`: `ibv_wr_post(3)`.

use core::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use rdma_sys::*;

use super::ah::AhObject;
use super::lock;
use super::post::{binding, qp_to_post, sge_list, total_len};
use super::qp_object::{Batch, QpObject};
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

/// Returns the batch, which only the caller uses between `ibv_wr_start` and its end.
///
/// # Safety
/// The queue pair is valid, and the caller has called `ibv_wr_start`.
unsafe fn batch<'a>(qp: *mut ibv_qp_ex) -> &'a mut Batch {
    // SAFETY: the caller keeps the contract above.
    unsafe { &mut (*qp.cast::<QpObject>()).batch }
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller passes a valid queue pair. Only the flag is read before the lock is acquired.
    lock::acquire(unsafe { &(*qp.cast::<QpObject>()).is_building });
    // SAFETY: this is `ibv_wr_start`, which has acquired the lock.
    let batch = unsafe { batch(qp) };
    (batch.count, batch.error) = (0, 0);
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller has called `ibv_wr_start`.
    unsafe { end(qp) };
}

/// Releases the batch.
///
/// # Safety
/// The caller has called `ibv_wr_start`, and has no reference to the batch any more.
unsafe fn end(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller passes a valid queue pair.
    unsafe { &(*qp.cast::<QpObject>()).is_building }.store(false, Ordering::Release);
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the caller has called `ibv_wr_start`.
    let (batch, number) = unsafe { (batch(qp), (*qp).qp_base.qp_num) };
    let result = if batch.error == 0 { post(batch, number) } else { batch.error };
    // SAFETY: as above.
    unsafe { end(qp) };
    result
}

/// Posts all requests of a batch, or none.
fn post(batch: &mut Batch, number: u32) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    if batch.count == 0 {
        return 0;
    }
    let jobs = &mut batch.jobs[..batch.count];
    let bytes = jobs.iter().map(|job| u64::from(job.len)).sum();
    let mut core = device.lock();
    match qp_to_post(&mut core, number, batch.count) {
        Ok(found) => {
            for job in jobs {
                // The old entry becomes an unused one of the batch, whose memory is reused.
                found.queues.send.push(|place| core::mem::swap(place, job));
            }
        }
        Err(errno) => return errno,
    }
    device.start_posted(core, number, bytes);
    0
}

/// Adds a work request to the batch.
///
/// # Safety
/// The caller has called `ibv_wr_start`.
unsafe fn add_job(qp: *mut ibv_qp_ex, task: Result<Task, c_int>) {
    // SAFETY: the caller keeps the contract above.
    let (batch, limits, wr_id, flags) =
        unsafe { (batch(qp), (*qp.cast::<QpObject>()).limits, (*qp).wr_id, (*qp).wr_flags) };
    let task = match task {
        Ok(task) => task,
        Err(errno) => {
            batch.error = errno;
            return;
        }
    };
    if batch.count == batch.jobs.len() {
        batch.jobs.push(Job::with_capacity(limits.cap.max_send_sge, limits.cap.max_inline_data));
    }
    batch.jobs[batch.count].reset(wr_id, task, flags, limits.is_all_signaled);
    batch.count += 1;
}

/// Returns the work request that was added last.
///
/// # Safety
/// The caller has called `ibv_wr_start`.
unsafe fn last_job<'a>(qp: *mut ibv_qp_ex) -> Option<&'a mut Job> {
    // SAFETY: the caller keeps the contract above.
    let batch = unsafe { batch(qp) };
    if batch.error != 0 {
        return None;
    }
    batch.count.checked_sub(1).map(|last| &mut batch.jobs[last])
}

unsafe fn add_request(qp: *mut ibv_qp_ex, request: Request) {
    // SAFETY: the caller has called `ibv_wr_start`. `ibv_wr_set_ud_addr` sets the destination of a datagram later.
    unsafe {
        let task = match ((*qp).qp_base.qp_type, request) {
            (IBV_QPT_UD, Request::Send(trailer)) => {
                let to = Destination::unset();
                let imm = if let Trailer::Immediate(imm) = trailer { Some(imm) } else { None };
                Task::Datagram { to, qp: 0, qkey: 0, imm }
            }
            _ => Task::Request(request),
        };
        add_job(qp, Ok(task));
    }
}

unsafe extern "C" fn wr_send(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller has called `ibv_wr_start`.
    unsafe { add_request(qp, Request::Send(Trailer::None)) }
}

unsafe extern "C" fn wr_send_imm(qp: *mut ibv_qp_ex, imm: __be32) {
    // SAFETY: the caller has called `ibv_wr_start`.
    unsafe { add_request(qp, Request::Send(Trailer::Immediate(u32::from_be(imm)))) }
}

unsafe extern "C" fn wr_send_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: the caller has called `ibv_wr_start`.
    unsafe { add_request(qp, Request::Send(Trailer::Invalidate(rkey))) }
}

unsafe extern "C" fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, address: u64) {
    // SAFETY: the caller has called `ibv_wr_start`.
    unsafe { add_request(qp, Request::Write { address, rkey, imm: None }) }
}

unsafe extern "C" fn wr_rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, address: u64, imm: __be32) {
    let write = Request::Write { address, rkey, imm: Some(u32::from_be(imm)) };
    // SAFETY: the caller has called `ibv_wr_start`.
    unsafe { add_request(qp, write) }
}

unsafe extern "C" fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, address: u64) {
    // SAFETY: the caller has called `ibv_wr_start`.
    unsafe { add_request(qp, Request::Read { address, rkey }) }
}

unsafe extern "C" fn wr_atomic_cmp_swp(qp: *mut ibv_qp_ex, rkey: u32, address: u64, compare: u64, swap: u64) {
    let atomic = Atomic { address, rkey, swap, compare };
    // SAFETY: the caller has called `ibv_wr_start`.
    unsafe { add_request(qp, Request::CompareSwap(atomic)) }
}

unsafe extern "C" fn wr_atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, address: u64, add: u64) {
    let atomic = Atomic { address, rkey, swap: add, compare: 0 };
    // SAFETY: the caller has called `ibv_wr_start`.
    unsafe { add_request(qp, Request::FetchAdd(atomic)) }
}

unsafe extern "C" fn wr_bind_mw(qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) {
    // SAFETY: the caller has called `ibv_wr_start`, and passes valid structures.
    unsafe { add_job(qp, binding(mw, rkey, &*info).map(|binding| Task::Bind(2, binding))) }
}

unsafe extern "C" fn wr_local_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: the caller has called `ibv_wr_start`.
    unsafe { add_job(qp, Ok(Task::Invalidate(rkey))) }
}

unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, remote_qp: u32, remote_qkey: u32) {
    // SAFETY: the caller has called `ibv_wr_start`, and passes a valid address handle.
    unsafe {
        if let Some(Job { task: Task::Datagram { to, qp, qkey, .. }, .. }) = last_job(qp) {
            (*to, *qp, *qkey) = ((*ah.cast::<AhObject>()).to, remote_qp, remote_qkey);
        }
    }
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: the caller has called `ibv_wr_start`.
    unsafe { set_sges(qp, &[ibv_sge { addr, length, lkey }]) }
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: the caller has called `ibv_wr_start`, and passes a valid array.
    unsafe {
        match sge_list(list, count as c_int) {
            Ok(sges) => set_sges(qp, sges),
            Err(errno) => batch(qp).error = errno,
        }
    }
}

unsafe fn set_sges(qp: *mut ibv_qp_ex, sges: &[ibv_sge]) {
    // SAFETY: the caller has called `ibv_wr_start`.
    let most = unsafe { (*qp.cast::<QpObject>()).limits.cap.max_send_sge } as usize;
    // SAFETY: as above.
    let Some(job) = (unsafe { last_job(qp) }) else { return };
    match total_len(sges) {
        Ok(len) if sges.len() <= most => {
            job.len = len;
            job.sges.clear();
            job.sges.extend_from_slice(sges);
        }
        // SAFETY: as above.
        _ => unsafe { batch(qp) }.error = libc::EINVAL,
    }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let one = ibv_data_buf { addr, length };
    // SAFETY: the caller has called `ibv_wr_start`, and passes readable memory.
    unsafe { wr_set_inline_data_list(qp, 1, &raw const one) }
}

unsafe extern "C" fn wr_set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    // SAFETY: the caller has called `ibv_wr_start`.
    let most = unsafe { (*qp.cast::<QpObject>()).limits.cap.max_inline_data } as usize;
    // SAFETY: as above.
    let Some(job) = (unsafe { last_job(qp) }) else { return };
    job.inline.clear();
    for index in 0..count {
        // SAFETY: the caller passes a valid array.
        let ibv_data_buf { addr, length } = unsafe { *list.add(index) };
        if length > most - job.inline.len() {
            // SAFETY: as above.
            unsafe { batch(qp) }.error = libc::EINVAL;
            return;
        }
        if length > 0 {
            // SAFETY: the caller's inline data is readable during the call, and is copied.
            job.inline.extend_from_slice(unsafe { core::slice::from_raw_parts(addr.cast::<u8>(), length) });
        }
    }
    job.len = job.inline.len() as u32;
    job.is_inline = true;
}

/// Binds a memory window of type 1: `ibv_bind_mw(3)`.
pub(crate) unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller passes valid objects.
    let (number, limits, wanted) = unsafe { ((*qp).qp_num, (*qp.cast::<QpObject>()).limits, *bind) };
    // SAFETY: as above.
    let binding = match unsafe { binding(mw, 0, &wanted.bind_info) } {
        // SAFETY: as above.
        Ok(binding) if unsafe { (*mw).type_ } == IBV_MW_TYPE_1 && limits.kind != IBV_QPT_UD => binding,
        _ => return libc::EINVAL,
    };
    let mut core = device.lock();
    match qp_to_post(&mut core, number, 1) {
        Ok(found) => found.queues.send.push(|job| {
            job.reset(wanted.wr_id, Task::Bind(1, binding), wanted.send_flags, limits.is_all_signaled);
        }),
        Err(errno) => return errno,
    }
    device.start_posted(core, number, 0);
    // SAFETY: the caller passes a valid window. Like libibverbs, this writes the key that the window will have.
    unsafe { (*mw).rkey = ibv_inc_rkey((*mw).rkey) };
    0
}
