//! Events of ids.

use core::ffi::{c_char, c_int, c_void};
use core::ptr::{null, null_mut};

use rdma_sys::*;

use super::object::{IdObject, channel_number, refresh};
use super::{multicast, qp, result};
use crate::device::cma::{CmEvent, Parameters};
use crate::device::{Device, Locked, device, wait};

/// The memory of an `rdma_cm_event`, which is its first field.
#[repr(C)]
struct EventObject {
    event: rdma_cm_event,
    private_data: Vec<u8>,
}

/// Reads an event: `rdma_get_cm_event(3)`. Waits for it, without a deadline, unless the descriptor is non-blocking.
pub unsafe extern "C" fn rdma_get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int {
    if event.is_null() {
        return result(Err(libc::EINVAL));
    }
    let Some(device) = device() else { return result(Err(libc::ENODEV)) };
    // SAFETY: the caller passes a valid channel.
    let (number, fd) = unsafe { (channel_number(channel), (*channel).fd) };
    loop {
        let mut core = device.lock();
        let Some(taken) = core.state.cma.take_event(number) else {
            let is_destroyed = core.state.cma.channels.get(number).is_none();
            drop(core);
            if is_destroyed {
                wait_for_the_end();
            }
            // A program that waits here does not poll, so the server has to receive MADs.
            device.server.end_idle();
            if let Err(error) = wait(fd) {
                if device.lock().state.cma.channels.get(number).is_some() {
                    return result(Err(error.raw_os_error().unwrap_or(libc::EIO)));
                }
            }
            continue;
        };
        // SAFETY: the ids of an event exist until it is acknowledged.
        if let Some(read) = unsafe { convert(device, core, channel, taken) } {
            // SAFETY: the caller passes a valid pointer.
            unsafe { event.write(read) };
            return 0;
        }
    }
}

/// Waits until the process ends or the thread is cancelled.
///
/// Programs such as rping destroy a channel while another thread waits for its events. In librdmacm that thread never returns.
fn wait_for_the_end() -> ! {
    loop {
        // SAFETY: the call takes no pointers.
        unsafe { libc::pause() };
    }
}

/// Makes the C structure of an event, and does what librdmacm does before it reports the event. Returns `None` for an event that
/// is not reported.
///
/// # Safety
/// The channel is valid. No other thread destroys the id of the event before it is acknowledged.
unsafe fn convert(
    device: &Device,
    mut core: Locked<'_>,
    channel: *mut rdma_event_channel,
    taken: CmEvent,
) -> Option<*mut rdma_cm_event> {
    let CmEvent { id: number, listener, mut kind, mut status, parameters } = taken;
    // An id that is destroyed takes its events with it.
    let reporter = core.state.cma.ids.get(listener.unwrap_or(number)).map(|id| id.object)?;
    let (mut id, mut listen_id) = (reporter as *mut rdma_cm_id, null_mut());
    if listener.is_some() {
        listen_id = id;
        // SAFETY: the listening id is valid.
        let (context, ps) = unsafe { ((*listen_id).context, (*listen_id).ps.0) };
        id = IdObject::allocate(number, channel, context, ps).cast();
        if let Some(request) = core.state.cma.ids.get_mut(number) {
            request.object = id as usize;
        }
    }
    if changes_route(kind) {
        // SAFETY: the id is valid. Its program waits for this event before it reads the route.
        unsafe { refresh(&core, id) };
    }
    *core.state.shared.events.unacknowledged.entry(reporter).or_default() += 1;
    drop(core);
    let object = id.cast::<IdObject>();
    // SAFETY: the id is valid, and its program does not use it while it reads its event.
    unsafe {
        match (kind, &parameters) {
            (RDMA_CM_EVENT_CONNECT_REQUEST, _) => {
                if let Parameters::Connected(connection) = &parameters {
                    (*object).responder_resources = connection.responder_resources;
                    (*object).initiator_depth = connection.initiator_depth;
                }
                if (*listen_id.cast::<IdObject>()).is_synchronous && super::rdma_migrate_id(id, null_mut()) != 0 {
                    status = -libc::ENOMEM;
                }
            }
            (RDMA_CM_EVENT_CONNECT_RESPONSE, _) if !(*id).qp.is_null() => match qp::finish_connect(id) {
                Ok(()) => kind = RDMA_CM_EVENT_ESTABLISHED,
                Err(errno) => {
                    (kind, status, (*object).has_failed) = (RDMA_CM_EVENT_CONNECT_ERROR, -errno, true);
                }
            },
            (RDMA_CM_EVENT_REJECTED | RDMA_CM_EVENT_DISCONNECTED, _) if (*object).has_failed => {
                // The program knows already that the connection has failed.
                acknowledge(device, reporter);
                return None;
            }
            (RDMA_CM_EVENT_REJECTED, _) => qp::fail(id),
            (RDMA_CM_EVENT_MULTICAST_JOIN, Parameters::Datagram(datagram)) => {
                let joined = datagram.membership.map_or(Ok(()), |membership| multicast::finish_join(id, membership));
                if let Err(errno) = joined {
                    (kind, status) = (RDMA_CM_EVENT_MULTICAST_ERROR, -errno);
                }
            }
            _ => {}
        }
    }
    // SAFETY: the id is valid.
    let (param, private_data) = unsafe { convert_parameters(id, parameters) };
    let event = rdma_cm_event { id, listen_id, event: kind, status, param };
    Some(Box::into_raw(Box::new(EventObject { event, private_data })).cast())
}

