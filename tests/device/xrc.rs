//! Extended reliable connections (XRC), which SoftRoCE and soft0 lack.

use rdma_safe::device::DeviceCapabilities;
use rdma_safe::xrc::XrcOpen;
use rdma_safe::{Access, ConnectOptions, Error, InitOptions, Inline, QueuePairType, WcStatus, WorkRequest};

use crate::support::lab::Memory;
use crate::support::{Rdma, device, error_of, within_deadline};

/// Whether the device supports XRC.
fn has_xrc(rdma: &Rdma) -> bool {
    let has = rdma.attributes().capabilities().contains(DeviceCapabilities::XRC);
    assert!(!((rdma.is_rxe() || rdma.is_soft()) && has), "{} now has XRC", rdma.device_name());
    has
}

#[test]
fn a_device_without_xrc_refuses_each_part_of_it_by_name() {
    let Some(rdma) = device() else { return };
    if has_xrc(&rdma) {
        println!("skipped: {} has XRC", rdma.device_name());
        return;
    }
    let refused = |error: Error| {
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(rdma.device_name()) && text.contains("XRC"), "{text}");
    };
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    refused(error_of(rdma.open_xrcd()));
    for open in [XrcOpen::OpenExisting, XrcOpen::OpenOrCreate, XrcOpen::CreateNew] {
        refused(error_of(rdma.open_shared_xrcd(&file, open)));
    }
    let (pd, cq) = (rdma.pd(), rdma.completion_queue(4).build().unwrap());
    for classic in [false, true] {
        refused(error_of(pd.queue_pair(&cq, &cq).qp_type(QueuePairType::XRC_SEND).classic(classic).build()));
    }
}

#[test]
fn a_message_over_xrc_arrives_in_the_queue_that_it_names() {
    let Some(rdma) = device() else { return };
    if !has_xrc(&rdma) {
        println!("skipped: {} has no XRC", rdma.device_name());
        return;
    }
    let (pd, domain) = (rdma.pd(), rdma.open_xrcd().unwrap());
    let mut cq = rdma.completion_queue(8).build().unwrap();
    let mut srq = domain.shared_receive_queue(&pd, &cq, 4).build().unwrap();
    let memory = Memory::with_access(&pd, 64, Access::LOCAL_WRITE);
    // SAFETY: a `Memory` tolerates any access, and outlives the queue pairs.
    unsafe { srq.receive(7, memory.sge(0..64)) }.unwrap();
    let send_cq = rdma.completion_queue(8).build().unwrap();
    let mut sender =
        pd.queue_pair(&send_cq, &send_cq).qp_type(QueuePairType::XRC_SEND).inline_data(16).build().unwrap();
    let mut target = domain.create_target().unwrap();
    let options = InitOptions::default().port(rdma.port).gid_index(rdma.gid.index);
    let (here, there) = (sender.init(&options).unwrap(), target.init(&options).unwrap());
    target.connect(&here, &ConnectOptions::default()).unwrap();
    sender.connect(&there, &ConnectOptions::default()).unwrap();
    let mut batch = sender.send_batch().unwrap();
    // SAFETY: the bytes are copied.
    unsafe { batch.to_srq(srq.xrc_number().unwrap()).send(WorkRequest::new(1).signaled(), Inline(b"over xrc")) }
        .unwrap();
    batch.post().unwrap();
    let received = within_deadline("a receive", || {
        cq.poll().next().unwrap().map(|wc| (wc.wr_id(), wc.status(), wc.byte_len(), wc.qp_num()))
    });
    assert_eq!(received, (7, WcStatus::SUCCESS, Some(8), Some(target.number())));
    assert_eq!(memory.get(0..9), b"over xrc\0");
    drop((sender, target, srq));
}
