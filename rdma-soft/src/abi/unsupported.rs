//! Functions that the device does not support.

use core::ffi::c_int;

use rdma_sys::{ibv_context, ibv_dm, ibv_ece, ibv_mr, ibv_pd, ibv_qp, ibv_wr_opcode};

use super::errors::null;

/// Fails: there is no enhanced connection establishment.
pub unsafe extern "C" fn ibv_query_ece(_: *mut ibv_qp, _: *mut ibv_ece) -> c_int {
    libc::EOPNOTSUPP
}

/// Fails: there is no enhanced connection establishment.
pub unsafe extern "C" fn ibv_set_ece(_: *mut ibv_qp, _: *mut ibv_ece) -> c_int {
    libc::EOPNOTSUPP
}

/// Returns 0: the bytes of a message may become visible in any order.
pub unsafe extern "C" fn ibv_query_qp_data_in_order(_: *mut ibv_qp, _: ibv_wr_opcode, _: u32) -> c_int {
    0
}

/// Fails: the device has no device file.
pub unsafe extern "C" fn ibv_import_device(_: c_int) -> *mut ibv_context {
    null(libc::EOPNOTSUPP)
}

/// Fails: objects cannot be shared between processes.
pub unsafe extern "C" fn ibv_import_pd(_: *mut ibv_context, _: u32) -> *mut ibv_pd {
    null(libc::EOPNOTSUPP)
}

/// Fails: objects cannot be shared between processes.
pub unsafe extern "C" fn ibv_import_mr(_: *mut ibv_pd, _: u32) -> *mut ibv_mr {
    null(libc::EOPNOTSUPP)
}

/// Fails: device memory is not supported.
pub unsafe extern "C" fn ibv_import_dm(_: *mut ibv_context, _: u32) -> *mut ibv_dm {
    null(libc::EOPNOTSUPP)
}

/// Does nothing, as no object can be imported.
pub unsafe extern "C" fn ibv_unimport_pd(_: *mut ibv_pd) {}

/// Does nothing, as no object can be imported.
pub unsafe extern "C" fn ibv_unimport_mr(_: *mut ibv_mr) {}

/// Does nothing, as no object can be imported.
pub unsafe extern "C" fn ibv_unimport_dm(_: *mut ibv_dm) {}

/// Fails: the device accesses only memory of its process.
pub unsafe extern "C" fn ibv_reg_dmabuf_mr(
    _: *mut ibv_pd,
    _: u64,
    _: usize,
    _: u64,
    _: c_int,
    _: c_int,
) -> *mut ibv_mr {
    null(libc::EOPNOTSUPP)
}
