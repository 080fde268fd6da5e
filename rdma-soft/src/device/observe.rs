//! What the device tells the [checker](crate::check).
//!
//! Each function costs one load and one branch while no checker is active.

use rdma_sys::*;

use super::cq::Cq;
use super::host::{Identity, Queues, Shared};
use super::keys::{Keys, access_flag};
use super::qp::Qp;
use super::queues::{Receive, ReceiveQueue, Task};
use super::slab::Slab;
use crate::check::{self, Attempt, Element, Owner, Posted, TooLong};
use crate::transport::{Access, Place, Request, Time};
use crate::wire::{Data, RemoteRange};

/// Name of an operation in reports.
fn name(task: &Task) -> &'static str {
    match task {
        Task::Request(Request::Send(_)) | Task::Datagram { .. } => "send",
        Task::Request(Request::Write { .. }) => "write",
        Task::Request(Request::Read { .. }) => "read",
        Task::Request(Request::CompareSwap(_) | Request::FetchAdd(_)) => "atomic operation",
        Task::Bind(..) => "bind",
        Task::Invalidate(_) => "local invalidation",
    }
}

/// Whether the device writes to the memory of a request.
fn is_written(task: &Task) -> bool {
    matches!(task, Task::Request(Request::Read { .. } | Request::CompareSwap(_) | Request::FetchAdd(_)))
}

/// Translates elements. Those with invalid keys are left out, and are reported when the device uses them.
fn elements(keys: &Keys, pd: u32, sges: &[ibv_sge]) -> Vec<Element> {
    let translate = |sge: &ibv_sge| {
        let memory = keys.local(pd, sge, false)?;
        Some(Element { address: memory.place.0, len: sge.length.into(), key: sge.lkey })
    };
    sges.iter().filter(|sge| sge.length > 0).filter_map(translate).collect()
}

/// Records the send work requests that were just posted.
pub(crate) fn posted_sends(qp: &Qp, shared: &Shared) {
    check::with(|check| {
        let Identity { number, pd, send_cq, cap, .. } = qp.id;
        let queue = &qp.queues.send;
        for at in check.next_send(number, queue.head())..queue.tail() {
            let Some(job) = queue.get(at) else { continue };
            let cq = job.is_signaled.then_some(send_cq);
            let elements = if job.is_inline { Vec::new() } else { elements(&shared.keys, pd, &job.sges) };
            let (wr_id, is_written) = (job.wr_id, is_written(&job.task));
            let posted = Posted { owner: Owner::Qp(number), wr_id, name: name(&job.task), is_written, cq, elements };
            check.posted_send(number, posted, cap.max_send_wr);
            if let Some((unpolled, capacity)) = cq.and_then(|cq| usage(&shared.cqs, cq)) {
                check.check_room(send_cq, unpolled, capacity, Some(number), wr_id);
            }
        }
    });
}

fn usage(cqs: &Slab<Cq>, cq: u32) -> Option<(usize, usize)> {
    cqs.get(cq).map(|cq| cq.completions.usage())
}

/// Records the receives that were just posted to a queue. Receives of a shared queue have no completion queue yet.
pub(crate) fn posted_receives(
    owner: Owner,
    queue: &mut ReceiveQueue,
    pd: u32,
    cq: Option<u32>,
    keys: &Keys,
    cqs: &Slab<Cq>,
) {
    check::with(|check| {
        let known = queue.posted.iter().rposition(|receive| receive.check != 0).map_or(0, |last| last + 1);
        for receive in queue.posted.range_mut(known..) {
            let (wr_id, elements) = (receive.wr_id, elements(keys, pd, &receive.sges));
            let posted = Posted { owner, wr_id, name: "receive", is_written: true, cq, elements };
            receive.check = check.posted_receive(posted);
            if let (Some(cq), Owner::Qp(qp)) = (cq, owner) {
                if let Some((unpolled, capacity)) = usage(cqs, cq) {
                    check.check_room(cq, unpolled, capacity, Some(qp), wr_id);
                }
            }
        }
    });
}

/// Notes that the work of a queue pair is dropped, because it is reset or destroyed.
pub(super) fn cleared(qp: u32, queues: &Queues) {
    check::with(|check| {
        // Receives that were taken from a shared queue do not go back there.
        queues.active.iter().for_each(|receive| check.forget(receive.check));
        check.cleared(Owner::Qp(qp));
    });
}

/// Notes that a receive completes.
pub(super) fn received(receive: &Receive) {
    check::with(|check| check.done(receive.check));
}

/// Reports a message that is longer than its receive. `bytes` of it have arrived.
pub(super) fn too_long(id: &Identity, receive: &Receive, bytes: u64) {
    check::with(|check| {
        let Receive { wr_id, sges, check: work } = receive;
        let element = |sge: &ibv_sge| Element { address: sge.addr, len: sge.length.into(), key: sge.lkey };
        check.receive_too_small(&TooLong {
            qp: id.number,
            cq: id.recv_cq,
            srq: id.srq,
            work: *work,
            wr_id: *wr_id,
            bytes,
            room: sges.iter().map(|sge| u64::from(sge.length)).sum(),
            elements: sges.len(),
            first: sges.first().map(element),
            is_datagram: id.kind == IBV_QPT_UD,
        });
    });
}

