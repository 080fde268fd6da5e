//! Protection domains, memory regions and windows.

use core::ffi::{c_int, c_uint, c_void};

use rdma_sys::*;

use super::context::number;
use super::refuse::null;
use crate::device::{Registration, device};

/// A protection domain.
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let Some(device) = device() else { return null(libc::ENODEV) };
    // SAFETY: the caller's context.
    let of = unsafe { number(context) };
    let handle = device.lock().state.pds.insert(of);
    Box::into_raw(Box::new(ibv_pd { context, handle }))
}

/// Frees a protection domain that nothing is in.
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller's domain.
    let handle = unsafe { (*pd).handle };
    let mut core = device.lock();
    if core.state.uses_pd(handle) {
        return libc::EBUSY;
    }
    core.state.pds.remove(handle);
    // SAFETY: made by `ibv_alloc_pd`, and nothing refers to it.
    drop(unsafe { Box::from_raw(pd) });
    0
}

unsafe fn register(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: u32) -> *mut ibv_mr {
    let Some(device) = device() else { return null(libc::ENODEV) };
    // SAFETY: the caller's domain.
    let ibv_pd { context, handle } = unsafe { *pd };
    let wanted = Registration { pd: handle, address: addr as u64, len: length as u64, iova, access };
    if let Err(errno) = wanted.check() {
        return null(errno);
    }
    let key = device.lock().state.shared.keys.register(&wanted);
    Box::into_raw(Box::new(ibv_mr { context, pd, addr, length, handle: key >> 8, lkey: key, rkey: key }))
}

/// Registers memory.
pub unsafe extern "C" fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
    // SAFETY: as the caller says.
    unsafe { register(pd, addr, length, addr as u64, access as u32) }
}

/// Registers memory that peers know by other addresses.
pub unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: as the caller says.
    unsafe { register(pd, addr, length, iova, access as u32) }
}

/// As [`ibv_reg_mr_iova`]; what inlines call.
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: as the caller says.
    unsafe { register(pd, addr, length, iova, access) }
}

/// Changes a region. It is as it was where that fails.
pub unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let Some(device) = device() else { return IBV_REREG_MR_ERR_CMD.0 };
    let has = |flag: ibv_rereg_mr_flags| flags as u32 & flag.0 != 0;
    let known = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
    if flags == 0 || flags as u32 & !known.0 != 0 {
        return IBV_REREG_MR_ERR_INPUT.0;
    }
    if (has(IBV_REREG_MR_CHANGE_TRANSLATION) && (addr.is_null() || length == 0))
        || (has(IBV_REREG_MR_CHANGE_PD) && pd.is_null())
    {
        return IBV_REREG_MR_ERR_INPUT.0;
    }
    // SAFETY: the caller's region.
    let key = unsafe { (*mr).lkey };
    let current = device.lock().state.shared.keys.registration(key);
    let changed = current.and_then(|mut wanted| {
        if has(IBV_REREG_MR_CHANGE_TRANSLATION) {
            (wanted.address, wanted.iova, wanted.len) = (addr as u64, addr as u64, length as u64);
        }
        if has(IBV_REREG_MR_CHANGE_PD) {
            // SAFETY: the caller's domain.
            wanted.pd = unsafe { (*pd).handle };
        }
        if has(IBV_REREG_MR_CHANGE_ACCESS) {
            wanted.access = access as u32;
        }
        wanted.check()?;
        device.lock().state.shared.keys.reregister(key, &wanted)
    });
    if let Err(errno) = changed {
        super::refuse::set_errno(errno);
        return IBV_REREG_MR_ERR_CMD.0;
    }
    // SAFETY: the caller's region, which nobody else uses meanwhile.
    unsafe {
        if has(IBV_REREG_MR_CHANGE_TRANSLATION) {
            ((*mr).addr, (*mr).length) = (addr, length);
        }
        if has(IBV_REREG_MR_CHANGE_PD) {
            ((*mr).pd, (*mr).context) = (pd, (*pd).context);
        }
    }
    0
}

/// Ends a registration. After that the device does not touch the memory.
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller's region.
    let key = unsafe { (*mr).lkey };
    if let Err(errno) = device.lock().state.shared.keys.deregister(key) {
        return errno;
    }
    // SAFETY: made by `register`, and nothing refers to it.
    drop(unsafe { Box::from_raw(mr) });
    0
}

pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    let Some(device) = device() else { return null(libc::ENODEV) };
    let number = match kind {
        IBV_MW_TYPE_1 => 1,
        IBV_MW_TYPE_2 => 2,
        _ => return null(libc::EINVAL),
    };
    // SAFETY: the caller's domain.
    let ibv_pd { context, handle } = unsafe { *pd };
    let rkey = device.lock().state.shared.keys.add_window(handle, number);
    Box::into_raw(Box::new(ibv_mw { context, pd, rkey, handle: rkey >> 8, type_: kind }))
}

pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller's window.
    let handle = unsafe { (*mw).handle };
    device.lock().state.shared.keys.remove_window(handle << 8);
    // SAFETY: made by `alloc_mw`, and nothing refers to it.
    drop(unsafe { Box::from_raw(mw) });
    0
}
