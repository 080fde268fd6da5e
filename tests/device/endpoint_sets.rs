//! Endpoints that share a completion queue, as in a server, with a pool of receives or receives of their own.

use std::time::Duration;

use rdma_safe::endpoint::Armed;
use rdma_safe::mr::Pages;
use rdma_safe::{
    Access, Completion, ConnectOptions, Device, Endpoint, EndpointBuilder, EndpointKey, EndpointSet, Error, Operation,
    PostError, ProtectionDomain, QueuePairType, ReceivePool, WcStatus, Work,
};

use crate::owned::wait;
use crate::support::child::{expect_kernel_objects, in_own_process};
use crate::support::lab::Mode;
use crate::support::{DEADLINE, Rdma, device, error_of, filled, pattern, rounds, within_deadline};

const CLIENTS: usize = rounds(12, 3) as usize;
const DEPTH: u32 = rounds(32, 8) as u32;
const SENDS: u32 = rounds(8, 4) as u32;
const LEN: usize = rounds(600, 40) as usize;

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
        let completions = pool.shared_receive_queue().max_wr() + CLIENTS as u32 * SENDS;
        let set = EndpointSet::builder(pd.context(), completions).events(events).classic_poll(mode.classic_cq);
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
        // Fewer retries than by default, since a test waits until the peer counts as lost.
        let options = ConnectOptions::default().retry_count(3);
        let mut endpoint = self.set.endpoint(key).unwrap();
        endpoint.connect_with(&peer.address(), &options).unwrap();
        peer.connect_with(&endpoint.address(), &options).unwrap();
        (key, peer)
    }

    /// Answers one request of each client except `excluded`, from the buffer of the request. Returns completions of `excluded`.
    fn serve(&mut self, pd: &ProtectionDomain, round: u64, excluded: Option<EndpointKey>) -> Vec<Completion> {
        let text = |client: usize| pattern(round * CLIENTS as u64 + client as u64, LEN);
        let mut asked = 0;
        for (client, (key, peer)) in self.clients.iter_mut().enumerate() {
            if Some(*key) != excluded {
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
            if Some(key) == excluded {
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
            if Some(*key) != excluded {
                let done = [wait(peer), wait(peer)];
                let answer = done.into_iter().find(|done| done.id.is_receive()).expect("an answer");
                assert!(*answer.buffer.unwrap() == *text(client), "the answer is of another client");
            }
        }
        others
    }
}

#[test]
fn clients_that_share_a_pool_are_served_after_one_of_them_dies() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        for events in [false, true] {
            if cfg!(miri) && events != mode.classic_cq {
                continue;
            }
            println!("{mode}, events {events}");
            let pd = rdma.pd();
            let mut server = Server::new(&rdma, &pd, mode, events);
            for round in 0..rounds(3, 1) {
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
            let mut round = rounds(3, 1);
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
            for round in round..round + rounds(3, 1) {
                assert!(server.serve(&pd, round, None).is_empty());
            }
            assert_eq!(server.pool.receives_in_flight(), DEPTH as usize);
        }
    }
}

#[test]
fn unread_requests_of_a_removed_client_are_returned() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        println!("{mode}");
        let pd = rdma.pd();
        let mut server = Server::new(&rdma, &pd, mode, false);
        for (client, (_, peer)) in server.clients.iter_mut().enumerate() {
            for seed in 0..2 {
                let mut request = pd.allocate(LEN).unwrap();
                request.copy_from_slice(&pattern(client as u64 * 2 + seed, LEN));
                peer.send(request).unwrap();
            }
            // After these completions, both requests have arrived.
            assert_eq!([wait(peer), wait(peer)].map(|done| done.operation), [Operation::Send; 2]);
        }
        for client in if cfg!(miri) { &[1][..] } else { &[7, 3, 0] } {
            let client = *client;
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

/// A set of a few endpoints, each connected to a peer.
pub(crate) struct Group {
    pub(crate) set: EndpointSet,
    pub(crate) keys: Vec<EndpointKey>,
    peers: Vec<Endpoint>,
}

fn small_builder<'a>(rdma: &Rdma, pd: &'a ProtectionDomain, mode: Mode) -> EndpointBuilder<'a> {
    let builder = rdma.endpoint(pd).send_depth(8).recv_depth(8).inline_data(64).peer_access(Access::REMOTE);
    builder.classic_post(mode.classic_qp).classic_poll(mode.classic_cq)
}

