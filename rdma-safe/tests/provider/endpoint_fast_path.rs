//! The fast path and the slow path of an endpoint have the same results.

use rdma_safe::interface::{Classic, Extended, Interface};
use rdma_safe::mr::Pages;
use rdma_safe::{Access, Buffer, Endpoint, Operation, ProtectionDomain, WcStatus, Work};

use crate::fake::{Config, Fake, Mode};
use crate::support::{CLASSIC, EXTENDED, Interfaces, connect, done, endpoints, in_flight, on_each_interface};

/// Longer buffers never match an open gate.
const GATE_LIMIT: usize = 1 << 20;

fn filled(pd: &ProtectionDomain, capacity: usize, bytes: &[u8]) -> Buffer {
    let mut buffer = pd.allocate(capacity).unwrap();
    buffer.fill_from(bytes).unwrap();
    buffer
}

/// Sends messages, writes, reads and writes with immediate data. Unsignaled work precedes the messages.
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
        let message = b.poll_with(|message| message).unwrap().unwrap();
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

        assert_eq!(a.poll_with(|_| ()).unwrap(), None);
        assert_eq!((a.sends_in_flight(), b.receives_in_flight()), (0, 0));
    }
}

#[test]
fn an_endpoint_with_a_fixed_interface_behaves_like_any_other() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        for capacity in [64, GATE_LIMIT + 64] {
            let (mut a, mut b) = endpoints(&pd, interfaces);
            conversation(&pd, &mut a, &mut b, capacity);
            match (interfaces.extended_qp, interfaces.extended_cq) {
                (true, true) => {
                    let (mut a, mut b) =
                        (a.with_interface::<Extended>().unwrap(), b.with_interface::<Extended>().unwrap());
                    conversation(&pd, &mut a, &mut b, capacity);
                }
                (false, false) => {
                    let (mut a, mut b) =
                        (a.with_interface::<Classic>().unwrap(), b.with_interface::<Classic>().unwrap());
                    conversation(&pd, &mut a, &mut b, capacity);
                }
                _ => {
                    let a = a.with_interface::<Extended>().unwrap_err().with_interface::<Classic>().unwrap_err();
                    assert_eq!(in_flight(&a), (0, 0));
                }
            }
        }
    });
}

#[test]
fn converting_to_the_wrong_interface_returns_the_endpoint_with_its_work() {
    for (interfaces, is_extended) in [(EXTENDED, true), (CLASSIC, false)] {
        let fake = Fake::new(Config::default());
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        b.receive(filled(&pd, 8, b"")).unwrap();
        fake.set_mode(Mode::Manual);
        a.send(filled(&pd, 8, b"abc")).unwrap();
        let mut a = if is_extended {
            a.with_interface::<Classic>().unwrap_err()
        } else {
            a.with_interface::<Extended>().unwrap_err()
        };
        fake.set_mode(Mode::AtPost);
        fake.progress();
        assert_eq!(&*done(&mut a).buffer.unwrap(), b"abc");
        assert_eq!(&*done(&mut b).buffer.unwrap(), b"abc");
    }
}

#[test]
fn work_in_flight_survives_the_conversion_to_a_fixed_interface() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    let (mut a, mut b) = endpoints(&pd, EXTENDED);
    b.receive(filled(&pd, 8, b"")).unwrap();
    a.post(Work::send_inline(b"silent").unsignaled()).unwrap();
    b.receive(filled(&pd, 8, b"")).unwrap();
    a.send(filled(&pd, 8, b"abc")).unwrap();
    let (mut a, mut b) = (a.with_interface::<Extended>().unwrap(), b.with_interface::<Extended>().unwrap());
    assert_eq!(&*a.poll().unwrap().unwrap().buffer.unwrap(), b"abc");
    assert_eq!(b.poll().unwrap().unwrap().byte_len, 6);
    assert_eq!(b.close().unwrap().len(), 1);
}

#[test]
fn posting_is_refused_before_connecting_and_works_after_a_forgotten_batch() {
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

        // The batch is forgotten. The next call takes the work back.
        let mut batch = a.batch().unwrap();
        batch.add(Work::send(filled(&pd, 8, b"never"))).unwrap();
        std::mem::forget(batch);
        b.receive(filled(&pd, 8, b"")).unwrap();
        a.send(filled(&pd, 8, b"abcd")).unwrap();
        assert_eq!((done(&mut a).buffer.unwrap().len(), done(&mut b).byte_len), (4, 4));
    });
}
