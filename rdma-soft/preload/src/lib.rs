//! `librdma_soft.so`: the functions of libibverbs, over the device of rdma-soft.
//!
//! With it in `LD_PRELOAD`, a program that is linked with libibverbs finds these functions first. The symbols have no
//! versions, which satisfies references to any. The library itself may still be loaded, by the program or for its providers,
//! but must never see an object of this device; that is why every public function is here, also those that refuse.

mod device_file;
mod dlopen;
mod next;

use core::ffi::{c_char, c_int, c_uint, c_void};

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
