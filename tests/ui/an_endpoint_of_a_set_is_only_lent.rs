//! A set looks up the endpoint of a completion by its key. If an endpoint could be moved out or swapped, completions of another
//! endpoint would release its buffers. A set lends one endpoint at a time, since no batch may be open while its queue is polled.

use rdma_safe::{EndpointKey, EndpointSet};

fn main() {}

fn exchange(a: &mut EndpointSet, b: &mut EndpointSet, key: EndpointKey) {
    std::mem::swap(a.endpoint(key).unwrap().poster, b.endpoint(key).unwrap().poster); //~ E0616
}

fn take(set: &mut EndpointSet, key: EndpointKey) -> rdma_safe::Endpoint {
    *set.endpoint(key).unwrap() //~ E0614
}

fn both(set: &mut EndpointSet, keys: [EndpointKey; 2]) {
    let mut one = set.endpoint(keys[0]).unwrap();
    let mut other = set.endpoint(keys[1]).unwrap(); //~ E0499 set
    one.send_inline(b"one").unwrap();
    other.send_inline(b"other").unwrap();
}

fn poll_during_a_batch(set: &mut EndpointSet, key: EndpointKey) {
    let mut endpoint = set.endpoint(key).unwrap();
    let batch = endpoint.batch().unwrap();
    set.poll().unwrap(); //~ E0499 set
    batch.post().unwrap();
}

fn keep(set: EndpointSet, key: EndpointKey) {
    let mut set = set;
    let endpoint = set.endpoint(key).unwrap();
    drop(set); //~ E0505 set
    endpoint.sends_in_flight();
}
