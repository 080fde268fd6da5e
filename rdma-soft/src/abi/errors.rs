//! How functions fail.

use core::ffi::c_int;
use core::ptr::null_mut;

/// Sets `errno`.
pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: `__errno_location` returns a valid pointer to the calling thread's errno and cannot fail.
    unsafe { *libc::__errno_location() = errno }
}

/// The `errno` of a function that has failed.
pub(crate) fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Sets `errno`, and returns the null pointer of a function that fails to create an object.
pub(crate) fn null<T>(errno: c_int) -> *mut T {
    set_errno(errno);
    null_mut()
}

/// Return types of functions that may be unsupported.
pub(crate) trait Unsupported {
    /// Sets `errno` to `EOPNOTSUPP`, and returns the value that means failure.
    fn unsupported() -> Self;
}

macro_rules! unsupported {
    ($($ty:ty = $value:expr),* $(,)?) => {$(
        impl Unsupported for $ty {
            fn unsupported() -> Self {
                set_errno(libc::EOPNOTSUPP);
                $value
            }
        }
    )*};
}

// An unsigned count with all bits set means failure, because C callers compare it with -1.
unsupported!(c_int = -1, i64 = -1, isize = -1, usize = usize::MAX);

impl<T> Unsupported for *mut T {
    fn unsupported() -> Self {
        null(libc::EOPNOTSUPP)
    }
}
