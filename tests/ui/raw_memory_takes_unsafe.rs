//! The device accesses memory by address, which the compiler cannot check. The caller must guarantee that the memory is valid.

use rdma_safe::{Access, Inline, ProtectionDomain, QueuePair, Remote, Sge, WorkRequest};
use rdma_safe::mr::{ProviderMemory, Reregistration};

fn main() {}

fn post(qp: &mut QueuePair, pd: &ProtectionDomain, mut memory: [u8; 8]) {
    let sge = Sge { address: 0x1000, len: 8, lkey: 1 };
    let mut batch = qp.send_batch().unwrap();
    batch.send(WorkRequest::new(1), sge).unwrap(); //~ E0133 send
    batch.write(WorkRequest::new(2), Remote { address: 0x1000, rkey: 1 }, Inline(b"anywhere")).unwrap(); //~ E0133 write
    drop(batch);
    qp.recv_batch().unwrap().receive(3, &[sge]).unwrap(); //~ E0133 receive
    qp.receive(4, sge).unwrap(); //~ E0133 receive
    let region = pd.register_raw(memory.as_mut_ptr(), 8, Access::REMOTE_WRITE).unwrap(); //~ E0133 register_raw
    let _ = region.reregister(Reregistration::new().memory(0x1000 as *mut u8, 8)); //~ E0133 reregister
    let _ = pd.register_dmabuf(std::io::stdin(), 0, 8, 0, Access::REMOTE_WRITE); //~ E0133 register_dmabuf
}

fn describe(pd: &ProtectionDomain, memory: &ProviderMemory, address: *mut u8) {
    let registration = pd.registration(Access::REMOTE_WRITE);
    let _ = registration.register_raw(address, 8); //~ E0133 register_raw
    let _ = registration.register_raw_at(address, 8, 0); //~ E0133 register_raw_at
    let _ = registration.register_dmabuf(std::io::stdin(), 0, 8, 0); //~ E0133 register_dmabuf
    let _ = registration.register_part(memory, 0, 8); //~ E0133 register_part
    let _ = memory.export_dmabuf(); //~ E0133 export_dmabuf
    let _ = pd.unprotected_domain(); //~ E0133 unprotected_domain
}
