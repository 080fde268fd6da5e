//! Removing endpoints from a set and dropping sets: capacity, returned buffers, leaks, and effects on other endpoints.

use rdma_safe::endpoint::Armed;
use rdma_safe::error::Verb;
use rdma_safe::{Buffer, Completion, EndpointKey, EndpointSet, Errno, Error, Operation, ReceivePool, WcStatus};

use crate::endpoint_sets::{Service, fill, pool};
use crate::failing_destruction::Count;
use crate::fake::{Config, Fake, Live, Mode};
use crate::support::{CLASSIC, EXTENDED, Interfaces, builder, in_every_order, on_each_interface, one_under_miri};

fn texts(buffers: &[Buffer]) -> Vec<&[u8]> {
    buffers.iter().map(|buffer| &buffer[..]).collect()
}

/// Runs a test on devices that discard the completions of a destroyed queue pair, and on devices that keep them.
fn on_each_device(test: impl Fn(&Fake, Interfaces)) {
    for sweeps in [false, true] {
        for &interfaces in one_under_miri(&[EXTENDED, CLASSIC]) {
            println!("{interfaces:?}, sweeps: {sweeps}");
            test(&Fake::new(Config { sweeps, ..Config::default() }), interfaces);
        }
    }
}

#[test]
fn removing_an_endpoint_returns_its_buffers_and_keeps_completions_of_others() {
    on_each_device(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, 3, None);
        for key in service.keys.clone() {
            for _ in 0..3 {
                service.set.endpoint(key).unwrap().receive(pd.allocate(16).unwrap()).unwrap();
            }
        }
        for (peer, text) in [(0, b"a1"), (1, b"b1"), (0, b"a2"), (2, b"c1"), (1, b"b2")] {
            service.say(peer, text);
        }
        assert_eq!(service.next_text(), (0, b"a1".to_vec()));
        let gone = service.keys[1];
        let mut outbox = pd.allocate(3).unwrap();
        outbox.copy_from_slice(b"out");
        fake.set_mode(Mode::Manual);
        service.set.endpoint(gone).unwrap().send(outbox).unwrap();
        let buffers = service.set.remove(gone).unwrap();
        fake.set_mode(Mode::AtPost);
        assert_eq!(texts(&buffers[..1]), [b"out"]);
        // The receives come back in order, whether their completions were already polled or not.
        assert_eq!(buffers.iter().map(Buffer::capacity).collect::<Vec<_>>(), [3, 16, 16, 16]);
        assert!(service.set.endpoint(gone).is_none());
        assert_eq!(service.next_text(), (0, b"a2".to_vec()));
        assert_eq!(service.next_text(), (2, b"c1".to_vec()));
        service.nothing();
        service.say(2, b"c2");
        assert_eq!(service.next_text(), (2, b"c2".to_vec()));
    });
}

#[test]
fn removing_an_endpoint_returns_only_the_pool_receives_it_consumed() {
    on_each_device(|fake, interfaces| {
        let pd = fake.pd();
        let mut pool = pool(&pd);
        let mut service = Service::new(&pd, interfaces, 3, Some(&pool));
        for (peer, text) in [(0, b"a1"), (1, b"b1"), (2, b"c1"), (1, b"b2")] {
            service.say(peer, text);
        }
        let keys = service.keys.clone();
        assert_eq!(texts(&service.set.remove(keys[1]).unwrap()), [b"b1", b"b2"]);
        assert_eq!(fill(&mut pool), 4, "all receives were consumed, so the pool has room for as many");
        service.say(0, b"a2");
        // Messages in its backlog come back, too.
        assert_eq!(texts(&service.set.remove(keys[2]).unwrap()), [b"c1"]);
        assert_eq!(service.next_text(), (0, b"a1".to_vec()));
        assert_eq!(service.next_text(), (0, b"a2".to_vec()));
        service.nothing();
        assert_eq!((service.set.len(), service.set.keys().collect::<Vec<_>>()), (1, vec![keys[0]]));
    });
}

