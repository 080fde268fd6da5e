//! Endpoints of a set that share a receive pool. Each gets its share while one peer floods.

use std::collections::VecDeque;

use rdma_safe::endpoint::Armed;
use rdma_safe::{Completion, Endpoint, EndpointKey, EndpointSet, Operation, ProtectionDomain, ReceivePool, WcStatus};

use crate::fake::Mode;
use crate::support::{Interfaces, builder, done, on_each_interface};

const DEPTH: u32 = 16;

/// Three endpoints that share a pool of sixteen receives, and their peers.
struct Service {
    set: EndpointSet,
    pool: ReceivePool,
    keys: Vec<EndpointKey>,
    peers: Vec<Endpoint>,
}

impl Service {
    fn new(pd: &ProtectionDomain, interfaces: Interfaces, share: u32, sends: u32) -> Self {
        Service::with_pending(pd, interfaces, share, sends, 0)
    }

    fn with_pending(pd: &ProtectionDomain, interfaces: Interfaces, share: u32, sends: u32, pending: u32) -> Self {
        let mut pool = ReceivePool::new(pd, DEPTH).unwrap();
        for buffer in pd.allocate(DEPTH as usize * 16).unwrap().into_chunks(16).unwrap() {
            pool.receive(buffer).unwrap();
        }
        let set = EndpointSet::builder(pd.context(), DEPTH + 3 * sends).events(true);
        let set = set.classic_poll(!interfaces.extended_cq).build().unwrap();
        let mut service = Service { set, pool, keys: Vec::new(), peers: Vec::new() };
        for index in 0..3 {
            service.connect(pd, interfaces, index, (share, sends, pending));
        }
        service
    }

    /// Builds the endpoint with this index. It replaces a removed endpoint, if any.
    fn connect(
        &mut self,
        pd: &ProtectionDomain,
        interfaces: Interfaces,
        index: usize,
        (share, sends, pending): (u32, u32, u32),
    ) {
        let endpoint = builder(pd, interfaces).send_depth(sends).pending_sends(pending).receive_pool(&self.pool);
        let key = endpoint.receive_share(share).build_in(&mut self.set).unwrap();
        let mut peer = builder(pd, interfaces).send_depth(32).recv_depth(32).build().unwrap();
        let mut endpoint = self.set.endpoint(key).unwrap();
        endpoint.connect(&peer.address()).unwrap();
        peer.connect(&endpoint.address()).unwrap();
        if index < self.keys.len() {
            (self.keys[index], self.peers[index]) = (key, peer);
        } else {
            self.keys.push(key);
            self.peers.push(peer);
        }
    }

    fn say(&mut self, peer: usize, text: &[u8]) {
        self.peers[peer].send_inline(text).unwrap();
        assert_eq!(done(&mut self.peers[peer]).operation, Operation::Send);
    }

    fn next(&mut self) -> Option<(usize, Completion)> {
        let (key, completion) = self.set.poll().unwrap()?;
        Some((self.keys.iter().position(|known| *known == key).expect("a key of the set"), completion))
    }

    #[track_caller]
    fn next_text(&mut self) -> (usize, Vec<u8>) {
        let (from, message) = self.next().expect("a completion");
        let buffer = message.ok().unwrap().buffer.unwrap();
        let text = buffer.to_vec();
        self.pool.receive(buffer).unwrap();
        (from, text)
    }
}

#[test]
fn a_flood_delays_a_message_by_one_message_of_each_other_endpoint() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, DEPTH, 8);
        for number in 0..8 {
            service.say(0, &[number]);
        }
        service.say(1, b"b0");
        service.say(2, b"c0");
        service.say(1, b"b1");
        assert_eq!(service.next_text(), (0, vec![0]));
        assert_eq!(service.set.backlog(service.keys[0]), Some(7));
        assert_eq!(service.next_text(), (1, b"b0".to_vec()));
        // This message arrived last and waits for one message of each other endpoint.
        service.say(2, b"c1");
        assert_eq!(service.next_text(), (2, b"c0".to_vec()));
        assert_eq!(service.next_text(), (0, vec![1]));
        assert_eq!(service.next_text(), (1, b"b1".to_vec()));
        assert_eq!(service.next_text(), (2, b"c1".to_vec()));
        for number in 2..8 {
            assert_eq!(service.next_text(), (0, vec![number]));
        }
        assert!(service.next().is_none());
        assert_eq!(service.pool.receives_in_flight(), DEPTH as usize);
    });
}

