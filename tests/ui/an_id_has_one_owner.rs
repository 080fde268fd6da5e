//! A cloned id would be destroyed twice, and a destroyed id must not be used. A connection lends its id immutably, so the id lives
//! as long as the connection and cannot migrate to another channel.

use rdma_safe::cm::{Connection, EventChannel, Id, Listener, PreparedRoute, Request};

fn main() {}

fn clone<T: Clone>(_: &T) {}

fn two_owners(id: &Id, listener: &Listener, connection: &Connection) {
    clone(id); //~ E0277 Clone
    clone(listener); //~ E0277 Clone
    clone(connection); //~ E0277 Clone
}

fn used_after_destroy(mut id: Id) {
    id.destroy().unwrap();
    id.disconnect().unwrap(); //~ E0382 id
}

fn of_a_connection(connection: &mut Connection, channel: &EventChannel) {
    connection.id().migrate(channel).unwrap(); //~ E0596
    connection.id().destroy().unwrap(); //~ E0507
}

fn answered_twice(request: Request) {
    request.reject(b"no").unwrap();
    request.reject(b"no").unwrap(); //~ E0382 request
}

fn connected_twice(route: PreparedRoute) {
    drop(route.connect(b"one"));
    drop(route.connect(b"other")); //~ E0382 route
}

fn private_data_of_a_closed_connection(connection: Connection) {
    let data = connection.private_data();
    connection.disconnect().unwrap(); //~ E0505 connection
    println!("{data:?}");
}
