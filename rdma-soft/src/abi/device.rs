//! The device and its contexts.

use core::ffi::{c_char, c_int};
use core::mem::size_of;
use core::ptr::null_mut;
use std::collections::VecDeque;
use std::sync::OnceLock;

use rdma_sys::*;

use super::context::{ContextObject, context_number, context_object};
use super::errors::null;
use super::fill::write_text;
use super::query::{guid, query_device_ex, query_port};
use super::{cq, memory, post, qp, srq, wr};
use crate::counters::report_at_exit;
use crate::device::{Context, Signal, device, is_removed, open_errno, report_leaks_of};

/// The device as programs see it: a `verbs_device` of rdma-core's drivers.
///
/// Vendor libraries read the driver's operations, which follow the `ibv_device`. For example, `mlx5dv_is_supported(3)` compares
/// them with its own.
#[repr(C)]
struct VerbsDevice {
    device: ibv_device,
    /// Space for `ops`, `refcount`, `entry`, `sysfs` and `core_support`, all of them zero.
    private: [u64; 6],
}

/// The only device. It is never freed.
struct DeviceObject(*mut ibv_device);

// SAFETY: the object is written once, when it is created, and only read afterwards.
unsafe impl Send for DeviceObject {}
// SAFETY: as above.
unsafe impl Sync for DeviceObject {}

fn the_device() -> *mut ibv_device {
    static OBJECT: OnceLock<DeviceObject> = OnceLock::new();
    let make = || {
        let mut object =
            ibv_device { node_type: IBV_NODE_CA, transport_type: IBV_TRANSPORT_IB, ..ibv_device::zeroed() };
        write_text(&mut object.name, "soft0");
        write_text(&mut object.dev_name, "uverbs-soft0");
        // The device is never freed, unlike the lists that contain it.
        DeviceObject(Box::into_raw(Box::new(VerbsDevice { device: object, private: [0; 6] })).cast())
    };
    OBJECT.get_or_init(make).0
}

/// Returns a list of the one device of this process, unless it was removed: `ibv_get_device_list(3)`.
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let first = if is_removed() { null_mut() } else { the_device() };
    if !count.is_null() {
        // SAFETY: the pointer is valid, unless it is null.
        unsafe { *count = (!first.is_null()).into() };
    }
    Box::into_raw(Box::new([first, null_mut()])).cast()
}

/// Frees a device list. The device itself stays.
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: `ibv_get_device_list` created the list as this type, and the caller frees it once.
    drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_device; 2]>()) });
}

/// Returns `soft0`.
pub unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: the caller passes a device of a list.
    unsafe { (&raw const (*device).name).cast() }
}

/// Returns the GUID, which is derived from the first address.
pub unsafe extern "C" fn ibv_get_device_guid(_device: *mut ibv_device) -> __be64 {
    device().map_or(0, guid)
}

/// Returns 0, the index of the only device.
pub unsafe extern "C" fn ibv_get_device_index(_device: *mut ibv_device) -> c_int {
    0
}

/// Opens the device: `ibv_open_device(3)`. Each call creates another context.
pub unsafe extern "C" fn ibv_open_device(raw: *mut ibv_device) -> *mut ibv_context {
    if is_removed() {
        return null(libc::ENODEV);
    }
    let Some(device) = device() else { return null(open_errno()) };
    report_at_exit();
    let signal = match Signal::new() {
        Ok(signal) => signal,
        Err(error) => return null(error.raw_os_error().unwrap_or(libc::EMFILE)),
    };
    #[cfg(miri)]
    crate::device::server_of_miri::opened(device);
    let async_fd = signal.fd();
    let number =
        device.lock().state.shared.events.contexts.insert(Context { signal, queue: VecDeque::with_capacity(16) });
    let mut context = ibv_context {
        device: raw,
        cmd_fd: -1,
        async_fd,
        num_comp_vectors: 1,
        abi_compat: __VERBS_ABI_IS_EXTENDED,
        ..ibv_context::zeroed()
    };
    context.ops.poll_cq = Some(cq::poll_cq);
    context.ops.req_notify_cq = Some(cq::req_notify_cq);
    context.ops.post_send = Some(post::post_send);
    context.ops.post_recv = Some(post::post_recv);
    context.ops.post_srq_recv = Some(srq::post_srq_recv);
    context.ops.alloc_mw = Some(memory::alloc_mw);
    context.ops.bind_mw = Some(wr::bind_mw);
    context.ops.dealloc_mw = Some(memory::dealloc_mw);
    let verbs = verbs_context {
        query_port: Some(query_port),
        query_device_ex: Some(query_device_ex),
        create_cq_ex: Some(cq::create_cq_ex),
        create_qp_ex: Some(qp::create_qp_ex),
        create_srq_ex: Some(srq::create_srq_ex),
        sz: size_of::<verbs_context>(),
        context,
        ..verbs_context::zeroed()
    };
    let object = Box::into_raw(Box::new(ContextObject { verbs, number }));
    // SAFETY: the object was just created.
    unsafe { &raw mut (*object).verbs.context }
}

/// Closes a context and removes all objects that are left in it. Using one of them afterwards is undefined behavior.
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: the caller passes a valid context.
    let number = unsafe { context_number(context) };
    let Some(device) = device() else { return libc::ENODEV };
    // Sending may announce events, which are raised when the device is unlocked. `close_context` waits for announced events, so
    // the device has to be unlocked in between.
    device.lock().send(device.now());
    let mut core = device.lock();
    report_leaks_of(&core.state, number);
    core.state.close_context(number);
    core.update_groups();
    device.unlock(core);
    #[cfg(miri)]
    crate::device::server_of_miri::closed(device);
    // SAFETY: `ibv_open_device` created it, and nothing in the device refers to it any more.
    drop(unsafe { Box::from_raw(context_object(context)) });
    0
}
