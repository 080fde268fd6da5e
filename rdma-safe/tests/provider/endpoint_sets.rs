//! Endpoints that share one completion queue: whose a completion is, and in which order they come.

use std::time::Duration;

use rdma_safe::{
    Access, Armed, Buffer, Completion, Endpoint, EndpointKey, EndpointSet, Error, Operation, Pages, PollError,
    PostError, ProtectionDomain, QueuePairType, ReceivePool, WcFields, WcStatus, Work,
};
use rdma_sys::{IBV_WC_RECV, IBV_WC_SUCCESS};

use crate::fake::{Config, Cqe, Fake, Mode};
use crate::support::{DEADLINE, EXTENDED, Interfaces, builder, done, on_each_interface};

/// A set, and a peer by itself for each of its endpoints.
pub(crate) struct Service {
    pub(crate) set: EndpointSet,
    pub(crate) keys: Vec<EndpointKey>,
    pub(crate) peers: Vec<Endpoint>,
}

impl Service {
    /// With `pool`, if there is one, or room for eight receives of each endpoint.
    pub(crate) fn new(
        pd: &ProtectionDomain,
        interfaces: Interfaces,
        endpoints: usize,
        pool: Option<&ReceivePool>,
    ) -> Self {
        let completions = endpoints as u32 * if pool.is_some() { 8 } else { 16 } + pool.map_or(0, |_| 4);
        let set = EndpointSet::builder(pd.context(), completions).classic_poll(!interfaces.extended_cq);
        let mut service = Service { set: set.build().unwrap(), keys: Vec::new(), peers: Vec::new() };
        for _ in 0..endpoints {
            service.add(pd, interfaces, pool);
        }
        service
    }

    pub(crate) fn add(&mut self, pd: &ProtectionDomain, interfaces: Interfaces, pool: Option<&ReceivePool>) {
        let mut endpoint = builder(pd, interfaces);
        if let Some(pool) = pool {
            endpoint = endpoint.receive_pool(pool);
        }
        let key = endpoint.build_in(&mut self.set).unwrap();
        let mut peer = builder(pd, interfaces).build().unwrap();
        let mut endpoint = self.set.endpoint(key).unwrap();
        endpoint.connect(&peer.address()).unwrap();
        peer.connect(&endpoint.address()).unwrap();
        self.keys.push(key);
        self.peers.push(peer);
    }

    /// Lets a peer send.
    pub(crate) fn say(&mut self, peer: usize, text: &[u8]) {
        self.peers[peer].send_inline(text).unwrap();
        assert_eq!(done(&mut self.peers[peer]).operation, Operation::Send);
    }

    /// The next completion, and whose it is, by its position.
    #[track_caller]
    pub(crate) fn next(&mut self) -> (usize, Completion) {
        let (key, completion) = self.set.poll().unwrap().expect("a completion");
        (self.keys.iter().position(|known| *known == key).expect("a key of the set"), completion)
    }

    #[track_caller]
    pub(crate) fn next_text(&mut self) -> (usize, Vec<u8>) {
        let (from, completion) = self.next();
        let completion = completion.ok().unwrap();
        assert_eq!(completion.operation, Operation::Receive);
        (from, completion.buffer.unwrap().to_vec())
    }

    #[track_caller]
    pub(crate) fn nothing(&mut self) {
        assert!(self.set.poll().unwrap().is_none(), "a completion that should not be there");
    }
}

/// A pool of four receives of sixteen bytes.
pub(crate) fn pool(pd: &ProtectionDomain) -> ReceivePool {
    let mut pool = ReceivePool::new(pd, 4).unwrap();
    fill(&mut pool);
    pool
}

/// Posts as many receives as there is room for.
pub(crate) fn fill(pool: &mut ReceivePool) -> usize {
    let before = pool.receives_in_flight();
    while pool.receives_in_flight() < 4 {
        pool.receive(pool.pd().allocate(16).unwrap()).unwrap();
    }
    4 - before
}

fn buffer(pd: &ProtectionDomain, text: &[u8]) -> Buffer {
    let mut buffer = pd.allocate(text.len()).unwrap();
    buffer.copy_from_slice(text);
    buffer
}

