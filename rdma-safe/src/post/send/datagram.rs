//! Sends that name their destination.

use std::marker::PhantomData;
use std::ptr::NonNull;

use rdma_sys::*;

use super::super::{Payload, PostError, WorkRequest};
use super::SendBatch;
use super::operations::{SEND_TO, SEND_TO_WITH_IMM};
use crate::AddressHandle;
use crate::cq::rare;
use crate::interface::Interface;

/// Where a datagram goes: the way to a port, and a queue pair there.
///
/// ```no_run
/// # use rdma_safe::*;
/// # fn example(pd: &ProtectionDomain, cq: &CompletionQueue, peer: QueuePairAddress) -> rdma_safe::Result<()> {
/// const QKEY: u32 = 0x1234;
/// let mut qp = pd.queue_pair(cq, cq).qp_type(QueuePairType::UD).inline_data(64).build()?;
/// let ours = qp.init_datagrams(QKEY, &InitOptions::default())?;
/// // … exchange `ours` for `peer`
/// let handle = pd.address_handle(&qp.address_of(&peer, &ConnectOptions::default())?)?;
/// let to = UdTarget::new(&handle, peer.qp_num, QKEY);
/// let mut batch = qp.send_batch()?;
/// // SAFETY: the bytes are copied in the call; `handle` stays until its completion was taken.
/// unsafe { batch.send_to(WorkRequest::new(1).signaled(), to, Inline(b"hello"))? };
/// batch.post()?;
/// // … take its completion
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct UdTarget<'a> {
    /// That of the handle: here, it need not be read again for each piece of work.
    ah: NonNull<ibv_ah>,
    handle: PhantomData<&'a AddressHandle>,
    /// Number of the peer's queue pair, 24 bits.
    pub qp_num: u32,
    /// Queue key of the peer's queue pair, without which it drops the datagram. With the highest bit set, what is sent is the
    /// sender's own (not by SoftRoCE).
    pub qkey: u32,
}

// SAFETY: it stands for a reference to the handle, which is `Sync`.
unsafe impl Send for UdTarget<'_> {}
// SAFETY: as above; the rest are numbers.
unsafe impl Sync for UdTarget<'_> {}

impl<'a> UdTarget<'a> {
    /// The queue pair `qp_num` behind `handle`, which takes what has the queue key `qkey`.
    #[must_use]
    #[inline(always)]
    pub fn new(handle: &'a AddressHandle, qp_num: u32, qkey: u32) -> Self {
        UdTarget { ah: handle.raw(), handle: PhantomData, qp_num, qkey }
    }

    pub(super) fn as_raw(self) -> *mut ibv_ah {
        self.ah.as_ptr()
    }

    /// All members of the multicast group behind `handle`, which is one of the group's GID, with this queue key. See
    /// [`QueuePair::attach_mcast`](crate::QueuePair::attach_mcast).
    #[must_use]
    #[inline(always)]
    pub fn multicast(handle: &'a AddressHandle, qkey: u32) -> Self {
        UdTarget::new(handle, 0xff_ffff, qkey)
    }

    #[inline(always)]
    pub(super) fn set(self, wr: &mut ibv_send_wr) {
        let UdTarget { ah, qp_num, qkey, .. } = self;
        wr.wr.ud = ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah: ah.as_ptr(), remote_qpn: qp_num, remote_qkey: qkey };
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
                ibv_wr_set_ud_addr(qp, to.ah.as_ptr(), to.qp_num, to.qkey);
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
                ibv_wr_set_ud_addr(qp, to.ah.as_ptr(), to.qp_num, to.qkey);
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
        let (len, max) = (payload.bytes(), self.limits.max_datagram);
        if len > u64::from(max) {
            rare();
            return Err(match max {
                u16::MAX => PostError::NotDatagram,
                max => PostError::DatagramTooLong { len, max: max.into() },
            });
        }
        Ok(())
    }
}

// What `UdTarget::set` sets is the whole of it, with what `batch` asserts of the others.
const _: () = assert!(size_of::<ibv_send_wr__bindgen_ty_2__bindgen_ty_3>() == 16);
