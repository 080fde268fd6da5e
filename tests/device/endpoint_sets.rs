//! Endpoints that share a completion queue and a pool of receives, as those of a server.

use rdma_safe::{
    Completion, ConnectOptions, Endpoint, EndpointKey, EndpointSet, Error, Operation, ProtectionDomain, ReceivePool,
    WcStatus,
};

use crate::owned::wait;
use crate::support::lab::Mode;
use crate::support::{DEADLINE, Rdma, device, error_of, pattern};

const CLIENTS: usize = 12;
const DEPTH: u32 = 32;
const SENDS: u32 = 8;
const LEN: usize = 600;

struct Server {
    set: EndpointSet,
    pool: ReceivePool,
    clients: Vec<(EndpointKey, Endpoint)>,
}

impl Server {
    fn new(rdma: &Rdma, pd: &ProtectionDomain, mode: Mode, events: bool) -> Self {
        let mut pool = ReceivePool::new(pd, DEPTH).unwrap();
        for buffer in pd.allocate(DEPTH as usize * 1024).unwrap().into_chunks(1024).unwrap() {
            pool.receive(buffer).unwrap();
        }
        let room = pool.shared_receive_queue().max_wr() + CLIENTS as u32 * SENDS;
        let set = EndpointSet::builder(pd.context(), room).events(events).classic_poll(mode.classic_cq);
        let mut server = Server { set: set.build().unwrap(), pool, clients: Vec::new() };
        for _ in 0..CLIENTS {
            let client = server.add(rdma, pd, mode);
            server.clients.push(client);
        }
        server
    }

    fn add(&mut self, rdma: &Rdma, pd: &ProtectionDomain, mode: Mode) -> (EndpointKey, Endpoint) {
        let builder = rdma.endpoint(pd).send_depth(SENDS).recv_depth(SENDS).classic_post(mode.classic_qp);
        let key = builder.clone().receive_pool(&self.pool).build_in(&mut self.set).unwrap();
        let mut peer = builder.classic_poll(mode.classic_cq).build().unwrap();
        // Not for as long as it takes by default until a peer counts as lost.
        let options = ConnectOptions::default().retry_count(3);
        let mut endpoint = self.set.endpoint(key).unwrap();
        endpoint.connect_with(&peer.address(), &options).unwrap();
        peer.connect_with(&endpoint.address(), &options).unwrap();
        (key, peer)
    }

    /// Lets all clients but `but` ask at once, answers each out of the buffer that its request has come in, and returns what
    /// completed of `but`.
    fn serve(&mut self, pd: &ProtectionDomain, round: u64, but: Option<EndpointKey>) -> Vec<Completion> {
        let text = |client: usize| pattern(round * CLIENTS as u64 + client as u64, LEN);
        let mut asked = 0;
        for (client, (key, peer)) in self.clients.iter_mut().enumerate() {
            if Some(*key) != but {
                peer.receive(pd.allocate(LEN).unwrap()).unwrap();
                let mut request = pd.allocate(LEN).unwrap();
                request.copy_from_slice(&text(client));
                peer.send(request).unwrap();
                asked += 1;
            }
        }
        let (mut answered, mut others) = (0, Vec::new());
        while answered < asked {
            let (key, done) = self.set.wait(DEADLINE).unwrap();
            if Some(key) == but {
                others.push(done);
                continue;
            }
            let done = done.ok().unwrap();
            let buffer = done.buffer.unwrap();
            if done.operation == Operation::Receive {
                let client = self.clients.iter().position(|(known, _)| *known == key).expect("a key of the set");
                assert!(*buffer == *text(client), "the request is of another client");
                self.set.endpoint(key).unwrap().send(buffer).unwrap();
            } else {
                self.pool.receive(buffer).unwrap();
                answered += 1;
            }
        }
        for (client, (key, peer)) in self.clients.iter_mut().enumerate() {
            if Some(*key) != but {
                let done = [wait(peer), wait(peer)];
                let answer = done.into_iter().find(|done| done.id.is_receive()).expect("an answer");
                assert!(*answer.buffer.unwrap() == *text(client), "the answer is of another client");
            }
        }
        others
    }
}

#[test]
fn a_client_that_dies_leaves_the_others_of_its_set_served() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        for events in [false, true] {
            println!("{mode}, events {events}");
            let pd = rdma.pd();
            let mut server = Server::new(&rdma, &pd, mode, events);
            for round in 0..3 {
                assert!(server.serve(&pd, round, None).is_empty());
            }
            let error = error_of(rdma.endpoint(&pd).receive_pool(&server.pool).build_in(&mut server.set));
            assert!(matches!(error, Error::EndpointSetFull { .. }), "{error}");

            let (dead, peer) = server.clients.remove(CLIENTS / 2);
            drop(peer);
            for _ in 0..3 {
                server.set.endpoint(dead).unwrap().send(pd.allocate(LEN).unwrap()).unwrap();
            }
            let mut lost = Vec::new();
            let mut round = 3;
            while lost.len() < 3 {
                lost.extend(server.serve(&pd, round, Some(dead)));
                round += 1;
            }
            let statuses: Vec<_> = lost.iter().map(|done| (done.operation, done.status)).collect();
            let flushed = (Operation::Send, WcStatus::WR_FLUSH_ERR);
            assert_eq!(statuses, [(Operation::Send, WcStatus::RETRY_EXC_ERR), flushed, flushed]);
            assert!(lost.iter().all(|done| done.buffer.as_ref().is_some_and(|buffer| buffer.len() == LEN)));

            assert!(server.set.remove(dead).unwrap().is_empty());
            assert!(server.set.endpoint(dead).is_none());
            let newcomer = server.add(&rdma, &pd, mode);
            assert_eq!(newcomer.0.index(), dead.index());
            server.clients.push(newcomer);
            for round in round..round + 3 {
                assert!(server.serve(&pd, round, None).is_empty());
            }
            assert_eq!(server.pool.receives_in_flight(), DEPTH as usize);
        }
    }
}

#[test]
fn requests_that_a_client_has_left_behind_come_back_when_it_is_removed() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        println!("{mode}");
        let pd = rdma.pd();
        let mut server = Server::new(&rdma, &pd, mode, false);
        for (client, (_, peer)) in server.clients.iter_mut().enumerate() {
            for seed in 0..2 {
                let mut request = pd.allocate(LEN).unwrap();
                request.copy_from_slice(&pattern(client as u64 * 2 + seed, LEN));
                peer.send(request).unwrap();
            }
            // Both have arrived then.
            assert_eq!([wait(peer), wait(peer)].map(|done| done.operation), [Operation::Send; 2]);
        }
        for client in [7, 3, 0] {
            let (key, _peer) = server.clients.remove(client);
            let buffers = server.set.remove(key).unwrap();
            assert_eq!(buffers.len(), 2);
            for (seed, buffer) in buffers.into_iter().enumerate() {
                assert!(*buffer == *pattern(client as u64 * 2 + seed as u64, LEN));
                server.pool.receive(buffer).unwrap();
            }
        }
        let mut left = 2 * server.clients.len();
        while left > 0 {
            let (key, request) = server.set.wait(DEADLINE).unwrap();
            assert!(server.clients.iter().any(|(known, _)| *known == key));
            let request = request.ok().unwrap();
            server.pool.receive(request.buffer.unwrap()).unwrap();
            left -= 1;
        }
        assert_eq!(server.pool.receives_in_flight(), DEPTH as usize);
    }
}
