//! Deviations of providers from their documentation, and how this crate works around them.
//!
//! Only this module knows which providers deviate. Other modules check [`Quirks`], and document their workaround at the
//! place.

use bitflags::bitflags;
use rdma_sys::Verbs;

use crate::device::DeviceAttributes;

bitflags! {
    /// Deviations of a device's provider from its documentation.
    ///
    /// A library does not report its patch level. So a deviation that was fixed in release N counts as fixed if the
    /// library has a symbol that was added in N or later. Minor versions may add flags, and remove those that no
    /// supported release needs.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct Quirks: u32 {
        /// `ibv_end_poll` after `ibv_next_poll` returned `ENOENT` advances the consumer index once too often. The queue
        /// then repeats stale entries forever. Some patched releases unlock the queue's lock twice instead.
        ///
        /// rxe before rdma-core 55 (index, commit b78b414e0) and before 59 (lock, commit 5e7aa4102). Workaround: each
        /// `start_poll`/`end_poll` takes one completion, and `next_poll` is not called. Counts as fixed from 59.
        const ONE_COMPLETION_PER_POLL = 1 << 0;

        /// `ibv_wr_set_sge_list` uses the length of its first element for all elements.
        ///
        /// rxe before rdma-core 64 (commit 406cd2ad0). Workaround: queue pairs with more than one send element post by
        /// `ibv_post_send`.
        const SGE_LISTS_MISCOUNTED = 1 << 1;

        /// `ibv_wr_set_inline_data_list` sends zero bytes.
        ///
        /// rxe before rdma-core 64 (commit 1e8ed0aff). Workaround: the slices are concatenated and set as one.
        const INLINE_LISTS_EMPTY = 1 << 2;

        /// `ibv_wr_set_inline_data` does nothing unless the flags of the work request have `IBV_SEND_INLINE`.
        ///
        /// rxe, all releases to 65. Workaround: the flag is always set with inline data; ibv_wr_post(3) allows it.
        const INLINE_NEEDS_FLAG = 1 << 3;

        /// Work is added to the queue before the doorbell, a system call. If that fails, the work stays there and is
        /// executed later. For example, `ibv_post_send` in another state than RTS returns `EINVAL`, but its work runs
        /// once the queue pair enters RTS.
        ///
        /// rxe, all releases to 65. Workaround: posting is refused before the call unless the state allows it. After a
        /// failed doorbell the work counts as posted.
        const REFUSED_SENDS_EXECUTE = 1 << 4;

        /// A receive that is posted in the error state never completes with a flush error.
        ///
        /// rxe of kernel 6.1. Workaround: destroying the queue pair returns buffers in flight; nothing waits for their
        /// completions.
        const LATE_RECEIVES_NOT_FLUSHED = 1 << 5;

        /// `ibv_wr_*` writes only the header of the last work request of a batch, lacks operations that it accepted,
        /// and does not undo an aborted batch.
        ///
        /// bnxt_re since rdma-core 56, according to its sources; not tested on hardware. Workaround: sends are posted
        /// by `ibv_post_send`.
        const EXTENDED_SENDS_BROKEN = 1 << 6;

        /// A `retry_cnt` of 7 retries forever, so that a lost peer is never reported.
        ///
        /// rxe of kernel 6.1. Workaround: [`ConnectOptions::retry_count`](crate::ConnectOptions::retry_count) is 6 by
        /// default, on all devices.
        const RETRY_COUNT_7_IS_INFINITE = 1 << 7;

        /// A memory window gives access to the whole region that it is bound to, not just to its bytes.
        ///
        /// rxe of kernel 6.1. No workaround: keep memory that the peer must not access out of the region.
        const WINDOWS_COVER_WHOLE_REGIONS = 1 << 8;

        /// The acknowledgement timeout runs while the peer sends RNR NAKs. After about a second the send fails with
        /// `RETRY_EXC_ERR`, as if the peer were gone, even if `rnr_retry` is 7, which should retry forever.
        ///
        /// rxe of kernel 6.1, seldom also of 6.12. Workaround: explanations of failed work mention this cause.
        const MISSING_RECEIVES_TIME_OUT = 1 << 9;

        /// The kernel frees a shared receive queue whose new size it refuses because of posted receives. A later use
        /// of the queue then crashes the kernel.
        ///
        /// rxe before kernel commit 503a5e4690ae (2025). Workaround:
        /// [`SharedReceiveQueue::resize`](crate::SharedReceiveQueue::resize) refuses sizes below the current one.
        const REFUSED_SRQ_SIZES_FREE_QUEUE = 1 << 10;

        /// RDMA writes of zero bytes are dropped, or fail.
        ///
        /// Virtual NICs of clouds drop messages without data (deepseek-ai/3FS issue 320); erdma counts as one of them.
        /// mthca fails such writes with `LOC_QP_OP_ERR` (openucx/ucx issue 5318). Neither was tested on hardware. Workaround:
        /// [`EndpointBuilder::keepalive`](crate::EndpointBuilder::keepalive), which needs such writes, is refused. Other virtual
        /// NICs have the identifiers of real ones and cannot be recognised.
        const EMPTY_WRITES_FAIL = 1 << 11;
    }
}