#[test]
fn a_completion_says_whose_it_is_in_the_order_of_the_device() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, 3, None);
        for key in service.keys.clone() {
            for _ in 0..2 {
                service.set.endpoint(key).unwrap().receive(pd.allocate(16).unwrap()).unwrap();
            }
        }
        for (peer, text) in [(2, b"c1"), (0, b"a1"), (2, b"c2"), (1, b"b1"), (0, b"a2")] {
            service.say(peer, text);
        }
        for (peer, text) in [(2, b"c1"), (0, b"a1"), (2, b"c2"), (1, b"b1"), (0, b"a2")] {
            assert_eq!(service.next_text(), (peer, text.to_vec()));
        }
        service.nothing();
        for (index, key) in service.keys.clone().into_iter().enumerate() {
            let peer = &mut service.peers[index];
            peer.receive(pd.allocate(16).unwrap()).unwrap();
            let id = service.set.endpoint(key).unwrap().send(buffer(&pd, b"answer")).unwrap();
            let (from, sent) = service.next();
            assert_eq!((from, sent.id, sent.operation, sent.status), (index, id, Operation::Send, WcStatus::SUCCESS));
            assert_eq!(*sent.buffer.unwrap(), *b"answer");
        }
        assert_eq!(service.set.len(), 3);
    });
}

#[test]
fn clients_that_share_a_pool_are_served_by_one_poll() {
    const ROUNDS: u32 = if cfg!(miri) { 6 } else { 1000 };
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut pool = pool(&pd);
        let mut service = Service::new(&pd, interfaces, 3, Some(&pool));
        for round in 0..ROUNDS {
            let clients = [round as usize % 3, round as usize / 2 % 3];
            for client in clients {
                service.peers[client].receive(pd.allocate(16).unwrap()).unwrap();
                service.say(client, &round.to_ne_bytes());
            }
            for client in clients {
                let (from, request) = service.next();
                assert_eq!((from, request.byte_len), (client, 4));
                // The answer goes out of the buffer that the request has come in, and then back into the pool.
                let mut request = request.buffer.unwrap();
                assert_eq!(request[..], round.to_ne_bytes());
                request[0] ^= 1;
                service.set.endpoint(service.keys[from]).unwrap().send(request).unwrap();
            }
            for client in clients {
                let (from, sent) = service.next();
                assert_eq!((from, sent.operation), (client, Operation::Send));
                pool.receive(sent.buffer.unwrap()).unwrap();
                assert_eq!(done(&mut service.peers[client]).buffer.unwrap()[..], (round ^ 1).to_ne_bytes());
            }
            service.nothing();
            assert_eq!(pool.receives_in_flight(), 4);
        }
    });
}

#[test]
fn what_comes_with_a_message_is_told_as_by_an_endpoint_by_itself() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let pool = pool(&pd);
        let exposed = pd.expose(Pages::new(16).unwrap(), Access::REMOTE).unwrap();
        for pool in [Some(&pool), None] {
            let mut service = Service::new(&pd, interfaces, 2, pool);
            if pool.is_none() {
                for _ in 0..3 {
                    let key = service.keys[1];
                    service.set.endpoint(key).unwrap().receive(pd.allocate(16).unwrap()).unwrap();
                }
            }
            let peer = &mut service.peers[1];
            peer.post(Work::send_inline(b"with").imm(7)).unwrap();
            peer.post(Work::write_inline(b"written", exposed.remote()).imm(9)).unwrap();
            peer.post(Work::send_inline(b"without")).unwrap();
            let (from, message) = service.next();
            assert_eq!((from, message.operation, message.imm()), (1, Operation::Receive, Some(7)));
            assert_eq!(*message.buffer.unwrap(), *b"with");
            let (_, written) = service.next();
            assert_eq!((written.operation, written.imm(), written.byte_len), (Operation::ReceiveWrite, Some(9), 7));
            assert_eq!(written.buffer.unwrap().len(), 0);
            let (_, message) = service.next();
            assert_eq!((message.operation, message.imm(), message.byte_len), (Operation::Receive, None, 7));
            service.nothing();
        }
    });
}

