//! Support for programs that fork while memory is registered.
//!
//! Call [`init`] at the start of such a program.
//!
//! # Objects that a child inherits
//!
//! A child has copies of all objects of its parent, but the device belongs to the parent. A child that was made by `fork(3)` may
//! drop these copies: nothing of the parent's is destroyed or freed. The child leaks the C objects and the registered memory
//! until it ends or executes another program. Calls that create, modify or destroy return
//! [`Error::Inherited`]. Do nothing else with inherited objects: posting and polling are not checked,
//! because a check would take time in every process. End batches and cursors before forking.
//!
//! A child of a raw `fork` or `clone` system call is not recognised, because the C library runs no handlers in it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

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

/// Number of forks between the first process of this program and this process.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The process that an object was created in. It recognises objects that a child of `fork(3)` has inherited.
///
/// For layers above, whose objects a child may drop. Other threads of the parent may have held the locks of these objects at the
/// fork, and may have been changing what they protect. So a child takes none of these locks, and forgets what they protect.
///
/// ```
/// use rdma_safe::fork::{self, Creator};
///
/// fork::watch()?;
/// let creator = Creator::current();
/// assert!(!creator.is_parent());
/// # Ok::<(), rdma_safe::Errno>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Creator(u32);

impl Creator {
    /// This process. Call [`watch`] before: earlier forks are not recognised.
    #[must_use]
    pub fn current() -> Creator {
        Creator(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this process was forked after the object was created. Costs one load.
    #[must_use]
    #[inline(always)]
    pub fn is_parent(self) -> bool {
        self.0 != GENERATION.load(Ordering::Relaxed)
    }
}

/// Recognises forks from now on: `pthread_atfork(3)`. Opening a device does this, too.
///
/// # Errors
/// `ENOMEM` if the C library cannot store the handler.
pub fn watch() -> Result<(), Errno> {
    static WATCHED: OnceLock<Result<(), Errno>> = OnceLock::new();
    *WATCHED.get_or_init(|| {
        if cfg!(miri) {
            // Miri neither forks nor has this function.
            return Ok(());
        }
        // SAFETY: the handler only changes an atomic, so it can run in the child of a process with several threads.
        check(unsafe { libc::pthread_atfork(None, None, Some(count_fork)) })
    })
}

extern "C" fn count_fork() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}
