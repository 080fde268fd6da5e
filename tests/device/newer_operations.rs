//! Operations that not every device supports: atomic write, flush, TCP segmentation.

use rdma_safe::device::DeviceCapabilities;
use rdma_safe::post::{FlushPlacement, FlushRange, Segments};
use rdma_safe::{
    Access, ConnectOptions, Error, InitOptions, PostError, QueuePairType, SendOps, Sge, UdTarget, WcOpcode, WcStatus,
    WorkRequest,
};

use crate::support::lab::{Lab, Memory, Mode};
use crate::support::link::Link;
use crate::support::{Rdma, device, error_of};

/// The operations among these that the device reports.
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
    // No device segments messages of a connection.
    let error = error_of(pd.queue_pair(&cq, &cq).operations(SendOps::SEND | SendOps::TSO).build());
    assert!(matches!(error, Error::UnsupportedOperations { ops: SendOps::TSO }), "{error}");
    let enabled = pd.queue_pair(&cq, &cq).build().unwrap().operations();
    assert!(reported.contains(enabled & (SendOps::FLUSH | SendOps::ATOMIC_WRITE | SendOps::TSO)), "{enabled:?}");
}

#[test]
fn an_atomic_write_and_its_flush_reach_the_peer_or_are_refused() {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        let mut lab = Lab::builder(&rdma, mode).build();
        let (remote, ops) = (lab.b.memory.remote(8), lab.a.qp.operations());
        let mut batch = lab.a.qp.send_batch().unwrap();
        // SAFETY: a `Memory` tolerates any access.
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
    // The rights to flush have their own bits.
    assert!(!Access::REMOTE.intersects(Access::FLUSH));
}

#[test]
fn an_atomic_write_and_a_flush_complete_if_the_device_reports_them() {
    let Some(rdma) = device() else { return };
    let ops = (SendOps::ATOMIC_WRITE | SendOps::FLUSH) & reported(&rdma);
    if ops != SendOps::ATOMIC_WRITE | SendOps::FLUSH {
        // The test above shows the refusal.
        return;
    }
    let link = Link { access: Access::REMOTE | Access::FLUSH_GLOBAL, ..Link::default() };
    let mut lab = Lab::builder(&rdma, Mode::EXTENDED).link(link).ops(SendOps::RDMA_WRITE | ops).build();
    let memory = Memory::with_access(&lab.pd, 4096, Access::LOCAL_WRITE | Access::REMOTE | Access::FLUSH_GLOBAL);
    let mut batch = lab.a.qp.send_batch().unwrap();
    // SAFETY: a `Memory` tolerates any access.
    unsafe { batch.atomic_write(WorkRequest::new(1).signaled(), memory.remote(8), *b"at once!") }.unwrap();
    for (id, range) in [(2, FlushRange::RANGE), (3, FlushRange::REGION)] {
        let flush = WorkRequest::new(id).signaled();
        batch.flush(flush, memory.remote(8), 8, FlushPlacement::GLOBAL, range).unwrap();
    }
    batch.post().unwrap();
    let opcodes: Vec<_> = (1..=3).map(|id| lab.a.next_ok(id).opcode).collect();
    assert_eq!(opcodes, [WcOpcode::ATOMIC_WRITE, WcOpcode::FLUSH, WcOpcode::FLUSH]);
    assert_eq!(memory.get(0..24), b"\0\0\0\0\0\0\0\0at once!\0\0\0\0\0\0\0\0");
    // This memory was registered without the right to flush.
    let mut batch = lab.a.qp.send_batch().unwrap();
    batch
        .flush(WorkRequest::new(4).signaled(), lab.b.memory.remote(0), 8, FlushPlacement::GLOBAL, FlushRange::RANGE)
        .unwrap();
    batch.post().unwrap();
    assert_eq!(lab.a.next().status, WcStatus::REM_ACCESS_ERR);
}

#[test]
fn segments_need_a_queue_pair_with_a_segment_header() {
    let Some(rdma) = device() else { return };
    let (pd, cq) = (rdma.pd(), rdma.completion_queue(8).build().unwrap());
    let mut datagrams = pd.queue_pair(&cq, &cq).qp_type(QueuePairType::UD).build().unwrap();
    let options = InitOptions::default().port(rdma.port).gid_index(rdma.gid.index);
    let to = datagrams.init_datagrams(5, &options).unwrap();
    let handle = pd.address_handle(&datagrams.address_of(&to, &ConnectOptions::default()).unwrap()).unwrap();
    let target = UdTarget::new(&handle, to.qp_num, 5);
    let mut lab = Lab::new(&rdma, Mode::EXTENDED);
    let (wr, segments) = (WorkRequest::new(1), Segments { header: b"", mss: 4 });
    // SAFETY: nothing is posted.
    unsafe {
        let mut batch = datagrams.send_batch().unwrap();
        let refused = batch.send_tso_to(wr, target, segments, Sge::EMPTY);
        assert_eq!(refused, Err(PostError::NotEnabled { op: SendOps::TSO }));
        drop(batch);
        let mut batch = lab.a.qp.send_batch().unwrap();
        let refused = batch.send_tso(wr, segments, Sge::EMPTY);
        assert_eq!(refused, Err(PostError::NotEnabled { op: SendOps::TSO }));
        assert_eq!(batch.send_tso_to(wr, target, segments, Sge::EMPTY), Err(PostError::NotDatagram));
    }
}
