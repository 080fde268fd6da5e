//! To make a handle of a C object takes the caller's word for what the object is and whose.

use std::ptr::NonNull;

use rdma_safe::sys::{ibv_ah, ibv_comp_channel, ibv_context, ibv_cq, ibv_mr, ibv_pd, ibv_qp, ibv_srq, ibv_td};
use rdma_safe::{
    AddressHandle, CompletionChannel, CompletionQueue, Context, ProtectionDomain, RawMemoryRegion, ThreadDomain,
};

fn main() {}

fn contexts(raw: NonNull<ibv_context>) {
    let _ = Context::from_raw(raw);
    let _ = Context::from_raw_borrowed(raw);
}

fn domains(context: &Context, pd: &ProtectionDomain, raw: NonNull<ibv_pd>, td: NonNull<ibv_td>) {
    let _ = ProtectionDomain::from_raw(context, raw);
    let _ = ProtectionDomain::from_raw_borrowed(context, raw);
    let _ = pd.parent_from_raw(None, raw);
    let _ = ThreadDomain::from_raw(context, td);
}

fn queues(
    context: &Context,
    pd: &ProtectionDomain,
    cq: &CompletionQueue,
    raw: (NonNull<ibv_comp_channel>, NonNull<ibv_cq>, NonNull<ibv_qp>, NonNull<ibv_srq>),
) {
    let _ = CompletionChannel::from_raw(context, raw.0);
    let _ = context.completion_queue(1).from_raw(raw.1);
    let _ = pd.queue_pair(cq, cq).from_raw(raw.2);
    let _ = pd.shared_receive_queue(1).from_raw(raw.3);
}

fn others(pd: &ProtectionDomain, ah: NonNull<ibv_ah>, mr: NonNull<ibv_mr>) {
    let _ = AddressHandle::from_raw(pd, ah);
    let _ = RawMemoryRegion::from_raw(pd, mr);
}
