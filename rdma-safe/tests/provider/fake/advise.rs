//! Advice on memory that is paged on demand.

use std::ffi::c_int;

use rdma_sys::*;

use super::state::enter;

/// A recorded call of `ibv_advise_mr`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Advised {
    pub(crate) advice: u32,
    pub(crate) flags: u32,
    /// Address and length.
    pub(crate) ranges: Vec<(u64, u32)>,
}

pub(super) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: ibv_advise_mr_advice,
    flags: u32,
    list: *mut ibv_sge,
    count: u32,
) -> c_int {
    enter(pd, "advise_mr", |state, _| {
        if let Some(errno) = state.fault("advise_mr") {
            return errno;
        }
        if count == 0 || advice.0 > IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT.0 || flags & !IBV_ADVISE_MR_FLAG_FLUSH.0 != 0
        {
            return libc::EINVAL;
        }
        let list = unsafe { std::slice::from_raw_parts(list, count as usize) };
        let write = advice == IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE;
        let known = |sge: &ibv_sge| state.is_on_demand(sge.lkey) && state.local(pd.addr(), sge, write).is_some();
        if !list.iter().all(known) {
            return libc::EFAULT;
        }
        let ranges = list.iter().map(|sge| (sge.addr, sge.length)).collect();
        state.advised.push(Advised { advice: advice.0, flags, ranges });
        0
    })
}