/// Whether an event tells the program about a new route. In librdmacm too, the others do not change the id.
fn changes_route(kind: rdma_cm_event_type) -> bool {
    matches!(
        kind,
        RDMA_CM_EVENT_ADDR_RESOLVED
            | RDMA_CM_EVENT_ROUTE_RESOLVED
            | RDMA_CM_EVENT_CONNECT_REQUEST
            | RDMA_CM_EVENT_CONNECT_RESPONSE
            | RDMA_CM_EVENT_ESTABLISHED
    )
}

/// Converts the parameters of an event. Returns them with their private data, which they point to.
///
/// The private data of a multicast event is the program's context of the membership.
///
/// # Safety
/// The id is valid.
unsafe fn convert_parameters(id: *mut rdma_cm_id, parameters: Parameters) -> (rdma_cm_event__bindgen_ty_1, Vec<u8>) {
    // The pointer stays valid when the vector moves.
    let pointer = |data: &Vec<u8>| if data.is_empty() { null() } else { data.as_ptr().cast::<c_void>() };
    let mut param = rdma_cm_event__bindgen_ty_1 { ud: rdma_ud_param::zeroed() };
    match parameters {
        Parameters::None => (param, Vec::new()),
        Parameters::Connected(connection) => {
            param.conn = rdma_conn_param {
                private_data: pointer(&connection.private_data),
                private_data_len: connection.private_data.len() as u8,
                responder_resources: connection.responder_resources,
                initiator_depth: connection.initiator_depth,
                flow_control: connection.flow_control.into(),
                retry_count: connection.retry_count,
                rnr_retry_count: connection.rnr_retry_count,
                srq: connection.srq.into(),
                qp_num: connection.qp_num,
            };
            (param, connection.private_data)
        }
        Parameters::Datagram(datagram) => {
            let private_data = match datagram.membership {
                // SAFETY: the caller passes a valid id.
                Some(membership) => unsafe { multicast::context_of(id, membership) },
                None => pointer(&datagram.private_data),
            };
            param.ud = rdma_ud_param {
                private_data,
                private_data_len: datagram.private_data.len() as u8,
                ah_attr: datagram.ah_attr,
                qp_num: datagram.qp_num,
                qkey: datagram.qkey,
            };
            (param, datagram.private_data)
        }
    }
}

/// Counts an event of an id as acknowledged.
fn acknowledge(device: &Device, reporter: usize) {
    let mut core = device.lock();
    let unacknowledged = &mut core.state.shared.events.unacknowledged;
    if let Some(left) = unacknowledged.get_mut(&reporter) {
        *left -= 1;
        if *left == 0 {
            unacknowledged.remove(&reporter);
        }
        device.acknowledge();
    }
}

/// Acknowledges an event, so that its id can be destroyed: `rdma_ack_cm_event(3)`.
pub unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    if event.is_null() {
        return result(Err(libc::EINVAL));
    }
    // SAFETY: `rdma_get_cm_event` created the event, and the caller acknowledges it once.
    let object = unsafe { Box::from_raw(event.cast::<EventObject>()) };
    let rdma_cm_event { id, listen_id, .. } = object.event;
    let reporter = if listen_id.is_null() { id } else { listen_id };
    if let Some(device) = device() {
        acknowledge(device, reporter as usize);
    }
    0
}

/// Returns the name of a connection event: `rdma_event_str(3)`.
pub unsafe extern "C" fn rdma_event_str(event: rdma_cm_event_type) -> *const c_char {
    macro_rules! names {
        ($($name:ident)*) => {
            match event {
                $($name => concat!(stringify!($name), "\0"),)*
                _ => "UNKNOWN EVENT\0",
            }
        };
    }
    let name = names! {
        RDMA_CM_EVENT_ADDR_RESOLVED RDMA_CM_EVENT_ADDR_ERROR RDMA_CM_EVENT_ROUTE_RESOLVED RDMA_CM_EVENT_ROUTE_ERROR
        RDMA_CM_EVENT_CONNECT_REQUEST RDMA_CM_EVENT_CONNECT_RESPONSE RDMA_CM_EVENT_CONNECT_ERROR
        RDMA_CM_EVENT_UNREACHABLE RDMA_CM_EVENT_REJECTED RDMA_CM_EVENT_ESTABLISHED RDMA_CM_EVENT_DISCONNECTED
        RDMA_CM_EVENT_DEVICE_REMOVAL RDMA_CM_EVENT_MULTICAST_JOIN RDMA_CM_EVENT_MULTICAST_ERROR
        RDMA_CM_EVENT_ADDR_CHANGE RDMA_CM_EVENT_TIMEWAIT_EXIT
    };
    name.as_ptr().cast()
}
