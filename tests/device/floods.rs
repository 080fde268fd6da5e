//! A server that one client floods keeps running and serves the other clients.

use std::collections::VecDeque;
use std::time::Instant;

use rdma_safe::{
    Buffer, Completion, Endpoint, EndpointBuilder, EndpointKey, EndpointSet, ProtectionDomain, ReceivePool,
};

use crate::support::lab::Mode;
use crate::support::{DEADLINE, Rdma, device, pattern};

const DEPTH: u32 = 256;
const LEN: usize = 64;
/// Sends of each endpoint of the server, far less than the requests that the flooding client keeps in flight.
const SENDS: u32 = 16;
const FLOOD: usize = 48;
/// Requests that a client may have unanswered.
const SHARE: u32 = 64;

/// How the server limits a client.
#[derive(Clone, Copy)]
enum Limit {
    Share,
    Pending,
}

impl Limit {
    fn apply(self, builder: EndpointBuilder<'_>) -> EndpointBuilder<'_> {
        match self {
            Limit::Share => builder.receive_share(SHARE),
            Limit::Pending => builder.pending_sends(2 * FLOOD as u32),
        }
    }
}

/// The server of the documentation of `EndpointSet`, and its clients.
struct Server {
    clients: EndpointSet,
    pool: ReceivePool,
    ends: Vec<Client>,
    /// The shares that removed clients have exceeded.
    exceeded: Vec<Option<u32>>,
}

/// A client that keeps up to `window` requests in flight.
struct Client {
    key: EndpointKey,
    endpoint: Endpoint,
    window: usize,
    /// Seeds of the requests in flight.
    requests: VecDeque<u64>,
    next: u64,
    answered: usize,
    idle: Vec<Buffer>,
    /// Whether it posts receives for answers.
    receives_answers: bool,
}

impl Client {
    /// Takes completions and, if `more`, sends requests up to the window.
    fn step(&mut self, more: bool) {
        while let Some(done) = self.endpoint.poll().unwrap() {
            // The server disconnects a client that does not listen.
            let Ok(done) = done.ok() else {
                assert!(!self.receives_answers);
                continue;
            };
            let (is_answer, buffer) = (done.id.is_receive(), done.buffer.unwrap());
            if is_answer {
                let seed = self.requests.pop_front().expect("an answer without a request");
                assert!(*buffer == *pattern(seed, LEN), "the answer is of another request");
                self.answered += 1;
            }
            self.idle.push(buffer);
        }
        while more && self.requests.len() < self.window && self.idle.len() >= 2 {
            let (inbox, mut request) = (self.idle.pop().unwrap(), self.idle.pop().unwrap());
            if self.receives_answers {
                self.endpoint.receive(inbox).unwrap();
            }
            request.fill_from(&pattern(self.next, LEN)).unwrap();
            self.endpoint.send(request).unwrap();
            self.requests.push_back(self.next);
            self.next += 1;
        }
    }
}

impl Server {
    fn new(rdma: &Rdma, pd: &ProtectionDomain, mode: Mode, windows: &[usize], limit: Limit) -> Self {
        let mut pool = ReceivePool::new(pd, DEPTH).unwrap();
        for buffer in pd.allocate(DEPTH as usize * LEN).unwrap().into_chunks(LEN).unwrap() {
            pool.receive(buffer).unwrap();
        }
        let room = pool.shared_receive_queue().max_wr() + windows.len() as u32 * SENDS;
        let mut clients = EndpointSet::builder(pd.context(), room).classic_poll(mode.classic_cq).build().unwrap();
        let ends = windows.iter().enumerate().map(|(index, window)| {
            let builder = rdma.endpoint(pd).classic_post(mode.classic_qp);
            let server = builder.clone().send_depth(SENDS).receive_pool(&pool);
            let key = limit.apply(server).build_in(&mut clients).unwrap();
            let mut endpoint = builder.classic_poll(mode.classic_cq).build().unwrap();
            let mut client = clients.endpoint(key).unwrap();
            client.connect(&endpoint.address()).unwrap();
            endpoint.connect(&client.address()).unwrap();
            let idle = pd.allocate(window * 4 * LEN).unwrap().into_chunks(LEN).unwrap();
            let next = index as u64 * 1_000_000;
            let receives_answers = *window <= SHARE as usize;
            Client {
                key,
                endpoint,
                window: *window,
                requests: VecDeque::new(),
                next,
                answered: 0,
                idle,
                receives_answers,
            }
        });
        let ends = ends.collect();
        Server { clients, pool, ends, exceeded: Vec::new() }
    }

