//! `soft0`, the software RNIC of the crate `rdma-soft`, as the only device of this process. With the feature `soft`.
//!
//! It speaks RoCEv2 over UDP sockets and takes nothing of the system: no RNIC, no kernel module, no rdma-core, no privilege. It is
//! for programs that shall run anywhere, of which the first line is
//!
//! ```
//! if rdma_safe::soft::install_by_default() {
//!     eprintln!("running on soft0");
//! }
//! ```
//!
//! Verbs of a process have one provider, which is settled by the first verb:
//!
//! | what | provider |
//! |---|---|
//! | [`install`] | soft0, unless there is one already |
//! | [`install_by_default`], [`install_for`] | the first of these rows that fits |
//! | … `RDMA_SYS_LIBIBVERBS` names a library | that one |
//! | … a device is named that begins with `soft` | soft0 |
//! | … the kernel has no RDMA device (`/sys/class/infiniband_verbs`), or there is no libibverbs | soft0 |
//! | … otherwise | libibverbs of the system |
//!
//! A device of another name is for the program to open: `Device::by_name` then says that there is only soft0. `Device::first`
//! does not read `RDMA_DEVICE`.
//!
//! `soft0` has no connection manager: everything in [`cm`](crate::cm) is refused with `EOPNOTSUPP`. Addresses of queue pairs
//! ([`QueuePairAddress`](crate::QueuePairAddress)) are exchanged out of band.

use std::sync::{Mutex, PoisonError};

pub use rdma_soft::faults::{Faults, FaultsError};
pub use rdma_soft::{Objects, PortCounters, counters, objects, set_faults, setup_error};
use rdma_sys::{AlreadyLoaded, LoadError, Verbs};

/// Whether soft0 was installed from here.
static INSTALLED: Mutex<bool> = Mutex::new(false);

/// Makes soft0 the only RDMA device of this process. It has to come before the first verb; to call it again changes nothing.
///
/// # Errors
/// [`AlreadyLoaded`] when another libibverbs or librdmacm is in use.
pub fn install() -> Result<(), AlreadyLoaded> {
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if !*installed {
        rdma_soft::install()?;
        *installed = true;
    }
    Ok(())
}

/// Installs soft0 where the process has no RDMA device, or where the variable `RDMA_DEVICE` names it; whether the process runs on
/// soft0 then. It has to come before the first verb: after that it is too late, and the answer is `false`.
///
/// The result may be ignored: if there is no device, opening one reports that.
pub fn install_by_default() -> bool {
    install_for(None)
}

/// As [`install_by_default`], of a program that can be told its device. `RDMA_DEVICE` counts where it was not.
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

/// Whether there is a device of the kernel, and a library that finds it.
fn has_device() -> bool {
    has_devices_of_kernel() && has_library()
}

fn has_devices_of_kernel() -> bool {
    let entries = std::fs::read_dir("/sys/class/infiniband_verbs").into_iter().flatten().flatten();
    // Beside them there is a file, `abi_version`.
    entries.map(|entry| entry.path()).any(|path| path.is_dir())
}

/// Not `rdma_sys::verbs`, by which it would be the one of the process. A library that is too old is there, and to be complained of.
fn has_library() -> bool {
    // SAFETY: libibverbs.so.1 is the SONAME of the ABI that the table describes; the first verb would load it just so.
    let loaded = unsafe { Verbs::load_from("libibverbs.so.1") };
    !matches!(loaded, Err(LoadError::Library { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft0_is_for_who_asks_for_it_or_has_nothing_else() {
        let never = || -> bool { panic!("there was no need to look") };
        assert!(takes_soft(false, None, || false));
        assert!(!takes_soft(false, None, || true));
        assert!(takes_soft(false, Some("soft0"), never));
        assert!(!takes_soft(false, Some("mlx5_0"), || true));
        assert!(takes_soft(false, Some("mlx5_0"), || false), "which is told then that there is soft0 only");
        for wish in [None, Some("soft0")] {
            assert!(!takes_soft(true, wish, never), "a library was named");
        }
    }
}
