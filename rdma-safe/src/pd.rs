//! Protection domains, and parent domains, which extend them.

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::*;

use crate::errno::check_ptr;
use crate::object::{Object, Parents};
use crate::{CompletionQueue, Context, Error, QueuePairBuilder, Result, SharedReceiveQueueBuilder, ThreadDomain};

/// A protection domain: queue pairs and memory regions work together only within one. Clones share it.
#[derive(Clone)]
pub struct ProtectionDomain {
    // First, so that it goes first.
    parent: Option<Arc<Object<MadeOf>>>,
    /// Of a parent domain, the domain that it extends in the end: what domains are compared by.
    inner: Arc<Object<MadeFrom>>,
}

struct MadeFrom {
    context: Context,
    end: End,
}

/// How a domain ends that is no parent domain.
enum End {
    Deallocated,
    /// By others.
    Borrowed,
    /// Given back to whoever has allocated it.
    Unimported,
}

/// What a parent domain is made of. For what is made in one with a thread domain the caller of `with_thread_domain` answers.
struct MadeOf {
    domain: Arc<Object<MadeFrom>>,
    td: Option<ThreadDomain>,
}

impl Parents for MadeFrom {
    type Raw = ibv_pd;

    const VERB: &'static str = "ibv_dealloc_pd";

    fn context(&self) -> &Context {
        &self.context
    }

    unsafe fn destroy(&self, raw: *mut ibv_pd) -> c_int {
        match self.end {
            End::Borrowed => 0,
            // SAFETY: the caller's contract.
            End::Deallocated => unsafe { (self.context.verbs().ibv_dealloc_pd)(raw) },
            End::Unimported => {
                // SAFETY: as above.
                unsafe { (self.context.verbs().ibv_unimport_pd)(raw) };
                0
            }
        }
    }
}

impl Parents for MadeOf {
    type Raw = ibv_pd;

    const VERB: &'static str = "ibv_dealloc_pd";

    fn context(&self) -> &Context {
        self.domain.context()
    }

    unsafe fn destroy(&self, raw: *mut ibv_pd) -> c_int {
        // SAFETY: the caller's contract.
        unsafe { (self.context().verbs().ibv_dealloc_pd)(raw) }
    }
}

impl ProtectionDomain {
    pub(crate) fn new(context: &Context) -> Result<Self> {
        // SAFETY: the context is valid.
        let raw = check_ptr(|| unsafe { (context.verbs().ibv_alloc_pd)(context.as_raw()) })
            .map_err(|errno| Error::AllocPd { errno })?;
        // SAFETY: just allocated, and given to nobody else.
        Ok(unsafe { ProtectionDomain::of(context, raw, End::Deallocated) })
    }

    /// # Safety
    /// `raw` must be a domain of `context`, no parent domain, and be there until this ends it as `end` says.
    unsafe fn of(context: &Context, raw: NonNull<ibv_pd>, end: End) -> Self {
        let made_from = MadeFrom { context: context.clone(), end };
        // SAFETY: the caller's contract; every region, address handle, queue pair, shared receive queue and parent domain in this
        // domain holds an `Arc` of it.
        ProtectionDomain { parent: None, inner: Arc::new(unsafe { Object::new(raw, made_from) }) }
    }

    /// # Safety
    /// `raw` must be a domain that was imported to `context`, and be this one's alone to give back.
    pub(crate) unsafe fn imported(context: &Context, raw: NonNull<ibv_pd>) -> ProtectionDomain {
        // SAFETY: the caller's contract.
        unsafe { ProtectionDomain::of(context, raw, End::Unimported) }
    }

