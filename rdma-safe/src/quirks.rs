//! Deviations of providers from their documentation, and where this crate works around them.
//!
//! The one home of such knowledge: other modules ask [`Quirks`], and say at the place what they do about it.

use bitflags::bitflags;
use rdma_sys::Verbs;

use crate::DeviceAttributes;

bitflags! {
    /// What a device's provider does differently from its documentation.
    ///
    /// A library does not tell its patch level, so an entry that was fixed in release N counts as fixed where a symbol is
    /// present that first came with N or later. Flags may come, and go when no supported release needs them, without a new
    /// major version.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct Quirks: u32 {
        /// `ibv_end_poll` after `ibv_next_poll` returned `ENOENT` advances the consumer index once too often, so that
        /// the queue repeats stale entries for ever; some patched releases unlock the queue's lock twice instead.
        ///
        /// rxe before rdma-core 55 (index, commit b78b414e0) and before 59 (lock, commit 5e7aa4102). Here: each
        /// `start_poll`/`end_poll` takes one completion, and `next_poll` is not called. Counts as fixed from 59.
        const ONE_COMPLETION_PER_POLL = 1 << 0;

        /// `ibv_wr_set_sge_list` counts the length of its first element for all of them.
        ///
        /// rxe before rdma-core 64 (commit 406cd2ad0). Here: queue pairs with more than one send element are posted to
        /// by `ibv_post_send`.
        const SGE_LISTS_MISCOUNTED = 1 << 1;

        /// `ibv_wr_set_inline_data_list` sends zero bytes.
        ///
        /// rxe before rdma-core 64 (commit 1e8ed0aff). Here: the pieces are copied together and set as one.
        const INLINE_LISTS_EMPTY = 1 << 2;

        /// `ibv_wr_set_inline_data` does nothing unless `IBV_SEND_INLINE` is among the flags of the work request.
        ///
        /// rxe, all releases to 65. Here: the flag is always set with inline data; ibv_wr_post(3) allows it.
        const INLINE_NEEDS_FLAG = 1 << 3;

        /// Work is put into the queue before the doorbell, a system call; when that fails the work stays there and is executed
        /// later. `ibv_post_send` outside RTS, for one, answers `EINVAL`, and its work runs once the queue pair gets there.
        ///
        /// rxe, all releases to 65. Here: postings are refused before the call unless the state allows them, and after a
        /// failed doorbell count as posted.
        const REFUSED_SENDS_EXECUTE = 1 << 4;

        /// A receive posted in the error state is never completed with a flush error.
        ///
        /// rxe of kernel 6.1. Here: buffers in flight come back by destroying the queue pair, not by waiting.
        const LATE_RECEIVES_NOT_FLUSHED = 1 << 5;

        /// `ibv_wr_*` writes the header of only the last work request of a batch, lacks operations that it accepted, and does
        /// not take an aborted batch back.
        ///
        /// bnxt_re since rdma-core 56, by its sources; not tried on hardware. Here: sends are posted by `ibv_post_send`.
        const EXTENDED_SENDS_BROKEN = 1 << 6;

        /// A `retry_cnt` of 7 never ends, so that a lost peer is never reported.
        ///
        /// rxe of kernel 6.1. Here: the default of
        /// [`ConnectOptions::retry_count`](crate::ConnectOptions::retry_count) is 6, for all devices alike.
        const SEVEN_RETRIES_ENDLESS = 1 << 7;

        /// A memory window opens all of the region that it is bound to, and not just its bytes.
        ///
        /// rxe of kernel 6.1. Here: nothing; what the peer must not reach does not belong into the region.
        const WINDOWS_UNBOUNDED = 1 << 8;

        /// The acknowledgement timeout runs while the peer says that it has no receive posted: after about a second the send fails
        /// with `RETRY_EXC_ERR`, as if the peer were gone, in spite of an `rnr_retry` of 7, which is to go on for ever.
        ///
        /// rxe of kernel 6.1. Here: what explains failed work names it among the causes.
        const MISSING_RECEIVES_TIME_OUT = 1 << 9;
    }
}

impl Quirks {
    /// `vendor_id` that rdma_rxe reports (kernel drivers/infiniband/sw/rxe/rxe_param.h).
    const RXE_VENDOR_ID: u32 = 0xff_ffff;

    /// Broadcom's, as PCI-SIG assigned it, which bnxt_re reports.
    const BROADCOM_VENDOR_ID: u32 = 0x14e4;

    pub(crate) fn of(attributes: &DeviceAttributes, verbs: &Verbs) -> Self {
        match attributes.vendor_id() {
            // First releases of these symbols: 59 and 64.
            Self::RXE_VENDOR_ID => Self::of_rxe(verbs.ibv_alloc_dmah.is_some(), verbs.ibv_alloc_buf.is_some()),
            Self::BROADCOM_VENDOR_ID => Quirks::EXTENDED_SENDS_BROKEN,
            _ => Quirks::empty(),
        }
    }

    fn of_rxe(since_59: bool, since_64: bool) -> Self {
        let mut quirks = Quirks::INLINE_NEEDS_FLAG
            | Quirks::REFUSED_SENDS_EXECUTE
            | Quirks::LATE_RECEIVES_NOT_FLUSHED
            | Quirks::SEVEN_RETRIES_ENDLESS
            | Quirks::WINDOWS_UNBOUNDED
            | Quirks::MISSING_RECEIVES_TIME_OUT;
        quirks.set(Quirks::ONE_COMPLETION_PER_POLL, !since_59);
        quirks.set(Quirks::SGE_LISTS_MISCOUNTED | Quirks::INLINE_LISTS_EMPTY, !since_64);
        quirks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_release_of_rxe_has_the_quirks_that_it_has() {
        let old = Quirks::of_rxe(false, false);
        assert_eq!(old, Quirks::all() - Quirks::EXTENDED_SENDS_BROKEN);
        assert_eq!(Quirks::of_rxe(true, false), old - Quirks::ONE_COMPLETION_PER_POLL);
        let newest = Quirks::of_rxe(true, true);
        assert!(!newest.intersects(Quirks::SGE_LISTS_MISCOUNTED | Quirks::INLINE_LISTS_EMPTY));
        assert!(newest.contains(Quirks::INLINE_NEEDS_FLAG | Quirks::REFUSED_SENDS_EXECUTE));
    }
}
