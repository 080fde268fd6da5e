//! Completion queues and channels.

use core::ffi::{c_int, c_uint, c_void};
use core::ptr::null_mut;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdma_sys::*;

use super::context::context_number;
use super::errors::{null, set_errno};
use super::limits::MAX_CQE;
use super::{events, lock};
use crate::check::{self, Object};
use crate::device::{Armed, Cancel, Channel, ChannelFds, Completions, Core, Cq, Device, Overrun, device, observe};

/// Fields that completions of this device have.
const FIELDS: u64 = (IBV_WC_EX_WITH_BYTE_LEN.0
    | IBV_WC_EX_WITH_IMM.0
    | IBV_WC_EX_WITH_QP_NUM.0
    | IBV_WC_EX_WITH_SRC_QP.0
    | IBV_WC_EX_WITH_SLID.0
    | IBV_WC_EX_WITH_SL.0
    | IBV_WC_EX_WITH_DLID_PATH_BITS.0) as u64;

/// The memory of an `ibv_cq`, which is the first part of `ex`.
#[repr(C)]
struct CqObject {
    ex: ibv_cq_ex,
    completions: Arc<Completions>,
    /// Whether a thread is between `ibv_start_poll` and `ibv_end_poll`.
    is_polled: AtomicBool,
    /// Whether only one thread uses the queue.
    is_single: bool,
    /// The completion at the cursor.
    current: ibv_wc,
    /// Whether the current poll holds an event: [`Device::poll`].
    holds: bool,
}

/// The memory of an `ibv_comp_channel`, which is its first field.
#[repr(C)]
struct ChannelObject {
    raw: ibv_comp_channel,
    number: u32,
    fds: ChannelFds,
}

/// Creates a completion channel: `ibv_create_comp_channel(3)`.
pub unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let Some(device) = device() else { return null(libc::ENODEV) };
    let made = match Channel::new() {
        Ok(channel) => channel,
        Err(error) => return null(error.raw_os_error().unwrap_or(libc::EMFILE)),
    };
    let fds = made.fds();
    let number = device.lock().state.shared.events.channels.insert(made);
    check::created(Object::CompletionChannel(number));
    let raw = ibv_comp_channel { context, fd: fds.epoll, refcnt: 0 };
    Box::into_raw(Box::new(ChannelObject { raw, number, fds })).cast()
}

/// Destroys a completion channel that no completion queue uses.
pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    let object = channel.cast::<ChannelObject>();
    // SAFETY: the caller passes a valid channel.
    let number = unsafe { (*object).number };
    device.end_direct(number);
    let channels = &mut device.lock().state.shared.events.channels;
    if channels.get(number).is_some_and(|channel| channel.users > 0) {
        return libc::EBUSY;
    }
    channels.remove(number);
    check::destroyed(Object::CompletionChannel(number));
    // SAFETY: `ibv_create_comp_channel` created it, and nothing refers to it any more.
    drop(unsafe { Box::from_raw(object) });
    0
}

struct Attributes {
    entries: u32,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: u32,
    is_single: bool,
}

unsafe fn create(context: *mut ibv_context, attributes: &Attributes) -> *mut CqObject {
    let Attributes { entries, cq_context, channel, vector, is_single } = *attributes;
    let Some(device) = device() else { return null(libc::ENODEV) };
    if entries == 0 || entries > MAX_CQE || vector > 0 {
        return null(libc::EINVAL);
    }
    let mut ex = ibv_cq_ex { context, channel, cq_context, cqe: entries as c_int, ..ibv_cq_ex::zeroed() };
    ex.start_poll = Some(start_poll);
    ex.next_poll = Some(next_poll);
    ex.end_poll = Some(end_poll);
    let completions = Arc::new(Completions::new(entries as usize));
    let object = Box::into_raw(Box::new(CqObject {
        ex,
        completions: Arc::clone(&completions),
        is_polled: AtomicBool::new(false),
        is_single,
        current: ibv_wc::zeroed(),
        holds: false,
    }));
    // SAFETY: the channel is valid, unless it is null.
    let channel = (!channel.is_null()).then(|| unsafe { (*channel.cast::<ChannelObject>()).number });
    let cq = Cq {
        completions,
        // SAFETY: the caller passes a valid context.
        context: unsafe { context_number(context) },
        channel,
        object: object as usize,
        users: 0,
        queued_events: 0,
        events: (0, 0),
    };
    let mut core = device.lock();
    let shared = &mut core.state.shared;
    if let Some(channel) = channel.and_then(|channel| shared.events.channels.get_mut(channel)) {
        channel.users += 1;
    }
    let number = shared.cqs.insert(cq);
    check::created(Object::CompletionQueue(number));
    // SAFETY: the object was just created.
    unsafe { (*object).ex.handle = number };
    object
}