    /// Adopts a domain that other code has allocated. It is deallocated with the last object that is made in it.
    ///
    /// # Safety
    /// `raw` must be a domain of `context`, no parent domain, and be this one's alone to deallocate. Other objects made in it must
    /// be gone before that.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: NonNull<ibv_pd>) -> ProtectionDomain {
        // SAFETY: the caller's contract.
        unsafe { ProtectionDomain::of(context, raw, End::Deallocated) }
    }

    /// As [`ProtectionDomain::from_raw`], of a domain that stays its owner's, as those of librdmacm do: it is not deallocated.
    ///
    /// # Safety
    /// As there, but that others deallocate it: they must not as long as this, or anything made in it, is there.
    #[must_use]
    pub unsafe fn from_raw_borrowed(context: &Context, raw: NonNull<ibv_pd>) -> ProtectionDomain {
        // SAFETY: the caller's contract.
        unsafe { ProtectionDomain::of(context, raw, End::Borrowed) }
    }

    /// Adopts a parent domain of this one that other code has allocated, for instance with allocators of its own. It is deallocated
    /// with the last object that is made in it.
    ///
    /// # Safety
    /// `raw` must have been allocated from this domain, which is no parent domain, and from `td` or, with `None`, no thread domain;
    /// and be this one's alone to deallocate. For the thread domain the contract is that of
    /// [`ProtectionDomain::with_thread_domain`]. What allocators it has must stay as long as it or anything made in it is there,
    /// and serve any thread.
    #[must_use]
    pub unsafe fn parent_from_raw(&self, td: Option<&ThreadDomain>, raw: NonNull<ibv_pd>) -> ProtectionDomain {
        // SAFETY: the caller's contract.
        unsafe { self.parent_of(td, raw) }
    }

    /// Makes a parent domain, which stands for this one wherever a domain is asked for: `ibv_alloc_parent_domain(3)`.
    ///
    /// [`CompletionQueueBuilder::parent_domain`](crate::CompletionQueueBuilder::parent_domain) wants one. To spare the
    /// provider's locks see [`ProtectionDomain::with_thread_domain`].
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::Verb`].
    #[doc(alias = "ibv_alloc_parent_domain")]
    pub fn parent_domain(&self) -> Result<ProtectionDomain> {
        self.alloc_parent(None, 0)
    }

    /// Makes a parent domain whose memory of the provider ([`ProtectionDomain::alloc_buf`]) need not be protected from the host of
    /// a confidential guest: `ibv_alloc_parent_domain(3)`. The device then reaches it directly, and by copies otherwise
    /// ([`DeviceCapabilities::CC_DMA_BOUNCE`](crate::DeviceCapabilities::CC_DMA_BOUNCE)). Where there is no such guest it is a
    /// parent domain as any.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a library before rdma-core 64, or a device without parent domains; [`Error::Verb`], with
    /// `EINVAL` where the provider cannot.
    ///
    /// # Safety
    /// The host can read and change such memory, and queues that are made in the domain, at any time. Trust it to leave them alone
    /// where this process does not expect a change; or make no queue in the domain, and of the memory no
    /// [`Buffer`](crate::Buffer), but an [`ExposedRegion`](crate::ExposedRegion).
    #[doc(alias = "ibv_alloc_parent_domain")]
    pub unsafe fn unprotected_domain(&self) -> Result<ProtectionDomain> {
        let context = self.context();
        // The flag came with it; what does not know the flag may take it for another one.
        if context.verbs().ibv_alloc_buf.is_none() {
            return Err(context.unsupported("unprotected memory of the provider (ibv_alloc_buf, rdma-core 64)"));
        }
        self.alloc_parent(None, IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC.0)
    }

    /// Makes a parent domain whose objects belong to a thread domain: `ibv_alloc_parent_domain(3)`.
    ///
    /// The provider leaves out the locks of what is made in it, and may give the objects of one thread domain a way to the
    /// device of their own, unlocked, too.
    ///
    /// # Errors
    /// [`Error::ForeignContext`] when `td` belongs to another context; [`Error::Unsupported`]; [`Error::Verb`].
    ///
    /// # Safety
    /// No two threads may use objects that are made in domains with this `td`, or a clone of it, at the same time. That holds
    /// for all of them together and not for each alone: queue pairs, and both queues of each, completion queues, regions. To
    /// make, change or drop one is to use it; so is to drop the last queue pair of a completion queue that is in the domain.
    #[doc(alias = "ibv_alloc_parent_domain")]
    pub unsafe fn with_thread_domain(&self, td: &ThreadDomain) -> Result<ProtectionDomain> {
        self.context().require_same(td.context(), "thread domain")?;
        self.alloc_parent(Some(td), 0)
    }

    /// With a mask that asks for no allocators.
    fn alloc_parent(&self, td: Option<&ThreadDomain>, comp_mask: u32) -> Result<ProtectionDomain> {
        let mut attr = ibv_parent_domain_init_attr {
            // Not every provider takes a parent domain here.
            pd: self.inner.as_raw(),
            td: td.map_or(std::ptr::null_mut(), ThreadDomain::as_raw),
            comp_mask,
            ..ibv_parent_domain_init_attr::zeroed()
        };
        let context = self.context();
        // SAFETY: the context and both domains are valid, and kept below; a mask of zero says that there are no allocators.
        let raw = check_ptr(|| unsafe { ibv_alloc_parent_domain(context.as_raw(), &mut attr) })
            .map_err(|errno| context.feature_error("ibv_alloc_parent_domain", "parent domains", errno))?;
        // SAFETY: just allocated from these, and given to nobody else.
        Ok(unsafe { self.parent_of(td, raw) })
    }

    /// # Safety
    /// As [`ProtectionDomain::parent_from_raw`].
    unsafe fn parent_of(&self, td: Option<&ThreadDomain>, raw: NonNull<ibv_pd>) -> ProtectionDomain {
        let inner = Arc::clone(&self.inner);
        let made_of = MadeOf { domain: Arc::clone(&inner), td: td.cloned() };
        // SAFETY: the caller's contract; what is made in it holds an `Arc` of it.
        ProtectionDomain { parent: Some(Arc::new(unsafe { Object::new(raw, made_of) })), inner }
    }

    /// Whether it is a parent domain.
    #[must_use]
    pub fn is_parent(&self) -> bool {
        self.parent.is_some()
    }

    /// The thread domain of a parent domain that was made with one.
    #[must_use]
    pub fn thread_domain(&self) -> Option<&ThreadDomain> {
        self.parent.as_ref().and_then(|parent| parent.td.as_ref())
    }

    /// The device that the domain belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.inner.context()
    }

    /// Starts describing a queue pair, of a reliable connection unless its type is set, whose sends complete on `send_cq` and
    /// receives on `recv_cq`. The two may be the same queue.
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

    /// Whether the two are the same domain, or one extends the other: objects of both work together.
    #[must_use]
    #[inline(always)]
    pub fn is_same(&self, other: &ProtectionDomain) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Tells it from others, as long as it or anything made from it exists; never 0.
    #[inline(always)]
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.inner).addr()
    }

    /// The kernel's handle, by which it can be imported: [`Context::import_pd`]. Of a parent domain, that of what it extends.
    #[must_use]
    pub fn handle(&self) -> u32 {
        // SAFETY: the domain is valid, and the field does not change.
        unsafe { (*self.inner.as_raw()).handle }
    }

    /// The C object, valid while this domain or anything made from it is.
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
