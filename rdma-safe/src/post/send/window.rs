//! Work that binds memory windows and invalidates local keys.

use rdma_sys::*;

use super::super::payload::NoData;
use super::super::{PostError, SendFlags, SendOps, WorkRequest};
use super::batch::{Slot, set_none};
use super::destination::Destination::Connected;
use super::{READY, SendBatch, SendQueue, SendState};
use crate::interface::Interface;
use crate::mw::{BindInfo, MemoryWindow, Type1, Type2};
use crate::{Errno, QueuePair, QueuePairType, RemoteMemory};

impl<I: Interface> SendBatch<'_, I> {
    /// Binds a memory window under its next key: `ibv_wr_bind_mw`.
    ///
    /// Returns the address and key that a peer needs to access the bytes after the binding has completed. Later work of
    /// the same queue pair may send them to the peer, since it starts after the binding.
    ///
    /// The window must be unbound, or the device fails the work. After the binding has completed, call
    /// [`MemoryWindow::confirm`] or [`MemoryWindow::revert`].
    ///
    /// # Errors
    /// [`PostError::NotEnabled`], [`PostError::BatchFull`]; [`PostError::WindowPending`]; [`PostError::WindowRegions`];
    /// [`PostError::ForeignDomain`]. The batch is then unchanged.
    ///
    /// # Safety
    /// The window must not be dropped or borrowed mutably until the batch was posted or dropped.
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
        let slot = self.begin(SendOps::BIND_MW, Connected, wr, &NoData)?;
        // SAFETY: the queue pair has the operation; the window and the region are valid. The caller promises to keep the
        // window, which keeps the region, until the batch is posted.
        unsafe {
            match slot {
                Slot::Extended(qp) => ibv_wr_bind_mw(qp, raw, rkey, &bind_info),
                Slot::Classic(wr) => {
                    set_none(&mut *wr, IBV_WR_BIND_MW);
                    (*wr).__bindgen_anon_2.bind_mw =
                        ibv_send_wr__bindgen_ty_4__bindgen_ty_1 { mw: raw, rkey, bind_info };
                }
            }
            self.finish(slot, Connected, NoData);
        }
        Ok(window.added(rkey, &info, self.queue.core.keeper()))
    }

    /// Invalidates the key of a local memory window of type 2: `ibv_wr_local_inv`.
    ///
    /// After it has completed, call [`MemoryWindow::invalidated`].
    ///
    /// # Errors
    /// [`PostError::NotEnabled`], [`PostError::BatchFull`]. The batch is then unchanged.
    #[doc(alias = "ibv_wr_local_inv")]
    #[inline]
    pub fn invalidate(&mut self, wr: WorkRequest, rkey: u32) -> Result<(), PostError> {
        let slot = self.begin(SendOps::LOCAL_INV, Connected, wr, &NoData)?;
        // SAFETY: the queue pair has the operation, which names no memory.
        unsafe {
            match slot {
                Slot::Extended(qp) => ibv_wr_local_inv(qp, rkey),
                Slot::Classic(wr) => {
                    set_none(&mut *wr, IBV_WR_LOCAL_INV);
                    (*wr).__bindgen_anon_1.invalidate_rkey = rkey;
                }
            }
            self.finish(slot, Connected, NoData);
        }
        Ok(())
    }
}

impl SendQueue<'_> {
    /// Binds a memory window: [`QueuePair::bind_window`](crate::QueuePair::bind_window).
    ///
    /// # Errors
    /// Those of [`QueuePair::bind_window`](crate::QueuePair::bind_window).
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
    /// Those of [`QueuePair::unbind_window`](crate::QueuePair::unbind_window).
    pub fn unbind_window(&mut self, wr: WorkRequest, window: &mut MemoryWindow<Type1>) -> Result<(), PostError> {
        self.state().unbind_window(wr, window)
    }
}