#[test]
fn work_that_one_completion_releases_comes_out_piece_by_piece_and_each_endpoint_has_its_turn() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, 2, None);
        for index in 0..2 {
            for _ in 0..3 {
                service.peers[index].receive(pd.allocate(16).unwrap()).unwrap();
            }
            let mut endpoint = service.set.endpoint(service.keys[index]).unwrap();
            let mut batch = endpoint.batch().unwrap();
            for text in [b"1", b"2"] {
                batch.add(Work::send(buffer(&pd, text)).unsignaled()).unwrap();
            }
            batch.add(Work::send(buffer(&pd, b"3"))).unwrap();
            batch.post().unwrap();
        }
        let mut texts = [Vec::new(), Vec::new()];
        for _ in 0..6 {
            let (from, sent) = service.next();
            assert_eq!((sent.operation, sent.status), (Operation::Send, WcStatus::SUCCESS));
            texts[from].extend_from_slice(&sent.buffer.unwrap());
        }
        assert_eq!(texts, [b"123".to_vec(), b"123".to_vec()]);
        service.nothing();
        // And what is silent is not handed out.
        service.peers[0].receive(pd.allocate(16).unwrap()).unwrap();
        let key = service.keys[0];
        for _ in 0..4 {
            service.peers[0].receive(pd.allocate(16).unwrap()).unwrap();
            service.set.endpoint(key).unwrap().post(Work::send_inline(b"silent").unsignaled()).unwrap();
            service.nothing();
        }
    });
}

#[test]
fn a_batch_that_was_forgotten_is_ended_before_anything_else_happens() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        // Without events the channel is not asked, which Miri could not do.
        let mut service = Service::new(&pd, interfaces, 2, None);
        let keys = service.keys.clone();
        let forget = |service: &mut Service, added: bool| {
            let mut endpoint = service.set.endpoint(keys[0]).unwrap();
            let mut batch = endpoint.batch().unwrap();
            if added {
                batch.add(Work::send(buffer(&pd, b"forgotten"))).unwrap();
            }
            std::mem::forget(batch);
        };
        for added in [false, true] {
            forget(&mut service, added);
            service.nothing();
            forget(&mut service, added);
            service.set.endpoint(keys[1]).unwrap().receive(pd.allocate(16).unwrap()).unwrap();
            service.say(1, b"others");
            assert_eq!(service.next_text(), (1, b"others".to_vec()));
            // What comes after it is as if it had not been.
            forget(&mut service, added);
            service.peers[0].receive(pd.allocate(16).unwrap()).unwrap();
            service.set.endpoint(keys[0]).unwrap().send(buffer(&pd, b"true")).unwrap();
            assert_eq!(done(&mut service.peers[0]).buffer.unwrap()[..], *b"true");
            assert_eq!(*service.next().1.buffer.unwrap(), *b"true");
        }
        forget(&mut service, true);
        assert!(service.set.remove(keys[0]).unwrap().is_empty());
        assert_eq!(service.set.len(), 1);
    });
}

#[test]
fn a_peer_that_fails_leaves_the_others_working() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut pool = pool(&pd);
        let mut service = Service::new(&pd, interfaces, 3, Some(&pool));
        // Longer than the buffers: that breaks the connection.
        service.peers[1].send_inline(&[1; 32]).unwrap();
        service.say(2, b"others");
        let (from, failed) = service.next();
        assert_eq!((from, failed.operation, failed.status), (1, Operation::Receive, WcStatus::LOC_LEN_ERR));
        assert_eq!(service.next_text(), (2, b"others".to_vec()));
        pool.receive(failed.buffer.unwrap()).unwrap();

        // Work of one whose queue pair the device has broken is flushed.
        let key = service.keys[0];
        let number = service.set.endpoint(key).unwrap().queue_pair().number();
        fake.set_mode(Mode::Manual);
        service.set.endpoint(key).unwrap().send(buffer(&pd, b"never sent")).unwrap();
        fake.break_qp(number);
        fake.set_mode(Mode::AtPost);
        let (from, flushed) = service.next();
        assert_eq!((from, flushed.status), (0, WcStatus::WR_FLUSH_ERR));
        assert_eq!(*flushed.buffer.unwrap(), *b"never sent");
        for key in [service.keys[0], service.keys[1]] {
            assert!(service.set.remove(key).unwrap().is_empty());
        }
        service.say(2, b"still");
        assert_eq!(service.next_text(), (2, b"still".to_vec()));
    });
}

