//! Options of ids.

use std::ffi::{c_int, c_void};

use rdma_sys::*;

use super::error::failed;
use super::{Id, Paths};
use crate::error::Verb;
use crate::{Errno, Result};

impl Id {
    /// Sets the type of service of the packets: `rdma_set_option(3)`.
    ///
    /// On InfiniBand the subnet manager interprets it. Call this before the route is resolved.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_set_option")]
    pub fn set_type_of_service(&mut self, tos: u8) -> Result<()> {
        self.set(RDMA_OPTION_ID_TOS, tos)
    }

    /// Allows to share the port with another id that allows it and does not listen: `rdma_set_option(3)`.
    ///
    /// Call this before [`Id::bind`].
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_set_option")]
    pub fn set_reuse_address(&mut self, reuse: bool) -> Result<()> {
        self.set(RDMA_OPTION_ID_REUSEADDR, c_int::from(reuse))
    }

    /// Restricts an id that is bound to an IPv6 address to IPv6: `rdma_set_option(3)`.
    ///
    /// IPv4 connections to the port are then left to other ids. Call this before [`Id::bind`].
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call).
    #[doc(alias = "rdma_set_option")]
    pub fn set_ipv6_only(&mut self, only: bool) -> Result<()> {
        self.set(RDMA_OPTION_ID_AFONLY, c_int::from(only))
    }

    /// Sets the ACK timeout of the queue pair: `rdma_set_option(3)`.
    ///
    /// A packet is retransmitted if it is not acknowledged within 4.096 µs · 2^`exponent`; `exponent` is 0 to 31. By
    /// default, the kernel chooses a value for the network: 0.5 s to 2 s on Ethernet. Call this before [`Id::connect`]
    /// or [`Id::accept`].
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` above 31.
    #[doc(alias = "rdma_set_option")]
    pub fn set_ack_timeout(&mut self, exponent: u8) -> Result<()> {
        if exponent > 31 {
            return Err(failed(Verb::RdmaSetOption, Errno(libc::EINVAL)));
        }
        self.set(RDMA_OPTION_ID_ACK_TIMEOUT, exponent)
    }

    /// Sets the route to the peer that ibacm returned, instead of [`Id::resolve_route`]: `rdma_set_option(3)`.
    ///
    /// The address must be resolved. [`RouteResolved`](super::EventKind::RouteResolved) follows.
    ///
    /// # Errors
    /// [`CmError::Call`](super::CmError::Call), with `EINVAL` before the address was resolved.
    #[doc(alias = "rdma_set_option")]
    pub fn set_paths(&mut self, paths: &Paths) -> Result<()> {
        let (bytes, len) = (paths.as_bytes().as_ptr().cast_mut().cast::<c_void>(), paths.as_bytes().len());
        // SAFETY: the id is valid, and so are the bytes, which the call only reads.
        self.call_on_device(Verb::RdmaSetOption, |cm, id| unsafe {
            (cm.rdma_set_option)(id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, bytes, len)
        })
    }

    fn set<T: Copy>(&mut self, option: c_int, mut value: T) -> Result<()> {
        // SAFETY: the id is valid, and so is the value during the call, with the given size.
        self.call(Verb::RdmaSetOption, |cm, id| unsafe {
            (cm.rdma_set_option)(id, RDMA_OPTION_ID, option, (&raw mut value).cast::<c_void>(), size_of::<T>())
        })
    }
}
