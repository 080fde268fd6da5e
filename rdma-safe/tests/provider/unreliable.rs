//! Unreliable connections: as reliable ones, but nobody is told what is lost.

use rdma_safe::{
    Access, ConnectOptions, Error, InitOptions, Inline, Pages, PostError, ProtectionDomain, QueuePairAddress,
    QueuePairState, QueuePairType, Remote, SendOps, Sge, WcFields, WcOpcode, WcStatus, WorkRequest,
};

use crate::support::{Interfaces, Raw, on_each_interface, post, raw_with, receive, seen};

fn initialised(pd: &ProtectionDomain, interfaces: Interfaces) -> (Raw, QueuePairAddress) {
    let mut raw = raw_with(pd, interfaces, WcFields::STANDARD, |qp| qp.qp_type(QueuePairType::UC));
    let address = raw.qp.init(&InitOptions::default().peer_access(Access::REMOTE)).unwrap();
    (raw, address)
}

fn pair(pd: &ProtectionDomain, interfaces: Interfaces) -> (Raw, Raw) {
    let ((mut a, to_a), (mut b, to_b)) = (initialised(pd, interfaces), initialised(pd, interfaces));
    a.qp.connect(&to_b, &ConnectOptions::default()).unwrap();
    b.qp.connect(&to_a, &ConnectOptions::default()).unwrap();
    assert_eq!((a.qp.state(), a.qp.qp_type()), (QueuePairState::RTS, QueuePairType::UC));
    (a, b)
}

#[test]
fn connecting_sets_what_the_type_has() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        fake.take_modified();
        let _pair = pair(&pd, interfaces);
        let masks: Vec<_> = fake.take_modified().iter().map(|(_, mask)| *mask).collect();
        assert_eq!(masks, [0x39, 0x39, 0x10_1181, 0x1_0001, 0x10_1181, 0x1_0001]);
    });
}

#[test]
fn sends_and_writes_arrive_with_and_without_immediate_data() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = pair(&pd, interfaces);
        let inbox = pd.allocate(16).unwrap();
        let exposed = pd.expose(Pages::new(16).unwrap(), Access::REMOTE_WRITE).unwrap();
        for wr_id in 1..4 {
            receive!(b, wr_id, inbox.sge()).unwrap();
        }
        post!(a,
            send(WorkRequest::new(1).signaled(), Inline(b"first"));
            send_imm(WorkRequest::new(2).signaled(), 7, Inline(b"second"));
            write(WorkRequest::new(3).signaled(), exposed.remote(), Inline(b"third"));
            write_imm(WorkRequest::new(4).signaled(), exposed.remote().slice(8, 8).unwrap(), 9, Inline(b"fourth"));
        )
        .unwrap();
        let sent: Vec<_> = seen(&mut a.cq).iter().map(|wc| (wc.wr_id, wc.status)).collect();
        assert_eq!(sent, [1, 2, 3, 4].map(|wr_id| (wr_id, WcStatus::SUCCESS)));
        let received: Vec<_> = seen(&mut b.cq).iter().map(|wc| (wc.opcode, wc.byte_len.unwrap(), wc.imm)).collect();
        let with_imm = (WcOpcode::RECV_RDMA_WITH_IMM, 6, Some(9));
        assert_eq!(received, [(WcOpcode::RECV, 5, None), (WcOpcode::RECV, 6, Some(7)), with_imm]);
        assert_eq!(&inbox[..7], b"second\0");
        let mut bytes = [0; 16];
        exposed.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"third\0\0\0fourth\0\0");
    });
}

#[test]
fn what_is_lost_makes_no_error() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = pair(&pd, interfaces);
        let inbox = pd.allocate(16).unwrap();
        let forged = Remote { address: 0x1000, rkey: 0x9999 };
        post!(a,
            send(WorkRequest::new(1).signaled(), Inline(b"no receive"));
            write(WorkRequest::new(2).signaled(), forged, Inline(b"no memory"));
        )
        .unwrap();
        receive!(b, 5, inbox.sge()).unwrap();
        assert_eq!(seen(&mut b.cq), [], "it does not wait for a receive");
        post!(a, send(WorkRequest::new(3).signaled(), Inline(b"taken"));).unwrap();
        let sent: Vec<_> = seen(&mut a.cq).iter().map(|wc| (wc.wr_id, wc.status)).collect();
        assert_eq!(sent, [1, 2, 3].map(|wr_id| (wr_id, WcStatus::SUCCESS)));
        assert_eq!(seen(&mut b.cq)[0].wr_id, 5);
        drop(b);
        post!(a, send(WorkRequest::new(4).signaled(), Inline(b"no peer"));).unwrap();
        assert_eq!(seen(&mut a.cq)[0].status, WcStatus::SUCCESS);
        assert_eq!(a.qp.query().unwrap().state(), Some(QueuePairState::RTS));
    });
}

#[test]
fn what_needs_answers_is_refused() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = pair(&pd, interfaces);
        assert_eq!(a.qp.operations(), SendOps::UC | SendOps::WINDOWS);
        let (wr, remote) = (WorkRequest::new(1), Remote { address: 64, rkey: 1 });
        let result = Sge { address: 64, len: 8, lkey: 1 };
        let mut batch = a.qp.send_batch().unwrap();
        // SAFETY: nothing of it is posted.
        unsafe {
            let not_enabled = |op| Err(PostError::NotEnabled { op });
            assert_eq!(batch.read(wr, remote, result), not_enabled(SendOps::RDMA_READ));
            assert_eq!(batch.compare_swap(wr, remote, 1, 1, result), not_enabled(SendOps::ATOMIC_CMP_AND_SWP));
            assert_eq!(batch.fetch_add(wr, remote, 1, result), not_enabled(SendOps::ATOMIC_FETCH_AND_ADD));
            assert_eq!(batch.send_invalidate(wr, 1, Inline(b"")), not_enabled(SendOps::SEND_WITH_INV));
        }
        drop(batch);
        let cq = pd.context().completion_queue(4).build().unwrap();
        let builder = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UC).classic(!interfaces.extended_qp);
        let error = builder.operations(SendOps::RC).build().unwrap_err();
        assert!(matches!(error, Error::UnsupportedOperations { ops } if ops == SendOps::RC - SendOps::UC), "{error}");
    });
}
