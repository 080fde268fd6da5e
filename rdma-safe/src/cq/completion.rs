//! Completions of work requests, and the errors of failed ones.

use std::fmt;
use std::ptr::NonNull;

use rdma_sys::*;

use super::{StandardFields, WcFields, WcFlags, WcOpcode, WcStatus};
use crate::srq::TagInfo;

/// A completion, valid until the cursor moves on.
///
/// Fields that the queue was created without are `None`. Unless the status is success, only [`wr_id`](Self::wr_id),
/// [`status`](Self::status), [`qp_num`](Self::qp_num) and [`vendor_error`](Self::vendor_error) are meaningful
/// (ibv_poll_cq(3)).
pub struct WorkCompletion<'a> {
    row: Row<'a>,
    fields: WcFields,
}

#[derive(Clone, Copy)]
pub(super) enum Row<'a> {
    /// The queue itself. Its cursor stays on the completion as long as `'a` borrows the `Poll`.
    Extended(NonNull<ibv_cq_ex>),
    Classic(&'a ibv_wc),
}

/// Reads a field with its accessor if an extended queue was created with it, or from `ibv_wc`.
macro_rules! field {
    ($self:ident, $field:expr, $read:ident, |$wc:ident| $classic:expr) => {
        match $self.row {
            Row::Extended(cq) if $self.fields.contains($field) => {
                // SAFETY: the cursor is on a completion, and `accessors::check` has found the accessor of this field.
                Some(unsafe { $read(cq.as_ptr()) })
            }
            Row::Extended(_) => None,
            Row::Classic($wc) => $classic,
        }
    };
}

impl<'a> WorkCompletion<'a> {
    /// The completion that `cq` is positioned on.
    ///
    /// # Safety
    /// The queue must be an extended one that was created with `fields`. It must be between start_poll and end_poll, and
    /// stay on this completion, for `'a`.
    #[inline(always)]
    pub(super) unsafe fn extended(cq: NonNull<ibv_cq_ex>, fields: WcFields) -> Self {
        WorkCompletion { row: Row::Extended(cq), fields }
    }

    #[inline(always)]
    pub(crate) fn classic(row: &'a ibv_wc) -> Self {
        WorkCompletion { row: Row::Classic(row), fields: WcFields::STANDARD }
    }

    /// The row of a classic queue; null for an extended queue.
    #[inline(always)]
    pub(crate) fn row(&self) -> *const ibv_wc {
        match self.row {
            Row::Classic(row) => row,
            Row::Extended(_) => std::ptr::null(),
        }
    }

    /// Borrows the completion for a shorter lifetime.
    #[inline(always)]
    pub(crate) fn reborrow(&self) -> WorkCompletion<'_> {
        WorkCompletion { row: self.row, fields: self.fields }
    }
}

