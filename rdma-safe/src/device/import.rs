//! Importing contexts and domains that another process shares.

use std::fs::File;
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use crate::errno::check_ptr;
use crate::error::Verb;
use crate::{Context, Error, ProtectionDomain, Result};

impl Context {
    /// The descriptor of the kernel's context. A process that has a duplicate can open the context with
    /// [`Context::import`].
    ///
    /// A duplicate can be passed with `SCM_RIGHTS`, for example. Its holder can access everything in the context,
    /// including all memory that is registered here.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the provider drives the device without the kernel.
    pub fn command_fd(&self) -> Result<BorrowedFd<'_>> {
        // SAFETY: the context is valid, and the field does not change.
        let fd = unsafe { (*self.as_raw()).cmd_fd };
        if fd < 0 {
            return Err(self.unsupported("sharing by a descriptor"));
        }
        // SAFETY: the descriptor is open as long as the context, which the borrow keeps.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Opens the context of another process from a duplicate of its [`Context::command_fd`]: `ibv_import_device(3)`.
    ///
    /// Both share the kernel's context, and can import its objects by handle: [`Context::import_pd`],
    /// [`ProtectionDomain::import_mr`], [`Context::import_dm`]. Objects that are created from this context belong to it
    /// alone. The kernel destroys the remaining objects when the last process has closed the descriptor.
    ///
    /// # Errors
    /// [`Error::Load`]; [`Error::Unsupported`]; [`Error::Verb`] with `EINVAL` or `ENODEV` if the descriptor is not that
    /// of a device. After an error the descriptor is leaked. The provider may have closed it or not, and closing it
    /// again could close another file.
    ///
    /// # Safety
    /// All holders of the descriptor can access the objects that are created here, and the memory that is
    /// registered. They must only use what this process has shared with them, and this process must only use what they
    /// have shared with it.
    #[doc(alias = "ibv_import_device")]
    pub unsafe fn import(fd: OwnedFd) -> Result<Context> {
        const VERB: Verb = Verb::ImportDevice;
        let verbs = rdma_sys::verbs()?;
        crate::fork::device_opened();
        let file = File::from(fd);
        let number = file.metadata().map_or(0, |metadata| metadata.rdev());
        // Whether the call succeeds or fails, the provider may have closed the descriptor or may close it later.
        let fd = file.into_raw_fd();
        // SAFETY: the descriptor is open, and ownership passes to the call.
        let raw = check_ptr(|| unsafe { (verbs.ibv_import_device)(fd) }).map_err(|errno| {
            let device = device_name(number).unwrap_or_else(|| format!("the device of descriptor {fd}"));
            match errno.is_unsupported() {
                true => Error::Unsupported { device, feature: "importing a context" },
                false => Error::Verb { verb: VERB, device, errno },
            }
        })?;
        // SAFETY: this library has just created it, and nobody else closes it.
        unsafe { Context::from_raw(raw) }
    }

    /// Imports a protection domain that another context of the same kernel context has allocated: `ibv_import_pd(3)`.
    ///
    /// Queue pairs in it can use the regions of both contexts. After its last object was dropped, it is released, but
    /// not deallocated.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::Verb`] with `ENOENT` if the kernel's context has no such domain.
    ///
    /// # Safety
    /// `handle` must be the [`ProtectionDomain::handle`] of a domain in a context that shares its kernel context with
    /// this one (see [`Context::import`]). Its owner must keep it until this, and everything created in it, is dropped.
    /// Each process must only use regions in it that it has registered, or whose keys it was given.
    #[doc(alias = "ibv_import_pd")]
    pub unsafe fn import_pd(&self, handle: u32) -> Result<ProtectionDomain> {
        // SAFETY: the context is valid; the caller vouches for the handle.
        let raw = check_ptr(|| unsafe { (self.verbs().ibv_import_pd)(self.as_raw(), handle) })
            .map_err(|errno| self.feature_error(Verb::ImportPd, "importing protection domains", errno))?;
        // SAFETY: the domain was just imported to this context, and nobody else has it.
        Ok(unsafe { ProtectionDomain::imported(self, raw) })
    }
}

/// RDMA device name of a character device number; `None` if it is not an RDMA device.
fn device_name(number: u64) -> Option<String> {
    let (major, minor) = (libc::major(number), libc::minor(number));
    let name = std::fs::read_to_string(format!("/sys/dev/char/{major}:{minor}/ibdev")).ok()?;
    Some(name.trim().into())
}
