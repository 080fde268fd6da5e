//! Prefetching of memory that is paged on demand.

use rdma_sys::*;

use super::Buffer;
use crate::errno::check;
use crate::error::Verb;
use crate::{ProtectionDomain, Result, Sge};

const FEATURE: &str = "prefetching of memory (ibv_advise_mr)";

/// Advice about pages: `enum ib_uverbs_advise_mr_advice`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Advice {
    /// Prepare pages for reading.
    Prefetch,
    /// Prepare pages for reading and writing.
    PrefetchWrite,
    /// Prepare only pages that are in memory.
    PrefetchNoFault,
}

impl Advice {
    fn to_raw(self) -> ibv_advise_mr_advice {
        match self {
            Advice::Prefetch => IBV_ADVISE_MR_ADVICE_PREFETCH,
            Advice::PrefetchWrite => IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE,
            Advice::PrefetchNoFault => IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
        }
    }
}

impl ProtectionDomain {
    /// Asks the device to prepare pages of regions with [`Access::ON_DEMAND`](crate::Access::ON_DEMAND):
    /// `ibv_advise_mr(3)`.
    ///
    /// `ranges` must be in regions of this domain. The device may do this after the call has returned. It is only a
    /// hint: pages may be evicted again.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the device has no on-demand paging; the verb is not called.
    /// [`Error::Verb`](crate::Error::Verb), for example with `EFAULT` for a range outside such regions, or with `EPERM`
    /// if the region lacks the required write access.
    #[doc(alias = "ibv_advise_mr")]
    pub fn advise(&self, advice: Advice, ranges: &[Sge]) -> Result<()> {
        self.advise_with(advice, 0, ranges)
    }

    /// Like [`ProtectionDomain::advise`], but waits until the device has the pages.
    ///
    /// # Errors
    /// Like [`ProtectionDomain::advise`].
    #[doc(alias = "ibv_advise_mr")]
    pub fn advise_and_wait(&self, advice: Advice, ranges: &[Sge]) -> Result<()> {
        self.advise_with(advice, IBV_ADVISE_MR_FLAG_FLUSH.0, ranges)
    }

    fn advise_with(&self, advice: Advice, flags: u32, ranges: &[Sge]) -> Result<()> {
        let context = self.context();
        if context.attributes().on_demand_paging().is_none() {
            return Err(context.unsupported(FEATURE));
        }
        // The kernel requires at least one range per call.
        for ranges in ranges.chunks(u32::MAX as usize) {
            // `Sge` has the layout of `struct ibv_sge`, which the call only reads.
            let list = ranges.as_ptr().cast_mut().cast::<ibv_sge>();
            // SAFETY: the domain is valid, and so is the list during the call. The device checks keys and addresses,
            // and preparing pages changes no byte.
            check(unsafe { ibv_advise_mr(self.as_raw(), advice.to_raw(), flags, list, ranges.len() as u32) })
                .map_err(|errno| context.feature_error(Verb::AdviseMr, FEATURE, errno))?;
        }
        Ok(())
    }
}

impl Buffer {
    /// Faults in the pages of this buffer for writing, and waits: `ibv_advise_mr(3)`.
    ///
    /// The buffer must be registered with [`Access::ON_DEMAND`](crate::Access::ON_DEMAND).
    ///
    /// # Errors
    /// Like [`ProtectionDomain::advise`].
    #[doc(alias = "ibv_advise_mr")]
    pub fn prefetch(&self) -> Result<()> {
        // Elements have a 32-bit length.
        const PIECE: usize = 1 << 30;
        let capacity = self.capacity();
        let piece = |offset: usize| Sge {
            address: self.address() + offset as u64,
            len: (capacity - offset).min(PIECE) as u32,
            lkey: self.lkey(),
        };
        let ranges: Vec<Sge> = (0..capacity).step_by(PIECE).map(piece).collect();
        self.pd().advise_and_wait(Advice::PrefetchWrite, &ranges)
    }
}
