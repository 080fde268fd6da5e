//! Programs that use the owned API of rdma-safe from many threads, over soft0 in the same process.
//!
//! They contain safe code only, so sanitizers must report nothing: `cargo xtask test --only sanitize`. soft0 is Rust code in
//! the same process, so ThreadSanitizer sees both sides of each access to registered memory.

#![forbid(unsafe_code)]
#![cfg(test)]

mod events;
mod exposed;
mod lifetime;
mod shared;

use std::time::Duration;

use rdma_safe::{Completion, Device, Endpoint, EndpointBuilder, ProtectionDomain};

/// Deadline for a test that hangs.
const HANG: Duration = Duration::from_secs(120);

/// A protection domain of soft0.
fn domain() -> ProtectionDomain {
    rdma_safe::soft::install().unwrap();
    Device::by_name("soft0").unwrap().open().unwrap().alloc_pd().unwrap()
}

/// Two endpoints that are connected to each other.
fn connected(builder: &EndpointBuilder<'_>) -> (Endpoint, Endpoint) {
    let (mut a, mut b) = (builder.clone().build().unwrap(), builder.clone().build().unwrap());
    a.connect(&b.address()).unwrap();
    b.connect(&a.address()).unwrap();
    (a, b)
}

/// Waits for the next completion, which must be a success.
#[track_caller]
fn wait(endpoint: &mut Endpoint) -> Completion {
    endpoint.wait(HANG).unwrap().ok().unwrap()
}
