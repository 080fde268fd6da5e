//! Event channels and ids.

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;

use rdma_sys::*;

use super::object::{ChannelObject, IdObject, channel_number, number};
use super::{devices, result};
use crate::abi::errors::{errno, null};
use crate::abi::events::wait_until_acknowledged;
use crate::check::{self, Object};
use crate::device::cma::{EventChannel, Id};
use crate::device::device;
use crate::transport::Time;

/// Creates an event channel: `rdma_create_event_channel(3)`.
pub unsafe extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    let Some(device) = device() else { return null(libc::ENODEV) };
    let made = match EventChannel::new() {
        Ok(channel) => channel,
        Err(error) => return null(error.raw_os_error().unwrap_or(libc::EMFILE)),
    };
    let fd = made.fd();
    let number = device.lock().state.cma.channels.insert(made);
    check::created(Object::EventChannel(number));
    Box::into_raw(Box::new(ChannelObject { channel: rdma_event_channel { fd }, number })).cast()
}

/// Destroys an event channel that no id uses any more.
pub unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: the caller passes a valid channel.
    let number = unsafe { channel_number(channel) };
    if let Some(device) = device() {
        check::destroyed(Object::EventChannel(number));
        let removed = device.lock().state.cma.channels.remove(number);
        drop(removed);
    }
    // SAFETY: `rdma_create_event_channel` created it, and nothing refers to it any more.
    drop(unsafe { Box::from_raw(channel.cast::<ChannelObject>()) });
}

/// Creates an id: `rdma_create_id(3)`. Without a channel, its calls wait for their events.
pub unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: rdma_port_space,
) -> c_int {
    let space = match ps {
        RDMA_PS_TCP | RDMA_PS_UDP | RDMA_PS_IPOIB => ps.0 as u16,
        // Native InfiniBand service ids do not belong to an IP address.
        RDMA_PS_IB => return result(Err(libc::EOPNOTSUPP)),
        _ => return result(Err(libc::EINVAL)),
    };
    if let Err(errno) = devices::open() {
        return result(Err(errno));
    }
    let is_synchronous = channel.is_null();
    // SAFETY: the function has no contract.
    let channel = if is_synchronous { unsafe { rdma_create_event_channel() } } else { channel };
    let (Some(device), false) = (device(), channel.is_null()) else { return -1 };
    // SAFETY: the channel is valid.
    let to = unsafe { channel_number(channel) };
    let mut core = device.lock();
    let is_first = match core.open_presence() {
        Ok(is_first) => is_first,
        Err(errno) => {
            drop(core);
            if is_synchronous {
                // SAFETY: the channel was created above, and nothing uses it.
                unsafe { rdma_destroy_event_channel(channel) };
            }
            return result(Err(errno));
        }
    };
    let number = core.state.cma.add_id(Id::new(space, to, 0));
    check::created(Object::Id(number));
    let object = IdObject::allocate(number, channel, context, ps.0);
    if let Some(id) = core.state.cma.ids.get_mut(number) {
        id.object = object as usize;
    }
    drop(core);
    if is_first {
        // From now on the server also waits for the ends of peers.
        device.server.wake_before(Time(0));
    }
    // SAFETY: the object was just created, and the caller passes a valid pointer.
    unsafe {
        (*object).is_synchronous = is_synchronous;
        id.write(object.cast());
    }
    0
}

/// Destroys an id: `rdma_destroy_id(3)`. Waits, without a deadline, until all its events are acknowledged.
pub unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    let Some(device) = device() else { return result(Err(libc::ENODEV)) };
    let object = id.cast::<IdObject>();
    // SAFETY: the caller passes a valid id.
    let (number, event, channel) = unsafe { (number(id), (*id).event, (*id).channel) };
    let mut core = device.lock();
    core.cm_destroy(number, device.now());
    // A peer in this process learns of it at once.
    core.receive_own(device.now());
    device.unlock(core);
    if !event.is_null() {
        // SAFETY: the event of a synchronous id was read and not acknowledged.
        unsafe { super::rdma_ack_cm_event(event) };
    }
    wait_until_acknowledged(id as usize);
    // SAFETY: the id is valid, and this call destroys it.
    unsafe {
        if (*object).is_synchronous {
            rdma_destroy_event_channel(channel);
        }
        drop(Box::from_raw(object));
    }
    0
}

/// Moves an id and its pending events to another channel: `rdma_migrate_id(3)`. Without a channel the id becomes synchronous.
///
/// Waits, without a deadline, until all events that were read are acknowledged.
pub unsafe extern "C" fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    let Some(device) = device() else { return result(Err(libc::ENODEV)) };
    let is_synchronous = channel.is_null();
    // SAFETY: the function has no contract.
    let channel = if is_synchronous { unsafe { rdma_create_event_channel() } } else { channel };
    if channel.is_null() {
        return -1;
    }
    let object = id.cast::<IdObject>();
    // SAFETY: the caller passes a valid id and channel.
    let (number, to) = unsafe { (number(id), channel_number(channel)) };
    // SAFETY: the caller passes a valid id. Its event is an event that was read and not acknowledged.
    unsafe {
        let event = core::mem::replace(&mut (*id).event, null_mut());
        if (*object).is_synchronous && !event.is_null() {
            super::rdma_ack_cm_event(event);
        }
    }
    device.lock().state.cma.migrate(number, to);
    wait_until_acknowledged(id as usize);
    // SAFETY: as above. Nothing uses the channel that a synchronous id had for itself.
    unsafe {
        if (*object).is_synchronous {
            rdma_destroy_event_channel((*id).channel);
        }
        (*object).is_synchronous = is_synchronous;
        (*id).channel = channel;
    }
    0
}

/// Returns the result of a call on an id, as 0 or as -1 with `errno`. A synchronous id waits for the event of the call first.
///
/// # Safety
/// The id is valid.
pub(super) unsafe fn finish(id: *mut rdma_cm_id, called: Result<(), c_int>) -> c_int {
    // SAFETY: the caller passes a valid id.
    result(called.and_then(|()| unsafe { complete(id) }))
}

/// Waits for the event of a call on a synchronous id, and keeps it in the id until the next call.
///
/// # Safety
/// The id is valid.
unsafe fn complete(id: *mut rdma_cm_id) -> Result<(), c_int> {
    // SAFETY: the caller passes a valid id, and only its own thread uses a synchronous id.
    unsafe {
        if !(*id.cast::<IdObject>()).is_synchronous {
            return Ok(());
        }
        let event = core::mem::replace(&mut (*id).event, null_mut());
        if !event.is_null() {
            super::rdma_ack_cm_event(event);
        }
        if super::rdma_get_cm_event((*id).channel, &raw mut (*id).event) != 0 {
            return Err(errno());
        }
        match (*(*id).event).status {
            0 => Ok(()),
            _ if (*(*id).event).event == RDMA_CM_EVENT_REJECTED => Err(libc::ECONNREFUSED),
            status => Err(status.abs()),
        }
    }
}
