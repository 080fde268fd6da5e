//! Protection domains, parent domains and thread domains.
//!
//! Start with [`Context::alloc_pd`](crate::Context::alloc_pd). Memory, queue pairs and address handles of one
//! [`ProtectionDomain`] can be used together.

mod td;

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::check_ptr;
use crate::error::Verb;
use crate::object::{Object, Parents};
use crate::srq::SharedReceiveQueueBuilder;
use crate::{CompletionQueue, Context, Error, QueuePairBuilder, Result};

pub use td::ThreadDomain;

/// A protection domain, outside of which queue pairs and memory regions cannot be combined. Clones share it.
#[derive(Clone)]
pub struct ProtectionDomain {
    // Dropped before `inner`.
    parent: Option<Arc<Object<ParentMadeFrom>>>,
    /// The protection domain. For a parent domain, the one that it extends. Domains are compared by this.
    inner: Arc<Object<MadeFrom>>,
}

struct MadeFrom {
    context: Context,
    release: Release,
}

/// How a protection domain is released.
enum Release {
    Deallocate,
    /// Not at all: the owner deallocates it.
    Borrowed,
    /// By `ibv_unimport_pd`, which leaves it to the process that has allocated it.
    Unimport,
}

/// The objects that a parent domain extends. For its use of a thread domain, the caller of `with_thread_domain` is
/// responsible.
struct ParentMadeFrom {
    domain: Arc<Object<MadeFrom>>,
    td: Option<ThreadDomain>,
}

impl Parents for MadeFrom {
    type Raw = ibv_pd;

    const VERB: Verb = Verb::DeallocPd;

    fn context(&self) -> &Context {
        &self.context
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_pd) -> c_int {
        match self.release {
            Release::Borrowed => 0,
            // SAFETY: the caller's contract.
            Release::Deallocate => unsafe { (self.context.verbs().ibv_dealloc_pd)(raw) },
            Release::Unimport => {
                // SAFETY: the caller's contract.
                unsafe { (self.context.verbs().ibv_unimport_pd)(raw) };
                0
            }
        }
    }
}

impl Parents for ParentMadeFrom {
    type Raw = ibv_pd;

    const VERB: Verb = Verb::DeallocPd;

    fn context(&self) -> &Context {
        self.domain.context()
    }

    unsafe fn destroy(&mut self, raw: *mut ibv_pd) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { (self.context().verbs().ibv_dealloc_pd)(raw) }
    }
}

impl ProtectionDomain {
    pub(crate) fn new(context: &Context) -> Result<Self> {
        // SAFETY: the context is valid.
        let raw = check_ptr(|| unsafe { (context.verbs().ibv_alloc_pd)(context.as_raw()) })
            .map_err(|errno| Error::AllocPd { errno })?;
        // SAFETY: the domain was just allocated, and nobody else has it.
        Ok(unsafe { ProtectionDomain::of(context, raw, Release::Deallocate) })
    }

    /// # Safety
    /// `raw` must be a domain of `context`, not a parent domain. It must stay valid until this releases it by
    /// `release`.
    unsafe fn of(context: &Context, raw: NonNull<ibv_pd>, release: Release) -> Self {
        let made_from = MadeFrom { context: context.clone(), release };
        // SAFETY: the caller's contract. Each region, address handle, queue pair, shared receive queue and parent
        // domain in this domain holds an `Arc` of the domain.
        ProtectionDomain { parent: None, inner: Arc::new(unsafe { Object::new(raw, made_from) }) }
    }

    /// # Safety
    /// `raw` must be a domain that was imported to `context` and that nobody else releases.
    pub(crate) unsafe fn imported(context: &Context, raw: NonNull<ibv_pd>) -> ProtectionDomain {
        // SAFETY: the caller's contract.
        unsafe { ProtectionDomain::of(context, raw, Release::Unimport) }
    }

