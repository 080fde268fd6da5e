//! Messages of a missing library or device.

use std::fmt::{Formatter, Result};

use rdma_sys::LoadError;

use super::Error;

macro_rules! soft {
    () => {
        "call rdma_safe::soft::install_by_default() before the first verb to run on soft0, the software RNIC of the \
         feature `soft`, where there is no RDMA device"
    };
}

/// Advice to use soft0, which needs neither RDMA devices nor libraries.
pub(super) const SOFT: &str = soft!();

pub(super) const NO_DEVICE: &str = concat!(
    "no RDMA device found (libibverbs is loaded and ibv_get_device_list is empty); ",
    soft!(),
    "; for a device of the kernel, check `rdma link` and `ls /sys/class/infiniband`, load the driver of your RNIC, or make one in \
     software: `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev INTERFACE`"
);

/// The message includes the library's error, so that error is not a `source`.
impl From<&'static LoadError> for Error {
    fn from(error: &'static LoadError) -> Error {
        Error::Load(error)
    }
}

pub(super) fn load(error: &&LoadError, f: &mut Formatter<'_>) -> Result {
    write!(f, "{error}")?;
    match error {
        // soft0 has no connection manager.
        LoadError::Library { library, .. } if library.starts_with("libibverbs") => write!(f, "; or {SOFT}"),
        _ => Ok(()),
    }
}

pub(super) fn advice_on_name(wanted: &str) -> String {
    if wanted.starts_with("named soft") { format!("; {SOFT} or RDMA_DEVICE names it") } else { String::new() }
}