impl Group {
    /// The endpoints take receives from `pool` if there is one.
    pub(crate) fn new(
        rdma: &Rdma,
        pd: &ProtectionDomain,
        mode: Mode,
        endpoints: usize,
        pool: Option<&ReceivePool>,
    ) -> Self {
        let set = EndpointSet::builder(pd.context(), endpoints as u32 * 16 + 4).classic_poll(mode.classic_cq);
        let mut group = Group { set: set.build().unwrap(), keys: Vec::new(), peers: Vec::new() };
        for _ in 0..endpoints {
            group.add(rdma, pd, mode, pool);
        }
        group
    }

    fn add(&mut self, rdma: &Rdma, pd: &ProtectionDomain, mode: Mode, pool: Option<&ReceivePool>) {
        let mut builder = small_builder(rdma, pd, mode);
        let mut peer = builder.clone().build().unwrap();
        if let Some(pool) = pool {
            builder = builder.receive_pool(pool);
        }
        let key = builder.build_in(&mut self.set).unwrap();
        let mut endpoint = self.set.endpoint(key).unwrap();
        endpoint.connect(&peer.address()).unwrap();
        peer.connect(&endpoint.address()).unwrap();
        self.keys.push(key);
        self.peers.push(peer);
    }

    /// Posts a receive of 16 bytes at an endpoint of the set.
    pub(crate) fn receive(&mut self, index: usize) {
        let mut endpoint = self.set.endpoint(self.keys[index]).unwrap();
        let buffer = endpoint.pd().allocate(16).unwrap();
        endpoint.receive(buffer).unwrap();
    }

    /// Sends `text` from a peer to its endpoint, and waits until it is acknowledged.
    pub(crate) fn send(&mut self, peer: usize, text: &[u8]) {
        self.peers[peer].send_inline(text).unwrap();
        assert_eq!(wait(&mut self.peers[peer]).operation, Operation::Send);
    }

    /// Waits for the next completion. Returns the index of its endpoint, too.
    #[track_caller]
    fn next(&mut self) -> (usize, Completion) {
        let (key, completion) = self.set.wait(DEADLINE).unwrap();
        (self.keys.iter().position(|known| *known == key).expect("a key of the set"), completion)
    }

    /// Waits for the next message. Returns the index of its endpoint, too.
    #[track_caller]
    pub(crate) fn next_text(&mut self) -> (usize, Vec<u8>) {
        let (index, completion) = self.next();
        let completion = completion.ok().unwrap();
        assert_eq!(completion.operation, Operation::Receive);
        (index, completion.buffer.unwrap().to_vec())
    }

    #[track_caller]
    fn expect_none(&mut self) {
        assert!(self.set.poll().unwrap().is_none());
    }
}

/// A pool of four receives of 16 bytes.
fn small_pool(pd: &ProtectionDomain) -> ReceivePool {
    let mut pool = ReceivePool::new(pd, 4).unwrap();
    refill(&mut pool);
    pool
}

fn refill(pool: &mut ReceivePool) {
    while pool.receives_in_flight() < 4 {
        pool.receive(pool.pd().allocate(16).unwrap()).unwrap();
    }
}

