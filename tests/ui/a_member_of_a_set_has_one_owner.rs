//! A cloned member could disconnect twice, and after the disconnect it has no endpoint. A member does not borrow its set, so the
//! set stays usable.

use rdma_safe::cm::SetConnection;
use rdma_safe::{EndpointBuilder, EndpointSet};

fn main() {}

fn clone<T: Clone>(_: &T) {}

fn two_owners(member: &SetConnection) {
    clone(member); //~ E0277 Clone
}

fn used_after_disconnect(member: SetConnection, set: &mut EndpointSet) {
    member.disconnect(set).unwrap();
    member.key(); //~ E0382 member
}

fn used_during_a_batch(member: &mut SetConnection, set: &mut EndpointSet) {
    let mut endpoint = set.endpoint(member.key()).unwrap();
    let batch = endpoint.batch().unwrap();
    member.is_connected(set).unwrap(); //~ E0499 set
    batch.post().unwrap();
}

fn answered_twice(request: rdma_safe::cm::Request, builder: EndpointBuilder<'_>, set: &mut EndpointSet) {
    request.accept_in(builder, set, b"").unwrap();
    request.reject(b"").unwrap(); //~ E0382 request
}
