//! Memory windows: remote access to part of a region, granted and revoked by work requests.
//!
//! Start with [`ProtectionDomain::memory_window`], which makes a [`MemoryWindow`].
//! [`QueuePair::bind_window`](crate::QueuePair::bind_window) binds one of type 1, and
//! [`SendBatch::bind`](crate::SendBatch::bind) one of type 2. An endpoint allocates and binds windows of its own, without
//! `unsafe`: [`Endpoint::bind_window`](crate::Endpoint::bind_window).

mod bind_info;
mod regions;

use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::check_ptr;
use crate::error::Verb;
use crate::object::{Object, Parents};
use crate::qp::Keeper;
use crate::{Context, PostError, ProtectionDomain, RemoteMemory, Result};

use bind_info::BoundRegion;
use regions::Regions;

pub use bind_info::BindInfo;

/// A memory window: a remote key to part of a region, `struct ibv_mw`, of type [`Type1`] or [`Type2`].
///
/// Registering memory takes a system call. Binding a window to part of registered memory takes a work request. Binding
/// returns a key, by which peers access the bytes of the [`BindInfo`] and no others. (On SoftRoCE they can access the
/// whole region, see
/// [`Quirks::WINDOWS_COVER_WHOLE_REGIONS`](crate::device::Quirks::WINDOWS_COVER_WHOLE_REGIONS).) The access ends when the
/// window is bound again, unbound, invalidated or dropped.
///
/// | | [`Type1`] | [`Type2`] |
/// |---|---|---|
/// | bound by | [`QueuePair::bind_window`] | [`SendBatch::bind`] |
/// | unbound by | [`QueuePair::unbind_window`] | [`SendBatch::invalidate`], or the peer's [`SendBatch::send_invalidate`] |
/// | accessible through | every queue pair of the domain | on most devices, only the queue pair that bound it |
///
/// The region needs [`Access::MW_BIND`](crate::Access::MW_BIND), but no remote access. The queue pair that the peer is
/// connected to needs the access of the window, by [`InitOptions::peer_access`](crate::InitOptions::peer_access) or
/// [`EndpointBuilder::peer_access`](crate::EndpointBuilder::peer_access). Otherwise the peer's work fails with
/// `REM_INV_REQ_ERR` or `REM_ACCESS_ERR`.
///
/// Binding is asynchronous: the window is bound once the completion reports success. Report the result to the window
/// with [`MemoryWindow::confirm`] or [`MemoryWindow::revert`] before it is bound again. While it is bound, a window of
/// type 2 keeps its queue pair alive.
///
/// # Regions stay registered
///
/// A window keeps every region that it was ever bound to until it is deallocated. The caller may be wrong about the end
/// of a binding, and some devices deregister a region that a window is still bound to. Therefore
/// [`MemoryWindow::confirm`], [`MemoryWindow::revert`] and [`MemoryWindow::invalidated`] release no region. A window
/// keeps each region once, and supports at most [`MemoryWindow::MAX_REGIONS`] different ones. A service that registers
/// regions frequently should allocate a new window from time to time, which costs less than the registrations.
/// [`MemoryWindow::release_unused_regions`] releases regions earlier, and is `unsafe`.
///
/// [`QueuePair::bind_window`]: crate::QueuePair::bind_window
/// [`QueuePair::unbind_window`]: crate::QueuePair::unbind_window
/// [`SendBatch::bind`]: crate::SendBatch::bind
/// [`SendBatch::invalidate`]: crate::SendBatch::invalidate
/// [`SendBatch::send_invalidate`]: crate::SendBatch::send_invalidate
///
/// ```no_run
/// # use rdma_safe::*;
/// use rdma_safe::mr::Pages;
/// use rdma_safe::mw::Type1;
///
/// # fn example(pd: &ProtectionDomain, qp: &mut QueuePair, cq: &mut CompletionQueue) -> rdma_safe::Result<()> {
/// // `qp` was initialised with `InitOptions::default().peer_access(Access::REMOTE_READ)`.
/// let region = pd.expose(Pages::new(4096)?, Access::MW_BIND)?;
/// let mut window = pd.memory_window::<Type1>()?;
/// let info = region.bind_info(1024, 512, Access::REMOTE_READ)?;
/// let remote = qp.bind_window(WorkRequest::new(1).signaled(), &mut window, info)?;
/// // … poll its completion:
/// # let succeeded = true;
/// if succeeded { window.confirm() } else { window.revert() }
/// // … send `remote` to the peer; later, revoke it:
/// qp.unbind_window(WorkRequest::new(2).signaled(), &mut window)?;
/// // … poll its completion:
/// window.confirm(); // from now on, the peer's accesses to `remote` fail and break the connection
/// # Ok(())
/// # }
/// ```
pub struct MemoryWindow<K: WindowType> {
    object: Object<MadeFrom>,
    /// Key of the last confirmed binding.
    rkey: u32,
    window_type: PhantomData<K>,
}

