//! Filling structures of the caller's.

use core::ffi::{c_char, c_void};
use core::mem::size_of;

/// Writes a text that is shorter than the field, which is zero.
pub(super) fn write_text(to: &mut [c_char], text: &str) {
    for (to, from) in to.iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// Writes as much as there is room for, and zeros where there is room for more: what later releases have there is not here.
///
/// # Safety
/// `to` has room for `size` bytes.
pub(super) unsafe fn write_front<T>(to: *mut c_void, from: &T, size: usize) {
    let len = size.min(size_of::<T>());
    let to = to.cast::<u8>();
    // SAFETY: the caller's promise, and no more than there is.
    unsafe {
        to.copy_from(core::ptr::from_ref(from).cast(), len);
        to.add(len).write_bytes(0, size - len);
    }
}
