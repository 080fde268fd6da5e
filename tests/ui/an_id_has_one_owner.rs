//! An id that could be cloned would be destroyed twice, and one that is used after its end is freed memory. That of a connection is
//! only looked at: it stays as long as the connection, and reports where that listens.

use rdma_safe::cm::{Connection, EventChannel, Id, Listener, PreparedRoute, Request};

fn main() {}

fn clone<T: Clone>(_: &T) {}

fn two_owners(id: &Id, listener: &Listener, connection: &Connection) {
    clone(id);
    clone(listener);
    clone(connection);
}

fn after_its_end(mut id: Id) {
    id.destroy().unwrap();
    id.disconnect().unwrap();
}

fn of_a_connection(connection: &mut Connection, channel: &EventChannel) {
    connection.id().migrate(channel).unwrap();
    connection.id().destroy().unwrap();
}

fn answered_twice(request: Request) {
    request.reject(b"no").unwrap();
    request.reject(b"no").unwrap();
}

fn connected_twice(route: PreparedRoute) {
    drop(route.connect(b"one"));
    drop(route.connect(b"other"));
}

fn words_of_one_that_is_gone(connection: Connection) {
    let words = connection.private_data();
    connection.disconnect().unwrap();
    println!("{words:?}");
}
