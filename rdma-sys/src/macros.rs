//! What the generated files would otherwise repeat for every type.

/// Or, and, not for newtypes of C enums whose values are bits.
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

/// [`Zeroed`](crate::Zeroed) for types of integers, raw pointers, optional functions and arrays and unions of those.
macro_rules! zeroed {
    ($($ty:ident),*) => {$(
        // SAFETY: the list names C structs and unions, whose fields are integers, newtypes of integers, raw pointers,
        // optional function pointers, libc's types of the same kind, or arrays of those. Each takes zero.
        unsafe impl crate::Zeroed for $ty {}
    )*};
}
pub(crate) use zeroed;

/// How a table is filled.
macro_rules! resolve {
    ($table:ident, [$(($required:ident, $since:literal)),*], [$($optional:ident),*]) => {
        impl $table {
            /// # Safety
            /// What `lookup` finds for a name must be null or the C function of that name.
            pub(crate) unsafe fn resolve(
                lookup: &mut crate::load::Lookup<'_>,
            ) -> Result<Self, crate::LoadError> {
                // SAFETY: each field's type is the signature of the function that its name stands for.
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

/// Types of which all-zero bytes are a value: every struct and union of the C headers.
///
/// C code clears these with `memset` before it fills in a few fields; [`zeroed`](Self::zeroed) is that, without
/// `unsafe` and without leaving padding or a forgotten field uninitialised.
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
    /// A value of zero bytes.
    #[inline]
    #[must_use]
    fn zeroed() -> Self {
        // SAFETY: the implementor promised that zero bytes are a value.
        unsafe { core::mem::zeroed() }
    }
}
