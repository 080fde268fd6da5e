//! A member that could be cloned would end its connection twice, and one that has ended it has no endpoint. It does not hold its
//! set, which others work with meanwhile.

use rdma_safe::cm::Member;
use rdma_safe::{EndpointBuilder, EndpointSet};

fn main() {}

fn clone<T: Clone>(_: &T) {}

fn two_owners(member: &Member) {
    clone(member);
}

fn after_its_end(member: Member, set: &mut EndpointSet) {
    member.disconnect(set).unwrap();
    member.key();
}

fn amid_a_batch(member: &mut Member, set: &mut EndpointSet) {
    let mut endpoint = set.endpoint(member.key()).unwrap();
    let batch = endpoint.batch().unwrap();
    member.is_connected(set).unwrap();
    batch.post().unwrap();
}

fn answered_twice(request: rdma_safe::cm::Request, builder: EndpointBuilder<'_>, set: &mut EndpointSet) {
    request.accept_in(builder, set, b"").unwrap();
    request.reject(b"").unwrap();
}