#[test]
fn a_message_found_by_arming_survives_the_removal_of_another_endpoint() {
    on_each_device(|fake, interfaces| {
        let pd = fake.pd();
        let pool = pool(&pd);
        let set = EndpointSet::builder(pd.context(), 64).events(true).classic_poll(!interfaces.extended_cq);
        let mut service = Service { set: set.build().unwrap(), keys: Vec::new(), peers: Vec::new() };
        for _ in 0..2 {
            service.add(&pd, interfaces, Some(&pool));
        }
        for (peer, text) in [(0, b"a1"), (0, b"a2"), (1, b"b1")] {
            service.say(peer, text);
        }
        assert_eq!(service.set.arm().unwrap(), Armed::Poll, "there is a completion to poll");
        let gone = service.keys[1];
        assert_eq!(texts(&service.set.remove(gone).unwrap()), [b"b1"]);
        assert_eq!(service.next_text(), (0, b"a1".to_vec()));
        assert_eq!(service.next_text(), (0, b"a2".to_vec()));
        service.nothing();
    });
}

#[test]
fn many_removals_in_a_row_lose_nothing() {
    on_each_device(|fake, interfaces| {
        let pd = fake.pd();
        let mut pool = pool(&pd);
        let mut service = Service::new(&pd, interfaces, 1, Some(&pool));
        let stays = service.keys[0];
        let mut expected = Vec::new();
        for round in 0..if cfg!(miri) { 4 } else { 10_u8 } {
            service.say(0, &[round]);
            expected.push(round);
            let passing = builder(&pd, interfaces).receive_pool(&pool);
            // As many sends as the set has room for.
            let error = passing.clone().build_in(&mut service.set).unwrap_err();
            assert!(matches!(error, Error::EndpointSetFull { needed: 20, capacity: 12 }), "{error}");
            let key = passing.send_depth(0).build_in(&mut service.set).unwrap();
            assert!(service.set.remove(key).unwrap().is_empty());
            fill(&mut pool);
        }
        for round in expected {
            let (key, message) = service.set.poll().unwrap().unwrap();
            assert_eq!(
                (key, message.operation, &message.buffer.unwrap()[..]),
                (stays, Operation::Receive, &[round][..])
            );
        }
        service.nothing();
    });
}

#[test]
fn a_key_names_one_endpoint_of_one_set() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut one, other) = (Service::new(&pd, interfaces, 2, None), Service::new(&pd, interfaces, 2, None));
        let old = one.keys[0];
        assert_ne!(old, one.keys[1]);
        one.set.remove(old).unwrap();
        one.add(&pd, interfaces, None);
        let new = one.keys[2];
        assert_eq!((new.index(), new == old), (old.index(), false), "the slot is reused, but the key differs");
        assert_eq!(one.set.endpoint(new).unwrap().queue_pair().id(), new.qp_id());
        for stranger in [old, other.keys[0], other.keys[1]] {
            assert!(one.set.endpoint(stranger).is_none());
            assert!(matches!(one.set.remove(stranger), Err(Error::NoSuchEndpoint)));
        }
        assert_eq!((one.set.len(), one.set.is_empty()), (2, false));
    });
}

#[test]
fn an_endpoint_that_could_overrun_the_queue_is_refused_with_the_needed_room() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let (pool, deep) = (ReceivePool::new(&pd, 10).unwrap(), ReceivePool::new(&pd, 20).unwrap());
    let mut set = EndpointSet::builder(pd.context(), 31).build().unwrap();
    assert_eq!((set.capacity(), set.is_empty()), (31, true));
    let add = |set: &mut EndpointSet, sends: u32, pool: Option<&ReceivePool>| -> Result<EndpointKey, u64> {
        let endpoint = builder(&pd, EXTENDED).send_depth(sends).recv_depth(8);
        let endpoint = if let Some(pool) = pool { endpoint.receive_pool(pool) } else { endpoint };
        endpoint.build_in(set).map_err(|error| match error {
            Error::EndpointSetFull { needed, capacity: 31 } => needed,
            other => panic!("{other}"),
        })
    };
    let first = add(&mut set, 5, Some(&pool)).unwrap();
    // The pool counts once.
    let second = add(&mut set, 5, Some(&pool)).unwrap();
    assert_eq!(add(&mut set, 4, None), Err(32));
    assert_eq!(add(&mut set, 1, Some(&deep)), Err(41));
    assert_eq!(add(&mut set, u32::MAX, Some(&pool)), Err(20 + u64::from(u32::MAX)));
    let third = add(&mut set, 3, None).unwrap();
    assert_eq!(add(&mut set, 1, Some(&pool)), Err(32));
    assert_eq!(fake.live().qps, 3, "no queue pair was created for a refused endpoint");
    set.remove(third).unwrap();
    set.remove(first).unwrap();
    // Half of the endpoints still use the pool.
    assert_eq!(add(&mut set, 1, Some(&deep)), Err(36));
    set.remove(second).unwrap();
    add(&mut set, 11, Some(&deep)).unwrap();
    assert_eq!(add(&mut set, 1, None), Err(40));
    let text = builder(&pd, EXTENDED).build_in(&mut set).unwrap_err().to_string();
    assert!(text.contains("47") && text.contains("31") && text.contains("EndpointSet::builder"), "{text}");
}

