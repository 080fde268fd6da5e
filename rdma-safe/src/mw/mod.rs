//! Memory windows: remote access to part of a region, which is given and taken by work of a queue pair.

mod bind_info;
mod regions;

use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::check_ptr;
use crate::object::{Object, Parents};
use crate::{Context, PostError, ProtectionDomain, RemoteMemory, Result, qp};

use bind_info::Kept;
use regions::Regions;

pub use bind_info::BindInfo;

/// A memory window: a key to part of a region, `struct ibv_mw`, of type [`Type1`] or [`Type2`].
///
/// Registering memory takes a system call; to bind a window to part of what is registered takes a work request. Peers get the key
/// that binding returns, reach the bytes of the [`BindInfo`] by it and no others (on SoftRoCE all of the region, see
/// [`Quirks::WINDOWS_UNBOUNDED`](crate::Quirks::WINDOWS_UNBOUNDED)), and lose them when the window is bound
/// elsewhere, unbound, invalidated or dropped.
///
/// | | [`Type1`] | [`Type2`] |
/// |---|---|---|
/// | bound by | [`QueuePair::bind_window`] | [`SendBatch::bind`] |
/// | unbound by | [`QueuePair::unbind_window`] | [`SendBatch::invalidate`], or the peer's [`SendBatch::send_invalidate`] |
/// | peers reach it through | every queue pair of the domain | on most devices, the queue pair that bound it |
///
/// The region needs [`Access::MW_BIND`](crate::Access::MW_BIND) and no remote right of its own. The queue pair here that the peer
/// is connected to needs the rights that the window gives, by [`InitOptions::peer_access`](crate::InitOptions::peer_access) or
/// [`EndpointBuilder::peer_access`](crate::EndpointBuilder::peer_access), or the peer's work fails with `REM_INV_REQ_ERR` or
/// `REM_ACCESS_ERR`.
///
/// Binding is work like any other: it has happened when its completion is a success, and the window has to be told, by
/// [`MemoryWindow::confirm`] or [`MemoryWindow::revert`], before it is bound again. While it is bound, a window of type 2 keeps its
/// queue pair.
///
/// # Regions stay registered
///
/// A window keeps every region that it was ever bound to until it is deallocated. The caller may be wrong about the end of a
/// binding, and some devices deregister a region that a window is still bound to. Therefore [`MemoryWindow::confirm`] and the like
/// release no region. A window keeps each region once, and takes at most [`MemoryWindow::MAX_REGIONS`] different ones. A service
/// that registers regions all the time should allocate a new window now and then, which costs less than the registrations.
/// [`MemoryWindow::release_former`] releases regions earlier, and is `unsafe`.
///
/// [`QueuePair::bind_window`]: crate::QueuePair::bind_window
/// [`QueuePair::unbind_window`]: crate::QueuePair::unbind_window
/// [`SendBatch::bind`]: crate::SendBatch::bind
/// [`SendBatch::invalidate`]: crate::SendBatch::invalidate
/// [`SendBatch::send_invalidate`]: crate::SendBatch::send_invalidate
///
/// ```no_run
/// # use rdma_safe::*;
/// # fn example(pd: &ProtectionDomain, qp: &mut QueuePair, cq: &mut CompletionQueue) -> rdma_safe::Result<()> {
/// // `qp` was initialised with `InitOptions::default().peer_access(Access::REMOTE_READ)`.
/// let region = pd.expose(Pages::new(4096)?, Access::MW_BIND)?;
/// let mut window = pd.memory_window::<Type1>()?;
/// let info = region.bind_info(1024, 512, Access::REMOTE_READ)?;
/// let remote = qp.bind_window(WorkRequest::new(1).signaled(), &mut window, info)?;
/// // … take its completion:
/// # let succeeded = true;
/// if succeeded { window.confirm() } else { window.revert() }
/// // … give `remote` to the peer; later, take it back:
/// qp.unbind_window(WorkRequest::new(2).signaled(), &mut window)?;
/// // … take its completion:
/// window.confirm(); // from here on, what the peer does with `remote` fails, and ends the connection
/// # Ok(())
/// # }
/// ```
pub struct MemoryWindow<K: WindowType> {
    object: Object<MadeFrom>,
    /// As of the last binding that was confirmed.
    rkey: u32,
    window_type: PhantomData<K>,
}