#[test]
fn each_completion_names_its_endpoint() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let pd = rdma.pd();
        let mut group = Group::new(&rdma, &pd, mode, 3, None);
        let messages = [(2, b"c1"), (0, b"a1"), (2, b"c2"), (1, b"b1"), (0, b"a2")];
        for (index, _) in messages {
            group.receive(index);
        }
        for (peer, text) in messages {
            group.send(peer, text);
        }
        let received = messages.map(|_| group.next_text());
        let of = |index| received.iter().filter(move |(from, _)| *from == index).map(|(_, text)| &text[..]);
        for index in 0..3 {
            assert!(messages.iter().filter(|(to, _)| *to == index).map(|(_, text)| &text[..]).eq(of(index)), "{mode}");
        }
        // soft0 completes a receive before it acknowledges the message. An RNIC may do so later.
        if rdma.is_soft() {
            assert_eq!(received, messages.map(|(peer, text)| (peer, text.to_vec())), "{mode}");
        }
        group.expect_none();
        for (index, key) in group.keys.clone().into_iter().enumerate() {
            group.peers[index].receive(pd.allocate(16).unwrap()).unwrap();
            let id = group.set.endpoint(key).unwrap().send(filled(&pd, b"answer")).unwrap();
            let (from, sent) = group.next();
            assert_eq!((from, sent.id, sent.operation, sent.status), (index, id, Operation::Send, WcStatus::SUCCESS));
            assert_eq!(*sent.buffer.unwrap(), *b"answer");
            assert_eq!(*wait(&mut group.peers[index]).buffer.unwrap(), *b"answer");
        }
        assert_eq!(group.set.len(), 3);
    }
}

#[test]
fn a_set_reports_immediate_data_and_writes_like_a_single_endpoint() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let pd = rdma.pd();
        let pool = small_pool(&pd);
        let exposed = pd.expose(Pages::new(16).unwrap(), Access::REMOTE).unwrap();
        for pool in [Some(&pool), None] {
            let mut group = Group::new(&rdma, &pd, mode, 2, pool);
            if pool.is_none() {
                (0..3).for_each(|_| group.receive(1));
            }
            let peer = &mut group.peers[1];
            peer.post(Work::send_inline(b"with").imm(7)).unwrap();
            peer.post(Work::write_inline(b"written", exposed.remote()).imm(9)).unwrap();
            peer.post(Work::send_inline(b"without")).unwrap();
            let (index, message) = group.next();
            assert_eq!((index, message.operation, message.imm()), (1, Operation::Receive, Some(7)));
            assert_eq!(*message.buffer.unwrap(), *b"with");
            let (_, written) = group.next();
            assert_eq!((written.operation, written.imm(), written.byte_len), (Operation::ReceiveWrite, Some(9), 7));
            assert_eq!(written.buffer.unwrap().len(), 0);
            let (_, message) = group.next();
            assert_eq!((message.operation, message.imm(), message.byte_len), (Operation::Receive, None, 7));
            group.expect_none();
        }
    }
}

#[test]
fn one_completion_releases_the_unsignaled_work_of_its_endpoint() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let pd = rdma.pd();
        let mut group = Group::new(&rdma, &pd, mode, 2, None);
        for (peer, key) in group.peers.iter_mut().zip(&group.keys) {
            for _ in 0..3 {
                peer.receive(pd.allocate(16).unwrap()).unwrap();
            }
            let mut endpoint = group.set.endpoint(*key).unwrap();
            let mut batch = endpoint.batch().unwrap();
            for text in [b"1", b"2"] {
                batch.add(Work::send(filled(&pd, text)).unsignaled()).unwrap();
            }
            batch.add(Work::send(filled(&pd, b"3"))).unwrap();
            batch.post().unwrap();
        }
        let mut texts = [Vec::new(), Vec::new()];
        for _ in 0..6 {
            let (index, sent) = group.next();
            assert_eq!((sent.operation, sent.status), (Operation::Send, WcStatus::SUCCESS));
            texts[index].extend_from_slice(&sent.buffer.unwrap());
        }
        assert_eq!(texts, [b"123", b"123"], "{mode}");
        group.expect_none();
        // Unsignaled work without a buffer is not returned.
        let key = group.keys[0];
        for _ in 0..4 {
            group.peers[0].receive(pd.allocate(16).unwrap()).unwrap();
        }
        for _ in 0..3 {
            group.set.endpoint(key).unwrap().post(Work::send_inline(b"silent").unsignaled()).unwrap();
            group.expect_none();
        }
        let id = group.set.endpoint(key).unwrap().send_inline(b"signaled").unwrap();
        let (index, sent) = group.next();
        assert_eq!((index, sent.id, sent.status), (0, id, WcStatus::SUCCESS));
        group.expect_none();
    }
}