/// Reports the elements of a work request that the device could not access.
pub(super) fn refused(id: &Identity, keys: &Keys, wr_id: u64, name: &'static str, sges: &[ibv_sge], is_written: bool) {
    check::with(|check| {
        for sge in sges.iter().filter(|sge| sge.length > 0 && keys.local(id.pd, sge, is_written).is_none()) {
            check.key_failed(&Attempt {
                qp: id.number,
                pd: id.pd,
                wr_id: Some(wr_id),
                key: sge.lkey,
                address: sge.addr,
                len: sge.length.into(),
                needed: if is_written { IBV_ACCESS_LOCAL_WRITE.0 } else { 0 },
                name,
                is_allowed_by_qp: true,
            });
        }
    });
}

/// Reports a work request whose memory the device could not access.
pub(super) fn refused_send(qp: &Qp, keys: &Keys, number: u64) {
    if let Some(job) = qp.queues.send.get(number).filter(|_| check::is_active()) {
        refused(&qp.id, keys, job.wr_id, name(&job.task), &job.sges, is_written(&job.task));
    }
}

/// Whether the device may write `data`: always, unless the checker finds that the memory is not mapped.
pub(super) fn may_write(qp: u32, place: Place, data: Data<'_>) -> bool {
    let check_write = |check: &mut check::Checker| {
        let is_mapped = check.device_writes(place.0, &data.to_vec());
        if !is_mapped {
            check.not_mapped(qp, place.0, data.len() as u64);
        }
        is_mapped
    };
    check::with(check_write).unwrap_or(true)
}

/// Whether the device may read memory: always, unless the checker finds that the memory is not mapped.
pub(super) fn may_read(qp: u32, place: Place, len: u64) -> bool {
    let check_read = |check: &mut check::Checker| {
        let is_mapped = check::is_readable(place.0, len);
        if !is_mapped {
            check.not_mapped(qp, place.0, len);
        }
        is_mapped
    };
    check::with(check_read).unwrap_or(true)
}

/// Checks the memory that a peer has named, and reports it if it may not be accessed.
pub(super) fn opened(
    id: &Identity,
    range: &RemoteRange,
    access: Access,
    is_allowed: bool,
    opened: Option<Place>,
) -> Option<Place> {
    if !check::is_active() {
        return opened;
    }
    let RemoteRange { address, rkey, len } = *range;
    match opened {
        Some(place) => may_read(id.number, place, len.into()).then_some(place),
        None => {
            let name = match access {
                Access::Read => "read by the peer",
                Access::Write => "write by the peer",
                Access::Atomic => "atomic operation of the peer",
            };
            check::with(|check| {
                check.key_failed(&Attempt {
                    qp: id.number,
                    pd: id.pd,
                    wr_id: None,
                    key: rkey,
                    address,
                    len: len.into(),
                    needed: access_flag(access),
                    name,
                    is_allowed_by_qp: is_allowed,
                });
            });
            None
        }
    }
}

/// Finds a completion queue of a channel that has completions, if no event will report them.
fn unreported(shared: &Shared, channel: u32) -> Option<(u32, usize)> {
    if shared.events.channels.get(channel).is_none_or(|channel| !channel.queue.is_empty()) {
        return None;
    }
    let of_channel = || shared.cqs.iter().filter(|(_, cq)| cq.channel == Some(channel));
    if of_channel().any(|(_, cq)| cq.completions.is_armed()) {
        return None;
    }
    of_channel().map(|(number, cq)| (number, cq.completions.usage().0)).find(|(_, waiting)| *waiting > 0)
}

/// Notes that work has completed. Reports threads that sleep although no event will wake them.
pub(super) fn completed(shared: &Shared, cq: u32) {
    check::with(|check| {
        let channel = shared.cqs.get(cq).and_then(|cq| cq.channel);
        if let Some(channel) = channel.filter(|channel| check.has_sleeper(*channel)) {
            if let Some((number, waiting)) = unreported(shared, channel) {
                check.thread_sleeps(number, waiting);
            }
        }
    });
}

/// Looks for completions that nobody takes and no event reports.
pub(super) fn watch_stalls(shared: &Shared, now: Time) {
    check::with(|check| {
        for (channel, _) in shared.events.channels.iter() {
            let found = unreported(shared, channel).and_then(|(number, waiting)| {
                let taken = shared.cqs.get(number)?.completions.taken();
                Some((number, waiting, taken))
            });
            check.watch_stall(channel, found, now);
        }
    });
}

/// Notes that a thread is about to sleep on a completion channel.
pub(crate) fn falls_asleep(shared: &Shared, channel: u32) {
    check::with(|check| {
        check.sleeps(channel, true);
        if let Some((number, waiting)) = unreported(shared, channel) {
            check.thread_sleeps(number, waiting);
        }
    });
}