impl Quirks {
    /// The `vendor_id` of rdma_rxe (kernel drivers/infiniband/sw/rxe/rxe_param.h).
    const RXE_VENDOR_ID: u32 = 0xff_ffff;

    /// Broadcom's PCI vendor id, which bnxt_re reports.
    const BROADCOM_VENDOR_ID: u32 = 0x14e4;

    /// Alibaba's PCI vendor id, which erdma reports.
    const ALIBABA_VENDOR_ID: u32 = 0x1ded;

    /// The vendor id of Mellanox, from its GUIDs, and the PCI device ids of its InfiniHost adapters, which mthca drives.
    const MELLANOX_VENDOR_ID: u32 = 0x02_c9;
    const INFINIHOST_PART_IDS: [u32; 5] = [0x5a44, 0x5e8c, 0x6274, 0x6278, 0x6282];

    pub(crate) fn of(attributes: &DeviceAttributes, verbs: &Verbs) -> Self {
        let mut quirks = Quirks::of_vendor(attributes, verbs);
        quirks.set(Quirks::EMPTY_WRITES_FAIL, Quirks::driver_without_empty_writes(attributes).is_some());
        quirks
    }

    /// The driver of a device with [`Quirks::EMPTY_WRITES_FAIL`].
    pub(crate) fn driver_without_empty_writes(attributes: &DeviceAttributes) -> Option<&'static str> {
        match (attributes.vendor_id(), attributes.vendor_part_id()) {
            (Self::ALIBABA_VENDOR_ID, _) => Some("erdma"),
            (Self::MELLANOX_VENDOR_ID, part) if Self::INFINIHOST_PART_IDS.contains(&part) => Some("mthca"),
            _ => None,
        }
    }

    fn of_vendor(attributes: &DeviceAttributes, verbs: &Verbs) -> Self {
        match attributes.vendor_id() {
            // These symbols were added in 59 and 64.
            Self::RXE_VENDOR_ID => Self::of_rxe(verbs.ibv_alloc_dmah.is_some(), verbs.ibv_alloc_buf.is_some()),
            Self::BROADCOM_VENDOR_ID => Quirks::EXTENDED_SENDS_BROKEN,
            _ => Quirks::empty(),
        }
    }

    fn of_rxe(since_59: bool, since_64: bool) -> Self {
        let mut quirks = Quirks::INLINE_NEEDS_FLAG
            | Quirks::REFUSED_SENDS_EXECUTE
            | Quirks::LATE_RECEIVES_NOT_FLUSHED
            | Quirks::RETRY_COUNT_7_IS_INFINITE
            | Quirks::WINDOWS_COVER_WHOLE_REGIONS
            | Quirks::MISSING_RECEIVES_TIME_OUT
            | Quirks::REFUSED_SRQ_SIZES_FREE_QUEUE;
        quirks.set(Quirks::ONE_COMPLETION_PER_POLL, !since_59);
        quirks.set(Quirks::SGE_LISTS_MISCOUNTED | Quirks::INLINE_LISTS_EMPTY, !since_64);
        quirks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_release_of_rxe_gets_its_quirks() {
        let old = Quirks::of_rxe(false, false);
        assert_eq!(old, Quirks::all() - Quirks::EXTENDED_SENDS_BROKEN - Quirks::EMPTY_WRITES_FAIL);
        assert_eq!(Quirks::of_rxe(true, false), old - Quirks::ONE_COMPLETION_PER_POLL);
        let newest = Quirks::of_rxe(true, true);
        assert!(!newest.intersects(Quirks::SGE_LISTS_MISCOUNTED | Quirks::INLINE_LISTS_EMPTY));
        assert!(newest.contains(Quirks::INLINE_NEEDS_FLAG | Quirks::REFUSED_SENDS_EXECUTE));
    }
}
