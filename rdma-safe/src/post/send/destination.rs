//! Destinations of work requests.

use std::marker::PhantomData;
use std::ptr::NonNull;

use rdma_sys::*;

use super::super::SendOps;
use super::operations::{to_datagram, to_srq};
use crate::AddressHandle;

/// Destination of a datagram: the path to a port, and a queue pair there.
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
    /// The C object of the handle, copied here so that it need not be read again for each work request.
    ah: NonNull<ibv_ah>,
    handle: PhantomData<&'a AddressHandle>,
    /// Number of the peer's queue pair, 24 bits.
    pub qp_num: u32,
    /// Queue key. The peer drops a datagram whose key is not that of its queue pair. If the highest bit is set, the
    /// queue key of the sending queue pair is sent instead (not by SoftRoCE).
    pub qkey: u32,
}

// SAFETY: this stands for a reference to the handle, which is `Sync`.
unsafe impl Send for UdTarget<'_> {}
// SAFETY: the handle is `Sync`; the other fields are numbers.
unsafe impl Sync for UdTarget<'_> {}

impl<'a> UdTarget<'a> {
    /// The queue pair `qp_num` at the port that `handle` leads to, with the queue key `qkey`.
    #[must_use]
    #[inline(always)]
    pub fn new(handle: &'a AddressHandle, qp_num: u32, qkey: u32) -> Self {
        UdTarget { ah: handle.raw(), handle: PhantomData, qp_num, qkey }
    }

    /// All members of a multicast group. `handle` must lead to the group's GID. See
    /// [`QueuePair::attach_mcast`](crate::QueuePair::attach_mcast).
    #[must_use]
    #[inline(always)]
    pub fn multicast(handle: &'a AddressHandle, qkey: u32) -> Self {
        UdTarget::new(handle, 0xff_ffff, qkey)
    }
}

/// Where a work request goes.
#[derive(Clone, Copy)]
pub(super) enum Destination<'a> {
    /// The peer that the queue pair is connected to.
    Connected,
    /// A shared receive queue of that peer, by its number. For XRC queue pairs.
    Srq(u32),
    /// A queue pair of any peer. For UD queue pairs.
    Datagram(UdTarget<'a>),
}

impl Destination<'_> {
    /// The bit of `op` with this destination.
    #[inline(always)]
    pub(super) fn encode(self, op: SendOps) -> SendOps {
        match self {
            Destination::Connected => op,
            Destination::Srq(_) => to_srq(op),
            Destination::Datagram(_) => to_datagram(op),
        }
    }

    /// Sets the destination of the work request that was just started.
    ///
    /// # Safety
    /// This must follow the builder call of an operation that `qp` has with this destination. It then has these
    /// functions, too.
    #[inline(always)]
    pub(super) unsafe fn set(self, qp: *mut ibv_qp_ex) {
        // SAFETY: the caller's contract; the address handle exists.
        unsafe {
            match self {
                Destination::Connected => {}
                Destination::Srq(number) => ibv_wr_set_xrc_srqn(qp, number),
                Destination::Datagram(to) => ibv_wr_set_ud_addr(qp, to.ah.as_ptr(), to.qp_num, to.qkey),
            }
        }
    }

    /// Writes the destination into a work request of `ibv_post_send`.
    #[inline(always)]
    pub(super) fn fill(self, wr: &mut ibv_send_wr) {
        match self {
            Destination::Connected => {}
            Destination::Srq(number) => wr.qp_type.xrc.remote_srqn = number,
            Destination::Datagram(UdTarget { ah, qp_num, qkey, .. }) => {
                let ah = ah.as_ptr();
                wr.wr.ud = ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah, remote_qpn: qp_num, remote_qkey: qkey };
                // Clears the rest of the union, where another member is longer.
                (wr.wr.atomic.swap, wr.wr.atomic.rkey) = (0, 0);
            }
        }
    }
}

// `Destination::fill` covers the whole union, given the assertions in `batch`.
const _: () = assert!(size_of::<ibv_send_wr__bindgen_ty_2__bindgen_ty_3>() == 16);
