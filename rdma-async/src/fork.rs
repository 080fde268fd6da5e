//! Recognises what a forked child has inherited.
//!
//! The descriptors and the device belong to the parent. Other threads of the parent may hold locks at the fork, and may be changing
//! what these protect. So a child takes no lock of an inherited driver when it drops its copies, and forgets what is locked.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Number of forks between the first process of this program and this process.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The process that an object was created in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Creator(u32);

impl Creator {
    /// This process. Call [`watch`] first.
    pub(crate) fn current() -> Self {
        Creator(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this process was forked after the object was created.
    #[inline(always)]
    pub(crate) fn is_parent(self) -> bool {
        self.0 != GENERATION.load(Ordering::Relaxed)
    }
}

/// Counts forks from now on.
///
/// # Errors
/// `ENOMEM` if the C library cannot store the handler.
pub(crate) fn watch() -> io::Result<()> {
    static WATCHED: OnceLock<i32> = OnceLock::new();
    let watched = *WATCHED.get_or_init(|| {
        if cfg!(miri) {
            // Miri neither forks nor has this function.
            return 0;
        }
        // SAFETY: the handler only changes an atomic, so it can run in the child of a process with several threads.
        unsafe { libc::pthread_atfork(None, None, Some(count)) }
    });
    if watched == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(watched)) }
}

extern "C" fn count() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}
