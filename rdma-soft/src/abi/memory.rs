//! Protection domains, memory regions and windows.

use core::ffi::{c_int, c_uint, c_void};

use rdma_sys::*;

use super::context::context_number;
use super::errors::null;
use crate::check::{self, Object};
use crate::device::{Registration, device};

/// Allocates a protection domain: `ibv_alloc_pd(3)`.
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let Some(device) = device() else { return null(libc::ENODEV) };
    // SAFETY: the caller passes a valid context.
    let of = unsafe { context_number(context) };
    let handle = device.lock().state.pds.insert(of);
    check::created(Object::ProtectionDomain(handle));
    Box::into_raw(Box::new(ibv_pd { context, handle }))
}

/// Frees a protection domain that has no objects.
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller passes a valid protection domain.
    let handle = unsafe { (*pd).handle };
    let mut core = device.lock();
    if core.state.uses_pd(handle) {
        return libc::EBUSY;
    }
    core.state.pds.remove(handle);
    check::destroyed(Object::ProtectionDomain(handle));
    // SAFETY: `ibv_alloc_pd` created it, and nothing refers to it any more.
    drop(unsafe { Box::from_raw(pd) });
    0
}

unsafe fn register(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: u32) -> *mut ibv_mr {
    let Some(device) = device() else { return null(libc::ENODEV) };
    // SAFETY: the caller passes a valid protection domain.
    let ibv_pd { context, handle } = unsafe { *pd };
    let wanted = Registration { pd: handle, address: addr as u64, len: length as u64, iova, access };
    if let Err(errno) = wanted.check() {
        return null(errno);
    }
    let mut core = device.lock();
    let key = core.state.shared.keys.register(&wanted);
    check::with(|check| check.registered(wanted.registered(key)));
    drop(core);
    Box::into_raw(Box::new(ibv_mr { context, pd, addr, length, handle: key >> 8, lkey: key, rkey: key }))
}

/// Registers memory: `ibv_reg_mr(3)`.
pub unsafe extern "C" fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe { register(pd, addr, length, addr as u64, access as u32) }
}

/// Registers memory that peers address by `iova`: `ibv_reg_mr_iova(3)`.
pub unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe { register(pd, addr, length, iova, access as u32) }
}

/// Does what [`ibv_reg_mr_iova`] does, for the inline functions of the C headers.
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the caller keeps the contract of the verb.
    unsafe { register(pd, addr, length, iova, access) }
}

/// Changes a region: `ibv_rereg_mr(3)`. A call that fails leaves it unchanged.
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
    // SAFETY: the caller passes a valid region.
    let key = unsafe { (*mr).lkey };
    let current = device.lock().state.shared.keys.registration(key);
    let changed = current.and_then(|mut wanted| {
        if has(IBV_REREG_MR_CHANGE_TRANSLATION) {
            (wanted.address, wanted.iova, wanted.len) = (addr as u64, addr as u64, length as u64);
        }
        if has(IBV_REREG_MR_CHANGE_PD) {
            // SAFETY: the caller passes a valid protection domain.
            wanted.pd = unsafe { (*pd).handle };
        }
        if has(IBV_REREG_MR_CHANGE_ACCESS) {
            wanted.access = access as u32;
        }
        wanted.check()?;
        let mut core = device.lock();
        core.state.shared.keys.reregister(key, &wanted)?;
        check::with(|check| check.reregistered(wanted.registered(key)));
        Ok(())
    });
    if let Err(errno) = changed {
        super::errors::set_errno(errno);
        return IBV_REREG_MR_ERR_CMD.0;
    }
    // SAFETY: the caller passes a valid region, and no other thread uses it at the same time.
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

/// Deregisters memory: `ibv_dereg_mr(3)`. Afterwards the device does not access it any more.
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller passes a valid region.
    let key = unsafe { (*mr).lkey };
    let mut core = device.lock();
    if let Err(errno) = core.state.shared.keys.deregister(key) {
        return errno;
    }
    check::with(|check| check.deregistering(key));
    drop(core);
    // SAFETY: `register` created it, and nothing refers to it any more.
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
    // SAFETY: the caller passes a valid protection domain.
    let ibv_pd { context, handle } = unsafe { *pd };
    let rkey = device.lock().state.shared.keys.add_window(handle, number);
    check::created(Object::Window(rkey >> 8));
    Box::into_raw(Box::new(ibv_mw { context, pd, rkey, handle: rkey >> 8, type_: kind }))
}

pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller passes a valid window.
    let handle = unsafe { (*mw).handle };
    check::destroyed(Object::Window(handle));
    device.lock().state.shared.keys.remove_window(handle << 8);
    // SAFETY: `alloc_mw` created it, and nothing refers to it any more.
    drop(unsafe { Box::from_raw(mw) });
    0
}
