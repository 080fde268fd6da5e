//! Objects that the program has not destroyed, for the [checker](crate::check).

use rdma_sys::*;

use super::cma::Id;
use super::qp::Qp;
use super::queues::Srq;
use super::state::State;
use super::{Cq, existing};
use crate::check::{self, Left, Object};

/// Reports the objects that are left in a context that is closed.
pub(crate) fn report_leaks_of(state: &State, context: u32) {
    check::with(|check| {
        let is_of = |pd: u32| state.pds.get(pd) == Some(&context);
        let mut left = objects(state, |of| of == context, is_of);
        let pds = state.pds.iter().filter(|(pd, _)| is_of(*pd));
        left.extend(pds.map(|(pd, _)| Left {
            object: Object::ProtectionDomain(pd),
            description: format!("protection domain {pd}"),
        }));
        check.leaked(left, "a context is closed");
    });
}

/// Reports the objects that are left when the process ends.
///
/// Contexts and protection domains are no leak: librdmacm keeps one of each for all ids.
pub(crate) fn report_leaks_at_exit() {
    let Some(device) = existing().filter(|_| check::is_active()) else { return };
    let core = device.lock();
    check::with(|check| check.leaked(all_objects(&core.state), "the process ends"));
}

/// The objects of contexts and protection domains.
fn objects(state: &State, is_of: impl Fn(u32) -> bool, has_pd: impl Fn(u32) -> bool) -> Vec<Left> {
    let mut left = Vec::new();
    let mut qps: Vec<&Qp> = state.qps.values().map(|qp| &**qp).filter(|qp| is_of(qp.id.context)).collect();
    qps.sort_by_key(|qp| qp.id.number);
    left.extend(qps.into_iter().map(queue_pair));
    let cqs = state.shared.cqs.iter().filter(|(_, cq)| is_of(cq.context));
    left.extend(cqs.map(|(number, cq)| completion_queue(number, cq)));
    let srqs = state.shared.srqs.iter().filter(|(_, srq)| is_of(srq.context));
    left.extend(srqs.map(|(number, srq)| shared_receive_queue(number, srq)));
    let (mut regions, mut windows) = state.shared.keys.objects(has_pd);
    regions.sort_by_key(|region| region.address);
    windows.sort_unstable();
    left.extend(regions.into_iter().map(|check::Registered { key, address, len, pd, .. }| Left {
        object: Object::Region(key),
        description: format!(
            "memory region {address:#x} to {:#x}, {len} bytes, key {key:#x}, in protection domain {pd}",
            address + len
        ),
    }));
    left.extend(
        windows.into_iter().map(|key| Left {
            object: Object::Window(key >> 8),
            description: format!("memory window with key {key:#x}"),
        }),
    );
    left
}

fn all_objects(state: &State) -> Vec<Left> {
    let mut left = objects(state, |_| true, |_| true);
    let channels = state.shared.events.channels.iter();
    left.extend(channels.map(|(number, channel)| Left {
        object: Object::CompletionChannel(number),
        description: format!("completion channel {number} of {} completion queues", channel.users),
    }));
    let channels = state.cma.channels.iter();
    left.extend(channels.map(|(number, _)| Left {
        object: Object::EventChannel(number),
        description: format!("event channel {number} of connections by address"),
    }));
    left.extend(state.cma.ids.iter().map(|(number, id)| cm_id(number, id)));
    left
}

fn queue_pair(qp: &Qp) -> Left {
    let kind = match qp.id.kind {
        IBV_QPT_RC => "RC",
        IBV_QPT_UC => "UC",
        _ => "UD",
    };
    let state = match qp.state {
        IBV_QPS_RESET => "RESET",
        IBV_QPS_INIT => "INIT",
        IBV_QPS_RTR => "RTR",
        IBV_QPS_RTS => "RTS",
        IBV_QPS_SQD => "SQD",
        IBV_QPS_SQE => "SQE",
        _ => "ERR",
    };
    let (number, cap, send) = (qp.id.number, qp.id.cap, &qp.queues.send);
    let oldest = send.get(send.head()).map(|job| format!(" from wr_id {:#x}", job.wr_id)).unwrap_or_default();
    let receives = match (qp.id.srq, qp.queues.receive.posted.front()) {
        (Some(srq), _) => format!("receives from shared receive queue {srq}"),
        (None, oldest) => {
            let oldest = oldest.map(|receive| format!(" from wr_id {:#x}", receive.wr_id)).unwrap_or_default();
            format!("{} of {} receives posted{oldest}", qp.queues.receive.posted.len(), cap.max_recv_wr)
        }
    };
    let description = format!(
        "queue pair {number:#x}: {kind} in {state}, {} of {} sends outstanding{oldest}, {receives}, completion queues {} and {}",
        send.tail() - send.head(),
        cap.max_send_wr,
        qp.id.send_cq,
        qp.id.recv_cq
    );
    Left { object: Object::QueuePair(number), description }
}

fn completion_queue(number: u32, cq: &Cq) -> Left {
    let (waiting, capacity) = cq.completions.usage();
    let channel = cq.channel.map(|channel| format!(", completion channel {channel}")).unwrap_or_default();
    let description = format!(
        "completion queue {number}: {waiting} completions wait in {capacity} entries, used {} times by queue pairs{channel}",
        cq.users
    );
    Left { object: Object::CompletionQueue(number), description }
}

fn shared_receive_queue(number: u32, srq: &Srq) -> Left {
    let (posted, capacity) = (srq.queue.posted.len(), srq.queue.capacity);
    let description =
        format!("shared receive queue {number}: {posted} of {capacity} receives posted, {} queue pairs", srq.users);
    Left { object: Object::SharedReceiveQueue(number), description }
}

fn cm_id(number: u32, id: &Id) -> Left {
    let peer = id.destination.map(|peer| format!(", to {peer}")).unwrap_or_default();
    let description = format!("id {number}: from {}{peer}, event channel {}", id.source, id.channel);
    Left { object: Object::Id(number), description }
}
