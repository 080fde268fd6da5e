//! Domains of extended reliable connections.

use std::ffi::c_int;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::check_ptr;
use crate::object::{Object, Parents};
use crate::{Context, DeviceCapabilities, Result};

const FEATURE: &str = "extended reliable connections (XRC)";

/// A domain of extended reliable connections (XRC): `struct ibv_xrcd`. Clones share it. Made by [`Context::open_xrcd`].
///
/// What arrives at a target of the domain, an [`XrcTarget`](crate::XrcTarget), goes to whichever shared receive queue of the domain
/// the message names. Processes that share a domain so share connections: each has queues of its own, and a host needs one
/// connection to a peer where it would need one for each process.
#[derive(Clone)]
pub struct XrcDomain {
    inner: Arc<Object<MadeFrom>>,
}

struct MadeFrom(Context);

impl Parents for MadeFrom {
    type Raw = ibv_xrcd;

    const VERB: &'static str = "ibv_close_xrcd";

    fn context(&self) -> &Context {
        &self.0
    }

    unsafe fn destroy(&self, raw: *mut ibv_xrcd) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { ibv_close_xrcd(raw) }
    }
}

/// Whether a domain that processes share has to exist, or must not: the flags of ibv_open_xrcd(3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum XrcOpen {
    /// It has to.
    Existing,
    /// It is made where it does not: `O_CREAT`.
    OrCreate,
    /// It must not: `O_CREAT | O_EXCL`.
    New,
}

impl Context {
    /// Opens a domain of extended reliable connections that is this process's own: `ibv_open_xrcd(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) where the device lacks [`DeviceCapabilities::XRC`];
    /// [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_open_xrcd")]
    pub fn open_xrcd(&self) -> Result<XrcDomain> {
        self.open_xrcd_of(None, XrcOpen::OrCreate)
    }

    /// Opens the domain that belongs to a file, by its inode: `ibv_open_xrcd(3)`. Every process that opens it so shares it. The
    /// file need not stay open.
    ///
    /// # Errors
    /// As [`Context::open_xrcd`]; [`Error::Verb`](crate::Error::Verb) with `ENOENT` and `EEXIST`, or `EINVAL`, where `open` does
    /// not fit.
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
                XrcOpen::Existing => 0,
                XrcOpen::OrCreate => libc::O_CREAT,
                XrcOpen::New => libc::O_CREAT | libc::O_EXCL,
            },
        };
        // SAFETY: the context is valid, the descriptor is open, and `attr` is for the duration of the call.
        let raw = check_ptr(|| unsafe { ibv_open_xrcd(self.as_raw(), &mut attr) })
            .map_err(|errno| self.feature_error("ibv_open_xrcd", FEATURE, errno))?;
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
    /// Adopts a domain that other code has opened. It is closed when nothing is left in it.
    ///
    /// # Safety
    /// `raw` must be a domain of `context`, and nobody else close it or use it afterwards: it is closed with the last clone of what
    /// is returned, and of what is made in it.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_xrcd>) -> Self {
        // SAFETY: the caller's contract; what is made in it holds an `Arc` of it.
        XrcDomain { inner: Arc::new(unsafe { Object::new(raw, MadeFrom(context.clone())) }) }
    }

    /// The device that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.inner.context()
    }

    /// The C object, valid while this domain or anything made in it is.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_xrcd {
        self.inner.as_raw()
    }

    /// Closes it: `ibv_close_xrcd(3)`. Dropping does the same, when nothing is left in it, and tells nobody.
    ///
    /// # Errors
    /// [`Error::InUse`](crate::Error::InUse) while there are clones of it, or something made in it: it is closed when the last of
    /// them is gone. [`Error::Verb`](crate::Error::Verb) with the provider's answer; the domain and its device then stay open until
    /// the process ends.
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
