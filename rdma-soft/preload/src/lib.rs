//! `librdma_soft.so`: the functions of libibverbs and librdmacm, implemented by soft0.
//!
//! A program that is linked with these libraries and has this library in `LD_PRELOAD` finds these functions first. The symbols
//! have no versions, which satisfies references to any version. libibverbs may still be loaded, by the program or for its
//! providers, but must never get an object of this device. So this library has every public function, even those that always
//! fail.

mod device_file;
mod dlopen;
mod mapping;
mod next;

use core::ffi::{c_char, c_int, c_uint, c_void};

use libc::{fd_set, iovec, msghdr, nfds_t, off_t, pollfd, sockaddr, socklen_t, timeval};
use rdma_sys::*;

/// Run by the dynamic linker when it initialises this library.
#[used]
#[unsafe(link_section = ".init_array")]
static RESOLVE: extern "C" fn() = resolve;

extern "C" fn resolve() {
    device_file::resolve();
    dlopen::resolve();
}

macro_rules! export {
    ($($visibility:ident { $(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?;)* })*) => {$($(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: the caller keeps the contract of the function of this name.
            unsafe { soft::abi::$name($($arg),*) }
        }
    )*)*};
}

soft::for_each_function!(export);
soft::for_each_cm_function!(export);

/// Fails like the other functions of rsockets. The C function is variadic. A callee that ignores the other arguments need not be.
#[unsafe(no_mangle)]
unsafe extern "C" fn rfcntl(_socket: c_int, _command: c_int) -> c_int {
    // SAFETY: the function fails for every descriptor.
    unsafe { soft::abi::rclose(-1) }
}
