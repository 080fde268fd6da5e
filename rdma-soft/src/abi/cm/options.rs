//! Options of ids, and enhanced connection establishment.

use core::ffi::{c_int, c_void};

use rdma_sys::*;

use super::object::number;
use super::result;
use crate::device::cma::{Id, IdState};
use crate::device::device;

/// Changes an id with the device locked. Fails with `ENXIO` if its device was removed.
///
/// # Safety
/// The id is valid.
unsafe fn change(id: *mut rdma_cm_id, change: impl FnOnce(&mut Id) -> Result<(), c_int>) -> Result<(), c_int> {
    let device = device().ok_or(libc::ENODEV)?;
    // SAFETY: the caller passes a valid id.
    let number = unsafe { number(id) };
    let mut core = device.lock();
    core.state.cma.check_device(number)?;
    core.state.cma.id_mut(number).and_then(change)
}

/// Reads an option value.
///
/// # Errors
/// `EINVAL` if it has another size.
///
/// # Safety
/// `value` points to `len` bytes.
unsafe fn read<T: Copy>(value: *const c_void, len: usize) -> Result<T, c_int> {
    if value.is_null() || len != size_of::<T>() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller passes that many bytes. `T` is an integer.
    Ok(unsafe { value.cast::<T>().read_unaligned() })
}

/// Sets an option of an id: `rdma_set_option(3)`.
pub unsafe extern "C" fn rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    optname: c_int,
    optval: *mut c_void,
    optlen: usize,
) -> c_int {
    // SAFETY: the caller passes a valid id and a value of that size.
    let set = unsafe {
        match (level, optname) {
            (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS) => read::<u8>(optval, optlen).and_then(|tos| {
                change(id, |id| {
                    id.options.tos = tos;
                    Ok(())
                })
            }),
            (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR) => read::<c_int>(optval, optlen).and_then(|value| {
                change(id, |id| {
                    if id.state == IdState::Listening {
                        return Err(libc::EINVAL);
                    }
                    id.options.reuses_address = value != 0;
                    Ok(())
                })
            }),
            (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY) => read::<c_int>(optval, optlen).and_then(|value| {
                change(id, |id| {
                    if !matches!(id.state, IdState::Idle | IdState::Bound) {
                        return Err(libc::EINVAL);
                    }
                    id.options.is_ipv6_only = value != 0;
                    Ok(())
                })
            }),
            (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT) => read::<u8>(optval, optlen).and_then(|exponent| {
                change(id, |id| {
                    if id.is_datagram() || exponent > 31 {
                        return Err(libc::EINVAL);
                    }
                    id.options.ack_timeout = Some(exponent);
                    Ok(())
                })
            }),
            // RoCE has no path records of a subnet administrator.
            (RDMA_OPTION_IB, RDMA_OPTION_IB_PATH) => Err(libc::EOPNOTSUPP),
            _ => Err(libc::ENOSYS),
        }
    };
    result(set)
}

/// Sets the vendor options that the next request or reply offers: `rdma_set_local_ece(3)`.
///
/// Fails with `EINVAL`, as in librdmacm, if the id has a queue pair.
pub unsafe extern "C" fn rdma_set_local_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int {
    if id.is_null() || ece.is_null() {
        return result(Err(libc::EINVAL));
    }
    // SAFETY: the caller passes valid arguments.
    let set = unsafe {
        let ibv_ece { vendor_id, options, comp_mask } = *ece;
        if !(*id).qp.is_null() || vendor_id == 0 || comp_mask != 0 {
            return result(Err(libc::EINVAL));
        }
        change(id, |id| {
            id.options.local_ece = (vendor_id, options);
            Ok(())
        })
    };
    result(set)
}

/// Returns the vendor options that the peer offers: `rdma_get_remote_ece(3)`.
pub unsafe extern "C" fn rdma_get_remote_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int {
    if id.is_null() || ece.is_null() {
        return result(Err(libc::EINVAL));
    }
    // SAFETY: the caller passes valid arguments.
    let got = unsafe {
        if !(*id).qp.is_null() {
            return result(Err(libc::EINVAL));
        }
        change(id, |id| {
            let (vendor_id, options) = id.options.remote_ece;
            ece.write(ibv_ece { vendor_id, options, comp_mask: 0 });
            Ok(())
        })
    };
    result(got)
}