#[test]
fn a_peer_that_exceeds_its_share_is_ended_and_its_receives_come_back() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, 4, 8);
        for number in 0..4 {
            service.say(0, &[number]);
        }
        assert_eq!(service.next_text(), (0, vec![0]), "up to the share, messages may wait");
        for number in 4..8 {
            service.say(0, &[number]);
        }
        service.say(1, b"others");
        let (from, ended) = service.next().expect("a completion");
        assert_eq!((from, ended.operation, ended.status), (0, Operation::Receive, WcStatus::GENERAL_ERR));
        assert_eq!((ended.exceeded_share(), ended.imm(), ended.invalidated_rkey()), (Some(4), None, None));
        let failed = ended.ok().unwrap_err();
        let explained = service.set.endpoint(service.keys[0]).unwrap().explain(&failed).to_string();
        for text in [failed.to_string(), explained] {
            assert!(text.contains("EndpointBuilder::receive_share"), "{text}");
        }
        service.pool.receive(failed.0.buffer.unwrap()).unwrap();
        // None of its later messages arrives.
        service.peers[0].send_inline(b"late").unwrap();
        assert_ne!(service.peers[0].poll().unwrap().expect("a completion").status, WcStatus::SUCCESS);
        let left = service.set.remove(service.keys[0]).unwrap();
        assert_eq!(left.iter().map(|buffer| buffer[0]).collect::<Vec<_>>(), [1, 2, 3, 4, 6, 7]);
        left.into_iter().for_each(|buffer| _ = service.pool.receive(buffer).unwrap());
        assert_eq!(service.next_text(), (1, b"others".to_vec()));
        assert!(service.next().is_none());
        assert_eq!((service.set.backlog(service.keys[0]), service.set.len()), (None, 2));
        assert_eq!(service.pool.receives_in_flight(), DEPTH as usize);
    });
}

#[test]
fn a_flood_is_answered_without_errors_and_without_starving_others() {
    const SHARE: u32 = 6;
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        // Each endpoint has room for one send and no pending sends, so a message is handed out when there is room for the
        // reply.
        let mut service = Service::new(&pd, interfaces, SHARE, 1);
        let rounds = if cfg!(miri) { 8 } else { 200 };
        let (mut answered, mut asked, mut since) = ([0; 3], [0; 3], [0; 3]);
        while answered.iter().sum::<u32>() < rounds {
            // The first client sends until its share is exhausted. The others send after each reply.
            for (peer, most) in [(0, SHARE), (1, 1), (2, 1)] {
                while asked[peer] - answered[peer] < most {
                    service.peers[peer].receive(pd.allocate(16).unwrap()).unwrap();
                    service.say(peer, b"ask");
                    asked[peer] += 1;
                    since[peer] = 0;
                }
            }
            let (from, completion) = service.next().expect("a completion");
            // Receives held by the flooding peer.
            let backlog = service.set.backlog(service.keys[0]).unwrap();
            assert!(backlog <= SHARE, "{backlog}");
            let completion = completion.ok().unwrap();
            if completion.operation == Operation::Receive {
                service.set.endpoint(service.keys[from]).unwrap().send(completion.buffer.unwrap()).unwrap();
                answered[from] += 1;
                assert_eq!(done(&mut service.peers[from]).operation, Operation::Receive);
            } else {
                service.pool.receive(completion.buffer.unwrap()).unwrap();
            }
            // Before the turn of another endpoint, each has at most one completed reply and one request.
            since.iter_mut().for_each(|steps| *steps += 1);
            for peer in [1, 2] {
                assert!(
                    asked[peer] == answered[peer] || since[peer] <= 6,
                    "client {peer} waited for {} turns",
                    since[peer]
                );
            }
        }
        assert!(answered.iter().all(|answered| *answered >= rounds / 4), "{answered:?}");
    });
}

#[test]
fn a_set_with_only_held_back_messages_can_wait_for_events() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, DEPTH, 2);
        for number in 0..4 {
            service.peers[0].receive(pd.allocate(16).unwrap()).unwrap();
            service.say(0, &[number]);
        }
        fake.set_mode(Mode::Manual);
        for _ in 0..2 {
            let (_, request) = service.next().unwrap();
            service.set.endpoint(service.keys[0]).unwrap().send(request.buffer.unwrap()).unwrap();
        }
        assert!(service.next().is_none(), "there is no room for an answer");
        assert_eq!((service.set.arm().unwrap(), service.set.backlog(service.keys[0])), (Armed::Wait, Some(2)));
        fake.progress();
        assert_eq!(service.set.arm().unwrap(), Armed::Poll);
        let operations: Vec<_> = std::iter::from_fn(|| service.next()).map(|(_, done)| done.operation).collect();
        assert_eq!(operations, [Operation::Send, Operation::Send, Operation::Receive, Operation::Receive]);
    });
}

#[test]
fn dropping_a_set_frees_waiting_messages() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, DEPTH, 8);
        for number in 0..4 {
            service.say(0, &[number]);
        }
        assert_eq!(service.next_text(), (0, vec![0]));
        drop(service.set);
        assert_eq!(service.pool.receives_in_flight(), DEPTH as usize - 3);
        assert_eq!(service.pool.close().unwrap().len(), DEPTH as usize - 3);
    });
}

