//! Completion queues that other code has created.

use std::ptr::NonNull;

use rdma_sys::*;

use super::{CompletionQueue, CompletionQueueBuilder, accessors};
use crate::id::CqId;
use crate::{Error, Result, WcFields};

impl CompletionQueueBuilder {
    /// Adopts a queue that other code has created as this builder says, for instance by calls of the vendor's. It is destroyed when
    /// it and the queue pairs that complete to it are gone.
    ///
    /// Set [`CompletionQueueBuilder::classic`] for a queue of `ibv_create_cq(3)`, which is polled by `ibv_poll_cq(3)`; without it
    /// `raw` is an extended one, such as `mlx5dv_create_cq` makes, which is polled by `ibv_start_poll`. The number of entries does
    /// not matter. Its `cq_context` is set anew, to what [`CompletionQueue::id`] returns.
    ///
    /// # Errors
    /// [`Error::WrongParent`] when it belongs to another context or channel than the builder; [`Error::CompletionFields`] for
    /// fields that a classic queue has not, or that an extended one has no function for; [`Error::Unsupported`] for an extended
    /// queue that lacks a function that all need. It then is as before, and the caller's.
    ///
    /// # Safety
    /// `raw` must be a completion queue that is this one's alone to destroy, to arm and to poll, and which nobody is polling now.
    /// The parent domain, if it was made in one, must be the builder's. Unless it is classic, `raw` must be the beginning of a
    /// `struct ibv_cq_ex` that was created with all [fields](CompletionQueueBuilder::fields) of the builder: their functions are
    /// called. Queue pairs of other code that complete to it must be gone before it, and its completions name only such work.
    /// Nobody may read an event of it, of its channel or such as [`AsyncEvents`](crate::AsyncEvents) takes, before this returns.
    pub unsafe fn from_raw(self, raw: NonNull<ibv_cq>) -> Result<CompletionQueue> {
        // SAFETY: the queue is valid, says the caller.
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
            // SAFETY: the queue is valid and, unless the builder says otherwise, an extended one, says the caller.
            unsafe { accessors::check(raw.as_ptr().cast(), self.fields) }
                .map_err(|lacking| lacking.into_error(&self.context))?;
        }
        let id = CqId::next();
        // SAFETY: as above, and nobody reads the field meanwhile, says the caller.
        unsafe { (*raw.as_ptr()).cq_context = id.to_context() };
        Ok(match self.classic {
            true => self.finish_classic((raw, id)),
            false => self.finish_extended((raw.cast(), id)),
        })
    }
}

impl CompletionQueue {
    /// The C object of an extended queue, valid while this queue is.
    #[must_use]
    pub fn as_raw_ex(&self) -> Option<NonNull<ibv_cq_ex>> {
        self.is_extended().then(|| self.raw.cast())
    }
}
