//! The table of librdmacm for programs that link this crate.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::null_mut;

use libc::{fd_set, iovec, msghdr, nfds_t, off_t, pollfd, sockaddr, socklen_t, timeval};
use rdma_sys::*;

macro_rules! define {
    ($($section:ident { $(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?;)* })*) => {
        /// The functions of librdmacm. Functions that are newer than rdma-core 44 are missing.
        pub(in crate::abi) fn table() -> Result<RdmaCm, LoadError> {
            let find = |name: &CStr| match name.to_bytes() {
                $($(name if name == stringify!($name).as_bytes() => super::$name as *mut c_void,)*)*
                // The entry needs a variadic function, which Rust cannot define. `fcntl` has the right type. It does no harm:
                // `rsocket` always fails, so programs have no descriptor of an rsocket to pass.
                b"rfcntl" => libc::fcntl as *mut c_void,
                _ => null_mut(),
            };
            // SAFETY: each name yields the function of that name, and the compiler checks the types in `signatures`.
            unsafe { RdmaCm::from_lookup("rdma-soft", find) }
        }

        /// Compiles only if the functions have the types of the table and of the list.
        const _: () = {
            fn signatures(table: &mut RdmaCm) {
                $($(table.$name = super::$name;)*)*
                $($(let _: unsafe extern "C" fn($($ty),*) $(-> $ret)? = super::$name;)*)*
            }
            _ = signatures as fn(&mut RdmaCm);
        };
    };
}

crate::for_each_cm_function!(define);
