//! How functions fail.

use core::ffi::c_int;
use core::ptr::null_mut;

/// Sets `errno`.
pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: `__errno_location` returns a valid pointer to the calling thread's errno and cannot fail.
    unsafe { *libc::__errno_location() = errno }
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

// A port of 0 means failure. So does an unsigned count with all bits set, because C callers compare it with -1.
unsupported!(c_int = -1, i64 = -1, isize = -1, usize = usize::MAX, u16 = 0);

impl Unsupported for () {
    fn unsupported() {}
}

impl<T> Unsupported for *mut T {
    fn unsupported() -> Self {
        null(libc::EOPNOTSUPP)
    }
}

/// C function types that have an implementation that fails with `EOPNOTSUPP`.
pub(super) trait UnsupportedFn {
    /// The function that fails.
    const FAIL: Self;
}

macro_rules! unsupported_fns {
    ($($fail:ident($($ty:ident)*);)*) => {$(
        unsafe extern "C" fn $fail<$($ty,)* R: Unsupported>($(_: $ty),*) -> R {
            R::unsupported()
        }

        impl<$($ty,)* R: Unsupported> UnsupportedFn for unsafe extern "C" fn($($ty),*) -> R {
            const FAIL: Self = $fail::<$($ty,)* R>;
        }
    )*};
}

unsupported_fns! {
    fail0();
    fail1(A);
    fail2(A B);
    fail3(A B C);
    fail4(A B C D);
    fail5(A B C D E);
    fail6(A B C D E F);
}