/// The domain of a window, and its bindings.
struct MadeFrom {
    /// Binding that was posted, but neither confirmed nor reverted.
    pending: Option<Pending>,
    bound: Option<Bound>,
    /// Released after the window is deallocated.
    regions: Regions,
    pd: ProtectionDomain,
}

impl Parents for MadeFrom {
    type Raw = ibv_mw;

    const VERB: Verb = Verb::DeallocMw;

    fn context(&self) -> &Context {
        self.pd.context()
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_mw) -> c_int {
        // SAFETY: the caller's contract. The device rejects posted work that names the window.
        unsafe { ibv_dealloc_mw(raw) }
    }
}

/// A binding of the window, as reported by the user.
struct Bound {
    region: BoundRegion,
    /// The queue pair of a type 2 window.
    _qp: Option<Arc<Keeper>>,
}

struct Pending {
    rkey: u32,
    /// The new binding; `None` if the work unbinds the window.
    to: Option<Bound>,
}

/// A type of memory window: [`Type1`] or [`Type2`].
pub trait WindowType: sealed::WindowType {}

/// Windows that are bound by `ibv_bind_mw(3)`.
#[derive(Clone, Copy, Debug)]
pub enum Type1 {}

/// Windows that are bound by work requests, and invalidated by local or remote ones.
#[derive(Clone, Copy, Debug)]
pub enum Type2 {}

impl WindowType for Type1 {}
impl WindowType for Type2 {}

mod sealed {
    use rdma_sys::*;

    use crate::device::DeviceCapabilities;

    /// Sealed, because the available verbs depend on it.
    pub trait WindowType {
        const RAW: ibv_mw_type;
        const FEATURE: &'static str;
        /// Capabilities, of which the device needs at least one.
        const NEEDS: DeviceCapabilities;
    }

    impl WindowType for super::Type1 {
        const RAW: ibv_mw_type = IBV_MW_TYPE_1;
        const FEATURE: &'static str = "memory windows of type 1";
        const NEEDS: DeviceCapabilities = DeviceCapabilities::MEM_WINDOW;
    }

    impl WindowType for super::Type2 {
        const RAW: ibv_mw_type = IBV_MW_TYPE_2;
        const FEATURE: &'static str = "memory windows of type 2";
        const NEEDS: DeviceCapabilities =
            DeviceCapabilities::MEM_WINDOW_TYPE_2A.union(DeviceCapabilities::MEM_WINDOW_TYPE_2B);
    }
}

impl ProtectionDomain {
    /// Allocates an unbound memory window of type [`Type1`] or [`Type2`]: `ibv_alloc_mw(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the device lacks windows of this type;
    /// [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_alloc_mw")]
    pub fn memory_window<K: WindowType>(&self) -> Result<MemoryWindow<K>> {
        let context = self.context();
        context.require_own()?;
        if !context.attributes().capabilities().intersects(K::NEEDS) {
            return Err(context.unsupported(K::FEATURE));
        }
        // SAFETY: the context is valid. Providers with windows set these functions, and the shims do not check the
        // first.
        let (bind, dealloc) = unsafe { ((*context.as_raw()).ops.bind_mw, (*context.as_raw()).ops.dealloc_mw) };
        if bind.is_none() || dealloc.is_none() {
            return Err(context.unsupported(K::FEATURE));
        }
        // SAFETY: the domain is valid.
        let raw = check_ptr(|| unsafe { ibv_alloc_mw(self.as_raw(), K::RAW) })
            .map_err(|errno| context.feature_error(Verb::AllocMw, K::FEATURE, errno))?;
        // SAFETY: just created.
        let rkey = unsafe { (*raw.as_ptr()).rkey };
        let made_from = MadeFrom { pending: None, bound: None, regions: Regions::default(), pd: self.clone() };
        // SAFETY: just allocated, and not shared with anything. Nothing is created from it.
        let object = unsafe { Object::new(raw, made_from) };
        Ok(MemoryWindow { object, rkey, window_type: PhantomData })
    }
}

impl<K: WindowType> MemoryWindow<K> {
    /// Maximum number of different regions that one window can be bound to.
    pub const MAX_REGIONS: usize = Regions::MAX;

    /// Remote key of the last binding that was posted and not reverted.
    ///
    /// It grants no access until that binding has completed.
    #[must_use]
    #[inline]
    pub fn rkey(&self) -> u32 {
        self.object.pending.as_ref().map_or(self.rkey, |pending| pending.rkey)
    }

