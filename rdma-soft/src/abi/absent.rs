//! What the device has none of.

use core::ffi::c_int;

use rdma_sys::{ibv_context, ibv_dm, ibv_ece, ibv_mr, ibv_pd, ibv_qp, ibv_wr_opcode};

use super::refuse::null;

/// There are no options of a vendor's connections.
pub unsafe extern "C" fn ibv_query_ece(_: *mut ibv_qp, _: *mut ibv_ece) -> c_int {
    libc::EOPNOTSUPP
}

/// There are no options of a vendor's connections.
pub unsafe extern "C" fn ibv_set_ece(_: *mut ibv_qp, _: *mut ibv_ece) -> c_int {
    libc::EOPNOTSUPP
}

/// Nothing is promised of the order in which a message's bytes become visible.
pub unsafe extern "C" fn ibv_query_qp_data_in_order(_: *mut ibv_qp, _: ibv_wr_opcode, _: u32) -> c_int {
    0
}

/// A device file of the kernel cannot be this device.
pub unsafe extern "C" fn ibv_import_device(_: c_int) -> *mut ibv_context {
    null(libc::EOPNOTSUPP)
}

/// Objects belong to one process.
pub unsafe extern "C" fn ibv_import_pd(_: *mut ibv_context, _: u32) -> *mut ibv_pd {
    null(libc::EOPNOTSUPP)
}

/// Objects belong to one process.
pub unsafe extern "C" fn ibv_import_mr(_: *mut ibv_pd, _: u32) -> *mut ibv_mr {
    null(libc::EOPNOTSUPP)
}

/// There is no memory on the device.
pub unsafe extern "C" fn ibv_import_dm(_: *mut ibv_context, _: u32) -> *mut ibv_dm {
    null(libc::EOPNOTSUPP)
}

/// Nothing was imported.
pub unsafe extern "C" fn ibv_unimport_pd(_: *mut ibv_pd) {}

/// Nothing was imported.
pub unsafe extern "C" fn ibv_unimport_mr(_: *mut ibv_mr) {}

/// Nothing was imported.
pub unsafe extern "C" fn ibv_unimport_dm(_: *mut ibv_dm) {}

/// The device reaches memory of its process only.
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
