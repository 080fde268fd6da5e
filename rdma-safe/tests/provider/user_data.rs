//! Completions return the number that the user has given to the work.

use rdma_safe::endpoint::{CompletionSink, DatagramSender, Succeeded, Transfer};
use rdma_safe::mr::Pages;
use rdma_safe::{Access, Completion, EndpointKey, Operation, Work};

use crate::endpoint_sets::{Service, pool};
use crate::support::{builder, connect, done, nothing, on_each_interface};

#[test]
fn every_kind_of_work_has_it() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut a = builder(&pd, interfaces).send_depth(4).pending_sends(8).send_sges(2).build().unwrap();
        let mut b = builder(&pd, interfaces).recv_depth(16).build().unwrap();
        connect(&mut a, &mut b);
        for _ in 0..16 {
            b.receive(pd.allocate(16).unwrap()).unwrap();
        }
        let exposed = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
        let remote = exposed.remote().slice(0, 8).unwrap();
        let buffer = || pd.allocate(8).unwrap();
        let list = || vec![buffer(), buffer()];
        // All but the first four wait for room.
        a.transfer(Transfer::Send, buffer(), 1).unwrap();
        a.transfer(Transfer::Write(remote), buffer(), u32::MAX).unwrap();
        a.transfer(Transfer::Read(remote), buffer(), 3).unwrap();
        a.post(Work::send(buffer()).user_data(4)).unwrap();
        a.post(Work::send_inline(b"inline").user_data(5)).unwrap();
        a.post(Work::send_list(list()).user_data(6)).unwrap();
        a.post(Work::fetch_add(buffer(), remote, 1).user_data(7)).unwrap();
        a.send(buffer()).unwrap();
        for expected in [1, u32::MAX, 3, 4, 5, 6, 7, 0] {
            assert_eq!(done(&mut a).user_data, expected);
        }
        let mut batch = a.batch().unwrap();
        batch.add(Work::send(buffer()).user_data(8)).unwrap();
        batch.add(Work::write(buffer(), remote).unsignaled().user_data(9)).unwrap();
        batch.add(Work::send_list(list()).imm(1).user_data(10)).unwrap();
        batch.post().unwrap();
        let mut all = Vec::new();
        a.poll_each(8, |done| all.push(done.user_data)).unwrap();
        assert_eq!(all, [8, 9, 10]);
        nothing(&mut a);
        while let Some(received) = b.poll().unwrap() {
            assert_eq!((received.operation, received.user_data), (Operation::Receive, 0));
        }
    });
}

/// What a poll has passed, by function.
#[derive(Default)]
struct Passed {
    sent: Vec<(EndpointKey, u32, usize)>,
    received: Vec<(EndpointKey, Vec<u8>)>,
    completed: Vec<(EndpointKey, Operation, u32, bool)>,
}

impl CompletionSink for Passed {
    fn sent(&mut self, key: EndpointKey, work: Succeeded) {
        self.sent.push((key, work.user_data, work.buffer.len()));
    }

    fn received(&mut self, key: EndpointKey, work: Succeeded) {
        assert!(work.id.is_receive() && work.operation == Operation::Receive);
        self.received.push((key, work.buffer.to_vec()));
    }

    fn completed(&mut self, key: EndpointKey, completion: Completion, sender: Option<DatagramSender>) {
        assert!(sender.is_none());
        let Completion { operation, user_data, .. } = completion;
        self.completed.push((key, operation, user_data, completion.ok().is_ok()));
    }
}

