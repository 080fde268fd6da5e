//! The descriptor of a context closes with it, so whoever looks at it keeps the context.

use rdma_safe::Context;

fn main() {}

fn descriptor(context: Context) {
    let fd = context.command_fd();
    drop(context);
    let _ = fd;
}
