//! The context that ids use.

use core::ffi::c_int;
use core::ptr::null_mut;
use std::sync::{Mutex, OnceLock, PoisonError};

use rdma_sys::*;

use crate::abi::errors::{errno, null};
use crate::abi::{ibv_alloc_pd, ibv_close_device, ibv_free_device_list, ibv_get_device_list, ibv_open_device};

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

/// Returns the context that [`open`] has opened.
pub(super) fn shared() -> Option<Shared> {
    SHARED.get().copied()
}

/// Opens the context, once. The device must not be locked.
///
/// # Errors
/// `ENODEV` without a device, and the errors of opening it. The next call tries again.
pub(super) fn open() -> Result<Shared, c_int> {
    static OPENING: Mutex<()> = Mutex::new(());
    if crate::device::device().is_none() {
        return Err(libc::ENODEV);
    }
    // The lock protects nothing that a panic could damage.
    let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(shared) = shared() {
        return Ok(shared);
    }
    // SAFETY: the functions are called with objects of each other. The list has an entry, as there is a device.
    unsafe {
        let list = ibv_get_device_list(null_mut());
        if list.is_null() {
            return Err(errno());
        }
        let context = if (*list).is_null() { null_mut() } else { ibv_open_device(*list) };
        let opened = if context.is_null() { Err(errno()) } else { Ok(()) };
        ibv_free_device_list(list);
        opened?;
        let pd = ibv_alloc_pd(context);
        if pd.is_null() {
            let errno = errno();
            ibv_close_device(context);
            return Err(errno);
        }
        Ok(*SHARED.get_or_init(|| Shared { context, pd }))
    }
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
