//! A server whose clients are connected by address, and that takes the requests of all from one pool of receives.

use rdma_safe::cm::{Connection, Connector, Listener};
use rdma_safe::{Endpoint, Operation, ReceivePool};

use crate::cm::address;
use crate::cm_connections::filled;
use crate::support::{DEADLINE, device, pattern, within_deadline};

const CLIENTS: u64 = 24;
const LEN: usize = 300;
const DEPTH: u32 = 32;

/// A request, its answer out of the same buffer, and the buffer back to the pool.
fn serve(client: &mut Connection, server: &mut Connection, pool: &mut ReceivePool, seed: u64) {
    let request = pattern(seed, LEN);
    let inbox = client.pd().allocate(LEN).unwrap();
    client.receive(inbox).unwrap();
    let outbox = filled(client.pd(), &request);
    client.send(outbox).unwrap();
    let arrived = server.wait(DEADLINE).unwrap().ok().unwrap();
    assert_eq!(arrived.operation, Operation::Receive);
    let buffer = arrived.buffer.unwrap();
    assert!(*buffer == *request, "the request of another");
    server.send(buffer).unwrap();
    pool.receive(server.wait(DEADLINE).unwrap().ok().unwrap().buffer.unwrap()).unwrap();
    let done = [0, 1].map(|_| client.wait(DEADLINE).unwrap().ok().unwrap());
    let answer = done.into_iter().find(|done| done.operation == Operation::Receive).expect("an answer");
    assert!(*answer.buffer.unwrap() == *request);
}

#[test]
fn many_clients_by_address_share_a_pool_of_receives() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let pd = rdma.pd();
    let mut pool = ReceivePool::new(&pd, DEPTH).unwrap();
    for buffer in pd.allocate(DEPTH as usize * 512).unwrap().into_chunks(512).unwrap() {
        pool.receive(buffer).unwrap();
    }
    let mut listener = Listener::bind((address, 0)).unwrap().pd(&pd);
    let (local, connector) = (listener.local_address(), Connector::new());
    let mut accept = |pool: &ReceivePool| {
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| connector.connect(local.ip().unwrap()).unwrap());
            let request = listener.next(DEADLINE).unwrap().expect("a request in time");
            assert!(!request.parameters().srq, "the client has receives of its own");
            let builder = Endpoint::builder(&pd).send_depth(4).recv_depth(8).receive_pool(pool);
            let server = request.prepare(builder).unwrap().accept(b"").unwrap();
            assert!(server.queue_pair().shared_receive_queue().is_some());
            (connecting.join().unwrap(), server)
        })
    };
    let mut ends: Vec<_> = (0..CLIENTS).map(|_| accept(&pool)).collect();
    for round in 0..3 {
        for (number, (client, server)) in (0..).zip(&mut ends) {
            serve(client, server, &mut pool, round * CLIENTS + number);
        }
    }
    // One goes, with a request that nobody has looked at: its buffer comes back, and the others are served.
    let (mut client, mut server) = ends.remove(5);
    let outbox = filled(client.pd(), b"last words");
    client.send(outbox).unwrap();
    let _ = client.wait(DEADLINE).unwrap().ok().unwrap();
    drop(client);
    within_deadline("the end", || (!server.is_connected().unwrap()).then_some(()));
    let buffers = server.disconnect().unwrap();
    assert_eq!(buffers.iter().map(|buffer| &**buffer).collect::<Vec<_>>(), [b"last words"]);
    for buffer in buffers {
        pool.receive(buffer).unwrap();
    }
    ends.push(accept(&pool));
    for (number, (client, server)) in (100..).zip(&mut ends) {
        serve(client, server, &mut pool, number);
    }
    assert_eq!(pool.receives_in_flight(), DEPTH as usize);
}
