//! Completions that have all standard fields.

use rdma_sys::*;

use super::WcFlags;
use super::completion::Row;

/// The fields of a completion that every device can report: [`WcFields::STANDARD`](crate::WcFields::STANDARD).
///
/// Returned by [`WorkCompletion::standard`](crate::WorkCompletion::standard) if the queue was created with all of them.
/// The methods are those of [`WorkCompletion`](crate::WorkCompletion) without the check whether the field exists. In a
/// loop that reads all fields, these checks cost more than the reads.
#[derive(Clone, Copy)]
pub struct StandardFields<'a> {
    row: Row<'a>,
}

macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $read:ident, $member:ident;)+) => {$(
        $(#[$doc])*
        #[must_use]
        #[inline(always)]
        pub fn $name(&self) -> $type {
            match self.row {
                // SAFETY: the cursor is on a completion, and `accessors::check` has found the accessor of this field.
                Row::Extended(cq) => unsafe { $read(cq.as_ptr()) },
                Row::Classic(wc) => wc.$member.into(),
            }
        }
    )+};
}

impl<'a> StandardFields<'a> {
    /// # Safety
    /// An extended queue must have been created with all of these fields.
    #[inline(always)]
    pub(super) unsafe fn new(row: Row<'a>) -> Self {
        StandardFields { row }
    }

    fields! {
        /// Bytes transferred.
        byte_len: u32 = ibv_wc_read_byte_len, byte_len;
        /// Number of the local queue pair.
        qp_num: u32 = ibv_wc_read_qp_num, qp_num;
        /// Number of the sending queue pair; UD only.
        src_qp: u32 = ibv_wc_read_src_qp, src_qp;
        /// LID of the sender; UD on InfiniBand only.
        slid: u32 = ibv_wc_read_slid, slid;
        /// Service level; UD on InfiniBand only.
        ///
        /// On Ethernet, drivers report the packet type here: 0xa for RoCE v2 over IPv4, 0x9 over IPv6.
        sl: u8 = ibv_wc_read_sl, sl;
        /// Low bits of the destination LID; UD on InfiniBand only.
        dlid_path_bits: u8 = ibv_wc_read_dlid_path_bits, dlid_path_bits;
    }

    /// Immediate data in host byte order, if the message has it.
    #[must_use]
    #[inline(always)]
    pub fn imm(&self) -> Option<u32> {
        // SAFETY: both accessors exist, see `fields`. With the flag, the union holds immediate data.
        let imm = unsafe {
            match self.row {
                Row::Extended(cq) if ibv_wc_read_wc_flags(cq.as_ptr()) & WcFlags::WITH_IMM.bits() != 0 => {
                    ibv_wc_read_imm_data(cq.as_ptr())
                }
                Row::Classic(wc) if wc.wc_flags & WcFlags::WITH_IMM.bits() != 0 => wc.__bindgen_anon_1.imm_data,
                _ => return None,
            }
        };
        Some(u32::from_be(imm))
    }
}

impl std::fmt::Debug for StandardFields<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StandardFields")
            .field("byte_len", &self.byte_len())
            .field("imm", &self.imm())
            .field("qp_num", &self.qp_num())
            .field("src_qp", &self.src_qp())
            .finish_non_exhaustive()
    }
}
