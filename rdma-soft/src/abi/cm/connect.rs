//! Connecting, accepting, rejecting and disconnecting.

use core::ffi::{c_int, c_void};

use rdma_sys::*;

use super::id::finish;
use super::object::{IdObject, number, update};
use super::{qp, result};
use crate::abi::limits::MAX_RD_ATOMIC;
use crate::device::cma::ConnectionParameters;
use crate::device::device;
use crate::wire::cm::RejectReason;

/// Reads private data.
///
/// # Safety
/// `data` points to `len` bytes, or is null.
unsafe fn private_data(data: *const c_void, len: u8) -> Vec<u8> {
    if data.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller passes that many bytes.
    unsafe { core::slice::from_raw_parts(data.cast::<u8>(), len.into()) }.to_vec()
}

/// Reads connection parameters. Null stands for the defaults of librdmacm.
///
/// `default` has the numbers of outstanding reads without parameters, and in place of `RDMA_MAX_RESP_RES` and
/// `RDMA_MAX_INIT_DEPTH` (255).
///
/// # Errors
/// `EINVAL` for more outstanding reads than the device supports.
///
/// # Safety
/// The id is valid. The parameters are valid or null.
unsafe fn parameters(
    id: *mut rdma_cm_id,
    raw: *const rdma_conn_param,
    default: (u8, u8),
) -> Result<ConnectionParameters, c_int> {
    let object = id.cast::<IdObject>();
    // SAFETY: the caller passes a valid id.
    let (own_qp, connect_data) = unsafe { ((*id).qp, (*object).connect_data.clone()) };
    let mut parameters = ConnectionParameters {
        private_data: connect_data,
        responder_resources: default.0,
        initiator_depth: default.1,
        retry_count: 7,
        rnr_retry_count: 7,
        ..ConnectionParameters::default()
    };
    if !raw.is_null() {
        // SAFETY: the caller passes valid parameters.
        let raw = unsafe { raw.read() };
        // SAFETY: as above.
        parameters.private_data.extend(unsafe { private_data(raw.private_data, raw.private_data_len) });
        let choose = |value: u8, default: u8| match value {
            u8::MAX => Ok(default),
            value if value > MAX_RD_ATOMIC => Err(libc::EINVAL),
            value => Ok(value),
        };
        parameters.responder_resources = choose(raw.responder_resources, default.0)?;
        parameters.initiator_depth = choose(raw.initiator_depth, default.1)?;
        parameters.flow_control = raw.flow_control != 0;
        (parameters.retry_count, parameters.rnr_retry_count) = (raw.retry_count, raw.rnr_retry_count);
        (parameters.qp_num, parameters.srq) = (raw.qp_num, raw.srq != 0);
    }
    if !own_qp.is_null() {
        // SAFETY: the queue pair of a valid id is valid.
        (parameters.qp_num, parameters.srq) = unsafe { ((*own_qp).qp_num, !(*own_qp).srq.is_null()) };
    }
    Ok(parameters)
}

