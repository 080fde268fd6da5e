//! The short way of an endpoint and the long one do the same.

use rdma_safe::{Access, Buffer, Endpoint, Interface, Operation, Pages, ProtectionDomain, WcStatus, Work};

use crate::fake::{Config, Fake, Mode};
use crate::support::{CLASSIC, EXTENDED, Interfaces, connect, done, endpoints, in_flight, on_each_interface};

/// Beyond it no gate is open.
const SHORT: usize = 1 << 20;

fn filled(pd: &ProtectionDomain, capacity: usize, bytes: &[u8]) -> Buffer {
    let mut buffer = pd.allocate(capacity).unwrap();
    buffer.fill_from(bytes).unwrap();
    buffer
}

/// A message there and back, a write, a read, and a notice; between work that has no completion of its own.
fn conversation<I: Interface>(pd: &ProtectionDomain, a: &mut Endpoint<I>, b: &mut Endpoint<I>, capacity: usize) {
    let exposed = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
    let remote = exposed.remote();
    let completed = |endpoint: &mut Endpoint<I>| endpoint.poll().unwrap().expect("a completion").ok().unwrap();
    for round in 0..3_u8 {
        b.receive(pd.allocate(capacity).unwrap()).unwrap();
        a.post(Work::write(filled(pd, capacity, &[round; 4]), remote).unsignaled()).unwrap();
        a.send(filled(pd, capacity, &[round; 7])).unwrap();
        let (write, send) = (completed(a), completed(a));
        assert_eq!((write.operation, send.operation), (Operation::Write, Operation::Send));
        assert_eq!((write.buffer.unwrap().len(), send.buffer.unwrap().len()), (4, 7));
        let message = b.take(|message| message).unwrap().unwrap();
        assert_eq!((message.operation, message.byte_len, message.imm()), (Operation::Receive, 7, None));
        assert_eq!(&*message.buffer.unwrap(), &[round; 7]);

        a.write(filled(pd, capacity, &[round + 1; 8]), remote).unwrap();
        a.read(filled(pd, capacity, &[0; 8]), remote.slice(0, 8).unwrap()).unwrap();
        let (write, read) = (completed(a), completed(a));
        assert_eq!((write.operation, write.byte_len), (Operation::Write, 0));
        assert_eq!((read.operation, read.byte_len), (Operation::Read, 8));
        assert_eq!(&*read.buffer.unwrap(), &[round + 1; 8]);

        b.receive(pd.allocate(capacity).unwrap()).unwrap();
        a.post(Work::write_inline(b"notice", remote).imm(7)).unwrap();
        assert_eq!(completed(a).operation, Operation::Write);
        let notice = completed(b);
        assert_eq!((notice.operation, notice.byte_len, notice.imm()), (Operation::ReceiveWrite, 6, Some(7)));
        assert_eq!(notice.buffer.unwrap().len(), 0);

        assert_eq!(a.take(|_| ()).unwrap(), None);
        assert_eq!((a.sends_in_flight(), b.receives_in_flight()), (0, 0));
    }
}

#[test]
fn an_endpoint_that_knows_its_interface_does_as_one_that_asks() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        for capacity in [64, SHORT + 64] {
            let (mut a, mut b) = endpoints(&pd, interfaces);
            conversation(&pd, &mut a, &mut b, capacity);
            match (interfaces.extended_qp, interfaces.extended_cq) {
                (true, true) => {
                    let (mut a, mut b) = (a.extended().unwrap(), b.extended().unwrap());
                    conversation(&pd, &mut a, &mut b, capacity);
                }
                (false, false) => {
                    let (mut a, mut b) = (a.classic().unwrap(), b.classic().unwrap());
                    conversation(&pd, &mut a, &mut b, capacity);
                }
                _ => {
                    let a = a.extended().unwrap_err().classic().unwrap_err();
                    assert_eq!(in_flight(&a), (0, 0));
                }
            }
        }
    });
}

#[test]
fn an_endpoint_of_the_other_interface_comes_back_with_its_work() {
    for (interfaces, is_extended) in [(EXTENDED, true), (CLASSIC, false)] {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        b.receive(filled(&pd, 8, b"")).unwrap();
        fake.set_mode(Mode::Manual);
        a.send(filled(&pd, 8, b"abc")).unwrap();
        let mut a = if is_extended { a.classic().unwrap_err() } else { a.extended().unwrap_err() };
        fake.set_mode(Mode::AtPost);
        fake.progress();
        assert_eq!(&*done(&mut a).buffer.unwrap(), b"abc");
        assert_eq!(&*done(&mut b).buffer.unwrap(), b"abc");
    }
}

#[test]
fn what_was_in_flight_before_an_endpoint_was_told_its_interface_comes_after() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let (mut a, mut b) = endpoints(&pd, EXTENDED);
    b.receive(filled(&pd, 8, b"")).unwrap();
    a.post(Work::send_inline(b"silent").unsignaled()).unwrap();
    b.receive(filled(&pd, 8, b"")).unwrap();
    a.send(filled(&pd, 8, b"abc")).unwrap();
    let (mut a, mut b) = (a.extended().unwrap(), b.extended().unwrap());
    assert_eq!(&*a.poll().unwrap().unwrap().buffer.unwrap(), b"abc");
    assert_eq!(b.poll().unwrap().unwrap().byte_len, 6);
    assert_eq!(b.close().unwrap().len(), 1);
}

#[test]
fn posting_is_refused_until_it_is_possible_and_after_it_is_no_more() {
    on_each_interface(|fake, interfaces: Interfaces| {
        let pd = fake.pd();
        let mut a = crate::support::builder(&pd, interfaces).build().unwrap();
        let mut b = crate::support::builder(&pd, interfaces).build().unwrap();
        let refused = a.send(filled(&pd, 8, b"abc")).unwrap_err();
        assert!(matches!(refused.error, rdma_safe::PostError::NotReady { .. }), "{refused}");
        assert_eq!(&*refused.buffer.unwrap(), b"abc");
        b.receive(filled(&pd, 8, b"")).unwrap();
        connect(&mut a, &mut b);
        a.send(filled(&pd, 8, b"abc")).unwrap();
        assert_eq!((done(&mut a).status, done(&mut b).byte_len), (WcStatus::SUCCESS, 3));

        // Forgotten: the next call takes it back.
        let mut batch = a.batch().unwrap();
        batch.add(Work::send(filled(&pd, 8, b"never"))).unwrap();
        std::mem::forget(batch);
        b.receive(filled(&pd, 8, b"")).unwrap();
        a.send(filled(&pd, 8, b"abcd")).unwrap();
        assert_eq!((done(&mut a).buffer.unwrap().len(), done(&mut b).byte_len), (4, 4));
    });
}
