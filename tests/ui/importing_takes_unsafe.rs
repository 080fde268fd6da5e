//! Importing objects of another process is unsafe. The caller must guarantee how all processes use them.

use std::os::fd::OwnedFd;

use rdma_safe::{Context, ProtectionDomain};

fn main() {}

fn contexts(fd: OwnedFd) {
    let _ = Context::import(fd); //~ E0133 import
}

fn objects(context: &Context, pd: &ProtectionDomain, handle: u32) {
    let _ = context.import_pd(handle); //~ E0133 import_pd
    let _ = pd.import_mr(handle); //~ E0133 import_mr
    let _ = context.import_dm(handle, 64); //~ E0133 import_dm
}
