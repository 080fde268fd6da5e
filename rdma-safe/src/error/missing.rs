//! Messages for a missing library, device or address.

use std::fmt::{Formatter, Result};
use std::time::Duration;

use rdma_sys::LoadError;

use super::{Errno, Error};

/// Advice to use soft0, which needs neither RDMA devices nor libraries.
macro_rules! use_soft0 {
    () => {
        "call rdma_safe::soft::install_by_default() before the first verb to run on soft0, the software RNIC of the \
         feature `soft`, if there is no RDMA device"
    };
}

pub(crate) use use_soft0;

const SOFT: &str = use_soft0!();

pub(super) const NO_DEVICE: &str = concat!(
    "no RDMA device found (libibverbs is loaded and ibv_get_device_list is empty); ",
    use_soft0!(),
    "; for a device of the kernel, check `rdma link` and `ls /sys/class/infiniband`, load the driver of your RNIC, or create a \
     software RNIC: `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev INTERFACE`"
);

pub(super) const NO_CHANNEL: &str = "there is no completion channel for events: build the queue with \
     CompletionQueueBuilder::channel, the endpoint with EndpointBuilder::events, or the set with EndpointSetBuilder::events";

pub(super) const FOREIGN_MEMORY: &str = "memory of a provider must be registered in exactly the domain that it was allocated \
     from, not in a parent domain of it: call alloc_buf on the domain that registers it";

pub(super) fn completion_fields(fields: &crate::WcFields, f: &mut Formatter<'_>) -> Result {
    write!(
        f,
        "this device cannot report {fields:?} in a completion; leave them out of CompletionQueueBuilder::fields, and \
         EndpointBuilder::timestamps unset"
    )
}

/// The message includes the library's error, so that error is not a `source`.
impl From<&'static LoadError> for Error {
    fn from(error: &'static LoadError) -> Error {
        Error::Load(error)
    }
}

pub(super) fn load(error: &&LoadError, f: &mut Formatter<'_>) -> Result {
    match error {
        LoadError::Library { library, tried, source, .. } => {
            let (tried, advice) = (tried.join(", "), error.advice());
            write!(f, "cannot load {library} (tried {tried}): {source}; {SOFT}; for a device of the kernel, {advice}")
        }
        _ => write!(f, "{error}"),
    }
}

pub(super) fn device_list(errno: &Errno, f: &mut Formatter<'_>) -> Result {
    write!(
        f,
        "ibv_get_device_list failed: {errno}; {SOFT}; for a device of the kernel, check that the ib_uverbs kernel module is loaded \
         (modprobe ib_uverbs) and that /sys/class/infiniband_verbs can be read"
    )
}

pub(super) fn no_such_gid(device: &String, port: &u8, index: &u32, table_len: &u32, f: &mut Formatter<'_>) -> Result {
    write!(
        f,
        "{device} port {port} has no GID at index {index} (the table has {table_len} entries, many may be empty); list them with \
         Context::gids or the example show_gids"
    )
}

pub(super) fn no_completion(waited: &Duration, f: &mut Formatter<'_>) -> Result {
    write!(
        f,
        "no completion within {waited:?}: the peer may be gone, or has posted no receive. A reliable connection retries such a \
         send without end; only connections by exchanged addresses can limit that, with ConnectOptions::rnr_retry. The work \
         stays in flight"
    )
}

pub(super) fn no_gid(device: &String, port: &u8, f: &mut Formatter<'_>) -> Result {
    write!(
        f,
        "{device} port {port} has no usable GID; on RoCE a GID appears when the network interface below the device is up and \
         has an address"
    )
}

pub(super) fn advice_on_name(requested: &str) -> String {
    if requested.starts_with("named soft") { format!("; {SOFT} or RDMA_DEVICE names it") } else { String::new() }
}

#[cfg(test)]
mod tests {
    use rdma_sys::Verbs;

    use super::*;
    use crate::cm::CmError;
    use crate::error::Verb;

    #[test]
    #[cfg_attr(miri, ignore = "opens a library")]
    fn without_a_device_soft0_is_recommended_first() {
        // SAFETY: there is no such library, so no code is loaded.
        let Err(missing) = (unsafe { Verbs::load_from("/no/such/library.so") }) else {
            panic!("nothing can be loaded")
        };
        let missing: &'static LoadError = Box::leak(Box::new(missing));
        let no_manager = CmError::Call { verb: Verb::RdmaCreateEventChannel, errno: Errno(libc::ENODEV) };
        for (error, of_the_kernel) in [
            (Error::NoDevice, "modprobe rdma_rxe"),
            (Error::Load(missing), "install rdma-core"),
            (Error::DeviceList { errno: Errno(libc::ENOSYS) }, "modprobe ib_uverbs"),
            (no_manager.into(), "modprobe rdma_ucm"),
        ] {
            let text = error.to_string();
            let [soft, kernel] =
                ["call rdma_safe::soft::install_by_default()", of_the_kernel].map(|part| text.find(part));
            assert!(soft.is_some() && soft < kernel, "{text}");
        }
    }
}
