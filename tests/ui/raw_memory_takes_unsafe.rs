//! The device reads and writes memory by address, behind the compiler's back: who names addresses has to vouch for them.

use rdma_safe::{Access, Inline, ProtectionDomain, ProviderMemory, QueuePair, Remote, Reregistration, Sge, WorkRequest};

fn main() {}

fn post(qp: &mut QueuePair, pd: &ProtectionDomain, mut memory: [u8; 8]) {
    let sge = Sge { address: 0x1000, len: 8, lkey: 1 };
    let mut batch = qp.send_batch().unwrap();
    batch.send(WorkRequest::new(1), sge).unwrap();
    batch.write(WorkRequest::new(2), Remote { address: 0x1000, rkey: 1 }, Inline(b"anywhere")).unwrap();
    drop(batch);
    qp.recv_batch().unwrap().receive(3, &[sge]).unwrap();
    qp.receive(4, sge).unwrap();
    let region = pd.register_raw(memory.as_mut_ptr(), 8, Access::REMOTE_WRITE).unwrap();
    let _ = region.reregister(Reregistration::new().memory(0x1000 as *mut u8, 8));
    let _ = pd.register_dmabuf(std::io::stdin(), 0, 8, 0, Access::REMOTE_WRITE);
}

fn describe(pd: &ProtectionDomain, memory: &ProviderMemory, address: *mut u8) {
    let registration = pd.registration(Access::REMOTE_WRITE);
    let _ = registration.register_raw(address, 8);
    let _ = registration.register_raw_at(address, 8, 0);
    let _ = registration.register_dmabuf(std::io::stdin(), 0, 8, 0);
    let _ = registration.register_part(memory, 0, 8);
    let _ = memory.export_dmabuf();
    let _ = pd.unprotected_domain();
}
