//! A server whose endpoints share a completion queue and a receive queue.

use rdma_safe::{Endpoint, EndpointSet, ReceivePool};

use crate::{HANG, domain, wait};

const CLIENTS: usize = 4;
const ROUNDS: usize = 60;

#[test]
fn clients_of_a_shared_set_and_pool_get_their_own_bytes_back() {
    let pd = domain();
    let mut pool = ReceivePool::new(&pd, 16).unwrap();
    for buffer in pd.allocate(16 * 64).unwrap().into_chunks(64).unwrap() {
        pool.receive(buffer).unwrap();
    }
    let mut set = EndpointSet::builder(pd.context(), 16 + CLIENTS as u32 * 4).events(true).build().unwrap();
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let mut client = Endpoint::builder(&pd).build().unwrap();
        let key = Endpoint::builder(&pd).send_depth(4).receive_pool(&pool).build_in(&mut set).unwrap();
        let mut end = set.endpoint(key).unwrap();
        end.connect(&client.address()).unwrap();
        client.connect(&end.address()).unwrap();
        clients.push(client);
    }
    std::thread::scope(|scope| {
        for (number, mut client) in clients.into_iter().enumerate() {
            let (mut inbox, mut outbox) = pd.allocate(128).unwrap().into_split(64).unwrap();
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let byte = (number * 50 + round) as u8;
                    client.receive(inbox).unwrap();
                    outbox.fill(byte);
                    client.send(outbox).unwrap();
                    let done = [wait(&mut client), wait(&mut client)];
                    let [first, second] = done.map(|done| (done.id.is_receive(), done.buffer.unwrap()));
                    (inbox, outbox) = if first.0 { (first.1, second.1) } else { (second.1, first.1) };
                    assert!(inbox.iter().all(|found| *found == byte));
                }
            });
        }
        // Each message has two completions, of its receive and of the reply.
        for _ in 0..2 * CLIENTS * ROUNDS {
            let (key, done) = set.wait(HANG).unwrap();
            let done = done.ok().unwrap();
            let buffer = done.buffer.unwrap();
            if done.id.is_receive() {
                set.endpoint(key).unwrap().send(buffer).unwrap();
            } else {
                pool.receive(buffer).unwrap();
            }
        }
    });
}