#[test]
fn a_set_with_the_exact_capacity_does_not_overrun() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut pool = pool(&pd);
        let mut service = Service::new(&pd, interfaces, 2, Some(&pool));
        assert_eq!(service.set.capacity(), 2 * 8 + 4);
        for round in 0..if cfg!(miri) { 1 } else { 3_u8 } {
            for index in 0..2 {
                service.say(index, &[round]);
                service.say(index, &[round]);
                for _ in 0..8 {
                    service.peers[index].receive(pd.allocate(16).unwrap()).unwrap();
                    service.set.endpoint(service.keys[index]).unwrap().send(pd.allocate(1).unwrap()).unwrap();
                }
            }
            let mut taken = [0, 0];
            for _ in 0..20 {
                let (_, completion) = service.next();
                assert_eq!(completion.status, WcStatus::SUCCESS);
                taken[usize::from(completion.id.is_receive())] += 1;
            }
            assert_eq!((taken, fill(&mut pool)), ([16, 4], 4));
            service.nothing();
            while service.peers.iter_mut().any(|peer| peer.poll().unwrap().is_some()) {}
        }
    });
}

#[test]
fn stale_completions_are_not_assigned_to_an_endpoint_with_the_same_number() {
    for &interfaces in one_under_miri(&[EXTENDED, CLASSIC]) {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let set = EndpointSet::builder(pd.context(), 48).classic_poll(!interfaces.extended_cq).build().unwrap();
        let mut service = Service { set, keys: Vec::new(), peers: Vec::new() };
        for _ in 0..2 {
            service.add(&pd, interfaces, None);
        }
        let [gone, stays] = service.keys[..] else { panic!("two keys") };
        for key in [gone, stays] {
            service.set.endpoint(key).unwrap().receive(pd.allocate(16).unwrap()).unwrap();
        }
        service.say(0, b"left");
        let number = service.set.endpoint(gone).unwrap().queue_pair().number();
        let verb = if interfaces.extended_cq { "start_poll" } else { "ibv_poll_cq" };
        fake.fail(verb, libc::EIO);
        assert!(matches!(service.set.remove(gone), Err(Error::Poll(_))), "its remaining completions cannot be polled");
        fake.heal(verb);
        assert!(service.set.endpoint(gone).is_none());
        service.say(1, b"others");
        fake.reuse_number(number);
        let new = builder(&pd, interfaces).build_in(&mut service.set).unwrap();
        let mut endpoint = service.set.endpoint(new).unwrap();
        assert_eq!(endpoint.queue_pair().number(), number);
        endpoint.receive(pd.allocate(16).unwrap()).unwrap();
        assert_eq!(service.next_text(), (1, b"others".to_vec()));
        service.nothing();
        assert_eq!(service.set.endpoint(new).unwrap().receives_in_flight(), 1);
        let error = builder(&pd, interfaces).build_in(&mut service.set).unwrap_err();
        assert!(
            matches!(error, Error::EndpointSetFull { needed: 64, capacity: 48 }),
            "the room stays reserved: {error}"
        );
    }
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn an_endpoint_that_cannot_be_destroyed_keeps_its_buffers_and_others_work() {
    for pooled in [false, true] {
        let fake = Fake::new(Config::default());
        fake.may_leak();
        let (pd, count) = (fake.pd(), Count::default());
        let mut pool = pool(&pd);
        let mut service = Service::new(&pd, EXTENDED, 2, pooled.then_some(&pool));
        let keys = service.keys.clone();
        fake.set_mode(Mode::Manual);
        service.set.endpoint(keys[0]).unwrap().send(count.buffer(&pd)).unwrap();
        if !pooled {
            service.set.endpoint(keys[0]).unwrap().receive(count.buffer(&pd)).unwrap();
            service.set.endpoint(keys[1]).unwrap().receive(pd.allocate(16).unwrap()).unwrap();
        }
        fake.fail("ibv_destroy_qp", libc::EBUSY);
        let error = service.set.remove(keys[0]).unwrap_err();
        assert!(matches!(error, Error::Verb { verb: Verb::DestroyQp, errno: Errno(libc::EBUSY), .. }), "{error}");
        fake.heal("ibv_destroy_qp");
        fake.set_mode(Mode::AtPost);
        fake.progress();
        assert_eq!(count.freed(), 0);
        assert!(matches!(service.set.remove(keys[0]), Err(Error::NoSuchEndpoint)));
        service.say(1, b"others");
        assert_eq!(service.next_text(), (1, b"others".to_vec()));
        service.nothing();
        if pooled {
            fill(&mut pool);
        }
        // Its room stays reserved, since its work may still complete.
        let error = builder(&pd, EXTENDED).build_in(&mut service.set).unwrap_err();
        assert!(matches!(error, Error::EndpointSetFull { .. }), "{error}");
        drop((service, pool, pd));
        assert_eq!(count.freed(), 0);
        let Live { contexts, pds, cqs, qps, .. } = fake.live();
        assert_eq!((contexts, pds, cqs, qps), (1, 1, 1, 1));
    }
}

#[test]
#[cfg_attr(miri, ignore = "leaks on purpose")]
fn a_set_that_is_dropped_while_nothing_can_be_destroyed_frees_nothing() {
    let fake = Fake::new(Config::default());
    fake.may_leak();
    let (pd, count) = (fake.pd(), Count::default());
    let mut service = Service::new(&pd, EXTENDED, 2, None);
    for key in service.keys.clone() {
        service.set.endpoint(key).unwrap().receive(count.buffer(&pd)).unwrap();
    }
    fake.fail("ibv_destroy_qp", libc::EBUSY);
    let Service { set, peers, .. } = service;
    drop((set, pd));
    assert_eq!((count.freed(), fake.live().cqs), (0, 3));
    drop(peers);
}

#[test]
fn a_set_its_pool_its_peers_and_its_buffers_may_be_dropped_in_any_order() {
    in_every_order(&[0, 1, 2, 3, 4], &mut |order| {
        // Miri is slow, so it tries only both orders of each pair.
        if cfg!(miri) && !order.is_sorted() && !order.is_sorted_by(|a, b| a > b) {
            return;
        }
        let fake = Fake::new(Config::default());
        let (pd, count) = (fake.pd(), Count::default());
        let mut pool = ReceivePool::new(&pd, 4).unwrap();
        for _ in 0..4 {
            pool.receive(count.buffer(&pd)).unwrap();
        }
        let mut service = Service::new(&pd, EXTENDED, 2, Some(&pool));
        for peer in [0, 1, 0] {
            service.say(peer, b"message");
        }
        let (_, handed_out) = service.next();
        let key = service.keys[1];
        let Service { mut set, peers, .. } = service;
        set.endpoint(key).unwrap().send(count.buffer(&pd)).unwrap();
        let objects: [Box<dyn std::any::Any>; 5] =
            [Box::new(set), Box::new(pool), Box::new(peers), Box::<Completion>::new(handed_out), Box::new(pd)];
        crate::support::drop_in_order(order, objects);
        assert_eq!(count.freed(), 5);
    });
}

#[test]
fn dropping_a_set_frees_pool_slots_of_messages_that_were_not_handed_out() {
    on_each_device(|fake, interfaces| {
        let pd = fake.pd();
        let mut pool = pool(&pd);
        let mut service = Service::new(&pd, interfaces, 2, Some(&pool));
        for peer in [0, 1, 1] {
            service.say(peer, b"message");
        }
        drop(service);
        assert_eq!((pool.receives_in_flight(), fill(&mut pool)), (1, 3));
        assert_eq!(pool.close().unwrap().len(), 4);
    });
}