    /// Adopts a protection domain that other code has allocated. It is deallocated with the last object created in it.
    ///
    /// # Safety
    /// `raw` must be a domain of `context`, not a parent domain, that nobody else deallocates. Other objects created in
    /// it must be destroyed before it is deallocated.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_pd>) -> ProtectionDomain {
        // SAFETY: the caller's contract.
        unsafe { ProtectionDomain::of(context, raw, Release::Deallocate) }
    }

    /// Adopts a domain like [`ProtectionDomain::from_raw`], but does not deallocate it: for example a domain of
    /// librdmacm.
    ///
    /// # Safety
    /// Those of [`ProtectionDomain::from_raw`], except that other code deallocates the domain. It must not do so as
    /// long as this, or anything created in it, exists.
    #[must_use]
    pub unsafe fn from_raw_borrowed(context: &Context, raw: NonNull<ibv_pd>) -> ProtectionDomain {
        // SAFETY: the caller's contract.
        unsafe { ProtectionDomain::of(context, raw, Release::Borrowed) }
    }

    /// Adopts a parent domain of this domain that other code has allocated, for example with custom allocators.
    ///
    /// It is deallocated with the last object created in it.
    ///
    /// # Safety
    /// `raw` must have been allocated from this domain, which must not be a parent domain, and from `td`, or no thread
    /// domain with `None`. Nobody else may deallocate it. For the thread domain, the contract is that of
    /// [`ProtectionDomain::with_thread_domain`]. Its allocators must stay valid as long as it or anything created in
    /// it, and must be callable from any thread.
    #[must_use]
    pub unsafe fn parent_from_raw(&self, td: Option<&ThreadDomain>, raw: NonNull<ibv_pd>) -> ProtectionDomain {
        // SAFETY: the caller's contract.
        unsafe { self.parent_of(td, raw) }
    }

    /// Creates a parent domain, which can be used in place of this domain: `ibv_alloc_parent_domain(3)`.
    ///
    /// [`CompletionQueueBuilder::parent_domain`](crate::cq::CompletionQueueBuilder::parent_domain) requires one. To avoid
    /// the provider's locks, see [`ProtectionDomain::with_thread_domain`].
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::Verb`].
    #[doc(alias = "ibv_alloc_parent_domain")]
    pub fn parent_domain(&self) -> Result<ProtectionDomain> {
        self.alloc_parent(None, 0)
    }

    /// Creates a parent domain for memory that a confidential guest shares with its host: `ibv_alloc_parent_domain(3)`.
    ///
    /// Memory from [`ProtectionDomain::alloc_buf`] in this domain need not be protected from the host. The device then
    /// accesses it directly instead of through bounce buffers
    /// ([`DeviceCapabilities::CC_DMA_BOUNCE`](crate::device::DeviceCapabilities::CC_DMA_BOUNCE)). Outside of such a guest, this
    /// is an ordinary parent domain.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 64, or a device without parent domains; [`Error::Verb`]
    /// with `EINVAL` if the provider lacks support.
    ///
    /// # Safety
    /// The host can read and change such memory, and the queues that are created in the domain, at any time. Either
    /// trust the host not to change them unexpectedly. Or create no queue in the domain, and use its memory only in an
    /// [`ExposedRegion`](crate::ExposedRegion), not in a [`Buffer`](crate::Buffer).
    #[doc(alias = "ibv_alloc_parent_domain")]
    pub unsafe fn unprotected_domain(&self) -> Result<ProtectionDomain> {
        let context = self.context();
        // The flag was added together with this function. An older library may take it for another flag.
        if context.verbs().ibv_alloc_buf.is_none() {
            return Err(context.unsupported("unprotected memory of the provider (ibv_alloc_buf, rdma-core 64)"));
        }
        self.alloc_parent(None, IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC.0)
    }

    /// Creates a parent domain whose objects belong to a thread domain: `ibv_alloc_parent_domain(3)`.
    ///
    /// The provider omits the locks of objects in it. It may also give the objects of a thread domain their own
    /// doorbell page, without a lock.
    ///
    /// # Errors
    /// [`Error::ForeignContext`] if `td` belongs to another context; [`Error::Unsupported`]; [`Error::Verb`].
    ///
    /// # Safety
    /// No two threads may use objects in domains with this `td`, or a clone of it, at the same time. This applies to
    /// all of these objects together, not to each alone: queue pairs and both queues of each, completion queues, and
    /// regions. Creating, modifying or dropping an object is a use. So is dropping the last queue pair of a completion
    /// queue in the domain.
    #[doc(alias = "ibv_alloc_parent_domain")]
    pub unsafe fn with_thread_domain(&self, td: &ThreadDomain) -> Result<ProtectionDomain> {
        self.context().require_same(td.context(), "thread domain")?;
        self.alloc_parent(Some(td), 0)
    }

    /// Allocates a parent domain without custom allocators.
    fn alloc_parent(&self, td: Option<&ThreadDomain>, comp_mask: u32) -> Result<ProtectionDomain> {
        let mut attr = ibv_parent_domain_init_attr {
            // Not every provider accepts a parent domain here.
            pd: self.inner.as_raw(),
            td: td.map_or(std::ptr::null_mut(), ThreadDomain::as_raw),
            comp_mask,
            ..ibv_parent_domain_init_attr::zeroed()
        };
        let context = self.context();
        // SAFETY: the context and both domains are valid, and are kept below. `comp_mask` says that there are no
        // allocators.
        let raw = check_ptr(|| unsafe { ibv_alloc_parent_domain(context.as_raw(), &mut attr) })
            .map_err(|errno| context.feature_error(Verb::AllocParentDomain, "parent domains", errno))?;
        // SAFETY: it was just allocated from these domains, and nobody else has it.
        Ok(unsafe { self.parent_of(td, raw) })
    }

    /// # Safety
    /// Those of [`ProtectionDomain::parent_from_raw`].
    unsafe fn parent_of(&self, td: Option<&ThreadDomain>, raw: NonNull<ibv_pd>) -> ProtectionDomain {
        let inner = Arc::clone(&self.inner);
        let made_from = ParentMadeFrom { domain: Arc::clone(&inner), td: td.cloned() };
        // SAFETY: the caller's contract. Everything created in the domain holds an `Arc` of the domain.
        ProtectionDomain { parent: Some(Arc::new(unsafe { Object::new(raw, made_from) })), inner }
    }

    /// Whether it is a parent domain.
    #[must_use]
    pub fn is_parent(&self) -> bool {
        self.parent.is_some()
    }

    /// The thread domain of a parent domain that was created with one.
    #[must_use]
    pub fn thread_domain(&self) -> Option<&ThreadDomain> {
        self.parent.as_ref().and_then(|parent| parent.td.as_ref())
    }

    /// The context that the domain belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.inner.context()
    }

    /// Starts describing a queue pair, whose sends complete on `send_cq` and receives on `recv_cq`.
    ///
    /// Both may be the same queue. The type is a reliable connection unless set.
    pub fn queue_pair<'a>(
        &'a self,
        send_cq: &'a CompletionQueue,
        recv_cq: &'a CompletionQueue,
    ) -> QueuePairBuilder<'a> {
        QueuePairBuilder::new(self, send_cq, recv_cq)
    }

    /// Starts describing a shared receive queue of `max_wr` work requests, at least 1.
    pub fn shared_receive_queue(&self, max_wr: u32) -> SharedReceiveQueueBuilder<'_> {
        SharedReceiveQueueBuilder::new(self, max_wr)
    }

    /// Whether both are the same domain, or one extends the other. Then their objects can be combined.
    #[must_use]
    #[inline(always)]
    pub fn is_same(&self, other: &ProtectionDomain) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Identifies the domain as long as it or anything created from it exists; never 0.
    #[inline(always)]
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.inner).addr()
    }

    /// The kernel's handle, for [`Context::import_pd`]. A parent domain has the handle of the domain that it extends.
    #[must_use]
    pub fn handle(&self) -> u32 {
        // SAFETY: the domain is valid, and the field does not change.
        unsafe { (*self.inner.as_raw()).handle }
    }

    /// The C object, valid while this domain or anything created from it exists.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_pd {
        self.parent.as_ref().map_or(self.inner.as_raw(), |parent| parent.as_raw())
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProtectionDomain")
            .field("device", &self.context().device_name())
            .field("parent", &self.is_parent())
            .field("thread_domain", &self.thread_domain().is_some())
            .finish_non_exhaustive()
    }
}