#[test]
fn a_forgotten_batch_of_an_endpoint_is_not_posted_and_blocks_nothing() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let pd = rdma.pd();
        let mut group = Group::new(&rdma, &pd, mode, 2, None);
        let keys = group.keys.clone();
        let forget = |group: &mut Group, has_work: bool| {
            let mut endpoint = group.set.endpoint(keys[0]).unwrap();
            let mut batch = endpoint.batch().unwrap();
            if has_work {
                batch.add(Work::send(filled(&pd, b"forgotten"))).unwrap();
            }
            std::mem::forget(batch);
        };
        for has_work in [false, true] {
            forget(&mut group, has_work);
            group.expect_none();
            forget(&mut group, has_work);
            group.receive(1);
            group.send(1, b"other");
            assert_eq!(group.next_text(), (1, b"other".to_vec()));
            forget(&mut group, has_work);
            group.peers[0].receive(pd.allocate(16).unwrap()).unwrap();
            group.set.endpoint(keys[0]).unwrap().send(filled(&pd, b"posted")).unwrap();
            assert_eq!(*wait(&mut group.peers[0]).buffer.unwrap(), *b"posted", "{mode}");
            assert_eq!(*group.next().1.buffer.unwrap(), *b"posted", "{mode}");
        }
        forget(&mut group, true);
        assert!(group.set.remove(keys[0]).unwrap().is_empty());
        assert_eq!(group.set.len(), 1);
    }
}

#[test]
fn a_request_that_is_too_long_fails_the_endpoint_of_its_client_only() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let pd = rdma.pd();
        let mut pool = small_pool(&pd);
        let mut group = Group::new(&rdma, &pd, mode, 3, Some(&pool));
        group.peers[1].send_inline(&[1; 32]).unwrap();
        let (index, failed) = group.next();
        assert_eq!((index, failed.operation), (1, Operation::Receive));
        // SoftRoCE deviates from the status of IBTA.
        let is_expected =
            if rdma.is_rxe() { failed.status != WcStatus::SUCCESS } else { failed.status == WcStatus::LOC_LEN_ERR };
        assert!(is_expected, "{mode}: {}", failed.status);
        pool.receive(failed.buffer.unwrap()).unwrap();
        group.send(2, b"other");
        assert_eq!(group.next_text(), (2, b"other".to_vec()));
        assert!(group.set.remove(group.keys[1]).unwrap().is_empty());
        group.send(0, b"still");
        assert_eq!(group.next_text(), (0, b"still".to_vec()));
    }
}

#[test]
fn hundreds_of_endpoints_share_one_pool_and_one_queue() {
    const ENDPOINTS: usize = rounds(300, 6) as usize;
    let Some(rdma) = device() else { return };
    in_own_process("endpoint_sets::hundreds_of_endpoints_share_one_pool_and_one_queue", || {
        let pd = rdma.pd();
        let mut pool = small_pool(&pd);
        let mut group = Group::new(&rdma, &pd, Mode::EXTENDED, ENDPOINTS, Some(&pool));
        let all_send = |group: &mut Group, pool: &mut ReceivePool| {
            for peer in (0..ENDPOINTS).rev() {
                group.send(peer, &peer.to_ne_bytes());
                let (index, message) = group.next();
                let buffer = message.ok().unwrap().buffer.unwrap();
                assert_eq!((index, &buffer[..]), (peer, &peer.to_ne_bytes()[..]));
                pool.receive(buffer).unwrap();
            }
        };
        all_send(&mut group, &mut pool);
        // Every tenth endpoint is replaced.
        let removed: Vec<EndpointKey> = group.keys.iter().copied().step_by(10).collect();
        for key in &removed {
            assert!(group.set.remove(*key).unwrap().is_empty());
            let index = group.keys.iter().position(|known| known == key).unwrap();
            group.keys.remove(index);
            group.peers.remove(index);
        }
        assert_eq!(group.set.len(), ENDPOINTS - removed.len());
        for _ in &removed {
            group.add(&rdma, &pd, Mode::EXTENDED, Some(&pool));
            let index = group.keys.last().unwrap().index();
            assert!(removed.iter().any(|key| key.index() == index), "a free index is reused");
        }
        all_send(&mut group, &mut pool);
        // One of the set, and one of each peer.
        expect_kernel_objects("cq", 1 + ENDPOINTS);
        assert_eq!(pool.receives_in_flight(), 4);
    });
}

