//! A cloned handle would destroy its object twice, and a cloned buffer would give memory two owners.

use rdma_safe::{AddressHandle, Buffer, CompletionQueue, Endpoint, ExposedRegion, QueuePair, RawMemoryRegion};
use rdma_safe::mr::ProviderMemory;

fn main() {}

fn clone<T: Clone>(_: &T) {}

fn all(qp: &QueuePair, cq: &CompletionQueue, endpoint: &Endpoint) {
    clone(qp); //~ E0277 Clone
    clone(cq); //~ E0277 Clone
    clone(endpoint); //~ E0277 Clone
}

fn memory(buffer: &Buffer, exposed: &ExposedRegion, raw: &RawMemoryRegion, provider: &ProviderMemory) {
    clone(buffer); //~ E0277 Clone
    clone(exposed); //~ E0277 Clone
    clone(raw); //~ E0277 Clone
    clone(provider); //~ E0277 Clone
}

fn destination(handle: &AddressHandle) {
    clone(handle); //~ E0277 Clone
}
