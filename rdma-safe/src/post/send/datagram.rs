//! Sends that name their destination.

use rdma_sys::*;

use super::super::{Payload, PostError, SendOps, WorkRequest};
use super::SendBatch;
use crate::AddressHandle;
use crate::cq::rare;
use crate::interface::Interface;

// The operations of a UD queue pair, as bits of their own in the set that a queue keeps. So sends with a destination and sends
// without one are told apart, and refused where they do not belong, by the one look that every operation takes anyway. No operation
// of verbs has these bits.
const SEND_TO: SendOps = SendOps::from_bits_retain(1 << 61);
const SEND_TO_WITH_IMM: SendOps = SendOps::from_bits_retain(1 << 62);
/// Of every UD queue pair, whatever it can post.
const DATAGRAMS: SendOps = SendOps::from_bits_retain(1 << 63);

/// What a UD queue pair keeps of the operations that it was created with.
pub(super) fn with_destination(ops: SendOps) -> SendOps {
    let mut kept = DATAGRAMS;
    kept.set(SEND_TO, ops.contains(SendOps::SEND));
    kept.set(SEND_TO_WITH_IMM, ops.contains(SendOps::SEND_WITH_IMM));
    kept
}

/// The operations that a queue pair was created with, of what it keeps.
pub(super) fn without_destination(kept: SendOps) -> SendOps {
    if !kept.contains(DATAGRAMS) {
        return kept;
    }
    let mut ops = SendOps::empty();
    ops.set(SendOps::SEND, kept.contains(SEND_TO));
    ops.set(SendOps::SEND_WITH_IMM, kept.contains(SEND_TO_WITH_IMM));
    ops
}

/// Why `op` is not among `usable`.
#[inline(always)]
pub(super) fn refusal(usable: SendOps, op: SendOps) -> PostError {
    let datagrams = usable.contains(DATAGRAMS);
    match op {
        SEND_TO | SEND_TO_WITH_IMM if !datagrams => PostError::NotDatagram,
        SEND_TO => PostError::NotEnabled { op: SendOps::SEND },
        SEND_TO_WITH_IMM => PostError::NotEnabled { op: SendOps::SEND_WITH_IMM },
        op if datagrams && SendOps::UD.contains(op) => PostError::NoDestination,
        op => PostError::NotEnabled { op },
    }
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug)]
pub struct UdTarget<'a> {
    /// The way to the peer's port.
    pub handle: &'a AddressHandle,
    /// Number of the peer's queue pair, 24 bits.
    pub qp_num: u32,
    /// Queue key of the peer's queue pair, without which it drops the datagram. With the highest bit set it is the sender's own
    /// that is sent.
    pub qkey: u32,
}

impl UdTarget<'_> {
    #[inline(always)]
    fn set(self, wr: &mut ibv_send_wr) {
        let UdTarget { handle, qp_num, qkey } = self;
        wr.wr.ud =
            ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah: handle.as_raw(), remote_qpn: qp_num, remote_qkey: qkey };
        // The rest, which is the end of a longer one.
        (wr.wr.atomic.swap, wr.wr.atomic.rkey) = (0, 0);
    }
}

impl<I: Interface> SendBatch<'_, I> {
    /// Sends `payload` to `to`, as one packet: `ibv_wr_send` and `ibv_wr_set_ud_addr`. Of UD queue pairs only.
    ///
    /// The receive that takes it needs [`Grh::LEN`](crate::Grh::LEN) bytes more than the payload. A datagram that finds no receive,
    /// or a queue pair with another queue key, is dropped, and the sender is not told.
    ///
    /// # Errors
    /// As [`SendBatch::send`]; [`PostError::NotDatagram`] on other queue pairs; [`PostError::DatagramTooLong`].
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[doc(alias = "ibv_wr_set_ud_addr")]
    #[inline(always)]
    pub unsafe fn send_to(
        &mut self,
        wr: WorkRequest,
        to: UdTarget<'_>,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        self.check_datagram(&payload)?;
        let extended = |qp| {
            // SAFETY: called by `add` as it says; a queue pair that has this operation has both functions, and the handle exists.
            unsafe {
                ibv_wr_send(qp);
                ibv_wr_set_ud_addr(qp, to.handle.as_raw(), to.qp_num, to.qkey);
            }
        };
        let classic = |wr: &mut ibv_send_wr| to.set(wr);
        // SAFETY: the caller's contract; the operation and its builders belong together.
        unsafe { self.add(SEND_TO, IBV_WR_SEND, wr, payload, extended, classic) }
    }

    /// As [`SendBatch::send_to`], with immediate data, given in host byte order: `ibv_wr_send_imm` and `ibv_wr_set_ud_addr`.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// See [`SendBatch`].
    #[inline(always)]
    pub unsafe fn send_imm_to(
        &mut self,
        wr: WorkRequest,
        to: UdTarget<'_>,
        imm: u32,
        payload: impl Payload,
    ) -> Result<(), PostError> {
        self.check_datagram(&payload)?;
        let imm = imm.to_be();
        let extended = |qp| {
            // SAFETY: as in `send_to`.
            unsafe {
                ibv_wr_send_imm(qp, imm);
                ibv_wr_set_ud_addr(qp, to.handle.as_raw(), to.qp_num, to.qkey);
            }
        };
        let classic = |wr: &mut ibv_send_wr| {
            to.set(wr);
            wr.__bindgen_anon_1.imm_data = imm;
        };
        // SAFETY: as in `send_to`.
        unsafe { self.add(SEND_TO_WITH_IMM, IBV_WR_SEND_WITH_IMM, wr, payload, extended, classic) }
    }

    /// Some devices drop a datagram that is longer than a packet, and report success.
    #[inline(always)]
    fn check_datagram(&self, payload: &impl Payload) -> Result<(), PostError> {
        let (len, max) = (payload.bytes(), self.queue.max_datagram);
        if len > u64::from(max) {
            rare();
            return Err(PostError::DatagramTooLong { len, max });
        }
        Ok(())
    }
}

// What `UdTarget::set` sets is the whole of it, with what `batch` asserts of the others.
const _: () = assert!(size_of::<ibv_send_wr__bindgen_ty_2__bindgen_ty_3>() == 16);
