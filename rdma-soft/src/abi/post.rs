//! Posting work: `ibv_post_send` and `ibv_post_recv`.

use core::ffi::c_int;

use rdma_sys::*;

use super::ah::AhObject;
use super::limits::MAX_MESSAGE;
use super::qp_object::{Limits, QpObject};
use crate::device::{Binding, Core, Device, Job, Locked, Qp, Task, device};
use crate::transport::Request;
use crate::wire::{Atomic, Trailer};

/// How often a post lets the queue pairs send once more. A window is four turns of one of them.
const TURNS: u32 = 3;

/// The parts of a work request.
///
/// # Safety
/// There are so many at `list`.
pub(crate) unsafe fn parts<'a>(list: *const ibv_sge, count: c_int) -> Result<&'a [ibv_sge], c_int> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        // SAFETY: the caller's promise.
        Ok(count) if !list.is_null() => Ok(unsafe { core::slice::from_raw_parts(list, count) }),
        _ => Err(libc::EINVAL),
    }
}

/// Bytes of all parts, no more than those of the longest message.
pub(crate) fn total(sges: &[ibv_sge]) -> Result<u32, c_int> {
    let total: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
    u32::try_from(total).ok().filter(|total| *total <= MAX_MESSAGE).ok_or(libc::EINVAL)
}

/// # Safety
/// The work request is whole: its address handle or region exist.
unsafe fn task(limits: &Limits, wr: &ibv_send_wr) -> Result<Task, c_int> {
    // SAFETY: the operation says which fields of the unions were set: no others are read. Pointers are of the caller's objects.
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

/// # Safety
/// The window exists, and the region, where one is given.
pub(crate) unsafe fn binding(mw: *mut ibv_mw, rkey: u32, info: &ibv_mw_bind_info) -> Result<Binding, c_int> {
    if mw.is_null() || (info.mr.is_null() && info.length > 0) {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's promise.
    let (window, region) = unsafe { ((*mw).handle << 8, if info.mr.is_null() { 0 } else { (*info.mr).lkey }) };
    Ok(Binding { window, rkey, region, address: info.addr, len: info.length, access: info.mw_access_flags })
}

/// Writes a work request over what was in a place of the send queue.
///
/// # Safety
/// What is to be inline may be read.
unsafe fn fill(job: &mut Job, limits: &Limits, wr: &ibv_send_wr, task: Task, sges: &[ibv_sge], len: u32) {
    job.begin(wr.wr_id, task, wr.send_flags, limits.is_all_signaled);
    job.len = len;
    job.is_inline = is_inline(wr, &task);
    if job.is_inline {
        // Of nothing the address may be any, also null.
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            // SAFETY: the caller's memory, which inline data is copied from at once.
            job.inline
                .extend_from_slice(unsafe { core::slice::from_raw_parts(sge.addr as *const u8, sge.length as usize) });
        }
    } else {
        job.sges.extend_from_slice(sges);
    }
}

/// Whether its data is copied when it is posted: only what goes to the peer can be.
fn is_inline(wr: &ibv_send_wr, task: &Task) -> bool {
    wr.send_flags & IBV_SEND_INLINE.0 != 0
        && matches!(task, Task::Request(Request::Send(_) | Request::Write { .. }) | Task::Datagram { .. })
}

/// Looks at what can be said before anything is posted.
///
/// # Safety
/// The work request is whole.
unsafe fn check<'a>(limits: &Limits, wr: &ibv_send_wr) -> Result<(Task, &'a [ibv_sge], u32), c_int> {
    // SAFETY: the caller's promise.
    let (task, sges) = unsafe { (task(limits, wr)?, parts(wr.sg_list, wr.num_sge)?) };
    // What has no data has no parts, whatever is written there.
    let sges = if matches!(task, Task::Bind(..) | Task::Invalidate(_)) { &[] } else { sges };
    let len = total(sges)?;
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
    // SAFETY: the caller's queue pair.
    let (number, limits) = unsafe { ((*qp).qp_num, &(*qp.cast::<QpObject>()).limits) };
    let mut core = device.lock();
    let mut result = 0;
    while !wr.is_null() {
        // SAFETY: the caller's list.
        let of = unsafe { &*wr };
        // SAFETY: as above.
        let posted = unsafe { check(limits, of) }.and_then(|(task, sges, len)| {
            let found = sending(&mut core, number, 1)?;
            // SAFETY: as above.
            found.queues.send.push(|job| unsafe { fill(job, limits, of, task, sges, len) });
            Ok(())
        });
        if let Err(errno) = posted {
            // SAFETY: the caller's pointer.
            unsafe { bad.write(wr) };
            result = errno;
            break;
        }
        wr = of.next;
    }
    posted(device, core, number);
    result
}

/// A queue pair that so much work can be posted to.
///
/// # Errors
/// `EINVAL` before it is ready to send, `ENOMEM` where there is no room.
pub(crate) fn sending(core: &mut Core, number: u32, count: usize) -> Result<&mut Qp, c_int> {
    let found = core.state.qps.get_mut(&number).ok_or(libc::EINVAL)?;
    if matches!(found.state, IBV_QPS_RESET | IBV_QPS_INIT | IBV_QPS_RTR) {
        return Err(libc::EINVAL);
    }
    if found.queues.send.room() < count { Err(libc::ENOMEM) } else { Ok(found) }
}

/// Begins with what was posted, in this thread.
pub(crate) fn posted(device: &Device, mut core: Locked<'_>, number: u32) {
    let state = &mut core.state;
    match state.qps.get_mut(&number) {
        Some(found) if found.state == IBV_QPS_ERR => found.fail(&mut state.shared),
        _ => state.wake(number),
    }
    let (now, before) = (device.now(), core.state.shared.packets);
    core.send(now);
    // While a program polls all the time, the server does not send the rest. The program may wait for memory next.
    for _ in 0..TURNS {
        if !core.is_busy() || !device.server.is_idle() {
            break;
        }
        core.send(now);
    }
    core.take_own(now);
    device.count_packets(&core, before);
    device.leave(core);
}

pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller's queue pair.
    let number = unsafe { (*qp).qp_num };
    let mut core = device.lock();
    let state = &mut core.state;
    let Some(found) = state.qps.get_mut(&number) else { return libc::EINVAL };
    let mut result = 0;
    while !wr.is_null() {
        // SAFETY: the caller's list.
        let ibv_recv_wr { wr_id, next, sg_list, num_sge } = unsafe { *wr };
        let is_ready = found.state != IBV_QPS_RESET && found.id.srq.is_none();
        let posted = if is_ready {
            // SAFETY: the caller's array.
            unsafe { parts(sg_list, num_sge) }.and_then(|sges| found.queues.receive.push(wr_id, sges))
        } else {
            Err(libc::EINVAL)
        };
        if let Err(errno) = posted {
            // SAFETY: the caller's pointer.
            unsafe { bad.write(wr) };
            result = errno;
            break;
        }
        wr = next;
    }
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
    fn a_message_whose_packets_could_not_be_told_apart_is_refused() {
        let part = |length| ibv_sge { addr: 0, length, lkey: 0 };
        assert_eq!(total(&[part(MAX_MESSAGE - 1), part(1)]), Ok(MAX_MESSAGE));
        assert_eq!(total(&[part(MAX_MESSAGE), part(1)]), Err(libc::EINVAL));
        assert_eq!(total(&[part(u32::MAX); 32]), Err(libc::EINVAL));
    }
}
