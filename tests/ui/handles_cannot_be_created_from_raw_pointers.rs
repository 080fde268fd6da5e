//! Safe code cannot create a handle from an arbitrary pointer.

use std::ptr::NonNull;

use rdma_safe::sys::{ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_mr, ibv_pd, ibv_qp};
use rdma_safe::{
    Buffer, CompletionChannel, CompletionQueue, Context, Device, ExposedRegion, ProtectionDomain, QueuePair, RawMemoryRegion,
};

fn main() {}

fn make<Raw, Handle: From<Raw>>(_: Raw) {}

fn handles(device: *mut ibv_device, context: *mut ibv_context, pd: *mut ibv_pd, channel: *mut ibv_comp_channel) {
    make::<_, Device>(device); //~ E0308
    make::<_, Context>(context); //~ E0308
    make::<_, ProtectionDomain>(pd); //~ E0308
    make::<_, CompletionChannel>(channel); //~ E0308
}

fn queues(cq: *mut ibv_cq, qp: *mut ibv_qp) {
    make::<_, CompletionQueue>(cq); //~ E0308
    make::<_, QueuePair>(qp); //~ E0308
}

fn memory(mr: *mut ibv_mr, bytes: NonNull<u8>) {
    make::<_, RawMemoryRegion>(mr); //~ E0308
    make::<_, ExposedRegion>(mr); //~ E0308
    make::<_, Buffer>(bytes); //~ E0277
}
