//! A dropped handshake ends, and the peer gets an error.
#![deny(unused_must_use)]

use rdma_safe::EndpointSet;
use rdma_safe::cm::{Connection, Handshake, PreparedRequest, SetConnection};

fn main() {}

fn never_advanced(request: PreparedRequest) {
    request.start_accept(b"").unwrap(); //~ unused_must_use Handshake
}

fn advanced_once(handshake: Handshake<Connection>) {
    handshake.advance().unwrap(); //~ unused_must_use Progress
}

fn advanced_once_in_a_set(handshake: Handshake<SetConnection>, set: &mut EndpointSet) {
    handshake.advance_in(set).unwrap(); //~ unused_must_use Progress
}
