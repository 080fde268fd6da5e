//! Macros that implement traits and table loading for the generated types.

/// Implements `|`, `&` and `!` for newtypes of C enums that are bit masks.
macro_rules! flags {
    ($($flags:ident),*) => {$(
        impl ::core::ops::BitOr for $flags {
            type Output = Self;
            #[inline]
            fn bitor(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }
        }

        impl ::core::ops::BitOrAssign for $flags {
            #[inline]
            fn bitor_assign(&mut self, other: Self) {
                self.0 |= other.0;
            }
        }

        impl ::core::ops::BitAnd for $flags {
            type Output = Self;
            #[inline]
            fn bitand(self, other: Self) -> Self {
                Self(self.0 & other.0)
            }
        }

        impl ::core::ops::BitAndAssign for $flags {
            #[inline]
            fn bitand_assign(&mut self, other: Self) {
                self.0 &= other.0;
            }
        }

        impl ::core::ops::Not for $flags {
            type Output = Self;
            #[inline]
            fn not(self) -> Self {
                Self(!self.0)
            }
        }
    )*};
}
pub(crate) use flags;

/// Implements [`Zeroed`](crate::Zeroed) for C structs and unions.
macro_rules! zeroed {
    ($($ty:ident),*) => {$(
        // SAFETY: the list names C structs and unions. Their fields are integers, newtypes of integers, raw pointers,
        // optional function pointers, similar types of libc, or arrays of these. Zero is valid for all of them.
        unsafe impl crate::Zeroed for $ty {}
    )*};
}
pub(crate) use zeroed;

/// Implements the loading of a table's functions.
macro_rules! resolve {
    ($table:ident, [$(($required:ident, $since:literal)),*], [$($optional:ident),*]) => {
        impl $table {
            /// # Safety
            /// For each name, `lookup` must find null or the C function of that name.
            pub(crate) unsafe fn resolve(
                lookup: &mut crate::load::Lookup<'_>,
            ) -> Result<Self, crate::LoadError> {
                // SAFETY: the type of each field is the signature of the function with its name.
                unsafe {
                    Ok(Self {
                        $($required: lookup.required(crate::macros::c_name!($required), $since)?,)*
                        $($optional: lookup.optional(crate::macros::c_name!($optional)),)*
                    })
                }
            }
        }
    };
}
pub(crate) use resolve;

macro_rules! c_name {
    ($name:ident) => {
        const {
            match core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => unreachable!(),
            }
        }
    };
}
pub(crate) use c_name;

/// Types for which all-zero bytes are a valid value: every struct and union of the C headers.
///
/// C code clears these with `memset` before it sets some fields. [`zeroed`](Self::zeroed) does this without `unsafe`,
/// and leaves no padding or field uninitialized.
///
/// ```
/// use rdma_sys::{Zeroed, ibv_qp_attr};
///
/// let attr = ibv_qp_attr { port_num: 1, ..ibv_qp_attr::zeroed() };
/// assert_eq!((attr.port_num, attr.pkey_index), (1, 0));
/// ```
///
/// # Safety
///
/// All-zero bytes must be a valid value of the type.
pub unsafe trait Zeroed: Sized {
    /// Returns a value with all bytes zero.
    #[inline]
    #[must_use]
    fn zeroed() -> Self {
        // SAFETY: the implementor guarantees that zero bytes are a valid value.
        unsafe { core::mem::zeroed() }
    }
}
