//! Waiting for an event although completions are there already hangs, so what `arm` says is not to be ignored.
#![deny(unused_must_use)]

use rdma_safe::{DatagramEndpoint, Endpoint, EndpointSet};

fn main() {}

fn unused(endpoint: &mut Endpoint, datagrams: &mut DatagramEndpoint, set: &mut EndpointSet) {
    endpoint.arm().unwrap();
    datagrams.arm().unwrap();
    set.arm().unwrap();
}
