//! The program must not access a buffer that the device uses. Posting moves the buffer until its completion.

use rdma_safe::{Buffer, Endpoint, RemoteMemory, Work};

fn main() {}

fn read_what_arrives(endpoint: &mut Endpoint, inbox: Buffer) -> u8 {
    endpoint.receive(inbox).unwrap();
    inbox[0] //~ E0382 inbox
}

fn change_what_is_sent(endpoint: &mut Endpoint, mut outbox: Buffer) {
    endpoint.send(outbox).unwrap();
    outbox[0] = 1; //~ E0382 outbox
}

fn post_twice(endpoint: &mut Endpoint, target: Buffer, remote: RemoteMemory) {
    let mut batch = endpoint.batch().unwrap();
    batch.add(Work::read(target, remote)).unwrap();
    batch.add(Work::read(target, remote)).unwrap(); //~ E0382 target
    batch.post().unwrap();
}

fn keep_a_slice(endpoint: &mut Endpoint, inbox: Buffer) -> u8 {
    let slice = &inbox[..];
    endpoint.receive(inbox).unwrap(); //~ E0505 inbox
    slice[0]
}