/// Random steps with a fixed seed: messages arrive once and in order, no reply is refused, and no buffer is lost.
#[test]
fn no_buffer_of_the_pool_is_lost_in_a_random_run() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut random = 0x2545_f491_4f6c_dd1d_u64;
        let mut below = move |bound: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % bound
        };
        for limits in [(3, 1, 0), (3, 2, 2), (DEPTH, 1, 1), (DEPTH, 4, 0)] {
            let (share, sends, pending) = limits;
            let mut service = Service::with_pending(&pd, interfaces, share, sends, pending);
            let mut expected: [VecDeque<u32>; 3] = Default::default();
            let (mut idle, mut next, mut ended) = (Vec::new(), 0_u32, 0);
            // Receives that no message has consumed. The pool also counts those whose completions the set has not polled yet.
            let mut vacant = DEPTH;
            for _ in 0..if cfg!(miri) { 20 } else { 3000 } {
                let client = below(3) as usize;
                match below(12) {
                    0..5 if vacant > 0 => {
                        service.peers[client].receive(pd.allocate(16).unwrap()).unwrap();
                        let peer = &mut service.peers[client];
                        peer.send_inline(&next.to_ne_bytes()).unwrap();
                        // The send fails if the connection has ended and the set has not reported that yet.
                        if peer.poll().unwrap().expect("a completion").status == WcStatus::SUCCESS {
                            expected[client].push_back(next);
                            next += 1;
                            vacant -= 1;
                        }
                    }
                    5..10 => {
                        let Some((from, done)) = service.next() else { continue };
                        let key = service.keys[from];
                        match done.ok() {
                            Ok(done) if done.operation == Operation::Receive => {
                                let buffer = done.buffer.unwrap();
                                assert_eq!(
                                    Some(buffer[..].try_into().unwrap()),
                                    expected[from].pop_front().map(u32::to_ne_bytes)
                                );
                                // Replies at once, like the loop in the documentation, so there is always room.
                                service.set.endpoint(key).unwrap().send(buffer).unwrap();
                                while service.peers[from].poll().unwrap().is_some() {}
                            }
                            Ok(done) => idle.extend(done.buffer),
                            Err(failed) => {
                                assert_eq!(failed.0.exceeded_share(), Some(share));
                                idle.extend(failed.0.buffer);
                                idle.extend(service.set.remove(key).unwrap());
                                expected[from].clear();
                                service.connect(&pd, interfaces, from, limits);
                                ended += 1;
                            }
                        }
                    }
                    10 if below(8) == 0 => {
                        idle.extend(service.set.remove(service.keys[client]).unwrap());
                        expected[client].clear();
                        service.connect(&pd, interfaces, client, limits);
                    }
                    _ => {
                        vacant += idle.len() as u32;
                        idle.drain(..).for_each(|buffer| _ = service.pool.receive(buffer).unwrap());
                    }
                }
            }
            assert!(ended > 0 || share == DEPTH || cfg!(miri), "{limits:?}");
            for key in service.keys.clone() {
                idle.extend(service.set.remove(key).unwrap());
            }
            assert_eq!(idle.len() + service.pool.receives_in_flight(), DEPTH as usize, "{limits:?}");
        }
    });
}

#[test]
fn a_message_found_by_arming_is_not_lost_when_an_endpoint_gets_a_share() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut pool = ReceivePool::new(&pd, 8).unwrap();
        for buffer in pd.allocate(8 * 16).unwrap().into_chunks(16).unwrap() {
            pool.receive(buffer).unwrap();
        }
        let set = EndpointSet::builder(pd.context(), 64).events(true).classic_poll(!interfaces.extended_cq);
        let mut set = set.build().unwrap();
        let key = builder(&pd, interfaces).receive_pool(&pool).build_in(&mut set).unwrap();
        let mut peer = builder(&pd, interfaces).build().unwrap();
        let mut endpoint = set.endpoint(key).unwrap();
        endpoint.connect(&peer.address()).unwrap();
        peer.connect(&endpoint.address()).unwrap();
        for text in [b"first", b"other"] {
            peer.send_inline(text).unwrap();
            assert!(peer.poll().unwrap().is_some());
        }
        assert_eq!(set.arm().unwrap(), Armed::Poll);
        // A new client connects. Its endpoint has a receive share.
        builder(&pd, interfaces).receive_pool(&pool).receive_share(4).build_in(&mut set).unwrap();
        let texts: Vec<_> =
            std::iter::from_fn(|| set.poll().unwrap()).map(|(_, done)| done.buffer.unwrap().to_vec()).collect();
        assert_eq!(texts, [b"first", b"other"]);
    });
}