/// Creates a completion queue: `ibv_create_cq(3)`.
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    let attributes =
        Attributes { entries: cqe.max(0) as u32, cq_context, channel, vector: vector as u32, is_single: false };
    // SAFETY: the caller keeps the contract of the verb.
    unsafe { create(context, &attributes) }.cast()
}

pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: the caller passes a valid structure. It may end after the last field that its mask names, so no later field is read.
    let (mask, wc_flags, attributes) = unsafe {
        let ibv_cq_init_attr_ex { cqe, cq_context, channel, comp_vector, wc_flags, comp_mask, .. } = *attr;
        let attributes = Attributes { entries: cqe, cq_context, channel, vector: comp_vector, is_single: false };
        (comp_mask, wc_flags, attributes)
    };
    // SAFETY: as above.
    let flags = if mask & IBV_CQ_INIT_ATTR_MASK_FLAGS.0 != 0 { unsafe { (*attr).flags } } else { 0 };
    let known = IBV_CREATE_CQ_ATTR_SINGLE_THREADED.0;
    if wc_flags & !FIELDS != 0 || mask & !IBV_CQ_INIT_ATTR_MASK_FLAGS.0 != 0 || flags & !known != 0 {
        return null(libc::EOPNOTSUPP);
    }
    let attributes = Attributes { is_single: flags != 0, ..attributes };
    // SAFETY: the caller keeps the contract of the verb.
    let object = unsafe { create(context, &attributes) };
    if object.is_null() {
        return null_mut();
    }
    // SAFETY: the object was just created, and no other thread knows of it.
    let ex = unsafe { &mut (*object).ex };
    ex.read_opcode = Some(read_opcode);
    ex.read_vendor_err = Some(read_vendor_err);
    ex.read_wc_flags = Some(read_wc_flags);
    let wants = |flag: ibv_create_cq_wc_flags| wc_flags & u64::from(flag.0) != 0;
    ex.read_byte_len = wants(IBV_WC_EX_WITH_BYTE_LEN).then_some(read_byte_len);
    ex.read_imm_data = wants(IBV_WC_EX_WITH_IMM).then_some(read_imm_data);
    ex.read_qp_num = wants(IBV_WC_EX_WITH_QP_NUM).then_some(read_qp_num);
    ex.read_src_qp = wants(IBV_WC_EX_WITH_SRC_QP).then_some(read_src_qp);
    ex.read_slid = wants(IBV_WC_EX_WITH_SLID).then_some(read_slid);
    ex.read_sl = wants(IBV_WC_EX_WITH_SL).then_some(read_sl);
    ex.read_dlid_path_bits = wants(IBV_WC_EX_WITH_DLID_PATH_BITS).then_some(read_dlid_path_bits);
    // Returns a pointer to the whole object. One derived from the reference `ex` would cover only that field.
    object.cast()
}

/// Returns the completions of a queue.
///
/// # Safety
/// The queue exists.
unsafe fn completions<'a>(cq: *mut ibv_cq) -> &'a Completions {
    // SAFETY: the caller keeps the contract above.
    unsafe { &(*cq.cast::<CqObject>()).completions }
}

/// Changes the capacity, which must hold the completions that the queue has: `ibv_resize_cq(3)`.
pub unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    if cqe <= 0 || cqe as u32 > MAX_CQE {
        return libc::EINVAL;
    }
    // SAFETY: the caller passes a valid queue.
    if !unsafe { completions(cq) }.resize(cqe as usize) {
        return libc::EINVAL;
    }
    // SAFETY: the caller passes a valid queue, and no other thread resizes it at the same time.
    unsafe { (*cq).cqe = cqe };
    0
}