/// What a window was made in, and what it is bound to.
struct MadeFrom {
    /// What was posted and neither confirmed nor reverted.
    pending: Option<Pending>,
    bound: Option<Bound>,
    /// Released after the window was deallocated.
    regions: Regions,
    pd: ProtectionDomain,
}

impl Parents for MadeFrom {
    type Raw = ibv_mw;

    const VERB: &'static str = "ibv_dealloc_mw";

    fn context(&self) -> &Context {
        self.pd.context()
    }

    unsafe fn destroy(&self, raw: *mut ibv_mw) -> c_int {
        // SAFETY: the caller's contract. Work that is posted and names it is refused by the device.
        unsafe { ibv_dealloc_mw(raw) }
    }
}

/// The binding of a window, as reported by the user.
struct Bound {
    region: Kept,
    /// Of type 2, which belongs to its queue pair.
    _qp: Option<Arc<qp::Shared>>,
}

struct Pending {
    rkey: u32,
    /// None where it unbinds.
    to: Option<Bound>,
}

/// A type of memory window: [`Type1`] or [`Type2`].
pub trait WindowType: sealed::WindowType {}

/// Windows that `ibv_bind_mw(3)` binds.
#[derive(Clone, Copy, Debug)]
pub enum Type1 {}

/// Windows that work requests bind, and local or remote ones invalidate.
#[derive(Clone, Copy, Debug)]
pub enum Type2 {}

impl WindowType for Type1 {}
impl WindowType for Type2 {}

mod sealed {
    use rdma_sys::*;

    use crate::DeviceCapabilities;

    /// Not implementable elsewhere: which verbs a window is for depends on it.
    pub trait WindowType {
        const RAW: ibv_mw_type;
        const FEATURE: &'static str;
        /// Any of these.
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
    /// Allocates a memory window, of type [`Type1`] or [`Type2`], which opens nothing yet: `ibv_alloc_mw(3)`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) where the device has none of the type;
    /// [`Error::Verb`](crate::Error::Verb).
    #[doc(alias = "ibv_alloc_mw")]
    pub fn memory_window<K: WindowType>(&self) -> Result<MemoryWindow<K>> {
        let context = self.context();
        if !context.attributes().capabilities().intersects(K::NEEDS) {
            return Err(context.unsupported(K::FEATURE));
        }
        // SAFETY: the context is valid; every provider that has windows sets these, the shims do not look at the first.
        let (bind, dealloc) = unsafe { ((*context.as_raw()).ops.bind_mw, (*context.as_raw()).ops.dealloc_mw) };
        if bind.is_none() || dealloc.is_none() {
            return Err(context.unsupported(K::FEATURE));
        }
        // SAFETY: the domain is valid.
        let raw = check_ptr(|| unsafe { ibv_alloc_mw(self.as_raw(), K::RAW) })
            .map_err(|errno| context.feature_error("ibv_alloc_mw", K::FEATURE, errno))?;
        // SAFETY: just made.
        let rkey = unsafe { (*raw.as_ptr()).rkey };
        let made_from = MadeFrom { pending: None, bound: None, regions: Regions::default(), pd: self.clone() };
        // SAFETY: just allocated, and given to nobody else; nothing is made from it.
        let object = unsafe { Object::new(raw, made_from) };
        Ok(MemoryWindow { object, rkey, window_type: PhantomData })
    }
}

impl<K: WindowType> MemoryWindow<K> {
    /// The most different regions that one window can be bound to.
    pub const MAX_REGIONS: usize = Regions::MAX;

    /// The remote key: that of the last binding which was posted and not reverted. It opens nothing before that has completed.
    #[must_use]
    #[inline]
    pub fn rkey(&self) -> u32 {
        self.object.pending.as_ref().map_or(self.rkey, |pending| pending.rkey)
    }

    /// Whether a binding was posted that was neither confirmed nor reverted.
    #[must_use]
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.object.pending.is_some()
    }

    /// Whether it is bound to a region, was before the pending binding, or will be after it, by what the user has reported.
    #[must_use]
    pub fn is_bound(&self) -> bool {
        self.object.bound.is_some() || self.object.pending.as_ref().is_some_and(|pending| pending.to.is_some())
    }

    /// What was posted last has happened: its completion, or that of later work of the same send queue, was a success. Does nothing
    /// if nothing is pending.
    ///
    /// If it has not happened, peers may still reach the region that the window was bound to before, which stays registered.
    pub fn confirm(&mut self) {
        if let Some(Pending { rkey, to }) = self.object.pending.take() {
            self.set_rkey(rkey);
            self.object.bound = to;
        }
    }

