//! Enhanced connection establishment (ECE): vendor options that both ends of a connection negotiate.

use rdma_sys::*;

use super::QueuePair;
use crate::Result;
use crate::errno::check;
use crate::error::Verb;

const FEATURE: &str = "enhanced connection establishment (ECE)";

/// Options of enhanced connection establishment: `struct ibv_ece`.
///
/// One end queries its options and sends them to the other end. The other end sets them and replies with those that it
/// accepted, which the first end then sets. All of this happens before RTR.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Ece {
    /// PCI vendor id of the vendor that defines the options.
    pub vendor_id: u32,
    /// The options, as the vendor defines them.
    pub options: u32,
}

impl Ece {
    /// Options of the vendor with this PCI vendor id.
    #[must_use]
    pub const fn new(vendor_id: u32, options: u32) -> Self {
        Ece { vendor_id, options }
    }
}

impl QueuePair {
    /// The current options: `ibv_query_ece(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported); [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_query_ece")]
    pub fn ece(&self) -> Result<Ece> {
        let mut ece = ibv_ece::zeroed();
        // SAFETY: the queue pair and the out pointer are valid. Only `&mut self` changes what the provider reads.
        let result = check(unsafe { (self.context().verbs().ibv_query_ece)(self.as_raw(), &mut ece) });
        result.map_err(|errno| self.context().feature_error(Verb::QueryEce, FEATURE, errno))?;
        Ok(Ece { vendor_id: ece.vendor_id, options: ece.options })
    }

    /// Sets the options for the following state changes: `ibv_set_ece(3)`. Returns the accepted options.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported), also for a `vendor_id` of 0;
    /// [`Error::Verb`](crate::Error::Verb) with `EINVAL` for the options of another vendor.
    #[doc(alias = "ibv_set_ece")]
    pub fn set_ece(&mut self, ece: Ece) -> Result<Ece> {
        let mut ece = ibv_ece { vendor_id: ece.vendor_id, options: ece.options, comp_mask: 0 };
        // SAFETY: the queue pair is valid and borrowed mutably, and `ece` is a valid in and out pointer.
        let result = check(unsafe { (self.context().verbs().ibv_set_ece)(self.as_raw(), &mut ece) });
        result.map_err(|errno| self.context().feature_error(Verb::SetEce, FEATURE, errno))?;
        Ok(Ece { vendor_id: ece.vendor_id, options: ece.options })
    }
}
