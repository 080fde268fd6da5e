//! Objects of a thread domain have no locks. The caller must guarantee that only one thread uses them at a time.

use rdma_safe::ProtectionDomain;
use rdma_safe::pd::ThreadDomain;

fn without_locks(pd: &ProtectionDomain, td: &ThreadDomain) {
    let _ = pd.with_thread_domain(td); //~ E0133 with_thread_domain
}

fn main() {}
