//! The result of `arm` tells whether completions are already there. Waiting for an event would then hang.
#![deny(unused_must_use)]

use rdma_safe::{DatagramEndpoint, Endpoint, EndpointSet};

fn main() {}

fn unused(endpoint: &mut Endpoint, datagrams: &mut DatagramEndpoint, set: &mut EndpointSet) {
    endpoint.arm().unwrap(); //~ unused_must_use Armed
    datagrams.arm().unwrap(); //~ unused_must_use Armed
    set.arm().unwrap(); //~ unused_must_use Armed
}
