//! Adopting completion queues that other code has created.

use std::ptr::NonNull;

use rdma_sys::*;

use super::{CompletionQueue, CompletionQueueBuilder, accessors};
use crate::id::CqId;
use crate::{Error, Result, WcFields};

impl CompletionQueueBuilder {
    /// Adopts a completion queue that other code has created, for example with vendor calls.
    ///
    /// The builder must describe the queue. With [`CompletionQueueBuilder::classic`] it must be a queue of
    /// `ibv_create_cq(3)`, which is polled by `ibv_poll_cq(3)`. Otherwise `raw` must be an extended queue, for example
    /// of `mlx5dv_create_cq`, which is polled by `ibv_start_poll`. The builder's number of entries is ignored. The
    /// `cq_context` is overwritten with the value of [`CompletionQueue::id`].
    ///
    /// The queue is destroyed when it and all queue pairs that complete to it were dropped.
    ///
    /// # Errors
    /// [`Error::WrongParent`] if it belongs to another context or channel than the builder; [`Error::CompletionFields`]
    /// for fields that a classic queue does not have, or that an extended one has no function for;
    /// [`Error::Unsupported`] if an extended queue lacks a function that polling needs. On an error the caller keeps
    /// the queue, unchanged.
    ///
    /// # Safety
    /// `raw` must be a completion queue that nobody else destroys, arms or polls. If it was created in a parent domain,
    /// that must be the builder's. Unless the builder is classic, `raw` must be the start of a `struct ibv_cq_ex` that
    /// was created with all [fields](CompletionQueueBuilder::fields) of the builder, because their functions are
    /// called. Queue pairs of other code that complete to it must be destroyed before it. Its completions must only
    /// name the work of such queue pairs. Nobody may read an event of it before this returns, from its channel or for
    /// example with [`AsyncEvents`](crate::AsyncEvents).
    pub unsafe fn from_raw(self, raw: NonNull<ibv_cq>) -> Result<CompletionQueue> {
        // SAFETY: the caller guarantees that the queue is valid.
        let (context, channel) = unsafe { ((*raw.as_ptr()).context, (*raw.as_ptr()).channel) };
        for (object, fits) in
            [("context", context == self.context.as_raw()), ("completion channel", channel == self.channel_ptr())]
        {
            if !fits {
                return Err(Error::WrongParent { object });
            }
        }
        if self.classic && !WcFields::STANDARD.contains(self.fields) {
            return Err(self.fields_error());
        }
        if !self.classic {
            // SAFETY: the caller guarantees that the queue is valid, and an extended one unless the builder is classic.
            unsafe { accessors::check(raw.as_ptr().cast(), self.fields) }
                .map_err(|missing| missing.into_error(&self.context))?;
        }
        let id = CqId::next();
        // SAFETY: the queue is valid, and the caller guarantees that nobody reads the field meanwhile.
        unsafe { (*raw.as_ptr()).cq_context = id.to_context() };
        Ok(match self.classic {
            true => self.finish_classic((raw, id)),
            false => self.finish_extended((raw.cast(), id)),
        })
    }
}

impl CompletionQueue {
    /// The C object of an extended queue, valid while this queue exists.
    #[must_use]
    pub fn as_raw_ex(&self) -> Option<NonNull<ibv_cq_ex>> {
        self.is_extended().then(|| self.raw.cast())
    }
}