impl WorkCompletion<'_> {
    /// Identifier of the work request.
    #[must_use]
    #[inline(always)]
    pub fn wr_id(&self) -> u64 {
        match self.row {
            // SAFETY: the queue is valid, and the cursor is on a completion.
            Row::Extended(cq) => unsafe { (*cq.as_ptr()).wr_id },
            Row::Classic(wc) => wc.wr_id,
        }
    }

    /// Status.
    #[must_use]
    #[inline(always)]
    pub fn status(&self) -> WcStatus {
        match self.row {
            // SAFETY: as in `wr_id`.
            Row::Extended(cq) => WcStatus(unsafe { (*cq.as_ptr()).status }.0),
            Row::Classic(wc) => WcStatus(wc.status.0),
        }
    }

    /// Returns an error unless the status is success.
    ///
    /// # Errors
    /// [`CompletionError`] if the status is not success.
    #[inline(always)]
    pub fn ok(&self) -> Result<(), CompletionError> {
        match self.status() {
            WcStatus::SUCCESS => Ok(()),
            status => Err(CompletionError {
                status,
                vendor_error: self.vendor_error(),
                wr_id: self.wr_id(),
                qp_num: self.qp_num(),
            }),
        }
    }

    /// Opcode: the operation that completed.
    #[must_use]
    #[inline(always)]
    pub fn opcode(&self) -> WcOpcode {
        match self.row {
            // SAFETY: the cursor is on a completion, and `accessors::check` has found this accessor.
            Row::Extended(cq) => WcOpcode(unsafe { ibv_wc_read_opcode(cq.as_ptr()) }.0),
            Row::Classic(wc) => WcOpcode(wc.opcode.0),
        }
    }

    /// Vendor-specific error code.
    #[must_use]
    #[inline(always)]
    pub fn vendor_error(&self) -> u32 {
        match self.row {
            // SAFETY: as in `opcode`.
            Row::Extended(cq) => unsafe { ibv_wc_read_vendor_err(cq.as_ptr()) },
            Row::Classic(wc) => wc.vendor_err,
        }
    }

    /// Flags, which say which of the other fields are meaningful.
    #[must_use]
    #[inline(always)]
    pub fn flags(&self) -> WcFlags {
        WcFlags::from_bits_retain(match self.row {
            // SAFETY: as in `opcode`.
            Row::Extended(cq) => unsafe { ibv_wc_read_wc_flags(cq.as_ptr()) },
            Row::Classic(wc) => wc.wc_flags,
        })
    }

    /// Bytes transferred; meaningful for receives, reads and atomics. For a datagram this includes the
    /// [`Grh::LEN`](crate::address::Grh::LEN) bytes before its payload.
    #[must_use]
    #[inline(always)]
    pub fn byte_len(&self) -> Option<u32> {
        field!(self, WcFields::BYTE_LEN, ibv_wc_read_byte_len, |wc| Some(wc.byte_len))
    }

    /// Immediate data in host byte order, if the message has it.
    #[must_use]
    #[inline(always)]
    pub fn imm(&self) -> Option<u32> {
        if !self.flags().contains(WcFlags::WITH_IMM) {
            return None;
        }
        // SAFETY: with this flag the union holds immediate data. Any four bytes are a valid number.
        field!(self, WcFields::IMM, ibv_wc_read_imm_data, |wc| Some(unsafe { wc.__bindgen_anon_1.imm_data }))
            .map(u32::from_be)
    }

    /// Raw value of the union of immediate data (in network byte order) and invalidated key; 0 if the queue was created
    /// without it.
    #[inline(always)]
    pub(crate) fn imm_or_key(&self) -> u32 {
        // SAFETY: any four bytes are a valid number.
        field!(self, WcFields::IMM, ibv_wc_read_imm_data, |wc| Some(unsafe { wc.__bindgen_anon_1.imm_data }))
            .unwrap_or(0)
    }

    /// The key that the peer's send invalidated, if any.
    #[must_use]
    #[inline(always)]
    pub fn invalidated_rkey(&self) -> Option<u32> {
        if !self.flags().contains(WcFlags::WITH_INV) {
            return None;
        }
        field!(self, WcFields::IMM, ibv_wc_read_invalidated_rkey, |wc| {
            // SAFETY: with this flag the union holds the key. Any four bytes are a valid number.
            Some(unsafe { wc.__bindgen_anon_1.invalidated_rkey })
        })
    }

    /// The fields of [`WcFields::STANDARD`], without a check for each; `None` if the queue was created without one of
    /// them.
    #[must_use]
    #[inline(always)]
    pub fn standard(&self) -> Option<StandardFields<'_>> {
        match self.row {
            Row::Extended(_) if !self.fields.contains(WcFields::STANDARD) => None,
            // SAFETY: the queue has all of these fields, or this is a row, which always has them.
            row => Some(unsafe { StandardFields::new(row) }),
        }
    }

    /// Number of the local queue pair.
    #[must_use]
    #[inline(always)]
    pub fn qp_num(&self) -> Option<u32> {
        field!(self, WcFields::QP_NUM, ibv_wc_read_qp_num, |wc| Some(wc.qp_num))
    }

    /// Number of the sending queue pair; UD only.
    #[must_use]
    #[inline(always)]
    pub fn src_qp(&self) -> Option<u32> {
        field!(self, WcFields::SRC_QP, ibv_wc_read_src_qp, |wc| Some(wc.src_qp))
    }

    /// LID of the sender; UD on InfiniBand only.
    #[must_use]
    #[inline(always)]
    pub fn slid(&self) -> Option<u32> {
        field!(self, WcFields::SLID, ibv_wc_read_slid, |wc| Some(u32::from(wc.slid)))
    }

    /// Service level; UD on InfiniBand only.
    ///
    /// On Ethernet, drivers report the packet type here: 0xa for RoCE v2 over IPv4, 0x9 over IPv6.
    #[must_use]
    #[inline(always)]
    pub fn sl(&self) -> Option<u8> {
        field!(self, WcFields::SL, ibv_wc_read_sl, |wc| Some(wc.sl))
    }

    /// Low bits of the destination LID; UD on InfiniBand only.
    #[must_use]
    #[inline(always)]
    pub fn dlid_path_bits(&self) -> Option<u8> {
        field!(self, WcFields::DLID_PATH_BITS, ibv_wc_read_dlid_path_bits, |wc| Some(wc.dlid_path_bits))
    }

    /// Completion time in ticks of the device's clock, whose frequency is
    /// [`DeviceAttributes::hca_core_clock`](crate::device::DeviceAttributes::hca_core_clock) kHz.
    #[must_use]
    #[inline(always)]
    pub fn completion_timestamp(&self) -> Option<u64> {
        field!(self, WcFields::COMPLETION_TIMESTAMP, ibv_wc_read_completion_ts, |_wc| None)
    }

    /// Completion time in nanoseconds of the wall clock.
    #[must_use]
    #[inline(always)]
    pub fn completion_wallclock_ns(&self) -> Option<u64> {
        field!(self, WcFields::COMPLETION_TIMESTAMP_WALLCLOCK, ibv_wc_read_completion_wallclock_ns, |_wc| None)
    }

    /// Tag of the message: `ibv_wc_read_tm_info`. Meaningful for messages with a tag on a shared receive queue with tag
    /// matching.
    #[doc(alias = "ibv_wc_read_tm_info")]
    #[must_use]
    #[inline]
    pub fn tag_info(&self) -> Option<TagInfo> {
        match self.row {
            Row::Extended(cq) if self.fields.contains(WcFields::TM_INFO) => {
                let mut info = ibv_wc_tm_info { tag: 0, priv_: 0 };
                // SAFETY: as in `field`, and `info` is a valid out pointer.
                unsafe { ibv_wc_read_tm_info(cq.as_ptr(), &mut info) };
                Some(TagInfo { tag: info.tag, private: info.priv_ })
            }
            _ => None,
        }
    }

    /// VLAN tag that the device stripped.
    #[must_use]
    #[inline(always)]
    pub fn cvlan(&self) -> Option<u16> {
        field!(self, WcFields::CVLAN, ibv_wc_read_cvlan, |_wc| None)
    }

    /// Tag of the matching flow.
    #[must_use]
    #[inline(always)]
    pub fn flow_tag(&self) -> Option<u32> {
        field!(self, WcFields::FLOW_TAG, ibv_wc_read_flow_tag, |_wc| None)
    }
}

impl fmt::Debug for WorkCompletion<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("WorkCompletion");
        debug.field("wr_id", &self.wr_id()).field("status", &self.status());
        match self.ok() {
            Ok(()) => debug.field("opcode", &self.opcode()).field("byte_len", &self.byte_len()),
            Err(_) => debug.field("vendor_error", &self.vendor_error()),
        }
        .finish()
    }
}

/// A work request that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "work request {wr_id}{} failed: {status} (vendor error {vendor_error:#x}): {}",
    qp_num.map(|qp| format!(" of QP {qp:#08x}")).unwrap_or_default(), status.explain()
)]
#[non_exhaustive]
pub struct CompletionError {
    /// Status.
    pub status: WcStatus,
    /// Vendor-specific error code.
    pub vendor_error: u32,
    /// Identifier of the work request.
    pub wr_id: u64,
    /// Number of the local queue pair, if the completion queue reports it.
    pub qp_num: Option<u32>,
}

impl CompletionError {
    /// An error that a program builds from its own record of a completion, to explain it.
    #[must_use]
    pub const fn new(status: WcStatus, vendor_error: u32, wr_id: u64) -> Self {
        CompletionError { status, vendor_error, wr_id, qp_num: None }
    }
}
