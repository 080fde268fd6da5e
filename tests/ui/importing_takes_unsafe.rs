//! To share what another process has takes the caller's word for what all that share it do with it.

use std::os::fd::OwnedFd;

use rdma_safe::{Context, ProtectionDomain};

fn main() {}

fn contexts(fd: OwnedFd) {
    let _ = Context::import(fd);
}

fn objects(context: &Context, pd: &ProtectionDomain, handle: u32) {
    let _ = context.import_pd(handle);
    let _ = pd.import_mr(handle);
    let _ = context.import_dm(handle, 64);
}
