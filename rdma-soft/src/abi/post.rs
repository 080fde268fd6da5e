//! Posting work requests: `ibv_post_send(3)` and `ibv_post_recv(3)`.

use core::ffi::c_int;

use rdma_sys::*;

use super::ah::AhObject;
use super::limits::MAX_MESSAGE;
use super::qp_object::{Limits, QpObject};
use crate::check::Owner;
use crate::device::{Binding, Core, Job, Qp, Shared, Task, device, observe};
use crate::transport::Request;
use crate::wire::{Atomic, Trailer};

/// Returns the scatter/gather elements of a work request.
///
/// # Safety
/// There are `count` elements at `list`.
pub(crate) unsafe fn sge_list<'a>(list: *const ibv_sge, count: c_int) -> Result<&'a [ibv_sge], c_int> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        // SAFETY: the caller keeps the contract above.
        Ok(count) if !list.is_null() => Ok(unsafe { core::slice::from_raw_parts(list, count) }),
        _ => Err(libc::EINVAL),
    }
}

/// Returns the length of a message.
///
/// # Errors
/// `EINVAL` if it is longer than [`MAX_MESSAGE`].
pub(crate) fn total_len(sges: &[ibv_sge]) -> Result<u32, c_int> {
    let total: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
    u32::try_from(total).ok().filter(|total| *total <= MAX_MESSAGE).ok_or(libc::EINVAL)
}

/// Converts the operation of a work request.
///
/// # Safety
/// The work request is valid, and so are the address handle and the region that it names.
unsafe fn task(limits: &Limits, wr: &ibv_send_wr) -> Result<Task, c_int> {
    // SAFETY: the opcode says which fields of the unions are set, and no others are read. The objects that they point to are valid.
    unsafe {
        let imm = || u32::from_be(wr.__bindgen_anon_1.imm_data);
        if limits.kind == IBV_QPT_UD {
            let imm = match wr.opcode {
                IBV_WR_SEND => None,
                IBV_WR_SEND_WITH_IMM => Some(imm()),
                _ => return Err(libc::EINVAL),
            };
            let ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah, remote_qpn, remote_qkey } = wr.wr.ud;
            if ah.is_null() {
                return Err(libc::EINVAL);
            }
            return Ok(Task::Datagram { to: (*ah.cast::<AhObject>()).to, qp: remote_qpn, qkey: remote_qkey, imm });
        }
        let is_reliable = limits.kind == IBV_QPT_RC;
        let remote = || (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey);
        let write = |imm| {
            let (address, rkey) = remote();
            Request::Write { address, rkey, imm }
        };
        let atomic = || {
            let of = wr.wr.atomic;
            match wr.opcode {
                IBV_WR_ATOMIC_FETCH_AND_ADD => {
                    Atomic { address: of.remote_addr, rkey: of.rkey, swap: of.compare_add, compare: 0 }
                }
                _ => Atomic { address: of.remote_addr, rkey: of.rkey, swap: of.swap, compare: of.compare_add },
            }
        };
        Ok(Task::Request(match wr.opcode {
            IBV_WR_SEND => Request::Send(Trailer::None),
            IBV_WR_SEND_WITH_IMM => Request::Send(Trailer::Immediate(imm())),
            IBV_WR_RDMA_WRITE => write(None),
            IBV_WR_RDMA_WRITE_WITH_IMM => write(Some(imm())),
            IBV_WR_SEND_WITH_INV if is_reliable => {
                Request::Send(Trailer::Invalidate(wr.__bindgen_anon_1.invalidate_rkey))
            }
            IBV_WR_RDMA_READ if is_reliable => {
                let (address, rkey) = remote();
                Request::Read { address, rkey }
            }
            IBV_WR_ATOMIC_CMP_AND_SWP if is_reliable => Request::CompareSwap(atomic()),
            IBV_WR_ATOMIC_FETCH_AND_ADD if is_reliable => Request::FetchAdd(atomic()),
            IBV_WR_LOCAL_INV => return Ok(Task::Invalidate(wr.__bindgen_anon_1.invalidate_rkey)),
            IBV_WR_BIND_MW => {
                let of = wr.__bindgen_anon_2.bind_mw;
                return binding(of.mw, of.rkey, &of.bind_info).map(|binding| Task::Bind(2, binding));
            }
            _ => return Err(libc::EINVAL),
        }))
    }
}

/// Converts the parameters of a bind.
///
/// # Safety
/// The window is valid, and so is the region, unless it is null.
pub(crate) unsafe fn binding(mw: *mut ibv_mw, rkey: u32, info: &ibv_mw_bind_info) -> Result<Binding, c_int> {
    if mw.is_null() || (info.mr.is_null() && info.length > 0) {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller keeps the contract above.
    let (window, region) = unsafe { ((*mw).handle << 8, if info.mr.is_null() { 0 } else { (*info.mr).lkey }) };
    Ok(Binding { window, rkey, region, address: info.addr, len: info.length, access: info.mw_access_flags })
}

/// Fills an entry of the send queue from a work request.
///
/// # Safety
/// The inline data is readable.
unsafe fn fill(job: &mut Job, limits: &Limits, wr: &ibv_send_wr, task: Task, sges: &[ibv_sge], len: u32) {
    job.reset(wr.wr_id, task, wr.send_flags, limits.is_all_signaled);
    job.len = len;
    job.is_inline = is_inline(wr, &task);
    if job.is_inline {
        // The address of an empty element may be anything, even null.
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            // SAFETY: the caller's inline data is readable during the call, and is copied.
            job.inline
                .extend_from_slice(unsafe { core::slice::from_raw_parts(sge.addr as *const u8, sge.length as usize) });
        }
    } else {
        job.sges.extend_from_slice(sges);
    }
}

