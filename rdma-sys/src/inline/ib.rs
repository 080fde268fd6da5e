//! Inline functions of `AF_IB` addresses.

use core::ffi::c_int;

use crate::bindings::*;

/// Returns 1 if an address is all zero, otherwise 0.
///
/// # Safety
/// `a` must be readable.
#[inline]
pub unsafe fn ib_addr_any(a: *const ib_addr) -> c_int {
    // SAFETY: the caller vouches for the pointer. All members of the union have the same 16 bytes.
    let words = unsafe { (*a).ib_u.uib_addr64 };
    c_int::from(words == [0, 0])
}

/// Returns 1 if an address is the loopback address, `::1`, otherwise 0.
///
/// # Safety
/// `a` must be readable.
#[inline]
pub unsafe fn ib_addr_loopback(a: *const ib_addr) -> c_int {
    // SAFETY: the caller vouches for the pointer. All members of the union have the same 16 bytes.
    let words = unsafe { (*a).ib_u.uib_addr32 };
    c_int::from(words == [0, 0, 0, 1_u32.to_be()])
}

/// Sets an address to four words in network byte order.
///
/// # Safety
/// `addr` must be writable.
#[inline]
pub unsafe fn ib_addr_set(addr: *mut ib_addr, w1: __be32, w2: __be32, w3: __be32, w4: __be32) {
    // SAFETY: the caller vouches for the pointer.
    unsafe { (*addr).ib_u.uib_addr32 = [w1, w2, w3, w4] }
}

/// Compares the bytes of two addresses. Returns a negative number, 0 or a positive number.
///
/// # Safety
/// Both pointers must be readable.
#[inline]
pub unsafe fn ib_addr_cmp(a1: *const ib_addr, a2: *const ib_addr) -> c_int {
    // SAFETY: the caller vouches for the pointers. All members of the union have the same 16 bytes.
    let (a1, a2) = unsafe { ((*a1).ib_u.uib_addr8, (*a2).ib_u.uib_addr8) };
    a1.cmp(&a2) as c_int
}
