//! The context that ids use.

use core::ffi::c_int;
use core::ptr::null_mut;
use std::sync::OnceLock;

use rdma_sys::*;

use crate::abi::errors::null;
use crate::abi::{ibv_alloc_pd, ibv_free_device_list, ibv_get_device_list, ibv_open_device};

/// The context and the protection domain of all ids. They stay open until the process ends, as those of librdmacm.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    pub(super) context: *mut ibv_context,
    pub(super) pd: *mut ibv_pd,
}

// SAFETY: both objects may be used from every thread, as those of libibverbs. They are never destroyed.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

static SHARED: OnceLock<Shared> = OnceLock::new();

/// Opens the context with the first call.
///
/// # Errors
/// `ENODEV` without a device, and the errors of opening it.
pub(super) fn shared() -> Result<Shared, c_int> {
    if let Some(shared) = SHARED.get() {
        return Ok(*shared);
    }
    Err(libc::ENODEV)
}

/// Opens the context, before any call that needs it. The device must not be locked.
///
/// # Errors
/// As [`shared`].
pub(super) fn open() -> Result<Shared, c_int> {
    let make = || {
        // SAFETY: the functions are called with objects of each other.
        unsafe {
            let list = ibv_get_device_list(null_mut());
            let context = ibv_open_device(*list);
            ibv_free_device_list(list);
            let pd = if context.is_null() { null_mut() } else { ibv_alloc_pd(context) };
            Shared { context, pd }
        }
    };
    if crate::device::device().is_none() {
        return Err(libc::ENODEV);
    }
    let shared = *SHARED.get_or_init(make);
    if shared.pd.is_null() { Err(libc::ENODEV) } else { Ok(shared) }
}

/// Returns a list of the one device, which is open: `rdma_get_devices(3)`.
pub unsafe extern "C" fn rdma_get_devices(num_devices: *mut c_int) -> *mut *mut ibv_context {
    let opened = open();
    if !num_devices.is_null() {
        // SAFETY: the pointer is valid unless it is null.
        unsafe { num_devices.write(c_int::from(opened.is_ok())) };
    }
    match opened {
        Ok(shared) => Box::into_raw(Box::new([shared.context, null_mut()])).cast(),
        Err(errno) => null(errno),
    }
}

/// Frees a list of devices. The device stays open.
pub unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    if !list.is_null() {
        // SAFETY: `rdma_get_devices` created the list as this type, and the caller frees it once.
        drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_context; 2]>()) });
    }
}
