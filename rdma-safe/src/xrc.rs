//! Extended reliable connections (XRC): domains and targets.
//!
//! Start with [`Context::open_xrcd`], which makes an [`XrcDomain`]. One connection of the domain reaches all of its
//! shared receive queues.

use std::ffi::c_int;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::device::DeviceCapabilities;
use crate::errno::check_ptr;
use crate::error::Verb;
use crate::object::{Object, Parents};
use crate::{Context, Result};

pub use crate::qp::xrc_target::XrcTarget;

const FEATURE: &str = "extended reliable connections (XRC)";

/// A domain of extended reliable connections (XRC): `struct ibv_xrcd`. Clones share it. Made by [`Context::open_xrcd`].
///
/// An [`XrcTarget`] of the domain delivers each message to the shared receive queue of the domain
/// that the message names. So processes that share a domain share connections: each process has its own shared receive
/// queues, but the host needs only one connection to a peer, not one per process.
#[derive(Clone)]
pub struct XrcDomain {
    inner: Arc<Object<MadeFrom>>,
}

struct MadeFrom(Context);

impl Parents for MadeFrom {
    type Raw = ibv_xrcd;

    const VERB: Verb = Verb::CloseXrcd;

    fn context(&self) -> &Context {
        &self.0
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_xrcd) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { ibv_close_xrcd(raw) }
    }
}

/// Whether a shared domain must already exist: the flags of ibv_open_xrcd(3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum XrcOpen {
    /// It must exist.
    OpenExisting,
    /// It is created if it does not exist: `O_CREAT`.
    OpenOrCreate,
    /// It must not exist: `O_CREAT | O_EXCL`.
    CreateNew,
}

impl Context {
    /// Opens an XRC domain that is private to this process: `ibv_open_xrcd(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the device lacks [`DeviceCapabilities::XRC`];
    /// [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_open_xrcd")]
    pub fn open_xrcd(&self) -> Result<XrcDomain> {
        self.open_xrcd_of(None, XrcOpen::OpenOrCreate)
    }

    /// Opens the XRC domain of a file, identified by its inode: `ibv_open_xrcd(3)`.
    ///
    /// All processes that open it with this file share it. The file need not stay open.
    ///
    /// # Errors
    /// Those of [`Context::open_xrcd`]; [`Error::Verb`](crate::Error::Verb) with `ENOENT`, `EEXIST` or `EINVAL` if the
    /// domain does not match `open`.
    #[doc(alias = "ibv_open_xrcd")]
    pub fn open_shared_xrcd(&self, file: impl AsFd, open: XrcOpen) -> Result<XrcDomain> {
        self.open_xrcd_of(Some(file.as_fd()), open)
    }

    fn open_xrcd_of(&self, file: Option<BorrowedFd<'_>>, open: XrcOpen) -> Result<XrcDomain> {
        self.require_xrc()?;
        let mut attr = ibv_xrcd_init_attr {
            comp_mask: (IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS).0,
            fd: file.map_or(-1, |file| file.as_raw_fd()),
            oflags: match open {
                XrcOpen::OpenExisting => 0,
                XrcOpen::OpenOrCreate => libc::O_CREAT,
                XrcOpen::CreateNew => libc::O_CREAT | libc::O_EXCL,
            },
        };
        // SAFETY: the context is valid, the descriptor is open, and `attr` is valid during the call.
        let raw = check_ptr(|| unsafe { ibv_open_xrcd(self.as_raw(), &mut attr) })
            .map_err(|errno| self.feature_error(Verb::OpenXrcd, FEATURE, errno))?;
        // SAFETY: it was just opened, and nobody else has it.
        Ok(unsafe { XrcDomain::from_raw(self, raw) })
    }

    pub(crate) fn require_xrc(&self) -> Result<()> {
        match self.attributes().capabilities().contains(DeviceCapabilities::XRC) {
            true => Ok(()),
            false => Err(self.unsupported(FEATURE)),
        }
    }
}

impl XrcDomain {
    /// Adopts a domain that other code has opened. It is closed with the last object in it.
    ///
    /// # Safety
    /// `raw` must be a domain of `context`. Nobody else may close or use it afterwards: it is closed with the last
    /// clone of the returned handle, and the last object in it.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_xrcd>) -> Self {
        // SAFETY: the caller's contract. Everything created in the domain holds an `Arc` of the domain.
        XrcDomain { inner: Arc::new(unsafe { Object::new(raw, MadeFrom(context.clone())) }) }
    }

    /// The context that the domain belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.inner.context()
    }

    /// The C object, valid while this domain or anything created in it exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_xrcd {
        self.inner.as_raw()
    }

    /// Closes the domain: `ibv_close_xrcd(3)`. Dropping does the same once nothing is left in it, but ignores errors.
    ///
    /// # Errors
    /// [`Error::InUse`](crate::Error::InUse) if it has clones or objects: it is closed with the last of them.
    /// [`Error::Verb`](crate::Error::Verb) if the provider fails; the domain and its context are then leaked.
    #[doc(alias = "ibv_close_xrcd")]
    pub fn close(self) -> Result<()> {
        Object::destroy_last(self.inner, "XRC domain", "clones, targets or shared receive queues").map(drop)
    }
}

impl fmt::Debug for XrcDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("XrcDomain").field("device", &self.context().device_name()).finish_non_exhaustive()
    }
}
