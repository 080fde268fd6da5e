//! Work that binds memory windows, and that takes keys away.

use rdma_sys::*;

use super::super::payload::NoData;
use super::super::{PostError, SendFlags, SendOps, WorkRequest};
use super::batch::set_none;
use super::{READY, SendBatch, SendQueue, SendState};
use crate::interface::Interface;
use crate::{BindInfo, Errno, MemoryWindow, QueuePair, QueuePairType, RemoteMemory, Type1, Type2};

impl<I: Interface> SendBatch<'_, I> {
    /// Binds a memory window, under the next of its keys: `ibv_wr_bind_mw`. Returns what a peer needs to reach the bytes once it
    /// has completed, which later work of the same queue pair may tell the peer: it begins after that.
    ///
    /// The window must be unbound, or the device fails the work. Tell it how this ended: [`MemoryWindow::confirm`],
    /// [`MemoryWindow::revert`].
    ///
    /// # Errors
    /// [`PostError::NotEnabled`], [`PostError::BatchFull`]; [`PostError::WindowPending`]; [`PostError::WindowRegions`];
    /// [`PostError::ForeignDomain`]. The batch is as before then.
    ///
    /// # Safety
    /// The window must be left alone, that is neither be dropped nor borrowed mutably, until the batch was posted or dropped.
    #[doc(alias = "ibv_wr_bind_mw")]
    #[doc(alias = "ibv_inc_rkey")]
    #[inline]
    pub unsafe fn bind(
        &mut self,
        wr: WorkRequest,
        window: &mut MemoryWindow<Type2>,
        info: BindInfo<'_>,
    ) -> Result<RemoteMemory, PostError> {
        check(window, Some(&info), self.queue)?;
        let (raw, rkey, bind_info) = (window.as_raw(), window.next_rkey(), info.to_raw());
        let extended = |qp| {
            // SAFETY: called by `add` as it says; the window and the region are valid.
            unsafe { ibv_wr_bind_mw(qp, raw, rkey, &bind_info) }
        };
        let classic = |wr: &mut ibv_send_wr| {
            set_none(wr);
            wr.__bindgen_anon_2.bind_mw = ibv_send_wr__bindgen_ty_4__bindgen_ty_1 { mw: raw, rkey, bind_info };
        };
        // SAFETY: the operation and its builder belong together. The window, which keeps the region, stays until the batch is
        // posted, as the caller promises.
        unsafe { self.add(SendOps::BIND_MW, IBV_WR_BIND_MW, wr, NoData, extended, classic)? }
        Ok(window.added(rkey, &info, &self.queue.shared))
    }

    /// Takes a key of this end away, that of a memory window of type 2: `ibv_wr_local_inv`. Tell the window when it has completed:
    /// [`MemoryWindow::invalidated`].
    ///
    /// # Errors
    /// [`PostError::NotEnabled`], [`PostError::BatchFull`]. The batch is as before then.
    #[doc(alias = "ibv_wr_local_inv")]
    #[inline]
    pub fn invalidate(&mut self, wr: WorkRequest, rkey: u32) -> Result<(), PostError> {
        let extended = |qp| {
            // SAFETY: called by `add` as it says.
            unsafe { ibv_wr_local_inv(qp, rkey) }
        };
        let classic = |wr: &mut ibv_send_wr| {
            set_none(wr);
            wr.__bindgen_anon_1.invalidate_rkey = rkey;
        };
        // SAFETY: the operation and its builder belong together; it names no memory.
        unsafe { self.add(SendOps::LOCAL_INV, IBV_WR_LOCAL_INV, wr, NoData, extended, classic) }
    }
}

impl SendQueue<'_> {
    /// Binds a memory window: [`QueuePair::bind_window`](crate::QueuePair::bind_window).
    ///
    /// # Errors
    /// As there.
    pub fn bind_window(
        &mut self,
        wr: WorkRequest,
        window: &mut MemoryWindow<Type1>,
        info: BindInfo<'_>,
    ) -> Result<RemoteMemory, PostError> {
        self.state().bind_window(wr, window, info)
    }

    /// Unbinds a memory window: [`QueuePair::unbind_window`](crate::QueuePair::unbind_window).
    ///
    /// # Errors
    /// As there.
    pub fn unbind_window(&mut self, wr: WorkRequest, window: &mut MemoryWindow<Type1>) -> Result<(), PostError> {
        self.state().unbind_window(wr, window)
    }
}

