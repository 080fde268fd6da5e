//! Options of ids.

use std::ffi::{c_int, c_void};

use rdma_sys::*;

use super::error::failed;
use super::{Id, Paths};
use crate::{Errno, Result};

impl Id {
    /// Type of service of the packets, or on InfiniBand what the subnet manager makes of it: `rdma_set_option(3)`. Before a route
    /// is resolved.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_set_option")]
    pub fn set_type_of_service(&mut self, tos: u8) -> Result<()> {
        self.set(RDMA_OPTION_ID_TOS, tos)
    }

    /// Whether the port may be in use by another id that says the same and does not listen: `rdma_set_option(3)`. Before
    /// [`Id::bind`].
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_set_option")]
    pub fn set_reuse_address(&mut self, reuse: bool) -> Result<()> {
        self.set(RDMA_OPTION_ID_REUSEADDR, c_int::from(reuse))
    }

    /// Whether an id that is bound to an IPv6 address leaves connections by IPv4 to others: `rdma_set_option(3)`. Before
    /// [`Id::bind`].
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_set_option")]
    pub fn set_ipv6_only(&mut self, only: bool) -> Result<()> {
        self.set(RDMA_OPTION_ID_AFONLY, c_int::from(only))
    }

    /// How long the queue pair waits for an acknowledgement before it sends again, 4.096 µs times 2 to this power, 0 to 31:
    /// `rdma_set_option(3)`. Before [`Id::connect`] or [`Id::accept`]. Unless set it is what the kernel makes of
    /// the network: 0.5 s to 2 s on Ethernet.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` beyond 31.
    #[doc(alias = "rdma_set_option")]
    pub fn set_ack_timeout(&mut self, exponent: u8) -> Result<()> {
        if exponent > 31 {
            return Err(failed("rdma_set_option", Errno(libc::EINVAL)));
        }
        self.set(RDMA_OPTION_ID_ACK_TIMEOUT, exponent)
    }

    /// Takes the way to the peer as ibacm has said it, instead of [`Id::resolve_route`]: `rdma_set_option(3)`. The address was
    /// resolved. Then comes [`RouteResolved`](super::EventKind::RouteResolved).
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` before the address was resolved.
    #[doc(alias = "rdma_set_option")]
    pub fn set_paths(&mut self, paths: &Paths) -> Result<()> {
        let (bytes, len) = (paths.as_bytes().as_ptr().cast_mut().cast::<c_void>(), paths.as_bytes().len());
        // SAFETY: the id is valid, and so are the bytes for the duration of the call, which reads them.
        self.call_on_device("rdma_set_option", |cm, id| unsafe {
            (cm.rdma_set_option)(id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, bytes, len)
        })
    }

    fn set<T: Copy>(&mut self, option: c_int, mut value: T) -> Result<()> {
        // SAFETY: the id is valid, and so is the value, of the size that it says, for the duration of the call.
        self.call("rdma_set_option", |cm, id| unsafe {
            (cm.rdma_set_option)(id, RDMA_OPTION_ID, option, (&raw mut value).cast::<c_void>(), size_of::<T>())
        })
    }
}