    /// What was posted last has not happened: its completion was a failure, or its batch was dropped or refused. The key is that of
    /// before again. Does nothing if nothing is pending.
    pub fn revert(&mut self) {
        if self.object.pending.take().is_some() {
            self.set_rkey(self.rkey);
        }
    }

    /// Releases the regions that the window was bound to before: all but the one it is bound to and the one of a pending binding.
    ///
    /// # Safety
    ///
    /// Every call of [`MemoryWindow::confirm`], [`MemoryWindow::revert`] and [`MemoryWindow::invalidated`] so far was true, and no
    /// binding that was posted and then reverted can still be executed. Otherwise the window may stay bound to freed memory.
    pub unsafe fn release_former(&mut self) {
        let MadeFrom { pending, bound, regions, .. } = &mut *self.object;
        let needed = [bound.as_ref(), pending.as_ref().and_then(|pending| pending.to.as_ref())];
        regions.retain(|kept| needed.iter().flatten().any(|to| to.region.as_raw() == kept.as_raw()));
    }

    /// Refuses a binding to more than [`MemoryWindow::MAX_REGIONS`] regions.
    #[inline]
    pub(crate) fn check_room(&self, info: &BindInfo<'_>) -> Result<(), PostError> {
        if self.object.regions.have_room_for(info) {
            return Ok(());
        }
        Err(PostError::WindowRegions { max: Regions::MAX })
    }

    /// Keeps the region of a binding that the provider has or may have taken.
    #[inline]
    pub(crate) fn keep(&mut self, info: &BindInfo<'_>) {
        self.object.regions.keep(info);
    }

    /// `ibv_bind_mw(3)` leaves it to its caller to take its change back, and binding by a work request to make it.
    fn set_rkey(&mut self, rkey: u32) {
        self.rkey = rkey;
        // SAFETY: the window is valid and borrowed mutably; no batch is to be open that names it.
        unsafe { (*self.as_raw()).rkey = rkey }
    }

    #[inline]
    pub(crate) fn is_of(&self, pd: &ProtectionDomain) -> bool {
        self.object.pd.is_same(pd)
    }

    /// The domain that it is in.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.object.pd
    }

    /// The C object, valid while this window is.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_mw {
        self.object.as_raw()
    }

    /// Unbinds and deallocates it: `ibv_dealloc_mw(3)`. Dropping does the same and tells nobody.
    ///
    /// # Errors
    /// [`Error::Verb`](crate::Error::Verb): then it stays, and the regions that it may be bound to, until the process ends.
    #[doc(alias = "ibv_dealloc_mw")]
    pub fn deallocate(self) -> Result<()> {
        self.object.destroy().map(drop)
    }
}

impl MemoryWindow<Type1> {
    /// What ends the binding; `None` where there is none, that would be known.
    pub(crate) fn unbinding(&self) -> Option<ibv_mw_bind_info> {
        self.object.bound.as_ref().map(|bound| bound.region.nothing())
    }

    /// `ibv_bind_mw` has taken it, and set the new key.
    pub(crate) fn posted(&mut self, info: Option<&BindInfo<'_>>) -> u32 {
        // SAFETY: the window is valid.
        let rkey = unsafe { (*self.as_raw()).rkey };
        self.object.pending = Some(Pending { rkey, to: info.map(|info| Bound { region: info.keep(), _qp: None }) });
        rkey
    }
}

impl MemoryWindow<Type2> {
    /// Its key was invalidated: by work here that has completed, or by the peer, whose send then names the key in
    /// [`WorkCompletion::invalidated_rkey`](crate::WorkCompletion::invalidated_rkey). Confirms what is pending, and releases the
    /// queue pair.
    pub fn invalidated(&mut self) {
        self.confirm();
        self.object.bound = None;
    }

    /// The key of the next binding, which a work request then sets.
    #[inline]
    pub(crate) fn next_rkey(&self) -> u32 {
        ibv_inc_rkey(self.rkey)
    }

    /// A work request was added that binds it under that key.
    #[inline]
    pub(crate) fn added(&mut self, rkey: u32, info: &BindInfo<'_>, qp: &Arc<qp::Shared>) -> RemoteMemory {
        self.keep(info);
        let to = Some(Bound { region: info.keep(), _qp: Some(Arc::clone(qp)) });
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
