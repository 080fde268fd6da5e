//! Completions of which all fields are there.

use rdma_sys::*;

use super::WcFlags;
use super::poll::Row;

/// The fields of a completion that every device can report, [`WcFields::STANDARD`](crate::WcFields::STANDARD), of a queue that was
/// created with all of them: [`WorkCompletion::standard`](crate::WorkCompletion::standard).
///
/// Each is that of the [`WorkCompletion`](crate::WorkCompletion) without the question whether it is there, which costs a loop that
/// reads all of them more than the reading.
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
                // SAFETY: the cursor stands on a completion, and the queue has the accessor of this field: `accessors::check` saw
                // it.
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
        /// On Ethernet, drivers report the type of the packet here: 0xa for RoCE v2 by IPv4, 0x9 by IPv6.
        sl: u8 = ibv_wc_read_sl, sl;
        /// Low bits of the destination LID; UD on InfiniBand only.
        dlid_path_bits: u8 = ibv_wc_read_dlid_path_bits, dlid_path_bits;
    }

    /// Immediate data of the peer in host byte order, if the message has it.
    #[must_use]
    #[inline(always)]
    pub fn imm(&self) -> Option<u32> {
        // SAFETY: both accessors are there, see `fields`. With the flag, the union holds immediate data.
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