/// Requests a connection, or looks up a datagram service: `rdma_connect(3)`.
pub unsafe extern "C" fn rdma_connect(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> c_int {
    // SAFETY: the caller passes valid arguments.
    let connected = unsafe {
        parameters(id, conn_param, (MAX_RD_ATOMIC, MAX_RD_ATOMIC)).and_then(|parameters| {
            let object = id.cast::<IdObject>();
            (*object).responder_resources = parameters.responder_resources;
            (*object).initiator_depth = parameters.initiator_depth;
            update(id, |core, number, now| core.cm_connect(number, parameters, now))
        })
    };
    // SAFETY: as above.
    unsafe { finish(id, connected) }
}

/// Accepts a request: `rdma_accept(3)`.
pub unsafe extern "C" fn rdma_accept(id: *mut rdma_cm_id, conn_param: *mut rdma_conn_param) -> c_int {
    let object = id.cast::<IdObject>();
    // SAFETY: the caller passes valid arguments.
    let accepted = unsafe {
        let requested = ((*object).responder_resources, (*object).initiator_depth);
        let most = (requested.0.min(MAX_RD_ATOMIC), requested.1.min(MAX_RD_ATOMIC));
        let prepared = parameters(id, conn_param, most).and_then(|parameters| {
            ((*object).responder_resources, (*object).initiator_depth) =
                (parameters.responder_resources, parameters.initiator_depth);
            if !(*id).qp.is_null() && (*id).qp_type != IBV_QPT_UD {
                qp::to_rts(id)?;
            }
            Ok(parameters)
        });
        prepared.and_then(|parameters| update(id, |core, number, now| core.cm_accept(number, &parameters, now)))
    };
    // The peer confirms a connection, but not the reply to a lookup.
    // SAFETY: as above.
    unsafe { if (*id).qp_type == IBV_QPT_UD { result(accepted) } else { finish(id, accepted) } }
}

unsafe fn reject(id: *mut rdma_cm_id, reason: RejectReason, data: *const c_void, len: u8) -> c_int {
    // SAFETY: the caller passes a valid id and data.
    let rejected = unsafe {
        let data = private_data(data, len);
        update(id, |core, number, now| core.cm_reject(number, reason, &data, now))
    };
    result(rejected)
}

/// Rejects a request or a reply: `rdma_reject(3)`.
pub unsafe extern "C" fn rdma_reject(id: *mut rdma_cm_id, private_data: *const c_void, private_data_len: u8) -> c_int {
    // SAFETY: the caller keeps the contract of the function.
    unsafe { reject(id, RejectReason::CONSUMER_DEFINED, private_data, private_data_len) }
}

/// Rejects a request because of its ECE options: `rdma_reject_ece(3)`.
pub unsafe extern "C" fn rdma_reject_ece(
    id: *mut rdma_cm_id,
    private_data: *const c_void,
    private_data_len: u8,
) -> c_int {
    // SAFETY: the caller keeps the contract of the function.
    unsafe { reject(id, RejectReason::VENDOR_OPTION_NOT_SUPPORTED, private_data, private_data_len) }
}

/// Confirms the reply of a peer, for a queue pair that the id does not own: `rdma_establish(3)`.
pub unsafe extern "C" fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller passes a valid id.
    let established = unsafe {
        match (*id).qp.is_null() {
            true => update(id, |core, number, now| core.cm_establish(number, now)),
            false => Err(libc::EINVAL),
        }
    };
    result(established)
}

/// Tells the connection manager of data that has arrived before the confirmation of the peer: `rdma_notify(3)`.
pub unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int {
    // SAFETY: the caller passes a valid id.
    let notified = unsafe {
        match event {
            IBV_EVENT_COMM_EST => update(id, |core, number, now| core.cm_notify(number, now)),
            _ => Ok(()),
        }
    };
    result(notified)
}

/// Ends a connection, or confirms its end: `rdma_disconnect(3)`.
pub unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller passes a valid id.
    let disconnected = unsafe {
        qp::fail(id);
        update(id, |core, number, now| core.cm_disconnect(number, now))
    };
    // SAFETY: as above.
    unsafe { finish(id, disconnected) }
}

/// Returns the attributes that move a queue pair to the state in `qp_attr`: `rdma_init_qp_attr` of rdma-core.
pub unsafe extern "C" fn rdma_init_qp_attr(
    id: *mut rdma_cm_id,
    qp_attr: *mut ibv_qp_attr,
    qp_attr_mask: *mut c_int,
) -> c_int {
    let Some(device) = device() else { return result(Err(libc::ENODEV)) };
    // SAFETY: the caller passes valid arguments.
    let found = unsafe {
        let (number, state) = (number(id), (*qp_attr).qp_state);
        device.lock().cm_attributes(number, state)
    };
    // SAFETY: as above.
    result(found.map(|(attr, mask)| unsafe {
        qp_attr.write(attr);
        qp_attr_mask.write(mask as c_int);
    }))
}