impl QueuePair {
    /// Posts work that binds a memory window under a new key: `ibv_bind_mw(3)`.
    ///
    /// An earlier binding of the window ends. Returns the address and key that a peer needs to access the bytes after
    /// the binding has completed. Later work of this queue pair may send them to the peer, since it starts after the
    /// binding.
    ///
    /// After the binding has completed, call [`MemoryWindow::confirm`] or [`MemoryWindow::revert`].
    ///
    /// # Errors
    /// [`PostError::NotReady`]; [`PostError::NotEnabled`] on queue pairs of other types than RC and UC;
    /// [`PostError::WindowPending`]; [`PostError::WindowRegions`]; [`PostError::ForeignDomain`];
    /// [`PostError::ZeroBased`]; [`PostError::QueueFull`] and [`PostError::Refused`] if the provider failed. The window
    /// is then unchanged. If the provider failed, the window keeps the region, since the provider may still execute the
    /// work.
    #[doc(alias = "ibv_bind_mw")]
    pub fn bind_window(
        &mut self,
        wr: WorkRequest,
        window: &mut MemoryWindow<Type1>,
        info: BindInfo<'_>,
    ) -> Result<RemoteMemory, PostError> {
        self.send_state().bind_window(wr, window, info)
    }

    /// Posts work that unbinds a memory window: `ibv_bind_mw(3)` with length 0.
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
        // Before the call, because a provider that reports a failure may still execute the work.
        window.keep(&info);
        // SAFETY: both belong to the domain of the queue pair. The region is borrowed, and the window keeps it.
        unsafe { self.post_bind(wr, window, info.to_raw())? }
        Ok(RemoteMemory { address: info.remote_address(), len: info.len(), rkey: window.posted(Some(&info)) })
    }

    fn unbind_window(&mut self, wr: WorkRequest, window: &mut MemoryWindow<Type1>) -> Result<(), PostError> {
        check(window, None, self)?;
        let nothing = window.unbinding().ok_or(PostError::NotBound)?;
        self.check_bind()?;
        // SAFETY: the window belongs to the domain of the queue pair and keeps the region.
        unsafe { self.post_bind(wr, window, nothing)? }
        window.posted(None);
        Ok(())
    }

    /// Checks that the queue pair can post a binding. Aborts a forgotten batch.
    fn check_bind(&mut self) -> Result<(), PostError> {
        // The provider takes the lock that a forgotten batch holds.
        self.abort();
        if *self.gate.get_mut() != READY {
            return Err(PostError::NotReady { state: self.core.state() });
        }
        if !matches!(self.core.qp_type(), QueuePairType::RC | QueuePairType::UC) {
            return Err(PostError::NotEnabled { op: SendOps::BIND_MW });
        }
        Ok(())
    }

    /// # Safety
    /// The window and the region must belong to the domain of the queue pair, and the window must keep the region.
    /// `check_bind` must have succeeded.
    unsafe fn post_bind(
        &mut self,
        wr: WorkRequest,
        window: &mut MemoryWindow<Type1>,
        bind_info: ibv_mw_bind_info,
    ) -> Result<(), PostError> {
        let send_flags = (wr.flags & (SendFlags::SIGNALED | SendFlags::FENCE)).bits();
        let mut bind = ibv_mw_bind { wr_id: wr.id, send_flags, bind_info };
        // SAFETY: queue pair, window and region are valid, and no batch is open. Allocating the window checked that the
        // operation exists.
        match unsafe { ibv_bind_mw(self.raw.as_ptr(), window.as_raw(), &mut bind) } {
            0 => Ok(()),
            libc::ENOMEM | libc::ENOSPC => Err(PostError::QueueFull { posted: 0 }),
            errno if errno > 0 => Err(PostError::Refused { posted: 0, errno: Errno(errno) }),
            _ => Err(PostError::Refused { posted: 0, errno: Errno::last() }),
        }
    }
}

/// Checks the protection domains and the state of `window`.
///
/// Providers cast objects to their own types, so an object of another device must not reach them.
fn check<K: crate::mw::WindowType>(
    window: &MemoryWindow<K>,
    info: Option<&BindInfo<'_>>,
    queue: &SendState,
) -> Result<(), PostError> {
    let pd = queue.core.pd();
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

// `bind` sets the whole union, so that nothing is left of a segmented send.
const _: () = assert!(size_of::<ibv_send_wr__bindgen_ty_4__bindgen_ty_1>() == size_of::<ibv_send_wr__bindgen_ty_4>());
