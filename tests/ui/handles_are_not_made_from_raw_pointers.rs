//! Safe code has no way to make a handle of a pointer that may be anything.

use std::ptr::NonNull;

use rdma_safe::sys::{ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_mr, ibv_pd, ibv_qp};
use rdma_safe::{
    Buffer, CompletionChannel, CompletionQueue, Context, Device, ExposedRegion, ProtectionDomain, QueuePair, RawMemoryRegion,
};

fn main() {}

fn make<Raw, Handle: From<Raw>>(_: Raw) {}

fn handles(device: *mut ibv_device, context: *mut ibv_context, pd: *mut ibv_pd, channel: *mut ibv_comp_channel) {
    make::<_, Device>(device);
    make::<_, Context>(context);
    make::<_, ProtectionDomain>(pd);
    make::<_, CompletionChannel>(channel);
}

fn queues(cq: *mut ibv_cq, qp: *mut ibv_qp) {
    make::<_, CompletionQueue>(cq);
    make::<_, QueuePair>(qp);
}

fn memory(mr: *mut ibv_mr, bytes: NonNull<u8>) {
    make::<_, RawMemoryRegion>(mr);
    make::<_, ExposedRegion>(mr);
    make::<_, Buffer>(bytes);
}
