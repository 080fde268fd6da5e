//! What will be done with memory that is paged on demand.

use rdma_sys::*;

use super::Buffer;
use crate::errno::check;
use crate::{ProtectionDomain, Result, Sge};

const FEATURE: &str = "prefetching of memory (ibv_advise_mr)";

/// What a device is advised to do with pages: `enum ib_uverbs_advise_mr_advice`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Advice {
    /// Have them ready to be read.
    Prefetch,
    /// Have them ready to be written, too.
    PrefetchWrite,
    /// Have those ready that the process has in memory, and let others be.
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
    /// Asks the device to prepare `ranges` of regions in this domain with [`Access::ON_DEMAND`](crate::Access::ON_DEMAND), which
    /// may happen after this has returned: `ibv_advise_mr(3)`. It is no more than a hint: pages may go again.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported), before the call where the device has no on-demand paging;
    /// [`Error::Verb`](crate::Error::Verb), for instance with `EFAULT` or `EPERM` for ranges that lie in no such region, or in one
    /// that cannot be written as advised.
    #[doc(alias = "ibv_advise_mr")]
    pub fn advise(&self, advice: Advice, ranges: &[Sge]) -> Result<()> {
        self.advise_with(advice, 0, ranges)
    }

    /// As [`ProtectionDomain::advise`], but returns when the device has the pages.
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "ibv_advise_mr")]
    pub fn advise_and_wait(&self, advice: Advice, ranges: &[Sge]) -> Result<()> {
        self.advise_with(advice, IBV_ADVISE_MR_FLAG_FLUSH.0, ranges)
    }

    fn advise_with(&self, advice: Advice, flags: u32, ranges: &[Sge]) -> Result<()> {
        let context = self.context();
        if context.attributes().on_demand_paging().is_none() {
            return Err(context.unsupported(FEATURE));
        }
        // The kernel wants at least one.
        for ranges in ranges.chunks(u32::MAX as usize) {
            // `Sge` has the layout of `struct ibv_sge`, which the call only reads.
            let list = ranges.as_ptr().cast_mut().cast::<ibv_sge>();
            // SAFETY: the domain is valid, and so is the list for the duration of the call. Keys and addresses in it are the
            // device's to check, and to prepare pages changes no byte.
            check(unsafe { ibv_advise_mr(self.as_raw(), advice.to_raw(), flags, list, ranges.len() as u32) })
                .map_err(|errno| context.feature_error("ibv_advise_mr", FEATURE, errno))?;
        }
        Ok(())
    }
}

impl Buffer {
    /// Asks the device to fault in its pages for writing, where it was registered with
    /// [`Access::ON_DEMAND`](crate::Access::ON_DEMAND): `ibv_advise_mr(3)`. Returns when that is done.
    ///
    /// # Errors
    /// As [`ProtectionDomain::advise`].
    #[doc(alias = "ibv_advise_mr")]
    pub fn prefetch(&self) -> Result<()> {
        // The length of an element has 32 bits.
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
