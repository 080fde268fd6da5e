//! Asynchronous events.

use core::ffi::c_int;

use rdma_sys::*;

use super::context::number;
use super::refuse::set_errno;
use crate::device::{device, wait};

/// Waits for an event, as long as it takes unless the descriptor is non-blocking.
pub unsafe extern "C" fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    let Some(device) = device() else { return -1 };
    // SAFETY: the caller's context.
    let (fd, of) = unsafe { ((*context).async_fd, number(context)) };
    loop {
        let mut core = device.lock();
        let events = &mut core.state.shared.events;
        let Some((event_type, object)) = events.take(of) else {
            drop(core);
            // Another thread may take it, or take it back since its object goes.
            if let Err(error) = wait(fd) {
                set_errno(error.raw_os_error().unwrap_or(libc::EIO));
                return -1;
            }
            continue;
        };
        *events.unacknowledged.entry(object).or_default() += 1;
        // Whichever object it is: all of them are pointers.
        let element = ibv_async_event__bindgen_ty_1 { qp: object as *mut ibv_qp };
        // SAFETY: the caller's structure.
        unsafe { event.write(ibv_async_event { element, event_type }) };
        return 0;
    }
}

/// Says that an event was dealt with, so that its object may go.
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    let Some(device) = device() else { return };
    // SAFETY: the caller's event, which `ibv_get_async_event` has written.
    let object = unsafe { (*event).element.qp } as usize;
    let mut core = device.lock();
    let unacknowledged = &mut core.state.shared.events.unacknowledged;
    if let Some(left) = unacknowledged.get_mut(&object) {
        *left -= 1;
        if *left == 0 {
            unacknowledged.remove(&object);
            device.acknowledge();
        }
    }
}

/// Waits until nothing of an object that goes is left unacknowledged: as long as it takes, as `ibv_destroy_qp` and its kind say.
pub(crate) fn settle(object: usize) {
    let Some(device) = device() else { return };
    let mut core = device.lock();
    while core.state.shared.events.unacknowledged.contains_key(&object) {
        core = device.wait_for_acknowledgement(core);
    }
}