/// Whether the data is copied when the request is posted. That applies only to data for the peer.
fn is_inline(wr: &ibv_send_wr, task: &Task) -> bool {
    wr.send_flags & IBV_SEND_INLINE.0 != 0
        && matches!(task, Task::Request(Request::Send(_) | Request::Write { .. }) | Task::Datagram { .. })
}

/// Checks a work request before anything is posted.
///
/// # Safety
/// The work request is valid.
unsafe fn check<'a>(limits: &Limits, wr: &ibv_send_wr) -> Result<(Task, &'a [ibv_sge], u32), c_int> {
    // SAFETY: the caller keeps the contract above.
    let (task, sges) = unsafe { (task(limits, wr)?, sge_list(wr.sg_list, wr.num_sge)?) };
    // Requests without data ignore their elements.
    let sges = if matches!(task, Task::Bind(..) | Task::Invalidate(_)) { &[] } else { sges };
    let len = total_len(sges)?;
    if sges.len() > limits.cap.max_send_sge as usize || (is_inline(wr, &task) && len > limits.cap.max_inline_data) {
        return Err(libc::EINVAL);
    }
    match task {
        Task::Request(Request::CompareSwap(_) | Request::FetchAdd(_)) if len < 8 => Err(libc::EINVAL),
        _ => Ok((task, sges, len)),
    }
}

pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller passes a valid queue pair.
    let (number, limits) = unsafe { ((*qp).qp_num, &(*qp.cast::<QpObject>()).limits) };
    let mut core = device.lock();
    let (mut result, mut bytes) = (0, 0);
    while !wr.is_null() {
        // SAFETY: the caller passes a valid list.
        let of = unsafe { &*wr };
        // SAFETY: as above.
        let posted = unsafe { check(limits, of) }.and_then(|(task, sges, len)| {
            let found = qp_to_post(&mut core, number, 1)?;
            // SAFETY: as above.
            found.queues.send.push(|job| unsafe { fill(job, limits, of, task, sges, len) });
            bytes += u64::from(len);
            Ok(())
        });
        if let Err(errno) = posted {
            // SAFETY: the caller passes a valid pointer.
            unsafe { bad.write(wr) };
            result = errno;
            break;
        }
        wr = of.next;
    }
    device.start_posted(core, number, bytes);
    result
}

/// Returns a queue pair that has room for `count` more work requests.
///
/// # Errors
/// `EINVAL` before the queue pair is ready to send, `ENOMEM` if the send queue is full.
pub(crate) fn qp_to_post(core: &mut Core, number: u32, count: usize) -> Result<&mut Qp, c_int> {
    let found = core.state.qps.get_mut(&number).ok_or(libc::EINVAL)?;
    if matches!(found.state, IBV_QPS_RESET | IBV_QPS_INIT | IBV_QPS_RTR) {
        return Err(libc::EINVAL);
    }
    if found.queues.send.room() < count { Err(libc::ENOMEM) } else { Ok(found) }
}

pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller passes a valid queue pair.
    let number = unsafe { (*qp).qp_num };
    let mut core = device.lock();
    let state = &mut core.state;
    let Some(found) = state.qps.get_mut(&number) else { return libc::EINVAL };
    let mut result = 0;
    while !wr.is_null() {
        // SAFETY: the caller passes a valid list.
        let ibv_recv_wr { wr_id, next, sg_list, num_sge } = unsafe { *wr };
        let is_ready = found.state != IBV_QPS_RESET && found.id.srq.is_none();
        let posted = if is_ready {
            // SAFETY: the caller passes a valid array.
            unsafe { sge_list(sg_list, num_sge) }.and_then(|sges| found.queues.receive.push(wr_id, sges))
        } else {
            Err(libc::EINVAL)
        };
        if let Err(errno) = posted {
            // SAFETY: the caller passes a valid pointer.
            unsafe { bad.write(wr) };
            result = errno;
            break;
        }
        wr = next;
    }
    let (owner, cq) = (Owner::Qp(number), Some(found.id.recv_cq));
    let Shared { keys, cqs, .. } = &state.shared;
    observe::posted_receives(owner, &mut found.queues.receive, found.id.pd, cq, keys, cqs);
    if found.state == IBV_QPS_ERR {
        found.fail(&mut state.shared);
        state.fail_overruns();
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_more_than_one_gib_is_refused() {
        let part = |length| ibv_sge { addr: 0, length, lkey: 0 };
        assert_eq!(total_len(&[part(MAX_MESSAGE - 1), part(1)]), Ok(MAX_MESSAGE));
        assert_eq!(total_len(&[part(MAX_MESSAGE), part(1)]), Err(libc::EINVAL));
        assert_eq!(total_len(&[part(u32::MAX); 32]), Err(libc::EINVAL));
    }
}
