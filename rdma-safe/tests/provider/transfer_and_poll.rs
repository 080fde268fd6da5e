//! Work that a set posts, with a look for its completion.

use rdma_safe::endpoint::{Transfer, Transferred};
use rdma_safe::mr::Pages;
use rdma_safe::{Access, Buffer, Operation, PollError, PostError, WorkId};

use crate::endpoint_sets::{Service, pool};
use crate::support::{Interfaces, on_each_interface};

/// The identifier of work in flight.
#[track_caller]
fn in_flight(transferred: Transferred) -> WorkId {
    match transferred {
        Transferred::InFlight(id) => id,
        other => panic!("{other:?}"),
    }
}

/// The identifier of work in flight. From an extended queue, the set keeps a completion.
#[track_caller]
fn in_flight_behind(transferred: Transferred, interfaces: Interfaces) -> WorkId {
    match transferred {
        Transferred::Kept(id) if interfaces.extended_cq => id,
        Transferred::InFlight(id) if !interfaces.extended_cq => id,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn completed(transferred: Transferred) -> Buffer {
    match transferred {
        Transferred::Completed(buffer) => buffer,
        other => panic!("{other:?}"),
    }
}

#[test]
fn work_that_has_completed_is_returned_at_once() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let exposed = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
        let remote = exposed.remote().slice(0, 8).unwrap();
        let mut service = Service::new(&pd, interfaces, 2, None);
        let key = service.keys[1];
        for transfer in [Transfer::Send, Transfer::Write(remote), Transfer::Read(remote)] {
            service.peers[1].receive(pd.allocate(16).unwrap()).unwrap();
            let transferred = service.set.transfer_and_poll(key, transfer, pd.allocate(8).unwrap(), 40).unwrap();
            if interfaces.extended_cq {
                assert_eq!(completed(transferred).len(), 8);
            } else {
                // A classic queue is left to the next poll.
                in_flight(transferred);
                let (from, done) = service.next();
                assert_eq!((from, done.user_data, done.buffer.map(|buffer| buffer.len())), (1, 40, Some(8)));
            }
            service.nothing();
        }
        assert_eq!(service.set.endpoint(key).unwrap().sends_in_flight(), 0);
    });
}

#[test]
fn other_completions_are_kept_for_the_next_poll_in_order() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let receives = pool(&pd);
        let mut service = Service::new(&pd, interfaces, 2, Some(&receives));
        let texts = [&b"first"[..], b"second", b"third"];
        texts.iter().for_each(|text| service.say(1, text));
        for number in 50..52 {
            // Each look finds one of the messages, all of one endpoint.
            service.peers[0].receive(pd.allocate(16).unwrap()).unwrap();
            let key = service.keys[0];
            let transferred = service.set.transfer_and_poll(key, Transfer::Send, pd.allocate(4).unwrap(), 9).unwrap();
            let id = in_flight_behind(transferred, interfaces);
            assert!(service.set.set_user_data(key, id, number));
        }
        let mut found = (Vec::new(), Vec::new());
        for _ in 0..5 {
            let (from, done) = service.next();
            match done.operation {
                Operation::Receive => found.0.push((from, done.buffer.unwrap().to_vec())),
                _ => found.1.push((from, done.user_data)),
            }
        }
        assert_eq!(found.0, texts.map(|text| (1, text.to_vec())));
        assert_eq!(found.1, [(0, 50), (0, 51)]);
        service.nothing();
    });
}

#[test]
fn work_that_fails_has_its_number() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, 1, None);
        let key = service.keys[0];
        // The peer has no receive that is long enough.
        service.peers[0].receive(pd.allocate(2).unwrap()).unwrap();
        let transferred = service.set.transfer_and_poll(key, Transfer::Send, pd.allocate(16).unwrap(), 9).unwrap();
        // The set keeps the completion of the failure.
        let id = in_flight_behind(transferred, interfaces);
        assert!(service.set.set_user_data(key, id, 50));
        let (_, done) = service.next();
        assert_eq!(done.user_data, 50);
        let failed = done.ok().unwrap_err();
        assert!(failed.0.buffer.is_some());
        assert!(!service.set.set_user_data(key, id, 51), "it was taken");
    });
}

#[test]
fn work_is_in_flight_if_the_poll_fails() {
    on_each_interface(|fake, interfaces| {
        if !interfaces.extended_cq {
            return;
        }
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, 1, None);
        let key = service.keys[0];
        service.peers[0].receive(pd.allocate(16).unwrap()).unwrap();
        fake.fail("start_poll", libc::EIO);
        let transferred = service.set.transfer_and_poll(key, Transfer::Send, pd.allocate(4).unwrap(), 9).unwrap();
        let Transferred::PollFailed(failed) = transferred else { panic!("{transferred:?}") };
        assert!(matches!(failed.error, PollError::Provider(_)));
        assert!(service.set.set_user_data(key, failed.id, 50));
        fake.heal("start_poll");
        assert_eq!(service.next().1.user_data, 50);
    });
}

#[test]
fn a_batch_that_was_forgotten_is_ended_first() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, 2, None);
        std::mem::forget(service.set.endpoint(service.keys[0]).unwrap().batch().unwrap());
        service.peers[1].receive(pd.allocate(16).unwrap()).unwrap();
        let key = service.keys[1];
        in_flight(service.set.transfer_and_poll(key, Transfer::Send, pd.allocate(4).unwrap(), 7).unwrap());
        assert_eq!(service.next().1.user_data, 7);
        assert_eq!(fake.take_violations(), [""; 0]);
    });
}

#[test]
fn work_for_an_endpoint_that_was_removed_is_returned() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, 1, None);
        let key = service.keys[0];
        drop(service.set.remove(key).unwrap());
        let rejected = service.set.transfer_and_poll(key, Transfer::Send, pd.allocate(4).unwrap(), 7).unwrap_err();
        assert!(matches!(rejected.error, PostError::EndpointFailed));
        assert_eq!(rejected.buffer.map(|buffer| buffer.len()), Some(4));
    });
}
