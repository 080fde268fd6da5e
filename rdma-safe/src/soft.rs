//! Makes `soft0`, the software RNIC of the crate `rdma-soft`, the only device of this process. Requires the feature
//! `soft`.
//!
//! It speaks RoCEv2 over UDP sockets, and needs no RNIC, kernel module, rdma-core or privileges. A program that should
//! run on any host starts with
//!
//! ```
//! if rdma_safe::soft::install_by_default() {
//!     eprintln!("running on soft0");
//! }
//! ```
//!
//! A process has one verbs provider, which is fixed by the first verb:
//!
//! | call | provider |
//! |---|---|
//! | [`install`] | soft0, unless there is one already |
//! | [`install_by_default`], [`install_for`] | the first of the following rows that applies |
//! | … `RDMA_SYS_LIBIBVERBS` names a library | that library |
//! | … the name of the requested device starts with `soft` | soft0 |
//! | … the kernel has no RDMA device (`/sys/class/infiniband_verbs`), or there is no libibverbs | soft0 |
//! | … otherwise | libibverbs of the system |
//!
//! The program itself opens the device. If it requests one with another name, `Device::by_name` reports that there is
//! only soft0. `Device::first` does not read `RDMA_DEVICE`.
//!
//! Connections by address ([`cm`](crate::cm)) need no set-up on one host: a [`Connector`](crate::cm::Connector) reaches the
//! [`Listener`](crate::cm::Listener) of another process at any address of the host, such as `127.0.0.1:7471`.

use std::sync::{Mutex, PoisonError};

/// The checker: finds programs that misuse the device. Same as `rdma_soft::check`.
#[doc(inline)]
pub use rdma_soft::check;
pub use rdma_soft::faults::{Faults, FaultsError};
pub use rdma_soft::{Objects, PortCounters, counters, objects, packets_of_thread, remove, set_faults, setup_error};
use rdma_sys::{AlreadyLoaded, LoadError, Verbs};

/// Whether this module has installed soft0.
static INSTALLED: Mutex<bool> = Mutex::new(false);

/// Makes soft0 the only RDMA device of this process. Must be called before the first verb; further calls do nothing.
///
/// # Errors
/// [`AlreadyLoaded`] if another libibverbs or librdmacm is in use.
pub fn install() -> Result<(), AlreadyLoaded> {
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if !*installed {
        rdma_soft::install()?;
        *installed = true;
    }
    Ok(())
}

/// Installs soft0 if there is no RDMA device, or if the variable `RDMA_DEVICE` names it.
///
/// Returns whether the process runs on soft0. Must be called before the first verb: later it changes nothing. The result may be
/// ignored: if there is no device, opening one reports that.
///
/// Without a device it installs soft0 even if `RDMA_DEVICE` names another device; [`Device::by_name`](crate::Device::by_name) then
/// reports that this one is missing. A service that must not run on soft0 checks the result, or does not call this function.
pub fn install_by_default() -> bool {
    install_for(None)
}

/// Like [`install_by_default`], for a program with a device option. `RDMA_DEVICE` is used if `device` is `None`.
pub fn install_for(device: Option<&str>) -> bool {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let wish = match device {
        Some(name) => Some(name.to_owned()),
        None => variable("RDMA_DEVICE").map(|name| name.to_string_lossy().into_owned()),
    };
    if is_installed() {
        return true;
    }
    takes_soft(variable("RDMA_SYS_LIBIBVERBS").is_some(), wish.as_deref(), has_device) && install().is_ok()
}

/// Whether soft0 was installed by a function of this module.
#[must_use]
pub fn is_installed() -> bool {
    *INSTALLED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn takes_soft(names_library: bool, wish: Option<&str>, has_device: impl FnOnce() -> bool) -> bool {
    if names_library {
        return false;
    }
    wish.is_some_and(|name| name.starts_with("soft")) || !has_device()
}

/// Whether the kernel has a device, and there is a library that finds it.
fn has_device() -> bool {
    has_devices_of_kernel() && has_library()
}

fn has_devices_of_kernel() -> bool {
    let entries = std::fs::read_dir("/sys/class/infiniband_verbs").into_iter().flatten().flatten();
    // The directory also has a file, `abi_version`.
    entries.map(|entry| entry.path()).any(|path| path.is_dir())
}

/// Loads a separate table, because `rdma_sys::verbs` would fix the library of the process. A library that is too old
/// counts as present, so that the program reports it.
fn has_library() -> bool {
    // SAFETY: libibverbs.so.1 is the SONAME of the ABI that the table describes. The first verb would load it in the
    // same way.
    let loaded = unsafe { Verbs::load_from("libibverbs.so.1") };
    !matches!(loaded, Err(LoadError::Library { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft0_is_used_if_it_is_requested_or_there_is_no_other_device() {
        let never = || -> bool { panic!("the devices need not be checked") };
        assert!(takes_soft(false, None, || false));
        assert!(!takes_soft(false, None, || true));
        assert!(takes_soft(false, Some("soft0"), never));
        assert!(!takes_soft(false, Some("mlx5_0"), || true));
        assert!(takes_soft(false, Some("mlx5_0"), || false), "opening it reports that there is only soft0");
        for wish in [None, Some("soft0")] {
            assert!(!takes_soft(true, wish, never), "a library was named");
        }
    }
}
