//! Inline functions that query a device.

use core::ffi::c_int;

use super::{Unsupported as _, extended, op};
use crate::bindings::*;
use crate::load::verbs;
use crate::newer::ibv_comp_cntr_caps;

/// The function behind C's macro `ibv_query_port`; see [`ibv_query_port`].
///
/// # Safety
/// Those of [`ibv_query_port`].
#[inline]
pub unsafe fn ___ibv_query_port(context: *mut ibv_context, port_num: u8, port_attr: *mut ibv_port_attr) -> c_int {
    // SAFETY: the caller vouches for the context and the memory. The exported function only writes the first part of
    // the structure.
    unsafe {
        if let Some(op) = op!(context, query_port) {
            return op(context, port_num, port_attr, size_of::<ibv_port_attr>());
        }
        port_attr.write_bytes(0, 1);
        match verbs() {
            Ok(verbs) => (verbs.ibv_query_port)(context, port_num, port_attr.cast()),
            Err(_) => c_int::unsupported(),
        }
    }
}

/// Reads the attributes of a port: `ibv_query_port(3)`. Returns 0 or an errno.
///
/// The exported function of this name serves old binaries: it does not write the newer fields.
///
/// # Safety
/// `context` must exist and `port_attr` must be writable.
#[inline]
pub unsafe fn ibv_query_port(context: *mut ibv_context, port_num: u8, port_attr: *mut ibv_port_attr) -> c_int {
    // SAFETY: the caller's contract is the same.
    unsafe { ___ibv_query_port(context, port_num, port_attr) }
}

/// Reads an entry of the GID table: `ibv_query_gid_ex(3)`. Returns 0 or an errno; `ENODATA` for an empty entry.
///
/// # Safety
/// `context` must exist and `entry` must be writable.
#[inline]
pub unsafe fn ibv_query_gid_ex(
    context: *mut ibv_context,
    port_num: u32,
    gid_index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
) -> c_int {
    match verbs() {
        // SAFETY: the caller vouches for the context and the memory, which has the size that is passed along.
        Ok(verbs) => unsafe {
            (verbs._ibv_query_gid_ex)(context, port_num, gid_index, entry, flags, size_of::<ibv_gid_entry>())
        },
        Err(_) => c_int::unsupported(),
    }
}

/// Reads the non-empty entries of the GID tables: `ibv_query_gid_table(3)`. Returns their number, or a negative errno.
///
/// # Safety
/// `context` must exist and `entries` must have space for `max_entries`.
#[inline]
pub unsafe fn ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
) -> isize {
    match verbs() {
        // SAFETY: the caller vouches for the context and the memory, whose entries have the size that is passed along.
        Ok(verbs) => unsafe {
            (verbs._ibv_query_gid_table)(context, entries, max_entries, flags, size_of::<ibv_gid_entry>())
        },
        Err(_) => -(libc::EOPNOTSUPP as isize),
    }
}

/// Reads the completion counter capabilities: `ibv_query_comp_cntr_caps(3)`, since rdma-core 65. Returns 0 or an errno;
/// `EOPNOTSUPP` with an older library.
///
/// # Safety
/// `context` must exist and `caps` must be writable.
#[inline]
pub unsafe fn ibv_query_comp_cntr_caps(context: *mut ibv_context, caps: *mut ibv_comp_cntr_caps) -> c_int {
    match verbs().ok().and_then(|verbs| verbs._ibv_query_comp_cntr_caps) {
        // SAFETY: the caller vouches for the context and the memory, which has the size that is passed along.
        Some(query) => unsafe { query(context, caps, size_of::<ibv_comp_cntr_caps>()) },
        None => c_int::unsupported(),
    }
}

extended! {
    /// Reads the device's clock: `ibv_query_rt_values_ex(3)`.
    fn ibv_query_rt_values_ex(
        context: *mut ibv_context,
        values: *mut ibv_values_ex,
    ) -> c_int = query_rt_values of context;
}

/// Reads the attributes of a device: `ibv_query_device_ex(3)`. Returns 0 or an errno.
///
/// If the provider lacks the extended query, the extended attributes are zero.
///
/// # Safety
/// `context` must exist, `input` must be null or initialized, and `attr` must be writable.
#[inline]
pub unsafe fn ibv_query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
) -> c_int {
    // SAFETY: the caller vouches for the context and the memory.
    unsafe {
        if !input.is_null() && (*input).comp_mask != 0 {
            return libc::EINVAL;
        }
        if let Some(op) = op!(context, query_device_ex) {
            let ret = op(context, input, attr, size_of::<ibv_device_attr_ex>());
            if ret != libc::EOPNOTSUPP && ret != libc::ENOSYS {
                return ret;
            }
        }
        attr.write_bytes(0, 1);
        match verbs() {
            Ok(verbs) => (verbs.ibv_query_device)(context, &raw mut (*attr).orig_attr),
            Err(_) => c_int::unsupported(),
        }
    }
}
