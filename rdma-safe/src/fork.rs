//! Programs that fork while memory is registered.

use std::sync::{Mutex, PoisonError};

use rdma_sys::*;

use crate::errno::check;
use crate::named::named;
use crate::{Errno, Error, Result};

/// Whether a device was opened, after which memory may be registered at any time. Held while libibverbs, which looks at
/// its own note of it without a lock, is set up.
static OPENED: Mutex<bool> = Mutex::new(false);

named! {
    /// Whether a process may fork while memory is registered: `enum ibv_fork_status`.
    pub struct ForkStatus(u32) as "fork status" {
        /// It may not: parent and child could get separate copies of a page, and the device keeps the wrong one.
        DISABLED = IBV_FORK_DISABLED.0 => "disabled",
        /// It may: a child has no registered pages at all.
        ENABLED = IBV_FORK_ENABLED.0 => "enabled",
        /// It may: the kernel (since 5.12) copies registered pages for the child, or nothing is pinned, as with `soft0`.
        UNNEEDED = IBV_FORK_UNNEEDED.0 => "unneeded",
    }
}

/// Lets this process fork while memory is registered: `ibv_fork_init(3)`. What the parent has opened is no child's to use, whatever
/// the status says: a daemon opens its devices after it has forked.
///
/// [`std::process::Command`] may fork, too. Call it first, before any device is opened; afterwards it does nothing if
/// [`fork_status`] is not [`ForkStatus::DISABLED`], and fails otherwise. From then on a child that touches a page with
/// registered memory before it executes another program is ended by a signal, so keep other data out of such pages: those of
/// [`Pages`](crate::Pages) and [`HugePages`](crate::HugePages) hold nothing else. Each registration takes a system call more.
///
/// # Errors
/// [`Error::Fork`]: with `EINVAL` when a device was opened before, `ENOSYS` when the kernel cannot. [`Error::Load`].
#[doc(alias = "ibv_fork_init")]
pub fn fork_init() -> Result<()> {
    let verbs = verbs()?;
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if status(verbs) != ForkStatus::DISABLED {
        return Ok(());
    }
    if *opened {
        return Err(Error::Fork { errno: Errno(libc::EINVAL) });
    }
    // SAFETY: no device was opened through this crate, and none is while the lock is held, so this crate has registered
    // nothing, and no thread of it is in the part of libibverbs that this sets up. Other code that uses libibverbs has to call
    // it first, too, says the manual page; that it then does is up to the `unsafe` of that code.
    check(unsafe { (verbs.ibv_fork_init)() }).map_err(|errno| Error::Fork { errno })
}

/// Whether this process may fork while memory is registered: `ibv_is_fork_initialized(3)`.
///
/// # Errors
/// [`Error::Load`].
#[doc(alias = "ibv_is_fork_initialized")]
pub fn fork_status() -> Result<ForkStatus> {
    let verbs = verbs()?;
    let _opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(status(verbs))
}

/// The lock must be held.
fn status(verbs: &Verbs) -> ForkStatus {
    // SAFETY: it asks the kernel, and reads what only `ibv_fork_init` writes, which is called with the lock held.
    ForkStatus(unsafe { (verbs.ibv_is_fork_initialized)() }.0)
}

/// A device is about to be opened.
pub(crate) fn too_late() {
    *OPENED.lock().unwrap_or_else(PoisonError::into_inner) = true;
}
