//! A handle that destroys on drop and can be cloned destroys twice; a buffer that can be cloned is memory with two owners.

use rdma_safe::{AddressHandle, Buffer, CompletionQueue, Endpoint, ExposedRegion, ProviderMemory, QueuePair, RawMemoryRegion};

fn main() {}

fn clone<T: Clone>(_: &T) {}

fn all(qp: &QueuePair, cq: &CompletionQueue, endpoint: &Endpoint) {
    clone(qp);
    clone(cq);
    clone(endpoint);
}

fn memory(buffer: &Buffer, exposed: &ExposedRegion, raw: &RawMemoryRegion, provider: &ProviderMemory) {
    clone(buffer);
    clone(exposed);
    clone(raw);
    clone(provider);
}

fn destination(handle: &AddressHandle) {
    clone(handle);
}
