//! Tests of the stub through rdma-safe.

use rdma_safe::address::AddressVector;
use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::{
    Access, Device, Endpoint, Gid, Inline, Mtu, Operation, QueuePair, QueuePairState, Remote, Sge, WcOpcode,
    WorkRequest,
};

#[test]
fn both_apis_work_over_the_stub() {
    rdma_stub::install().unwrap();
    let pd = Device::first().unwrap().open().unwrap().alloc_pd().unwrap();
    for classic in [false, true] {
        let mut endpoint =
            Endpoint::builder(&pd).inline_data(64).classic_post(classic).classic_poll(classic).build().unwrap();
        assert_eq!(endpoint.queue_pair().is_extended(), !classic);
        let peer = endpoint.address();
        endpoint.connect(&peer).unwrap();
        endpoint.send(pd.allocate(32).unwrap()).unwrap();
        let sent = endpoint.poll().unwrap().unwrap().ok().unwrap();
        assert_eq!((sent.operation, sent.buffer.unwrap().len()), (Operation::Send, 32));
        endpoint.receive(pd.allocate(16).unwrap()).unwrap();
        assert!(endpoint.poll().unwrap().is_none(), "no peer sends");
        assert_eq!(endpoint.close().unwrap().len(), 1);

        let mut endpoint = Endpoint::builder(&pd).classic_post(classic).classic_poll(classic).build().unwrap();
        // SAFETY: the queue pair belongs to this provider.
        unsafe { rdma_stub::rdma_stub_receive_at_once(endpoint.queue_pair().as_raw(), true) };
        endpoint.receive(pd.allocate(16).unwrap()).unwrap();
        let received = endpoint.poll().unwrap().unwrap().ok().unwrap();
        assert_eq!((received.operation, received.imm()), (Operation::Receive, Some(7)));

        let mut srq = pd.shared_receive_queue(4).sges(2).build().unwrap();
        // SAFETY: the provider moves no data.
        (0..9).for_each(|wr_id| unsafe { srq.receive(wr_id, Sge::EMPTY) }.unwrap());

        let mut cq = pd.context().completion_queue(16).classic(classic).build().unwrap();
        let mut qp = pd.queue_pair(&cq, &cq).inline_data(64).classic(classic).build().unwrap();
        to_rts(&mut qp);
        let mut batch = qp.send_batch().unwrap();
        // SAFETY: the provider moves no data.
        unsafe {
            batch.write(WorkRequest::new(1), Remote { address: 8, rkey: 9 }, Inline(b"inline")).unwrap();
            batch.send(WorkRequest::new(2).signaled(), Sge::EMPTY).unwrap();
        }
        batch.post().unwrap();
        let mut poll = cq.poll();
        let wc = poll.next().unwrap().unwrap();
        assert_eq!((wc.wr_id(), wc.opcode()), (2, WcOpcode::SEND));
        assert!(poll.next().unwrap().is_none());
        drop(poll);
        assert_eq!(rdma_stub::rdma_stub_latest_cq(), cq.as_raw());
        // SAFETY: the queue belongs to this provider.
        unsafe { rdma_stub::rdma_stub_endless(cq.as_raw(), 2) };
        for _ in 0..2 {
            let mut poll = cq.poll();
            let mut count = 0;
            while let Some(wc) = poll.next().unwrap() {
                assert_eq!((wc.wr_id(), wc.byte_len(), wc.imm()), (7, Some(64), Some(7)));
                count += 1;
            }
            assert_eq!(count, 2);
        }
    }
}

fn to_rts(qp: &mut QueuePair) {
    let init = QueuePairAttributes::new().set_state(QueuePairState::INIT);
    let rtr = QueuePairAttributes::new().set_state(QueuePairState::RTR);
    let rts = QueuePairAttributes::new().set_state(QueuePairState::RTS);
    let gid = Gid::ZERO;
    for attributes in [
        init.set_port(1).set_pkey_index(0).set_access(Access::empty()),
        rtr.set_address(AddressVector::from_gid(1, gid, 0))
            .set_path_mtu(Mtu::MTU_4096)
            .set_dest_qp_num(1)
            .set_rq_psn(0)
            .set_max_dest_rd_atomic(1)
            .set_min_rnr_timer(12),
        rts.set_sq_psn(0).set_timeout(14).set_retry_count(6).set_rnr_retry(7).set_max_rd_atomic(1),
    ] {
        qp.modify(&attributes).unwrap();
    }
}
