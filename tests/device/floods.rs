//! A server that is flooded by one client: it lives on, and serves the others.

use std::collections::VecDeque;

use rdma_safe::{Buffer, Endpoint, EndpointKey, EndpointSet, ProtectionDomain, ReceivePool};

use crate::support::lab::Mode;
use crate::support::{DEADLINE, Rdma, device, pattern};

const DEPTH: u32 = 256;
const LEN: usize = 64;
/// Sends of each endpoint of the server, far less than the requests that the flooding client keeps in flight.
const SENDS: u32 = 16;
const FLOOD: usize = 48;

/// The server of the documentation of `EndpointSet`, and its clients.
struct Server {
    clients: EndpointSet,
    pool: ReceivePool,
    ends: Vec<Client>,
}

/// A client that keeps up to `window` requests in flight.
struct Client {
    key: EndpointKey,
    endpoint: Endpoint,
    window: usize,
    /// Seeds of the requests in flight.
    asked: VecDeque<u64>,
    next: u64,
    answered: usize,
    idle: Vec<Buffer>,
}

impl Client {
    /// Takes what is done, and sends requests up to the window while `more`.
    fn step(&mut self, more: bool) {
        while let Some(done) = self.endpoint.poll().unwrap() {
            let done = done.ok().unwrap();
            let (is_answer, buffer) = (done.id.is_receive(), done.buffer.unwrap());
            if is_answer {
                let seed = self.asked.pop_front().expect("an answer without a request");
                assert!(*buffer == *pattern(seed, LEN), "the answer is of another request");
                self.answered += 1;
            }
            self.idle.push(buffer);
        }
        while more && self.asked.len() < self.window && self.idle.len() >= 2 {
            let (inbox, mut request) = (self.idle.pop().unwrap(), self.idle.pop().unwrap());
            self.endpoint.receive(inbox).unwrap();
            request.fill_from(&pattern(self.next, LEN)).unwrap();
            self.endpoint.send(request).unwrap();
            self.asked.push_back(self.next);
            self.next += 1;
        }
    }
}

impl Server {
    fn new(rdma: &Rdma, pd: &ProtectionDomain, mode: Mode, windows: &[usize]) -> Self {
        let mut pool = ReceivePool::new(pd, DEPTH).unwrap();
        for buffer in pd.allocate(DEPTH as usize * LEN).unwrap().into_chunks(LEN).unwrap() {
            pool.receive(buffer).unwrap();
        }
        let room = pool.shared_receive_queue().max_wr() + windows.len() as u32 * SENDS;
        let mut clients = EndpointSet::builder(pd.context(), room).classic_poll(mode.classic_cq).build().unwrap();
        let ends = windows.iter().enumerate().map(|(index, window)| {
            let builder = rdma.endpoint(pd).classic_post(mode.classic_qp);
            let server = builder.clone().send_depth(SENDS).pending_sends(2 * FLOOD as u32).receive_pool(&pool);
            let key = server.build_in(&mut clients).unwrap();
            let mut endpoint = builder.classic_poll(mode.classic_cq).build().unwrap();
            let mut client = clients.endpoint(key).unwrap();
            client.connect(&endpoint.address()).unwrap();
            endpoint.connect(&client.address()).unwrap();
            let idle = pd.allocate(window * 4 * LEN).unwrap().into_chunks(LEN).unwrap();
            let next = index as u64 * 1_000_000;
            Client { key, endpoint, window: *window, asked: VecDeque::new(), next, answered: 0, idle }
        });
        let ends = ends.collect();
        Server { clients, pool, ends }
    }

    /// One round of the documented loop.
    fn serve(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        let Server { clients, pool, .. } = self;
        let (key, done) = clients.wait(DEADLINE)?;
        let Some(mut client) = clients.endpoint(key) else { return Ok(()) };
        match done.ok() {
            Ok(done) => {
                let buffer = done.buffer.unwrap();
                if done.id.is_receive() {
                    client.send(buffer)?; // a request: answer it, out of the buffer that it has come in
                } else {
                    pool.receive(buffer)?; // the answer has left: its buffer is free for the next request
                }
            }
            Err(failed) => {
                let buffers = clients.remove(key)?;
                for buffer in buffers.into_iter().chain(failed.0.buffer) {
                    pool.receive(buffer)?;
                }
            }
        }
        Ok(())
    }
}

#[test]
fn a_client_with_more_requests_in_flight_than_the_server_has_sends_is_served_beside_the_others() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        println!("{mode}");
        let pd = rdma.pd();
        let mut server = Server::new(&rdma, &pd, mode, &[FLOOD, 1, 1]);
        let total = |server: &Server| server.ends.iter().map(|client| client.answered).sum::<usize>();
        // The flood is in the server's queue before it looks.
        server.ends.iter_mut().for_each(|client| client.step(true));
        while server.ends[1..].iter().any(|client| client.answered < 40) || server.ends[0].answered < 10 * FLOOD {
            let before = total(&server);
            server.serve().unwrap();
            server.ends.iter_mut().for_each(|client| client.step(true));
            assert!(total(&server) >= before);
        }
        let keys: Vec<_> = server.clients.keys().collect();
        assert!(server.ends.iter().all(|client| keys.contains(&client.key)), "the server has removed a client");
        // All that is in flight is answered, and the pool is whole again.
        while server.ends.iter().any(|client| !client.asked.is_empty())
            || server.pool.receives_in_flight() < DEPTH as usize
        {
            if server.pool.receives_in_flight() < DEPTH as usize {
                server.serve().unwrap();
            }
            server.ends.iter_mut().for_each(|client| client.step(false));
        }
    }
}
