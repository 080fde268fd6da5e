//! Operations that not every device has: atomic write, flush, segmentation of TCP.

use rdma_safe::{
    Access, DeviceCapabilities, Error, FlushPlacement, FlushRange, PostError, QueuePairType, SendOps, WcOpcode,
    WcStatus, WorkRequest,
};

use crate::support::lab::{Lab, Memory, Mode};
use crate::support::link::Link;
use crate::support::{Rdma, device, error_of};

/// What the device has, of operations that it has to report.
fn reported(rdma: &Rdma) -> SendOps {
    let attributes = rdma.attributes();
    let can = |capability| attributes.capabilities().intersects(capability);
    let mut ops = SendOps::empty();
    ops.set(SendOps::FLUSH, can(DeviceCapabilities::FLUSH_GLOBAL | DeviceCapabilities::FLUSH_PERSISTENT));
    ops.set(SendOps::ATOMIC_WRITE, can(DeviceCapabilities::ATOMIC_WRITE));
    let segments = attributes.segmentation_offload();
    ops.set(SendOps::TSO, segments.is_some_and(|tso| tso.qp_types.contains(QueuePairType::UD)));
    ops
}

#[test]
fn operations_that_the_device_does_not_report_are_refused_by_name() {
    let Some(rdma) = device() else { return };
    let (pd, reported) = (rdma.pd(), reported(&rdma));
    // The provider of rdma-core 44 accepts atomic writes, and the kernel fails them.
    if rdma.is_rxe() {
        let newer = SendOps::FLUSH | SendOps::ATOMIC_WRITE;
        assert_eq!(reported, if rdma.is_newer_rxe() { newer } else { SendOps::empty() });
    }
    let cq = rdma.completion_queue(8).build().unwrap();
    for op in (SendOps::FLUSH | SendOps::ATOMIC_WRITE | SendOps::TSO) - reported {
        let qp_type = if op == SendOps::TSO { QueuePairType::UD } else { QueuePairType::RC };
        let error = error_of(pd.queue_pair(&cq, &cq).qp_type(qp_type).operations(SendOps::SEND | op).build());
        assert!(matches!(error, Error::UnsupportedOperations { ops } if ops == op), "{error}");
    }
    if !reported.contains(SendOps::TSO) {
        let error = error_of(pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).tso_header(64).build());
        assert!(matches!(error, Error::UnsupportedOperations { ops: SendOps::TSO }), "{error}");
    }
}

#[test]
fn an_atomic_write_and_its_flush_reach_the_peer_or_are_refused() {
    let Some(rdma) = device() else { return };
    for mode in Mode::ALL {
        let mut lab = Lab::builder(&rdma, mode).build();
        let (remote, ops) = (lab.b.memory.remote(8), lab.a.qp.operations());
        let mut batch = lab.a.qp.send_batch().unwrap();
        // SAFETY: memory of a `Memory`, which tolerates any write.
        let written = unsafe { batch.atomic_write(WorkRequest::new(1).signaled(), remote, *b"at once!") };
        if !ops.contains(SendOps::ATOMIC_WRITE) {
            assert!(rdma.is_rxe() || mode.classic_qp || !reported(&rdma).contains(SendOps::ATOMIC_WRITE));
            assert_eq!(written, Err(PostError::NotEnabled { op: SendOps::ATOMIC_WRITE }));
        }
        let flushed = batch.flush(WorkRequest::new(2), remote, 8, FlushPlacement::GLOBAL, FlushRange::RANGE);
        if !ops.contains(SendOps::FLUSH) {
            assert_eq!(flushed, Err(PostError::NotEnabled { op: SendOps::FLUSH }));
        }
        drop(batch);
        if ops.contains(SendOps::ATOMIC_WRITE) {
            let mut batch = lab.a.qp.send_batch().unwrap();
            // SAFETY: as above.
            unsafe { batch.atomic_write(WorkRequest::new(3).signaled(), remote, *b"at once!") }.unwrap();
            batch.post().unwrap();
            lab.a.next_ok(3);
            assert_eq!(lab.b.memory.get(0..24), b"\0\0\0\0\0\0\0\0at once!\0\0\0\0\0\0\0\0");
        }
    }
    // The rights have places of their own.
    assert!(!Access::REMOTE.intersects(Access::FLUSH));
}

#[test]
fn an_atomic_write_and_a_flush_are_done_where_the_device_reports_them() {
    let Some(rdma) = device() else { return };
    let ops = (SendOps::ATOMIC_WRITE | SendOps::FLUSH) & reported(&rdma);
    if ops != SendOps::ATOMIC_WRITE | SendOps::FLUSH {
        // That they are refused there is tested above.
        return;
    }
    let link = Link { access: Access::REMOTE | Access::FLUSH_GLOBAL, ..Link::default() };
    let mut lab = Lab::builder(&rdma, Mode::ALL[0]).link(link).ops(SendOps::RDMA_WRITE | ops).build();
    let memory = Memory::with_access(&lab.pd, 4096, Access::LOCAL_WRITE | Access::REMOTE | Access::FLUSH_GLOBAL);
    let mut batch = lab.a.qp.send_batch().unwrap();
    // SAFETY: memory of a `Memory`, which tolerates any write.
    unsafe { batch.atomic_write(WorkRequest::new(1).signaled(), memory.remote(8), *b"at once!") }.unwrap();
    for (id, range) in [(2, FlushRange::RANGE), (3, FlushRange::REGION)] {
        let flush = WorkRequest::new(id).signaled();
        batch.flush(flush, memory.remote(8), 8, FlushPlacement::GLOBAL, range).unwrap();
    }
    batch.post().unwrap();
    let opcodes: Vec<_> = (1..=3).map(|id| lab.a.next_ok(id).opcode).collect();
    assert_eq!(opcodes, [WcOpcode::ATOMIC_WRITE, WcOpcode::FLUSH, WcOpcode::FLUSH]);
    assert_eq!(memory.get(0..24), b"\0\0\0\0\0\0\0\0at once!\0\0\0\0\0\0\0\0");
    // Not what this memory was registered for.
    let mut batch = lab.a.qp.send_batch().unwrap();
    batch
        .flush(WorkRequest::new(4).signaled(), lab.b.memory.remote(0), 8, FlushPlacement::GLOBAL, FlushRange::RANGE)
        .unwrap();
    batch.post().unwrap();
    assert_eq!(lab.a.next().status, WcStatus::REM_ACCESS_ERR);
}
