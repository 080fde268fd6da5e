//! Objects of a thread domain have no locks, so whoever makes one answers for the threads that use it.

use rdma_safe::{ProtectionDomain, ThreadDomain};

fn without_locks(pd: &ProtectionDomain, td: &ThreadDomain) {
    let _ = pd.with_thread_domain(td);
}

fn main() {}