#[test]
fn a_completion_that_names_no_work_is_an_error_of_its_endpoint_and_of_no_other() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, 2, None);
        for key in service.keys.clone() {
            service.set.endpoint(key).unwrap().receive(pd.allocate(16).unwrap()).unwrap();
        }
        let key = service.keys[0];
        // SAFETY: the queue pair is valid, and the field is set at creation.
        let cq = unsafe { (*service.set.endpoint(key).unwrap().queue_pair().as_raw()).recv_cq };
        let truth = Cqe { status: IBV_WC_SUCCESS.0, opcode: IBV_WC_RECV.0, byte_len: 4, ..Cqe::default() };
        // Of no endpoint of the set.
        fake.inject(cq, Cqe { wr_id: 1 << 63 | 1, qp_num: 0xff_ffff, ..truth });
        assert!(matches!(service.set.poll(), Err(PollError::Unexpected { .. })));
        // Of one of them, but a receive that was not posted.
        let number = service.set.endpoint(key).unwrap().queue_pair().number();
        fake.inject(cq, Cqe { wr_id: 1 << 63 | 2, qp_num: number, ..truth });
        assert!(matches!(service.set.poll(), Err(PollError::Unexpected { wr_id }) if wr_id == 1 << 63 | 2));
        let refused = service.set.endpoint(key).unwrap().send(buffer(&pd, b"doubtful")).unwrap_err();
        assert_eq!((refused.error, refused.buffer.is_some()), (PostError::Poisoned, true));
        service.say(1, b"others");
        assert_eq!(service.next_text(), (1, b"others".to_vec()));
        assert_eq!(service.set.remove(key).unwrap().len(), 1);
    });
}

#[test]
fn a_provider_that_fails_to_be_polled_says_so_and_keeps_nothing() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, 1, None);
        let key = service.keys[0];
        service.set.endpoint(key).unwrap().receive(pd.allocate(16).unwrap()).unwrap();
        let verb = if interfaces.extended_cq { "start_poll" } else { "ibv_poll_cq" };
        fake.fail(verb, libc::EIO);
        assert!(matches!(service.set.poll(), Err(PollError::Provider(_))));
        fake.heal(verb);
        service.say(0, b"later");
        assert_eq!(service.next_text(), (0, b"later".to_vec()));
    });
}

#[test]
fn a_thousand_endpoints_share_one_pool_and_one_queue() {
    const ENDPOINTS: usize = if cfg!(miri) { 12 } else { 1000 };
    let fake = Fake::new(Config { max_cqe: 1 << 16, ..Config::default() });
    let pd = fake.pd();
    let mut pool = pool(&pd);
    let mut service = Service::new(&pd, EXTENDED, ENDPOINTS, Some(&pool));
    let all_speak = |service: &mut Service, pool: &mut ReceivePool, first: usize| {
        for peer in (first..ENDPOINTS).rev() {
            service.say(peer, &peer.to_ne_bytes());
            let (from, message) = service.next();
            let buffer = message.ok().unwrap().buffer.unwrap();
            assert_eq!((from, &buffer[..]), (peer, &peer.to_ne_bytes()[..]));
            pool.receive(buffer).unwrap();
        }
    };
    all_speak(&mut service, &mut pool, 0);
    // Some go, and as many come.
    let gone: Vec<_> = service.keys.iter().copied().step_by(10).collect();
    for key in &gone {
        assert!(service.set.remove(*key).unwrap().is_empty());
    }
    assert_eq!(service.set.len(), ENDPOINTS - gone.len());
    let mut keep = service.keys.iter().map(|key| !gone.contains(key));
    service.peers.retain(|_| keep.next().unwrap());
    service.keys.retain(|key| !gone.contains(key));
    for _ in &gone {
        service.add(&pd, EXTENDED, Some(&pool));
        let place = service.keys.last().unwrap().index();
        assert!(gone.iter().any(|key| key.index() == place), "a place that was free");
    }
    all_speak(&mut service, &mut pool, ENDPOINTS - 2 * gone.len());
    let one_queue = fake.live().cqs - ENDPOINTS;
    assert_eq!((one_queue, pool.receives_in_flight()), (1, 4));
}

