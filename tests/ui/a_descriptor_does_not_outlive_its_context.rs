//! A borrowed descriptor keeps its context alive, since the context closes it.

use rdma_safe::Context;

fn main() {}

fn descriptor(context: Context) {
    let fd = context.command_fd();
    drop(context); //~ E0505 context
    let _ = fd;
}
