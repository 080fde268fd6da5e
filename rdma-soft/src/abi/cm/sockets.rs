//! rsockets, which are not supported.

use core::ffi::{c_int, c_void};
use std::sync::Once;

use libc::{fd_set, iovec, msghdr, nfds_t, off_t, pollfd, sockaddr, socklen_t, timeval};

use crate::abi::errors::Unsupported;

/// Prints once that rsockets are not supported.
fn report() {
    static REPORTED: Once = Once::new();
    REPORTED.call_once(|| {
        eprintln!(
            "rdma-soft: rsockets (rsocket and the functions that take its descriptors) are not supported by soft0: use \
             rdma_connect and rdma_accept, or TCP sockets"
        );
    });
}

macro_rules! define {
    (
        connections { $($connections:tt)* }
        sockets { $(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)* }
    ) => {$(
        #[doc = concat!("Fails with `EOPNOTSUPP`: `", stringify!($name), "` of rsockets.")]
        pub unsafe extern "C" fn $name($(_: $ty),*) -> $ret {
            report();
            Unsupported::unsupported()
        }
    )*};
}

crate::for_each_cm_function!(define);