#[test]
fn one_channel_reports_completions_of_all_endpoints() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let pd = rdma.pd();
        let pool = small_pool(&pd);
        let mut group = Group::new(&rdma, &pd, mode, 0, None);
        assert!(matches!(error_of(group.set.arm()), Error::NoChannel));
        assert!(group.set.channel().is_none());

        let set = EndpointSet::builder(pd.context(), 64).events(true).classic_poll(mode.classic_cq);
        group.set = set.build().unwrap();
        assert!(group.set.channel().is_some());
        (0..2).for_each(|_| group.add(&rdma, &pd, mode, Some(&pool)));
        assert_eq!(group.set.arm().unwrap(), Armed::Wait, "nothing has completed");
        group.send(1, b"first");
        within_deadline("a completion", || (group.set.arm().unwrap() == Armed::Poll).then_some(()));
        assert_eq!(group.set.arm().unwrap(), Armed::Poll, "the completion was not taken yet");
        group.send(0, b"second");
        assert_eq!(group.next_text(), (1, b"first".to_vec()), "{mode}");
        assert_eq!(group.next_text(), (0, b"second".to_vec()), "{mode}");
        assert!(matches!(error_of(group.set.wait(Duration::from_millis(1))), Error::Timeout { .. }));
        let Group { set, keys, peers } = &mut group;
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| set.wait(DEADLINE).unwrap());
            peers[0].send_inline(b"third").unwrap();
            let (key, message) = waiter.join().unwrap();
            assert_eq!((key, &message.buffer.unwrap()[..]), (keys[0], &b"third"[..]));
        });
    }
}

#[test]
fn only_connections_of_the_same_context_join_a_set() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let mut set = EndpointSet::builder(pd.context(), 64).build().unwrap();
    let error = error_of(rdma.endpoint(&pd).qp_type(QueuePairType::UD).build_in(&mut set));
    assert!(
        matches!(error, Error::WrongType { operation: "EndpointBuilder::build_in", qp_type: QueuePairType::UD, .. }),
        "{error}"
    );
    let foreign = Device::by_name(rdma.device_name()).unwrap().open().unwrap().alloc_pd().unwrap();
    let error = error_of(rdma.endpoint(&foreign).build_in(&mut set));
    assert!(matches!(error, Error::ForeignContext { .. }), "{error}");
    // Another domain of the same context is allowed.
    let other = rdma.pd();
    let uc = rdma.endpoint(&other).qp_type(QueuePairType::UC).send_depth(8).recv_depth(8);
    let key = uc.build_in(&mut set).unwrap();
    let mut endpoint = set.endpoint(key).unwrap();
    assert_eq!(error_of(endpoint.receive(pd.allocate(8).unwrap())).error, PostError::ForeignBuffer);
    endpoint.receive(other.allocate(8).unwrap()).unwrap();
    assert_eq!((endpoint.receives_in_flight(), set.len()), (1, 1));
}

#[test]
fn a_set_moves_between_threads() {
    fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<EndpointSet>();
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let mut pool = small_pool(&pd);
    let mut group = Group::new(&rdma, &pd, Mode::EXTENDED, 2, Some(&pool));
    group.send(1, b"before");
    let mut group = std::thread::spawn(move || {
        assert_eq!(group.next_text(), (1, b"before".to_vec()));
        group
    })
    .join()
    .unwrap();
    refill(&mut pool);
    group.send(0, b"after");
    assert_eq!(group.next_text(), (0, b"after".to_vec()));
}
