//! Creating completion queues.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::sync::{Arc, Mutex};

use rdma_sys::*;

use super::accessors::{self, MissingFunctions};
use super::{ClassicBatch, CompletionQueue, Mode, Parents, Shared, WcFields};
use crate::device::Quirks;
use crate::errno::check_ptr;
use crate::id::CqId;
use crate::object::Object;
use crate::{CompletionChannel, Context, Errno, Error, ProtectionDomain, Result};

/// Describes a completion queue: `ibv_create_cq_ex(3)`, or `ibv_create_cq(3)` if the provider lacks it.
///
/// Made by [`Context::completion_queue`].
#[derive(Clone, Debug)]
#[must_use = "a builder creates nothing until `build`"]
pub struct CompletionQueueBuilder {
    pub(super) context: Context,
    pub(super) entries: u32,
    pub(super) fields: WcFields,
    pub(super) vector: u32,
    pub(super) channel: Option<CompletionChannel>,
    pub(super) classic: bool,
    pub(super) domain: Option<ProtectionDomain>,
}

impl CompletionQueueBuilder {
    pub(crate) fn new(context: &Context, entries: u32) -> Self {
        CompletionQueueBuilder {
            context: context.clone(),
            entries,
            fields: WcFields::STANDARD,
            vector: 0,
            channel: None,
            classic: false,
            domain: None,
        }
    }

    /// Fields that completions must have; [`WcFields::STANDARD`] unless set. Fewer fields can be faster on some
    /// devices.
    pub fn fields(mut self, fields: WcFields) -> Self {
        self.fields = fields;
        self
    }

    /// Reports events through `channel` when the queue is armed.
    pub fn channel(mut self, channel: &CompletionChannel) -> Self {
        self.channel = Some(channel.clone());
        self
    }

    /// Completion vector, which selects the interrupt of the events; 0 unless set, below
    /// [`Context::completion_vectors`].
    pub fn vector(mut self, vector: u32) -> Self {
        self.vector = vector;
        self
    }

    /// Uses `ibv_create_cq` and `ibv_poll_cq` even if the extended interface is available; false unless set.
    pub fn classic(mut self, classic: bool) -> Self {
        self.classic = classic;
        self
    }

    /// Creates the queue in a parent domain. If that has a thread domain, the queue needs no lock.
    pub fn parent_domain(mut self, domain: &ProtectionDomain) -> Self {
        self.domain = Some(domain.clone());
        self
    }

    /// Creates the queue.
    ///
    /// # Errors
    /// [`Error::ForeignContext`] if the channel or the domain belongs to another context; [`Error::NotParentDomain`] if
    /// the domain is not a parent domain; [`Error::Unsupported`] if the provider cannot create queues in a parent
    /// domain; [`Error::CreateCompletionQueue`] if the number of entries or the vector exceeds the device's limits;
    /// [`Error::CompletionFields`] if the device cannot report the fields, or accepts them but has no function to read
    /// them.
    #[doc(alias = "ibv_create_cq_ex")]
    #[doc(alias = "ibv_create_cq")]
    pub fn build(self) -> Result<CompletionQueue> {
        self.context.require_own()?;
        if let Some(channel) = &self.channel {
            self.context.require_same(channel.context(), "completion channel")?;
        }
        if let Some(domain) = &self.domain {
            return self.build_in(domain);
        }
        if !self.classic {
            match self.create_extended() {
                Ok(raw) => match self.require_accessors(raw) {
                    Ok(()) => return Ok(self.finish_extended(raw)),
                    Err(_) if WcFields::STANDARD.contains(self.fields) => {}
                    Err(missing) => return Err(missing.into_error(&self.context)),
                },
                // Not all providers have extended queues, or all fields in them, so the classic call is tried next.
                // Some providers report EINVAL for a field that they do not know. If EINVAL has another reason, the
                // classic call fails with it, too.
                Err(errno)
                    if WcFields::STANDARD.contains(self.fields)
                        && (errno.is_unsupported() || errno.0 == libc::EINVAL) => {}
                Err(errno) if errno.is_unsupported() || errno.0 == libc::EINVAL && self.is_within_limits() => {
                    return Err(self.fields_error());
                }
                Err(errno) => return Err(self.error(errno)),
            }
        }
        if !WcFields::STANDARD.contains(self.fields) {
            return Err(self.fields_error());
        }
        let raw = self.create_classic().map_err(|errno| self.error(errno))?;
        Ok(self.finish_classic(raw))
    }