    /// Whether a posted binding is neither confirmed nor reverted.
    #[must_use]
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.object.pending.is_some()
    }

    /// Whether the window is bound, according to the user's reports, before or after a pending binding.
    #[must_use]
    pub fn is_bound(&self) -> bool {
        self.object.bound.is_some() || self.object.pending.as_ref().is_some_and(|pending| pending.to.is_some())
    }

    /// Reports that the last posted binding has completed with success.
    ///
    /// Success means that its completion, or that of later work in the same send queue, is a success. Does nothing if
    /// nothing is pending.
    ///
    /// If the report is wrong, peers may still access the previous region, which stays registered.
    pub fn confirm(&mut self) {
        if let Some(Pending { rkey, to }) = self.object.pending.take() {
            self.set_rkey(rkey);
            self.object.bound = to;
        }
    }

    /// Reports that the last posted binding has failed.
    ///
    /// Its completion was an error, or its batch was dropped or refused. This restores the previous key. Does nothing
    /// if nothing is pending.
    pub fn revert(&mut self) {
        if self.object.pending.take().is_some() {
            self.set_rkey(self.rkey);
        }
    }

    /// Releases all regions that are neither bound nor part of a pending binding.
    ///
    /// # Safety
    ///
    /// Every call of [`MemoryWindow::confirm`], [`MemoryWindow::revert`] and [`MemoryWindow::invalidated`] so far must
    /// have been correct, and no binding that was posted and then reverted may still be executed. Otherwise the window
    /// may stay bound to freed memory.
    pub unsafe fn release_unused_regions(&mut self) {
        let MadeFrom { pending, bound, regions, .. } = &mut *self.object;
        let needed = [bound.as_ref(), pending.as_ref().and_then(|pending| pending.to.as_ref())];
        regions.retain(|region| needed.iter().flatten().any(|to| to.region.as_raw() == region.as_raw()));
    }

    /// Rejects a binding to more than [`MemoryWindow::MAX_REGIONS`] regions.
    #[inline]
    pub(crate) fn check_room(&self, info: &BindInfo<'_>) -> Result<(), PostError> {
        if self.object.regions.have_room_for(info) {
            return Ok(());
        }
        Err(PostError::WindowRegions { max: Regions::MAX })
    }

    /// Keeps the region of a binding that the provider has taken, or may have taken.
    #[inline]
    pub(crate) fn keep(&mut self, info: &BindInfo<'_>) {
        self.object.regions.keep(info);
    }

    /// Sets the key. `ibv_bind_mw(3)` leaves restoring the key to its caller, and binding by a work request leaves
    /// setting it.
    fn set_rkey(&mut self, rkey: u32) {
        self.rkey = rkey;
        // SAFETY: the window is valid and borrowed mutably. No open batch names it.
        unsafe { (*self.as_raw()).rkey = rkey }
    }

    #[inline]
    pub(crate) fn is_of(&self, pd: &ProtectionDomain) -> bool {
        self.object.pd.is_same(pd)
    }

    /// The domain of the window.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.object.pd
    }

    /// The C object, valid while this window exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_mw {
        self.object.as_raw()
    }

    /// Unbinds and deallocates the window: `ibv_dealloc_mw(3)`. Dropping does the same, but ignores errors.
    ///
    /// # Errors
    /// [`Error::Verb`](crate::Error::Verb). The window and the regions that it may be bound to are then kept until the
    /// process ends.
    #[doc(alias = "ibv_dealloc_mw")]
    pub fn deallocate(self) -> Result<()> {
        self.object.destroy().map(drop)
    }
}

impl MemoryWindow<Type1> {
    /// Parameters to unbind the window; `None` if it is not bound, as far as known.
    pub(crate) fn unbinding(&self) -> Option<ibv_mw_bind_info> {
        self.object.bound.as_ref().map(|bound| bound.region.unbind_info())
    }

    /// Records a binding that `ibv_bind_mw` has accepted. It has set the new key.
    pub(crate) fn posted(&mut self, info: Option<&BindInfo<'_>>) -> u32 {
        // SAFETY: the window is valid.
        let rkey = unsafe { (*self.as_raw()).rkey };
        self.object.pending = Some(Pending { rkey, to: info.map(|info| Bound { region: info.keep(), _qp: None }) });
        rkey
    }
}

impl MemoryWindow<Type2> {
    /// Reports that the key was invalidated.
    ///
    /// It was invalidated by local work that has completed, or by a send of the peer, which names the key in
    /// [`WorkCompletion::invalidated_rkey`](crate::WorkCompletion::invalidated_rkey). This confirms a pending binding
    /// and releases the queue pair.
    pub fn invalidated(&mut self) {
        self.confirm();
        self.object.bound = None;
    }

    /// The key of the next binding, which a work request sets.
    #[inline]
    pub(crate) fn next_rkey(&self) -> u32 {
        ibv_inc_rkey(self.rkey)
    }

    /// Records a work request that binds the window to this key.
    #[inline]
    pub(crate) fn added(&mut self, rkey: u32, info: &BindInfo<'_>, qp: Arc<Keeper>) -> RemoteMemory {
        self.keep(info);
        let to = Some(Bound { region: info.keep(), _qp: Some(qp) });
        self.object.pending = Some(Pending { rkey, to });
        RemoteMemory { address: info.remote_address(), len: info.len(), rkey }
    }
}

impl<K: WindowType> fmt::Debug for MemoryWindow<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryWindow")
            .field("type", &K::RAW.0)
            .field("rkey", &format_args!("{:#x}", self.rkey()))
            .field("bound", &self.is_bound())
            .field("pending", &self.is_pending())
            .finish_non_exhaustive()
    }
}