#[test]
fn a_sink_is_given_the_same_work_by_the_function_for_it() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, 2, None);
        let [first, second] = [service.keys[0], service.keys[1]];
        service.set.endpoint(second).unwrap().receive(pd.allocate(16).unwrap()).unwrap();
        service.say(1, b"hello");
        for key in [first, second] {
            let mut endpoint = service.set.endpoint(key).unwrap();
            endpoint.transfer(Transfer::Send, pd.allocate(4).unwrap(), 40 + key.index() as u32).unwrap();
        }
        for peer in &mut service.peers {
            peer.receive(pd.allocate(16).unwrap()).unwrap();
        }
        let mut passed = Passed::default();
        assert_eq!(service.set.poll_into(0, &mut passed).unwrap(), 0);
        assert_eq!(service.set.poll_into(8, &mut passed).unwrap(), 3);
        if interfaces.extended_cq {
            assert_eq!(passed.sent, [(first, 40, 4), (second, 41, 4)]);
            assert_eq!(passed.received, [(second, b"hello".to_vec())]);
            assert_eq!(passed.completed, []);
        } else {
            let sends: Vec<_> = passed.completed.iter().filter(|done| done.1 == Operation::Send).collect();
            assert_eq!(sends, [&(first, Operation::Send, 40, true), &(second, Operation::Send, 41, true)]);
        }
        // Work that has failed keeps its number. A message that is too long for the receive ends the connection.
        service.peers[0].receive(pd.allocate(2).unwrap()).unwrap();
        let mut endpoint = service.set.endpoint(first).unwrap();
        endpoint.transfer(Transfer::Send, pd.allocate(16).unwrap(), 50).unwrap();
        endpoint.transfer(Transfer::Send, pd.allocate(16).unwrap(), 51).unwrap();
        let mut passed = Passed::default();
        while service.set.poll_into(8, &mut passed).unwrap() != 0 {}
        let failed: Vec<_> = passed.completed.iter().filter(|done| done.1 == Operation::Send).collect();
        assert_eq!(failed, [&(first, Operation::Send, 50, false), &(first, Operation::Send, 51, false)]);
    });
}

#[test]
fn a_sink_is_given_receives_of_a_pool_and_messages_with_immediate_data() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let receives = pool(&pd);
        let mut service = Service::new(&pd, interfaces, 2, Some(&receives));
        service.say(1, b"hello");
        service.peers[0].post(Work::send_inline(b"urgent").imm(7)).unwrap();
        assert_eq!(done(&mut service.peers[0]).operation, Operation::Send);
        service.say(0, b"bye");
        let mut passed = Passed::default();
        assert_eq!(service.set.poll_into(8, &mut passed).unwrap(), 3);
        let [first, second] = [service.keys[0], service.keys[1]];
        let immediate = (first, Operation::Receive, 0, true);
        if interfaces.extended_cq {
            // The message with immediate data ends the fast path.
            assert_eq!(passed.received[0], (second, b"hello".to_vec()));
            assert_eq!(passed.completed[0], immediate);
        }
        assert_eq!(passed.received.len() + passed.completed.len(), 3);
        assert!(passed.completed.contains(&immediate));
        assert_eq!(receives.receives_in_flight(), 1);
    });
}

/// A sink that fails.
struct Failing;

impl CompletionSink for Failing {
    fn completed(&mut self, _: EndpointKey, _: Completion, _: Option<DatagramSender>) {
        panic!("on purpose");
    }
}

#[test]
fn a_sink_that_panics_ends_the_poll() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, 1, None);
        let key = service.keys[0];
        for text in [&b"lost"[..], b"found"] {
            service.set.endpoint(key).unwrap().receive(pd.allocate(16).unwrap()).unwrap();
            service.say(0, text);
        }
        let poll = || service.set.poll_into(8, Failing);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(poll)).is_err());
        assert_eq!(fake.take_violations(), [""; 0]);
        assert_eq!(service.next_text(), (0, b"found".to_vec()));
    });
}

#[test]
fn reads_of_a_set_have_their_length_however_they_are_taken() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let exposed = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
        let mut service = Service::new(&pd, interfaces, 1, None);
        let mut endpoint = service.set.endpoint(service.keys[0]).unwrap();
        for len in [8, 16] {
            let remote = exposed.remote().slice(0, len).unwrap();
            endpoint.transfer(Transfer::Read(remote), pd.allocate(len as usize).unwrap(), len as u32).unwrap();
        }
        let mut lengths = Vec::new();
        let taken = service.set.poll_each(1, |_, done| lengths.push((done.operation, done.byte_len, done.user_data)));
        assert_eq!(taken.unwrap(), 1);
        let (_, done) = service.set.poll().unwrap().unwrap();
        lengths.push((done.operation, done.byte_len, done.user_data));
        assert_eq!(lengths, [(Operation::Read, 8, 8), (Operation::Read, 16, 16)]);
    });
}
