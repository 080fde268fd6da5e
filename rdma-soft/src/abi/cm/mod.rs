//! The functions of librdmacm, under their C names.
//!
//! The ids themselves are in [`device::cma`](crate::device::cma). This module keeps the C structures that programs read, and does
//! what librdmacm does in the process of the program: state changes of queue pairs, and the synchronous calls.

mod address;
mod address_info;
mod connect;
mod devices;
mod endpoint;
mod events;
mod functions;
mod id;
mod multicast;
mod object;
mod options;
mod qp;
mod resolve;
mod sockets;
mod table;

pub use address_info::*;
pub use connect::*;
pub use devices::*;
pub use endpoint::*;
pub use events::*;
pub use id::*;
pub use multicast::*;
pub use options::*;
pub use qp::*;
pub use resolve::*;
pub use sockets::*;
pub(in crate::abi) use table::table;

use core::ffi::c_int;

use super::errors::set_errno;

/// Returns 0, or sets `errno` and returns -1.
fn result(result: Result<(), c_int>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}
