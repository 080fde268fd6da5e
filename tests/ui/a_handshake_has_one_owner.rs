//! Advancing takes the handshake, so that no program advances one that is complete or has failed. A handshake of a member of a
//! set needs the set. Events come from the channel only.

use rdma_safe::cm::{Connection, EventKind, Handshake, Outcome, PreparedRequest, SetConnection};

fn main() {}

fn clone<T: Clone>(_: &T) {}

fn two_owners(handshake: &Handshake<Connection>) {
    clone(handshake); //~ E0277 Clone
}

fn advanced_twice(handshake: Handshake<Connection>) {
    let _failed = handshake.advance().unwrap_err();
    let _ = handshake.advance(); //~ E0382 handshake
}

fn rejected_while_accepting(request: PreparedRequest) {
    let accepting = request.start_accept(b"").unwrap();
    drop(request); //~ E0382 request
    drop(accepting);
}

fn advanced_without_its_set(handshake: Handshake<SetConnection>) {
    let _ = handshake.advance(); //~ E0599 advance
}

fn waited_for_without_its_set(handshake: Handshake<SetConnection>) {
    let _ = handshake.wait(); //~ E0599 wait
}

fn forged_event(handshake: Handshake<Connection>, event: EventKind) {
    let _ = Connection::handle(handshake, Ok(Some(event)), &mut ()); //~ E0308
}
