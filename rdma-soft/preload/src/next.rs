//! The functions that this library interposes.

use core::ffi::{CStr, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

/// A function that the program would call without this library.
pub(crate) struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn new(name: &'static CStr) -> Next {
        Next { name, found: AtomicPtr::new(null_mut()) }
    }

    /// Returns the address of the function, or null.
    ///
    /// The first call takes the lock of the dynamic linker and clears `dlerror`, so it is made when this library is initialised.
    /// Threads that look the function up at the same time store the same address.
    #[inline(never)]
    pub(crate) fn get(&self) -> *mut c_void {
        let known = self.found.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: the name is a string, and the handle stands for the libraries after this one.
        let mut symbol = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        if symbol.is_null() && self.name.to_bytes().starts_with(b"__") {
            // Functions for programs built before glibc 2.33 have only the first symbol version of their architecture.
            let version = if cfg!(target_arch = "x86_64") { c"GLIBC_2.2.5" } else { c"GLIBC_2.17" };
            // SAFETY: as above.
            symbol = unsafe { libc::dlvsym(libc::RTLD_NEXT, self.name.as_ptr(), version.as_ptr()) };
        }
        self.found.store(symbol, Ordering::Relaxed);
        symbol
    }
}
