//! Asynchronous events.

use core::ffi::c_int;

use rdma_sys::*;

use super::context::context_number;
use super::errors::set_errno;
use crate::check::{self, PATIENCE};
use crate::device::{Core, Device, Locked, device, wait};

/// Waits for an asynchronous event, without a deadline unless the descriptor is non-blocking.
pub unsafe extern "C" fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    let Some(device) = device() else { return -1 };
    // SAFETY: the caller passes a valid context.
    let (fd, of) = unsafe { ((*context).async_fd, context_number(context)) };
    loop {
        let mut core = device.lock();
        let events = &mut core.state.shared.events;
        let Some((event_type, object)) = events.take(of) else {
            drop(core);
            // Another thread may take the event first. It is also withdrawn if its object is destroyed.
            if let Err(error) = wait(fd) {
                set_errno(error.raw_os_error().unwrap_or(libc::EIO));
                return -1;
            }
            continue;
        };
        *events.unacknowledged.entry(object).or_default() += 1;
        // All fields of the union are pointers, so any of them will do.
        let element = ibv_async_event__bindgen_ty_1 { qp: object as *mut ibv_qp };
        // SAFETY: the caller passes a valid structure.
        unsafe { event.write(ibv_async_event { element, event_type }) };
        return 0;
    }
}

/// Acknowledges an event, so that its object can be destroyed: `ibv_ack_async_event(3)`.
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    let Some(device) = device() else { return };
    // SAFETY: the caller passes an event that `ibv_get_async_event` has written.
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

/// Waits until all events of an object are acknowledged. `ibv_destroy_qp(3)` and its like document that they wait without a
/// deadline.
pub(crate) fn wait_until_acknowledged(object: usize) {
    let Some(device) = device() else { return };
    let unacked = |core: &Core| core.state.shared.events.unacknowledged.get(&object).map_or(0, |unacked| *unacked);
    wait_for_acknowledgements(device, device.lock(), unacked, |unacked| {
        format!("destroying the object at {object:#x} waits until {unacked} of its events are acknowledged")
    });
}

/// Waits until all events are acknowledged. The checker reports a wait of more than a second.
pub(crate) fn wait_for_acknowledgements<'a>(
    device: &'a Device,
    mut core: Locked<'a>,
    unacked: impl Fn(&Core) -> u32,
    report: impl Fn(u32) -> String,
) -> Locked<'a> {
    // Another thread may be about to acknowledge the event.
    let mut report_at = Some(device.now() + PATIENCE);
    loop {
        let left = unacked(&core);
        if left == 0 {
            return core;
        }
        if report_at.is_some_and(|at| device.now() >= at) {
            report_at = None;
            check::with(|check| check.unacked(report(left)));
        }
        core = device.wait_for_acknowledgement(core, PATIENCE);
    }
}
