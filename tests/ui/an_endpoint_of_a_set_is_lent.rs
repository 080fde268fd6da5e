//! Completions find their endpoint by its place in the set: one that could be taken out, or exchanged for another, would have its
//! buffers released by the completions of that. And it is lent to one user at a time, since a batch of it is not to be open
//! while the queue is polled.

use rdma_safe::{EndpointKey, EndpointSet};

fn main() {}

fn exchange(a: &mut EndpointSet, b: &mut EndpointSet, key: EndpointKey) {
    std::mem::swap(a.endpoint(key).unwrap().poster, b.endpoint(key).unwrap().poster);
}

fn take(set: &mut EndpointSet, key: EndpointKey) -> rdma_safe::Endpoint {
    *set.endpoint(key).unwrap()
}

fn both(set: &mut EndpointSet, keys: [EndpointKey; 2]) {
    let mut one = set.endpoint(keys[0]).unwrap();
    let mut other = set.endpoint(keys[1]).unwrap();
    one.send_inline(b"one").unwrap();
    other.send_inline(b"other").unwrap();
}

fn poll_amid_a_batch(set: &mut EndpointSet, key: EndpointKey) {
    let mut endpoint = set.endpoint(key).unwrap();
    let batch = endpoint.batch().unwrap();
    set.poll().unwrap();
    batch.post().unwrap();
}

fn keep(set: EndpointSet, key: EndpointKey) {
    let mut set = set;
    let endpoint = set.endpoint(key).unwrap();
    drop(set);
    endpoint.sends_in_flight();
}
