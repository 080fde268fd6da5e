//! Support for programs that fork while memory is registered.
//!
//! Call [`init`] at the start of such a program.

use std::sync::{Mutex, PoisonError};

use rdma_sys::*;

use crate::errno::check;
use crate::named::named;
use crate::{Errno, Error, Result};

/// Whether a device was opened, so that memory may be registered at any time. The lock is held while libibverbs sets up
/// fork support, because libibverbs reads its own flag without a lock.
static OPENED: Mutex<bool> = Mutex::new(false);

named! {
    /// Whether a process may fork while memory is registered: `enum ibv_fork_status`.
    pub struct ForkStatus(u32) as "fork status" {
        /// It may not fork: parent and child could get separate copies of a page, and the device keeps the wrong one.
        DISABLED = IBV_FORK_DISABLED.0 => "disabled",
        /// It may fork: a child does not inherit registered pages.
        ENABLED = IBV_FORK_ENABLED.0 => "enabled",
        /// It may fork: the kernel (since 5.12) copies registered pages for the child, or nothing is pinned, as with
        /// `soft0`.
        UNNEEDED = IBV_FORK_UNNEEDED.0 => "unneeded",
    }
}

/// Enables fork support in this process, so that it may fork while memory is registered: `ibv_fork_init(3)`.
///
/// Call it before any device is opened; [`std::process::Command`] may fork, too. If a device is open, it does nothing
/// if [`status`] is not [`ForkStatus::DISABLED`], and fails otherwise. A child must never use what its parent has
/// opened, whatever the status says: a daemon opens its devices after it has forked.
///
/// With fork support enabled, a child that accesses a page with registered memory before it executes another program is
/// killed by a signal. So keep other data out of such pages; those of [`Pages`](crate::mr::Pages) and
/// [`HugePages`](crate::mr::HugePages) hold no other data. Each registration takes one more system call.
///
/// # Errors
/// [`Error::Fork`] with `EINVAL` if a device was opened before, or `ENOSYS` if the kernel lacks support;
/// [`Error::Load`].
#[doc(alias = "ibv_fork_init")]
pub fn init() -> Result<()> {
    let verbs = verbs()?;
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if read_status(verbs) != ForkStatus::DISABLED {
        return Ok(());
    }
    if *opened {
        return Err(Error::Fork { errno: Errno(libc::EINVAL) });
    }
    // SAFETY: this crate has opened no device, and opens none while the lock is held. So it has registered nothing, and
    // none of its threads is in the part of libibverbs that this sets up. According to the manual page, other code must
    // call this before it uses libibverbs; the `unsafe` of that code must guarantee it.
    check(unsafe { (verbs.ibv_fork_init)() }).map_err(|errno| Error::Fork { errno })
}

/// Whether this process may fork while memory is registered: `ibv_is_fork_initialized(3)`.
///
/// # Errors
/// [`Error::Load`].
#[doc(alias = "ibv_is_fork_initialized")]
pub fn status() -> Result<ForkStatus> {
    let verbs = verbs()?;
    let _opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(read_status(verbs))
}

/// Reads the status. The lock must be held.
fn read_status(verbs: &Verbs) -> ForkStatus {
    // SAFETY: it asks the kernel, and reads state that only `ibv_fork_init` writes, which is called with the lock held.
    ForkStatus(unsafe { (verbs.ibv_is_fork_initialized)() }.0)
}

/// Records that a device is about to be opened.
pub(crate) fn device_opened() {
    *OPENED.lock().unwrap_or_else(PoisonError::into_inner) = true;
}
