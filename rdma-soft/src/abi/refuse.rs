//! How functions say that there is no such thing.

use core::ffi::c_int;
use core::ptr::null_mut;

/// Sets `errno`.
pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: `__errno_location` returns a valid pointer to the calling thread's errno and cannot fail.
    unsafe { *libc::__errno_location() = errno }
}

/// How a function that returns an object fails.
pub(crate) fn null<T>(errno: c_int) -> *mut T {
    set_errno(errno);
    null_mut()
}

/// What functions return that fail and set `errno`.
pub(crate) trait Refused {
    /// The value, after `errno` has become `EOPNOTSUPP`.
    fn refused() -> Self;
}

macro_rules! refused {
    ($($ty:ty = $value:expr),* $(,)?) => {$(
        impl Refused for $ty {
            fn refused() -> Self {
                set_errno(libc::EOPNOTSUPP);
                $value
            }
        }
    )*};
}

// A port is 0 where there is none, and a count without a sign is the -1 that C callers compare it with.
refused!(c_int = -1, i64 = -1, isize = -1, usize = usize::MAX, u16 = 0);

impl Refused for () {
    fn refused() {}
}

impl<T> Refused for *mut T {
    fn refused() -> Self {
        null(libc::EOPNOTSUPP)
    }
}

/// Pointers to C functions that fail with `EOPNOTSUPP`, whatever their arguments.
pub(super) trait Refusing {
    /// Such a function of this type.
    const REFUSE: Self;
}

macro_rules! refusing {
    ($($refuse:ident($($ty:ident)*);)*) => {$(
        unsafe extern "C" fn $refuse<$($ty,)* R: Refused>($(_: $ty),*) -> R {
            R::refused()
        }

        impl<$($ty,)* R: Refused> Refusing for unsafe extern "C" fn($($ty),*) -> R {
            const REFUSE: Self = $refuse::<$($ty,)* R>;
        }
    )*};
}

refusing! {
    refuse0();
    refuse1(A);
    refuse2(A B);
    refuse3(A B C);
    refuse4(A B C D);
    refuse5(A B C D E);
    refuse6(A B C D E F);
}
