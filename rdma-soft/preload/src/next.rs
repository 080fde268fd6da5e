//! The functions that those of this library stand before.

use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};

/// The function of that name that the program would have called, or null.
///
/// `dlsym` of the C library allocates only to report an error. Threads that ask at the same time store the same address.
#[inline(never)]
pub(crate) fn next(name: &CStr, found: &AtomicPtr<c_void>) -> *mut c_void {
    let known = found.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    // SAFETY: a string; the handle stands for the libraries behind this one.
    let mut symbol = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if symbol.is_null() && name.to_bytes().starts_with(b"__") {
        // The functions of programs from before glibc 2.33 have only the first version of their architecture.
        let version = if cfg!(target_arch = "x86_64") { c"GLIBC_2.2.5" } else { c"GLIBC_2.17" };
        // SAFETY: as above.
        symbol = unsafe { libc::dlvsym(libc::RTLD_NEXT, name.as_ptr(), version.as_ptr()) };
    }
    found.store(symbol, Ordering::Relaxed);
    symbol
}
