//! Filling the caller's structures.

use core::ffi::{c_char, c_void};
use core::mem::size_of;

/// Writes a text to a field that is longer and holds zeros.
pub(super) fn write_text(to: &mut [c_char], text: &str) {
    for (to, from) in to.iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// Writes the first `size` bytes of a structure, followed by zeros if it is shorter.
///
/// Structures of other releases of libibverbs have fewer or more fields at the end.
///
/// # Safety
/// `to` has room for `size` bytes.
pub(super) unsafe fn write_front<T>(to: *mut c_void, from: &T, size: usize) {
    let len = size.min(size_of::<T>());
    let to = to.cast::<u8>();
    // SAFETY: the caller keeps the contract above, and `len` is at most the size of each structure.
    unsafe {
        to.copy_from(core::ptr::from_ref(from).cast(), len);
        to.add(len).write_bytes(0, size - len);
    }
}
