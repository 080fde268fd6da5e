//! Unreliable connections: lost messages are not reported.

use rdma_safe::{
    Access, ConnectOptions, Error, InitOptions, PostError, ProtectionDomain, QueuePairAddress, QueuePairState,
    QueuePairType, SendFlags, SendOps, WcOpcode,
};

use crate::support::lab::{Data, MEMORY, Memory, Mode, Op, Side, Wr, cq_builder, try_next};
use crate::support::{Rdma, device, error_of, lossless_device, pattern, rounds};

fn on_every_interface(device: fn() -> Option<Rdma>, body: impl Fn(&Rdma, Mode, Side, Side)) {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        println!("{mode}");
        let pd = rdma.pd();
        let ((mut a, to_a), (mut b, to_b)) = (side(&rdma, &pd, mode), side(&rdma, &pd, mode));
        a.qp.connect(&to_b, &ConnectOptions::default()).expect("the first queue pair connects");
        b.qp.connect(&to_a, &ConnectOptions::default()).expect("the second queue pair connects");
        assert_eq!(
            (a.qp.qp_type(), a.qp.state(), a.qp.operations() - SendOps::WINDOWS),
            (QueuePairType::UC, QueuePairState::RTS, SendOps::UC)
        );
        body(&rdma, mode, a, b);
    }
}

fn side(rdma: &Rdma, pd: &ProtectionDomain, mode: Mode) -> (Side, QueuePairAddress) {
    let cq = cq_builder(rdma, 128, mode).build().expect("a completion queue");
    let builder = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UC).inline_data(64);
    let mut qp = builder.classic(mode.classic_qp).build().expect("a queue pair");
    assert!(!rdma.is_rxe() || qp.is_extended() != mode.classic_qp);
    let options = InitOptions::default().port(rdma.port).gid_index(rdma.gid.index).peer_access(Access::REMOTE_WRITE);
    let address = qp.init(&options).expect("it has a port");
    (Side { qp, cq, memory: Memory::new(pd, MEMORY) }, address)
}

#[test]
fn an_unreliable_connection_delivers_sends_of_any_length() {
    on_every_interface(lossless_device, |_, _, mut a, mut b| {
        for (id, len) in [(1, 1), (2, 1024), (3, 1025), (4, rounds(30_000, 3000) as usize)] {
            b.memory.put(99 + len, &[0xaa; 2]);
            b.receive(id, 100..40_000).unwrap();
            a.memory.put(0, &pattern(id, len));
            a.post(&[Wr::new(id + 100, Op::Send, Data::One(a.memory.sge(0..len)))]).unwrap();
            assert_eq!(a.next_ok(id + 100).opcode, WcOpcode::SEND);
            let wc = b.next_ok(id);
            assert_eq!((wc.opcode, wc.byte_len, wc.imm), (WcOpcode::RECV, Some(len as u32), None));
            assert!(b.memory.get(100..100 + len) == pattern(id, len), "{len} bytes");
            assert_eq!(b.memory.get(100 + len..101 + len), [0xaa]);
        }
        b.receive(5, 0..64).unwrap();
        a.post(&[Wr::new(105, Op::SendImm(0x0102_0304), Data::Inline(b"inline"))]).unwrap();
        a.next_ok(105);
        let wc = b.next_ok(5);
        assert_eq!((wc.byte_len, wc.imm), (Some(6), Some(0x0102_0304)));
        assert_eq!(b.memory.get(0..6), b"inline");
    });
}

#[test]
fn an_unreliable_connection_writes_with_and_without_immediate_data() {
    on_every_interface(lossless_device, |_, _, mut a, mut b| {
        b.receive(7, 0..64).unwrap();
        let len = rounds(9000, 1100) as usize;
        a.memory.put(0, &pattern(1, len));
        let data = Data::One(a.memory.sge(0..len));
        let write = Wr::new(1, Op::Write(b.memory.remote(1000)), data);
        let with_imm = Wr::new(2, Op::WriteImm(b.memory.remote(20_000), 77), data);
        a.post(&[write, with_imm]).unwrap();
        assert_eq!((a.next_ok(1).opcode, a.next_ok(2).opcode), (WcOpcode::RDMA_WRITE, WcOpcode::RDMA_WRITE));
        let wc = b.next_ok(7);
        assert_eq!((wc.opcode, wc.byte_len, wc.imm), (WcOpcode::RECV_RDMA_WITH_IMM, Some(len as u32), Some(77)));
        assert!(b.memory.get(1000..1000 + len) == pattern(1, len));
        assert!(b.memory.get(20_000..20_000 + len) == pattern(1, len));
    });
}

#[test]
fn messages_lost_on_an_unreliable_connection_cause_no_error() {
    on_every_interface(lossless_device, |_, _, mut a, mut b| {
        a.post(&[Wr::new(1, Op::Send, Data::Inline(b"no receive"))]).unwrap();
        a.next_ok(1);
        let forged = rdma_safe::Remote { rkey: b.memory.remote(0).rkey ^ 0xff00, ..b.memory.remote(0) };
        a.post(&[Wr::new(2, Op::Write(forged), Data::Inline(b"no memory"))]).unwrap();
        a.next_ok(2);
        b.receive(3, 0..64).unwrap();
        a.post(&[Wr::new(3, Op::Send, Data::Inline(b"taken"))]).unwrap();
        a.next_ok(3);
        assert_eq!(b.next_ok(3).byte_len, Some(5), "the first one after the loss that finds a receive");
        assert_eq!(b.memory.get(0..6), b"taken\0");
        assert_eq!(try_next(&mut b.cq), None);
        drop(b);
        a.post(&[Wr::new(4, Op::Send, Data::Inline(b"no peer"))]).unwrap();
        a.next_ok(4);
        assert_eq!(a.qp.query().unwrap().state(), Some(QueuePairState::RTS));
    });
}

#[test]
fn an_unreliable_connection_refuses_operations_that_need_a_response() {
    on_every_interface(device, |rdma, mode, mut a, b| {
        let word = Data::One(a.memory.sge(0..8));
        for (op, name) in [
            (Op::Read(b.memory.remote(0)), SendOps::RDMA_READ),
            (Op::FetchAdd(b.memory.remote(0), 1), SendOps::ATOMIC_FETCH_AND_ADD),
            (Op::CompareSwap(b.memory.remote(0), 0, 1), SendOps::ATOMIC_CMP_AND_SWP),
        ] {
            let refused = a.post(&[Wr::new(1, op, word).flags(SendFlags::SIGNALED)]);
            assert_eq!(refused, Err(PostError::NotEnabled { op: name }));
        }
        let refused = a.post(&[Wr::new(1, Op::SendInvalidate(1), Data::Inline(b""))]);
        assert_eq!(refused, Err(PostError::NotEnabled { op: SendOps::SEND_WITH_INV }));
        let (pd, cq) = (rdma.pd(), rdma.completion_queue(4).build().unwrap());
        let builder = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UC).classic(mode.classic_qp);
        let error = error_of(builder.operations(SendOps::RC).build());
        assert!(matches!(error, Error::UnsupportedOperations { ops } if ops == SendOps::RC - SendOps::UC), "{error}");
    });
}