/// Destroys a completion queue that no queue pair uses, once all its events are acknowledged.
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: the caller passes a valid queue.
    let handle = unsafe { (*cq).handle };
    let mut core = device.lock();
    if core.state.shared.cqs.get(handle).is_none_or(|cq| cq.users > 0) {
        return libc::EBUSY;
    }
    let shared = &mut core.state.shared;
    let channel = shared.cqs.get(handle).and_then(|cq| cq.channel);
    if let Some(channel) = channel.and_then(|channel| shared.events.channels.get_mut(channel)) {
        channel.remove_cq(handle);
        channel.users -= 1;
    }
    if let Some(cq) = shared.cqs.get(handle) {
        let (context, object) = (cq.context, cq.object);
        shared.events.remove_object(context, object);
    }
    // A thread that has taken an event of the queue uses the queue's address until it acknowledges the event. The manual page
    // allows this call to wait for that without a deadline.
    check::with(|check| check.cq_destroyed(handle));
    let unacked = |core: &Core| {
        let cq = core.state.shared.cqs.get(handle);
        cq.map_or(0, |cq| cq.events.0.wrapping_sub(cq.events.1))
    };
    let mut core = events::wait_for_acknowledgements(device, core, unacked, |unacked| {
        format!("ibv_destroy_cq waits until {unacked} completion events of completion queue {handle} are acknowledged")
    });
    core.state.shared.cqs.remove(handle);
    core.state.shared.events.clear_overrun(handle);
    drop(core);
    events::wait_until_acknowledged(cq as usize);
    // SAFETY: `create` created the object, and nothing refers to it any more.
    drop(unsafe { Box::from_raw(cq.cast::<CqObject>()) });
    0
}

/// Arms a queue for one event: `ibv_req_notify_cq(3)`.
///
/// If the queue already has a matching completion, the event is raised at once, as RNICs do. Some programs rely on that and do not
/// poll again after arming.
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    let armed = if solicited_only == 0 { Armed::Any } else { Armed::Solicited };
    // SAFETY: the caller passes a valid queue.
    let (handle, is_due) = unsafe { ((*cq).handle, completions(cq).arm(armed)) };
    if is_due {
        let mut core = device.lock();
        let shared = &mut core.state.shared;
        if let Some(found) = shared.cqs.get_mut(handle) {
            found.notify_armed(handle, &mut shared.events);
        }
    }
    device.begin_wait();
    0
}

/// Waits for a completion event, without a deadline unless the descriptor is non-blocking.
pub unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    let Some(device) = device() else { return -1 };
    let object = channel.cast::<ChannelObject>();
    // SAFETY: the caller passes a valid channel.
    let (number, fds) = unsafe { ((*object).number, (*object).fds) };
    let cancel = Cancel::defer();
    let taken = take_event(device, number, fds, cancel);
    cancel.restore();
    match taken {
        Ok(object) => {
            // SAFETY: a queue exists until its events are acknowledged, and this event is counted. The caller passes valid
            // pointers.
            unsafe {
                cq.write(object);
                cq_context.write((*object).cq_context);
            }
            0
        }
        Err(error) => {
            set_errno(error.raw_os_error().unwrap_or(libc::EIO));
            -1
        }
    }
}

/// Waits for an event, counts it as unacknowledged, and returns its queue.
fn take_event(device: &Device, channel: u32, fds: ChannelFds, cancel: Cancel) -> io::Result<*mut ibv_cq> {
    loop {
        let sleeps = check::is_active() && fds.is_nonblocking().is_ok_and(|is_nonblocking| !is_nonblocking);
        if sleeps {
            observe::falls_asleep(&device.lock().state.shared, channel);
        }
        let pending = device.wait_for_event(channel, fds, cancel);
        let mut core = device.lock();
        if sleeps {
            check::with(|check| check.sleeps(channel, false));
        }
        let pending = pending?;
        let shared = &mut core.state.shared;
        if shared.events.channels.get(channel).is_none() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        if let Some(found) = shared.events.take_completion_event(channel, pending).and_then(|of| shared.cqs.get_mut(of))
        {
            found.queued_events -= 1;
            found.events.0 = found.events.0.wrapping_add(1);
            return Ok(found.object as *mut ibv_cq);
        }
    }
}

/// Acknowledges events: `ibv_ack_cq_events(3)`.
pub unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    let Some(device) = device() else { return };
    // SAFETY: the caller passes a valid queue.
    let handle = unsafe { (*cq).handle };
    if let Some(found) = device.lock().state.shared.cqs.get_mut(handle) {
        found.events.1 = found.events.1.wrapping_add(count);
        let (taken, acknowledged) = found.events;
        if (taken.wrapping_sub(acknowledged) as i32) < 0 {
            check::with(|check| {
                check.unacked(format!(
                    "{acknowledged} events of completion queue {handle} were acknowledged, but only {taken} were taken"
                ));
            });
        }
        device.acknowledge();
    }
}

pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, room: c_int, to: *mut ibv_wc) -> c_int {
    let Some(device) = device() else { return -1 };
    // SAFETY: the caller passes a valid queue.
    let (handle, completions) = unsafe { ((*cq).handle, completions(cq)) };
    let holds = completions.is_empty() && device.poll(handle);
    let mut at = to;
    let taken = completions.take(room.max(0) as usize, |wc| {
        // SAFETY: the caller's array has room for `room` completions.
        unsafe {
            at.write(wc);
            at = at.add(1);
        }
    });
    if holds && !completions.is_empty() {
        device.release_events();
    }
    taken.map_or(-libc::EIO, |count| count as c_int)
}

/// # Safety
/// The caller is between `ibv_start_poll` and `ibv_end_poll`.
unsafe fn set_current(object: *mut CqObject, wc: ibv_wc) {
    // SAFETY: the caller passes a valid queue, and no other thread polls it.
    unsafe {
        (*object).ex.wr_id = wc.wr_id;
        (*object).ex.status = wc.status;
        (*object).current = wc;
    }
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    let object = cq.cast::<CqObject>();
    // SAFETY: the caller passes a valid queue and structure.
    let (is_single, comp_mask) = unsafe { ((*object).is_single, (*attr).comp_mask) };
    let Some(device) = device() else { return libc::ENODEV };
    if comp_mask != 0 {
        return libc::EINVAL;
    }
    if !is_single {
        // SAFETY: the caller passes a valid queue.
        lock::acquire(unsafe { &(*object).is_polled });
    }
    // SAFETY: as above.
    let (handle, completions) = unsafe { ((*cq).handle, &(*object).completions) };
    let holds = completions.is_empty() && device.poll(handle);
    // SAFETY: from here until `ibv_end_poll` only the caller polls.
    let result = poll_result(completions.take(1, |wc| unsafe {
        set_current(object, wc);
        (*object).holds = holds;
    }));
    if result != 0 && !is_single {
        // SAFETY: as above.
        unsafe { (*object).is_polled.store(false, Ordering::Release) };
    }
    result
}

/// Return value of a poll for one completion: 0, `ENOENT` if the queue is empty, `EIO` if it has overrun.
fn poll_result(taken: Result<usize, Overrun>) -> c_int {
    match taken {
        Ok(0) => libc::ENOENT,
        Ok(_) => 0,
        Err(Overrun) => libc::EIO,
    }
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    let object = cq.cast::<CqObject>();
    // SAFETY: the caller is between `ibv_start_poll` and `ibv_end_poll`.
    poll_result(unsafe { (*object).completions.take(1, |wc| set_current(object, wc)) })
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    let object = cq.cast::<CqObject>();
    // SAFETY: the caller is between `ibv_start_poll` and `ibv_end_poll`, so only this thread uses the fields. The next
    // `ibv_start_poll` sets them.
    let has_to_release = unsafe { (*object).holds && !(*object).completions.is_empty() };
    // SAFETY: as above.
    unsafe { (*object).is_polled.store(false, Ordering::Release) };
    if let Some(device) = has_to_release.then(device).flatten() {
        device.release_events();
    }
}

/// Defines accessors, each of which reads a field of the completion at the cursor.
macro_rules! accessors {
    ($($name:ident -> $ty:ty = |$wc:ident| $value:expr;)+) => {
        $(unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $ty {
            // SAFETY: the caller is between `ibv_start_poll` and `ibv_end_poll`.
            let $wc = unsafe { &(*cq.cast::<CqObject>()).current };
            $value
        })+
    };
}

accessors! {
    read_opcode -> ibv_wc_opcode = |wc| wc.opcode;
    read_vendor_err -> u32 = |wc| wc.vendor_err;
    read_wc_flags -> c_uint = |wc| wc.wc_flags;
    read_byte_len -> u32 = |wc| wc.byte_len;
    // SAFETY: both fields of the union are 32 bits.
    read_imm_data -> u32 = |wc| unsafe { wc.__bindgen_anon_1.imm_data };
    read_qp_num -> u32 = |wc| wc.qp_num;
    read_src_qp -> u32 = |wc| wc.src_qp;
    read_slid -> u32 = |wc| wc.slid.into();
    read_sl -> u8 = |wc| wc.sl;
    read_dlid_path_bits -> u8 = |wc| wc.dlid_path_bits;
}
