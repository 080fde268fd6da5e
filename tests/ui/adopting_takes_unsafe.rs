//! Adopting a C object is unsafe. The caller must guarantee its type, validity and ownership.

use std::ptr::NonNull;

use rdma_safe::{AddressHandle, CompletionChannel, CompletionQueue, Context, ProtectionDomain, RawMemoryRegion};
use rdma_safe::pd::ThreadDomain;
use rdma_safe::sys::{ibv_ah, ibv_comp_channel, ibv_context, ibv_cq, ibv_mr, ibv_pd, ibv_qp, ibv_srq, ibv_td};

fn main() {}

fn contexts(raw: NonNull<ibv_context>) {
    let _ = Context::from_raw(raw); //~ E0133 from_raw
    let _ = Context::from_raw_borrowed(raw); //~ E0133 from_raw_borrowed
}

fn domains(context: &Context, pd: &ProtectionDomain, raw: NonNull<ibv_pd>, td: NonNull<ibv_td>) {
    let _ = ProtectionDomain::from_raw(context, raw); //~ E0133 from_raw
    let _ = ProtectionDomain::from_raw_borrowed(context, raw); //~ E0133 from_raw_borrowed
    let _ = pd.parent_from_raw(None, raw); //~ E0133 parent_from_raw
    let _ = ThreadDomain::from_raw(context, td); //~ E0133 from_raw
}

fn queues(
    context: &Context,
    pd: &ProtectionDomain,
    cq: &CompletionQueue,
    raw: (NonNull<ibv_comp_channel>, NonNull<ibv_cq>, NonNull<ibv_qp>, NonNull<ibv_srq>),
) {
    let _ = CompletionChannel::from_raw(context, raw.0); //~ E0133 from_raw
    let _ = context.completion_queue(1).from_raw(raw.1); //~ E0133 from_raw
    let _ = pd.queue_pair(cq, cq).from_raw(raw.2); //~ E0133 from_raw
    let _ = pd.shared_receive_queue(1).from_raw(raw.3); //~ E0133 from_raw
}

fn others(pd: &ProtectionDomain, ah: NonNull<ibv_ah>, mr: NonNull<ibv_mr>) {
    let _ = AddressHandle::from_raw(pd, ah); //~ E0133 from_raw
    let _ = RawMemoryRegion::from_raw(pd, mr); //~ E0133 from_raw
}
