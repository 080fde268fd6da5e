//! Contexts and domains of other processes, which take part in the use of what the kernel has for them.

use std::fs::File;
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use crate::errno::check_ptr;
use crate::{Context, Error, ProtectionDomain, Result};

impl Context {
    /// The descriptor by which the kernel knows this context. Whoever gets a duplicate of it, by `SCM_RIGHTS` for instance, can
    /// open the context there, too: [`Context::import`].
    ///
    /// To give it away is to give away what the context has: its new holder can reach all memory that is registered here.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the provider drives the device without the kernel.
    pub fn command_fd(&self) -> Result<BorrowedFd<'_>> {
        // SAFETY: the context is valid, and the field does not change.
        let fd = unsafe { (*self.as_raw()).cmd_fd };
        if fd < 0 {
            return Err(self.unsupported("sharing by a descriptor"));
        }
        // SAFETY: it is open as long as the context is, which the borrow keeps.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Opens a context that another process has, by a duplicate of its [`Context::command_fd`]: `ibv_import_device(3)`.
    ///
    /// The two share the kernel's context, and see its objects by handles: [`Context::import_pd`], [`ProtectionDomain::import_mr`],
    /// [`Context::import_dm`]. What is made from this one is its own. The kernel ends what a process has left when the last of
    /// them has closed the descriptor.
    ///
    /// # Errors
    /// [`Error::Load`]; [`Error::Unsupported`]; [`Error::Verb`], with `EINVAL` or `ENODEV` when the descriptor is not of a device.
    /// The descriptor stays open then, unless the provider has closed it: which it has done is not said, and a number that
    /// is closed twice may be somebody else's by then.
    ///
    /// # Safety
    /// Everyone who holds the descriptor can reach the objects that are made here, and the memory that is registered. They must use
    /// none of it but what this process lets them use, as this one must use none of theirs.
    #[doc(alias = "ibv_import_device")]
    pub unsafe fn import(fd: OwnedFd) -> Result<Context> {
        const VERB: &str = "ibv_import_device";
        let verbs = rdma_sys::verbs()?;
        crate::fork::too_late();
        let file = File::from(fd);
        let number = file.metadata().map_or(0, |metadata| metadata.rdev());
        // Whether the call fails or not, it may have closed the descriptor, or be going to.
        let fd = file.into_raw_fd();
        // SAFETY: an open descriptor, which is given away.
        let raw = check_ptr(|| unsafe { (verbs.ibv_import_device)(fd) }).map_err(|errno| {
            let device = device_name(number).unwrap_or_else(|| format!("the device of descriptor {fd}"));
            match errno.is_unsupported() {
                true => Error::Unsupported { device, feature: "importing a context" },
                false => Error::Verb { verb: VERB, device, errno },
            }
        })?;
        // SAFETY: just made by this library, and nobody else's to close.
        unsafe { Context::from_raw(raw) }
    }

    /// Takes part in the use of a domain that another context of the same kernel context has allocated: `ibv_import_pd(3)`.
    ///
    /// Queue pairs that are made in it work with the regions of both. When the last object that is made in it is gone, it is given
    /// back and not deallocated.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::Verb`], with `ENOENT` when the kernel's context has no such domain.
    ///
    /// # Safety
    /// `handle` must be the [`ProtectionDomain::handle`] of a domain in a context that shares the kernel's with this one (see
    /// [`Context::import`]), and whoever has allocated it must keep it until this, and all that is made in it, is gone. Of the
    /// regions in it each process must name to its queue pairs only those that it has registered or been given the keys of.
    #[doc(alias = "ibv_import_pd")]
    pub unsafe fn import_pd(&self, handle: u32) -> Result<ProtectionDomain> {
        // SAFETY: the context is valid; the caller vouches for the handle.
        let raw = check_ptr(|| unsafe { (self.verbs().ibv_import_pd)(self.as_raw(), handle) })
            .map_err(|errno| self.feature_error("ibv_import_pd", "importing protection domains", errno))?;
        // SAFETY: just imported to this context, and given to nobody else.
        Ok(unsafe { ProtectionDomain::imported(self, raw) })
    }
}

/// Of a character device, by its number: `None` when it is of no RDMA device.
fn device_name(number: u64) -> Option<String> {
    let (major, minor) = (libc::major(number), libc::minor(number));
    let name = std::fs::read_to_string(format!("/sys/dev/char/{major}:{minor}/ibdev")).ok()?;
    Some(name.trim().into())
}
