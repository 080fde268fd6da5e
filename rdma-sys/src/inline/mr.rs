//! Inline functions of memory regions, memory windows and device memory.

use core::ffi::{c_int, c_uint, c_void};

use super::{Unsupported as _, extended, set};
use crate::bindings::*;
use crate::load::verbs;

/// The function behind C's macro `ibv_reg_mr`.
///
/// The macro sets `is_access_const` if the compiler can see that no optional flag is set; see [`ibv_reg_mr`].
///
/// # Safety
/// Those of [`ibv_reg_mr`].
#[inline]
pub unsafe fn __ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_uint,
    is_access_const: c_int,
) -> *mut ibv_mr {
    let Ok(verbs) = verbs() else {
        return <*mut ibv_mr>::unsupported();
    };
    // SAFETY: the caller vouches for the domain and the memory.
    unsafe {
        if is_access_const != 0 && access & IBV_ACCESS_OPTIONAL_RANGE.0 == 0 {
            (verbs.ibv_reg_mr)(pd, addr, length, access as c_int)
        } else {
            (verbs.ibv_reg_mr_iova2)(pd, addr, length, addr.expose_provenance() as u64, access)
        }
    }
}

/// Registers memory: `ibv_reg_mr(3)`. Returns null and sets errno on failure.
///
/// Optional flags ([`IBV_ACCESS_OPTIONAL_RANGE`]) are dropped if the library or the kernel does not know them.
///
/// # Safety
/// `pd` must exist. Until the region is deregistered, the memory must stay mapped, and the device may access it as
/// `access` allows.
#[inline]
pub unsafe fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
    // SAFETY: the caller's contract is the same.
    unsafe { __ibv_reg_mr(pd, addr, length, access as c_uint, 0) }
}

/// The function behind C's macro `ibv_reg_mr_iova`; see [`__ibv_reg_mr`].
///
/// # Safety
/// Those of [`ibv_reg_mr`].
#[inline]
pub unsafe fn __ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
    is_access_const: c_int,
) -> *mut ibv_mr {
    let Ok(verbs) = verbs() else {
        return <*mut ibv_mr>::unsupported();
    };
    // SAFETY: the caller vouches for the domain and the memory.
    unsafe {
        if is_access_const != 0 && access & IBV_ACCESS_OPTIONAL_RANGE.0 == 0 {
            (verbs.ibv_reg_mr_iova)(pd, addr, length, iova, access as c_int)
        } else {
            (verbs.ibv_reg_mr_iova2)(pd, addr, length, iova, access)
        }
    }
}

/// Registers memory with an address chosen by the caller: `ibv_reg_mr_iova(3)`. Returns null and sets errno on failure.
///
/// # Safety
/// Those of [`ibv_reg_mr`].
#[inline]
pub unsafe fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's contract is the same.
    unsafe { __ibv_reg_mr_iova(pd, addr, length, iova, access as c_uint, 0) }
}

/// Allocates a memory window: `ibv_alloc_mw(3)`. Returns null and sets errno on failure, `EOPNOTSUPP` without the
/// operation.
///
/// # Safety
/// `pd` must exist.
#[inline]
pub unsafe fn ibv_alloc_mw(pd: *mut ibv_pd, type_: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: the caller vouches for the domain.
    unsafe {
        match (*(*pd).context).ops.alloc_mw {
            Some(op) => op(pd, type_),
            None => <*mut ibv_mw>::unsupported(),
        }
    }
}

/// Frees a memory window: `ibv_dealloc_mw(3)`. Returns 0 or an errno, `EOPNOTSUPP` without the operation, which the C
/// function does not check.
///
/// # Safety
/// `mw` must exist.
#[inline]
pub unsafe fn ibv_dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: the caller vouches for the window.
    unsafe {
        match (*(*mw).context).ops.dealloc_mw {
            Some(op) => op(mw),
            None => c_int::unsupported(),
        }
    }
}

/// The next key of a type 2 memory window: increments the lowest 8 bits, with wrap-around.
#[inline]
#[must_use]
pub const fn ibv_inc_rkey(rkey: u32) -> u32 {
    (rkey & !0xff) | (rkey.wrapping_add(1) & 0xff)
}

/// Binds a type 1 memory window: `ibv_bind_mw(3)`. Returns 0 or an errno.
///
/// The rxe provider dereferences `mr` even if it is null, which should unbind the window. Bind length 0 of a real
/// region instead.
///
/// # Safety
/// `qp` and `mw` must exist. `mw_bind` must be initialized, with an `mr` that is null or exists. The context must have
/// the operation, as all contexts of rdma-core do.
#[inline]
pub unsafe fn ibv_bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, mw_bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: the caller vouches for all pointers and for the operation.
    unsafe {
        let info = (*mw_bind).bind_info;
        if (*mw).type_ != IBV_MW_TYPE_1 {
            return libc::EINVAL;
        }
        if info.mr.is_null() {
            if info.addr != 0 || info.length != 0 {
                return libc::EINVAL;
            }
        } else if (*mw).pd != (*info.mr).pd {
            return libc::EPERM;
        }
        set((*(*mw).context).ops.bind_mw)(qp, mw, mw_bind)
    }
}

extended! {
    /// Advises the kernel about the use of memory: `ibv_advise_mr(3)`.
    fn ibv_advise_mr(
        pd: *mut ibv_pd,
        advice: ibv_advise_mr_advice,
        flags: u32,
        sg_list: *mut ibv_sge,
        num_sge: u32,
    ) -> c_int = advise_mr of (*pd).context;

    /// Allocates device memory: `ibv_alloc_dm(3)`.
    fn ibv_alloc_dm(
        context: *mut ibv_context,
        attr: *mut ibv_alloc_dm_attr,
    ) -> *mut ibv_dm = alloc_dm of context;

    /// Frees device memory: `ibv_free_dm(3)`.
    fn ibv_free_dm(dm: *mut ibv_dm) -> c_int = free_dm of (*dm).context;
}

/// Copies to device memory: `ibv_memcpy_to_dm(3)`. Returns 0 or an errno.
///
/// # Safety
/// `dm` must exist, with its function pointers set, as for all of rdma-core. `host_addr` must be readable for `length`
/// bytes.
#[inline]
pub unsafe fn ibv_memcpy_to_dm(dm: *mut ibv_dm, dm_offset: u64, host_addr: *const c_void, length: usize) -> c_int {
    // SAFETY: the caller vouches for all pointers and for the function.
    unsafe { set((*dm).memcpy_to_dm)(dm, dm_offset, host_addr, length) }
}

/// Copies from device memory: `ibv_memcpy_from_dm(3)`. Returns 0 or an errno.
///
/// # Safety
/// Those of [`ibv_memcpy_to_dm`], with `host_addr` writable.
#[inline]
pub unsafe fn ibv_memcpy_from_dm(host_addr: *mut c_void, dm: *mut ibv_dm, dm_offset: u64, length: usize) -> c_int {
    // SAFETY: the caller vouches for all pointers and for the function.
    unsafe { set((*dm).memcpy_from_dm)(host_addr, dm, dm_offset, length) }
}

extended! {
    /// Allocates a region that discards writes and reads as zero: `ibv_alloc_null_mr(3)`.
    fn ibv_alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr = alloc_null_mr of (*pd).context;

    /// Registers device memory: `ibv_reg_dm_mr(3)`.
    fn ibv_reg_dm_mr(
        pd: *mut ibv_pd,
        dm: *mut ibv_dm,
        dm_offset: u64,
        length: usize,
        access: c_uint,
    ) -> *mut ibv_mr = reg_dm_mr of (*pd).context;
}