    /// Creates the queue in a parent domain. The classic interface cannot do this, so there is no fallback.
    fn build_in(&self, domain: &ProtectionDomain) -> Result<CompletionQueue> {
        self.context.require_same(domain.context(), "parent domain")?;
        if !domain.is_parent() {
            return Err(Error::NotParentDomain);
        }
        let unsupported = || self.context.unsupported("completion queues in a parent domain");
        if self.classic {
            return Err(self.context.unsupported("classic completion queues in a parent domain"));
        }
        match self.create_extended() {
            Ok(raw) => match self.require_accessors(raw) {
                Ok(()) => Ok(self.clone().finish_extended(raw)),
                Err(missing) => Err(missing.into_error(&self.context)),
            },
            Err(errno) if errno.is_unsupported() || errno.0 == libc::EINVAL && self.is_within_limits() => {
                Err(unsupported())
            }
            Err(errno) => Err(self.error(errno)),
        }
    }

    pub(super) fn fields_error(&self) -> Error {
        Error::CompletionFields { fields: self.fields - WcFields::STANDARD }
    }

    fn is_within_limits(&self) -> bool {
        let max = self.context.attributes().max_cqe();
        (1..=max).contains(&self.entries) && self.vector < self.context.completion_vectors()
    }

    fn create_extended(&self) -> Result<(NonNull<ibv_cq_ex>, CqId), Errno> {
        let id = CqId::next();
        let mut attr = ibv_cq_init_attr_ex {
            cqe: self.entries,
            cq_context: id.to_context(),
            channel: self.channel_ptr(),
            comp_vector: self.vector,
            wc_flags: self.fields.bits(),
            comp_mask: self.domain.as_ref().map_or(0, |_| IBV_CQ_INIT_ATTR_MASK_PD.0),
            flags: 0,
            parent_domain: self.domain.as_ref().map_or(std::ptr::null_mut(), ProtectionDomain::as_raw),
        };
        // SAFETY: the context, the channel and the domain are valid, and `attr` is valid during the call.
        check_ptr(|| unsafe { ibv_create_cq_ex(self.context.as_raw(), &mut attr) }).map(|raw| (raw, id))
    }

    /// Checks the functions of a new queue, and destroys it if one is missing.
    fn require_accessors(&self, raw: (NonNull<ibv_cq_ex>, CqId)) -> Result<(), MissingFunctions> {
        // SAFETY: the queue was just created by the extended call.
        unsafe { accessors::check(raw.0.as_ptr(), self.fields) }
            .inspect_err(|_| drop(self.clone().finish_extended(raw)))
    }

    fn create_classic(&self) -> Result<(NonNull<ibv_cq>, CqId), Errno> {
        let id = CqId::next();
        let (Ok(entries), Ok(vector)) = (i32::try_from(self.entries), i32::try_from(self.vector)) else {
            return Err(Errno(libc::EINVAL));
        };
        // SAFETY: the context and the channel are valid.
        check_ptr(|| unsafe {
            (self.context.verbs().ibv_create_cq)(
                self.context.as_raw(),
                entries,
                id.to_context(),
                self.channel_ptr(),
                vector,
            )
        })
        .map(|raw| (raw, id))
    }

    pub(super) fn finish_extended(self, (raw, id): (NonNull<ibv_cq_ex>, CqId)) -> CompletionQueue {
        let one_per_poll = self.context.quirks().contains(Quirks::ONE_COMPLETION_PER_POLL);
        let fields = self.fields;
        // SAFETY: the queue is valid. An extended queue starts with the fields of a classic one.
        let cq = unsafe { NonNull::new_unchecked(ibv_cq_ex_to_cq(raw.as_ptr())) };
        CompletionQueue {
            raw: cq,
            mode: Mode::Extended,
            fields,
            one_per_poll,
            batch: ClassicBatch::empty(),
            shared: self.share(cq, id),
        }
    }

    pub(super) fn finish_classic(self, (raw, id): (NonNull<ibv_cq>, CqId)) -> CompletionQueue {
        CompletionQueue {
            raw,
            mode: Mode::Classic,
            fields: WcFields::STANDARD,
            one_per_poll: false,
            batch: ClassicBatch::new(),
            shared: self.share(raw, id),
        }
    }

    fn share(self, raw: NonNull<ibv_cq>, id: CqId) -> Arc<Shared> {
        // SAFETY: the queue is valid, and the field is set at creation.
        let capacity = unsafe { (*raw.as_ptr()).cqe }.max(0) as u32;
        let parents = Parents { context: self.context, channel: self.channel, _domain: self.domain };
        Arc::new(Shared {
            // SAFETY: the queue was created in or adopted with these parents. Queue pairs and all other objects that
            // complete to it hold an `Arc` of this.
            object: unsafe { Object::new(raw, parents) },
            id,
            capacity: AtomicU32::new(capacity),
            polling: AtomicUsize::new(0),
            deferred: Mutex::default(),
        })
    }

    pub(super) fn channel_ptr(&self) -> *mut ibv_comp_channel {
        self.channel.as_ref().map_or(std::ptr::null_mut(), CompletionChannel::as_raw)
    }

    fn error(&self, errno: Errno) -> Error {
        Error::CreateCompletionQueue {
            entries: self.entries,
            max_entries: self.context.attributes().max_cqe(),
            vectors: self.context.completion_vectors(),
            errno,
        }
    }
}
