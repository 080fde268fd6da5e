//! Enhanced connection establishment: options of a vendor that both ends of a connection agree on.

use rdma_sys::*;

use super::QueuePair;
use crate::Result;
use crate::errno::check;

const FEATURE: &str = "enhanced connection establishment (ECE)";

/// Options of enhanced connection establishment: `struct ibv_ece`.
///
/// One end queries its own, the other is told them, sets them and answers what of them it accepted; the first sets those.
/// All of that comes before RTR.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Ece {
    /// The vendor whose options they are.
    pub vendor_id: u32,
    /// The options, in the vendor's own meaning.
    pub options: u32,
}

impl QueuePair {
    /// The options that it has now: `ibv_query_ece(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported); [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_query_ece")]
    pub fn ece(&self) -> Result<Ece> {
        let mut ece = ibv_ece::zeroed();
        // SAFETY: the queue pair is valid, and so is the out pointer. What the provider reads only a `&mut self` changes.
        let result = check(unsafe { (self.context().verbs().ibv_query_ece)(self.as_raw(), &mut ece) });
        result.map_err(|errno| self.context().feature_error("ibv_query_ece", FEATURE, errno))?;
        Ok(Ece { vendor_id: ece.vendor_id, options: ece.options })
    }

    /// Sets the options for the changes of state to come, and returns those that were accepted: `ibv_set_ece(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported), also for a `vendor_id` of 0; [`Error::Verb`](crate::Error::Verb) with
    /// `EINVAL` for those of another vendor.
    #[doc(alias = "ibv_set_ece")]
    pub fn set_ece(&mut self, ece: Ece) -> Result<Ece> {
        let mut ece = ibv_ece { vendor_id: ece.vendor_id, options: ece.options, comp_mask: 0 };
        // SAFETY: the queue pair is valid and borrowed mutably, and `ece` is a valid in and out pointer.
        let result = check(unsafe { (self.context().verbs().ibv_set_ece)(self.as_raw(), &mut ece) });
        result.map_err(|errno| self.context().feature_error("ibv_set_ece", FEATURE, errno))?;
        Ok(Ece { vendor_id: ece.vendor_id, options: ece.options })
    }
}