#[test]
fn completions_have_timestamps_where_the_set_asks_for_them() {
    let wc_flags = (WcFields::STANDARD | WcFields::COMPLETION_TIMESTAMP).bits();
    let fake = Fake::new(Config { wc_flags, ..Config::default() });
    let pd = fake.pd();
    let mut pool = ReceivePool::new(&pd, 1).unwrap();
    let mut set = EndpointSet::builder(pd.context(), 20).timestamps(true).build().unwrap();
    // Of the endpoint it does not matter.
    let key = builder(&pd, EXTENDED).receive_pool(&pool).timestamps(false).build_in(&mut set).unwrap();
    let mut peer = builder(&pd, EXTENDED).build().unwrap();
    let mut endpoint = set.endpoint(key).unwrap();
    endpoint.connect(&peer.address()).unwrap();
    peer.connect(&endpoint.address()).unwrap();
    let id = pool.receive(pd.allocate(16).unwrap()).unwrap();
    peer.send_inline(b"now").unwrap();
    let (whose, message) = set.poll().unwrap().unwrap();
    assert_eq!((whose, message.id), (key, id));
    assert!(message.timestamp.is_some());
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no poll(2)")]
fn one_event_wakes_whoever_waits_for_all() {
    for mode in [Mode::AtPost, Mode::AtPoll] {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let pool = pool(&pd);
        let mut set = EndpointSet::builder(pd.context(), 64).events(true).build().unwrap();
        let keys = [(); 2].map(|()| builder(&pd, EXTENDED).receive_pool(&pool).build_in(&mut set).unwrap());
        let mut peers = [(); 2].map(|()| builder(&pd, EXTENDED).build().unwrap());
        for (key, peer) in keys.iter().zip(&mut peers) {
            let mut endpoint = set.endpoint(*key).unwrap();
            endpoint.connect(&peer.address()).unwrap();
            peer.connect(&endpoint.address()).unwrap();
        }
        assert!(set.channel().is_some());
        assert_eq!(set.arm().unwrap(), Armed::Wait, "nothing has arrived");
        peers[1].send_inline(b"hello").unwrap();
        if mode == Mode::AtPost {
            assert_eq!(set.arm().unwrap(), Armed::Poll, "there is something to poll");
            assert_eq!(set.arm().unwrap(), Armed::Poll, "and there still is");
        }
        peers[0].send_inline(b"and hello").unwrap();
        for (key, text) in [(keys[1], &b"hello"[..]), (keys[0], b"and hello")] {
            let (whose, message) = set.wait(DEADLINE).unwrap();
            assert_eq!((whose, &message.buffer.unwrap()[..]), (key, text));
        }
        let waited = Duration::from_millis(1);
        assert!(matches!(set.wait(waited), Err(Error::Timeout { .. })));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| set.wait(DEADLINE).unwrap());
            peers[0].send_inline(b"late").unwrap();
            let (whose, message) = waiter.join().unwrap();
            assert_eq!((whose, &message.buffer.unwrap()[..]), (keys[0], &b"late"[..]));
        });
    }
    let fake = Fake::new(Config::default());
    let mut set = EndpointSet::builder(fake.pd().context(), 4).build().unwrap();
    assert!(matches!(set.arm(), Err(Error::NoChannel)));
    assert!(set.channel().is_none());
}

#[test]
fn only_connections_of_the_same_context_go_into_a_set() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut set = EndpointSet::builder(pd.context(), 64).build().unwrap();
    let error = builder(&pd, EXTENDED).qp_type(QueuePairType::UD).build_in(&mut set).unwrap_err();
    assert!(
        matches!(error, Error::WrongType { what: "EndpointBuilder::build_in", qp_type: QueuePairType::UD, .. }),
        "{error}"
    );
    let error = builder(&fake.pd(), EXTENDED).build_in(&mut set).unwrap_err();
    assert!(matches!(error, Error::ForeignContext { .. }), "{error}");
    // Another domain of the same one may.
    let other = pd.context().alloc_pd().unwrap();
    let key = builder(&other, EXTENDED).qp_type(QueuePairType::UC).build_in(&mut set).unwrap();
    let mut endpoint = set.endpoint(key).unwrap();
    assert_eq!(endpoint.receive(pd.allocate(8).unwrap()).unwrap_err().error, PostError::ForeignBuffer);
    endpoint.receive(other.allocate(8).unwrap()).unwrap();
    assert_eq!((endpoint.receives_in_flight(), fake.live().qps), (1, 1));
}

#[test]
fn a_set_goes_from_thread_to_thread() {
    fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<EndpointSet>();
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let mut pool = pool(&pd);
    let mut service = Service::new(&pd, EXTENDED, 2, Some(&pool));
    service.say(1, b"before");
    let mut service = std::thread::spawn(move || {
        assert_eq!(service.next_text(), (1, b"before".to_vec()));
        service
    })
    .join()
    .unwrap();
    fill(&mut pool);
    service.say(0, b"after");
    assert_eq!(service.next_text(), (0, b"after".to_vec()));
}