impl QueuePair {
    /// Posts work that binds a memory window, wherever it was bound before, under a new key: `ibv_bind_mw(3)`. Returns what a peer
    /// needs to reach the bytes once it has completed, which later work of this queue pair may tell the peer: it begins after that.
    ///
    /// Tell the window how it ended: [`MemoryWindow::confirm`], [`MemoryWindow::revert`].
    ///
    /// # Errors
    /// [`PostError::NotReady`]; [`PostError::NotEnabled`] on queue pairs of other types than RC and UC;
    /// [`PostError::WindowPending`]; [`PostError::WindowRegions`]; [`PostError::ForeignDomain`]; [`PostError::ZeroBased`];
    /// [`PostError::QueueFull`] and [`PostError::Refused`] when the provider failed. The window is as before then. If the
    /// provider failed, the window keeps the region, since the provider may still execute the work.
    #[doc(alias = "ibv_bind_mw")]
    pub fn bind_window(
        &mut self,
        wr: WorkRequest,
        window: &mut MemoryWindow<Type1>,
        info: BindInfo<'_>,
    ) -> Result<RemoteMemory, PostError> {
        self.send_state().bind_window(wr, window, info)
    }

    /// Posts work that unbinds a memory window: `ibv_bind_mw(3)` with no bytes.
    ///
    /// # Errors
    /// [`PostError::NotBound`]; those of [`QueuePair::bind_window`].
    #[doc(alias = "ibv_bind_mw")]
    pub fn unbind_window(&mut self, wr: WorkRequest, window: &mut MemoryWindow<Type1>) -> Result<(), PostError> {
        self.send_state().unbind_window(wr, window)
    }
}

impl SendState {
    fn bind_window(
        &mut self,
        wr: WorkRequest,
        window: &mut MemoryWindow<Type1>,
        info: BindInfo<'_>,
    ) -> Result<RemoteMemory, PostError> {
        check(window, Some(&info), self)?;
        if info.is_zero_based() {
            return Err(PostError::ZeroBased);
        }
        self.check_bind()?;
        // Before the call, since a provider that reports a failure may still execute the work.
        window.keep(&info);
        // SAFETY: both are of the domain of the queue pair; the region is borrowed, and the window keeps it.
        unsafe { self.post_bind(wr, window, info.to_raw())? }
        Ok(RemoteMemory { address: info.remote_address(), len: info.len(), rkey: window.posted(Some(&info)) })
    }

    fn unbind_window(&mut self, wr: WorkRequest, window: &mut MemoryWindow<Type1>) -> Result<(), PostError> {
        check(window, None, self)?;
        let nothing = window.unbinding().ok_or(PostError::NotBound)?;
        self.check_bind()?;
        // SAFETY: the window is of the domain of the queue pair, and holds the region.
        unsafe { self.post_bind(wr, window, nothing)? }
        window.posted(None);
        Ok(())
    }

    /// Checks that the queue pair can post a binding, and ends a forgotten batch.
    fn check_bind(&mut self) -> Result<(), PostError> {
        // The provider takes the lock that a batch which was forgotten holds.
        self.abort();
        if *self.gate.get_mut() != READY {
            return Err(PostError::NotReady { state: self.shared.state() });
        }
        if !matches!(self.shared.qp_type(), QueuePairType::RC | QueuePairType::UC) {
            return Err(PostError::NotEnabled { op: SendOps::BIND_MW });
        }
        Ok(())
    }

    /// # Safety
    /// The window and the region must be of the domain of the queue pair, and the window keep the region. `check_bind` must have
    /// succeeded.
    unsafe fn post_bind(
        &mut self,
        wr: WorkRequest,
        window: &mut MemoryWindow<Type1>,
        bind_info: ibv_mw_bind_info,
    ) -> Result<(), PostError> {
        let send_flags = (wr.flags & (SendFlags::SIGNALED | SendFlags::FENCE)).bits();
        let mut bind = ibv_mw_bind { wr_id: wr.id, send_flags, bind_info };
        // SAFETY: queue pair, window and region are valid, no batch is open, and the operation exists, which was looked at when the
        // window was allocated.
        match unsafe { ibv_bind_mw(self.raw.as_ptr(), window.as_raw(), &mut bind) } {
            0 => Ok(()),
            libc::ENOMEM | libc::ENOSPC => Err(PostError::QueueFull { posted: 0 }),
            errno if errno > 0 => Err(PostError::Refused { posted: 0, errno: Errno(errno) }),
            _ => Err(PostError::Refused { posted: 0, errno: Errno::last() }),
        }
    }
}

/// Providers cast objects to their own types, so that none of another device must get there; the domain says more.
fn check<K: crate::WindowType>(
    window: &MemoryWindow<K>,
    info: Option<&BindInfo<'_>>,
    queue: &SendState,
) -> Result<(), PostError> {
    let pd = queue.shared.pd();
    if !window.is_of(pd) {
        return Err(PostError::ForeignDomain { object: "memory window" });
    }
    if info.is_some_and(|info| !info.pd().is_same(pd)) {
        return Err(PostError::ForeignDomain { object: "memory region" });
    }
    if window.is_pending() {
        return Err(PostError::WindowPending);
    }
    info.map_or(Ok(()), |info| window.check_room(info))
}

// What `bind` sets is the whole of it, so that nothing is left of a segmented send.
const _: () = assert!(size_of::<ibv_send_wr__bindgen_ty_4__bindgen_ty_1>() == size_of::<ibv_send_wr__bindgen_ty_4>());