    /// One round of the documented loop.
    fn serve(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        let (key, done) = self.clients.wait(DEADLINE)?;
        self.handle(key, done)
    }

    fn handle(&mut self, key: EndpointKey, done: Completion) -> Result<(), Box<dyn std::error::Error>> {
        let Server { clients, pool, exceeded, .. } = self;
        let Some(mut client) = clients.endpoint(key) else { return Ok(()) };
        match done.ok() {
            Ok(done) => {
                let buffer = done.buffer.unwrap();
                if done.id.is_receive() {
                    client.send(buffer)?; // a request: answer it from the same buffer
                } else {
                    pool.receive(buffer)?; // the answer was sent: its buffer is free for the next request
                }
            }
            Err(failed) => {
                exceeded.push(failed.0.exceeded_share());
                let buffers = clients.remove(key)?;
                for buffer in buffers.into_iter().chain(failed.0.buffer) {
                    pool.receive(buffer)?;
                }
            }
        }
        Ok(())
    }

    /// Answers all requests in flight, until all receives of the pool are posted again.
    fn finish(&mut self) {
        let deadline = Instant::now() + DEADLINE;
        while self.ends.iter().any(|client| !client.requests.is_empty())
            || self.pool.receives_in_flight() < DEPTH as usize
        {
            assert!(Instant::now() < deadline, "requests are unanswered");
            // A receive counts as in flight until its completion is polled, so requests may be in flight while the count is full.
            if let Some((key, done)) = self.clients.poll().unwrap() {
                self.handle(key, done).unwrap();
            }
            self.ends.iter_mut().for_each(|client| client.step(false));
        }
    }
}

#[test]
fn a_client_with_more_requests_than_the_server_has_sends_does_not_starve_others() {
    let Some(rdma) = device() else { return };
    for (index, mode) in Mode::ALL.into_iter().enumerate() {
        println!("{mode}");
        let pd = rdma.pd();
        let limit = if index % 2 == 0 { Limit::Share } else { Limit::Pending };
        let mut server = Server::new(&rdma, &pd, mode, &[FLOOD, 1, 1], limit);
        let total = |server: &Server| server.ends.iter().map(|client| client.answered).sum::<usize>();
        // The flood is in the server's queue before the server polls.
        server.ends.iter_mut().for_each(|client| client.step(true));
        while server.ends[1..].iter().any(|client| client.answered < 40) || server.ends[0].answered < 10 * FLOOD {
            let before = total(&server);
            server.serve().unwrap();
            server.ends.iter_mut().for_each(|client| client.step(true));
            assert!(total(&server) >= before);
        }
        let keys: Vec<_> = server.clients.keys().collect();
        assert!(server.ends.iter().all(|client| keys.contains(&client.key)), "the server has removed a client");
        server.finish();
    }
}

#[test]
fn a_client_that_exceeds_its_share_is_disconnected_and_others_are_served() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        println!("{mode}");
        let pd = rdma.pd();
        // The first client acknowledges no answers. So its answers, and then its requests up to its share, keep receives occupied.
        let windows = [2 * SHARE as usize, 1, 1];
        let mut server = Server::new(&rdma, &pd, mode, &windows, Limit::Share);
        let flooding = server.ends[0].key;
        while server.exceeded.is_empty() || server.ends[1..].iter().any(|client| client.answered < 40) {
            server.ends.iter_mut().for_each(|client| client.step(true));
            server.serve().unwrap();
            // The backlog never exceeds the share. It is `None` once the client was removed.
            let waiting = server.clients.backlog(flooding).unwrap_or(0);
            assert!(waiting <= SHARE, "{waiting}");
        }
        assert_eq!((&server.exceeded[..], server.ends.remove(0).answered), (&[Some(SHARE)][..], 0));
        assert_eq!(server.clients.len(), 2);
        server.finish();
    }
}
