//! The send queue for posting through a known interface.

use std::marker::PhantomData;

use super::super::{PostError, SendOps};
use super::batch::QueueInfo;
use super::{READY, SendBatch, SendState};
use crate::branch::rare;
use crate::interface::{Any, Interface, Known};

/// The send queue of a queue pair, borrowed separately by [`QueuePair::split`](crate::QueuePair::split).
///
/// ```no_run
/// # use rdma_safe::{QueuePair, Remote, Sge, WorkRequest};
/// use rdma_safe::interface::Extended;
///
/// # fn example(qp: &mut QueuePair, memory: Sge, remote: Remote) -> Result<(), Box<dyn std::error::Error>> {
/// let (sends, _) = qp.split();
/// let mut sends = sends.with_interface::<Extended>().ok_or("the provider has no ibv_wr_*")?;
/// for id in 0..1000 {
///     // SAFETY: `memory` stays registered and is not written until the work has completed.
///     sends.post(|batch| unsafe { batch.write(WorkRequest::new(id).signaled(), remote, memory) })?;
///     // … take its completion
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SendQueue<'q, I: Interface = Any> {
    /// Copy of [`SendState::info`], so that it need not be read again for each post.
    ///
    /// `usable` is empty if the state of the queue pair does not allow sends. Only `modify` and similar methods change
    /// that, and they would have to borrow the queue pair.
    info: QueueInfo,
    state: &'q mut SendState,
    interface: PhantomData<I>,
}

// SAFETY: the pointers belong to `state`, which is `Send`: the C object may be used from any thread (see `Context`),
// and the mutable borrow of the queue pair moves along. `post` starts and ends a batch in one call. A batch of `batch`
// borrows this handle, which then stays in its thread. If that batch is forgotten, the next user of the queue ends it,
// perhaps in another thread, as for a `QueuePair` that is moved.
unsafe impl<I: Interface> Send for SendQueue<'_, I> {}
// SAFETY: a shared reference only allows `Debug`, which prints the pointers without following them and immutable fields
// of `state`.
unsafe impl<I: Interface> Sync for SendQueue<'_, I> {}

impl<'q> SendQueue<'q> {
    pub(crate) fn new(state: &'q mut SendState) -> Self {
        SendQueue { info: state.info(SendOps::empty()), state, interface: PhantomData }
    }

    pub(super) fn state(&mut self) -> &mut SendState {
        self.state
    }

    /// Starts a batch: [`QueuePair::send_batch`](crate::QueuePair::send_batch).
    ///
    /// # Errors
    /// Those of [`QueuePair::send_batch`](crate::QueuePair::send_batch).
    #[inline(always)]
    pub fn batch(&mut self) -> Result<SendBatch<'_>, PostError> {
        self.state.batch()
    }

    /// Fixes the interface at compile time: [`Extended`](crate::interface::Extended) for `ibv_wr_*`, or
    /// [`Classic`](crate::interface::Classic) for `ibv_post_send(3)`.
    ///
    /// `None` if the queue pair uses the other interface. With a fixed interface, [`SendQueue::post`] costs less than a batch of
    /// [`SendQueue::batch`], which checks the interface, the state of the queue pair and forgotten batches each time.
    #[doc(alias = "ibv_wr_start")]
    #[doc(alias = "ibv_post_send")]
    #[must_use]
    #[inline]
    pub fn with_interface<I: Known>(self) -> Option<SendQueue<'q, I>> {
        if I::EXTENDED == Some(self.state.is_extended()) { Some(self.into_known()) } else { None }
    }

    // Not inlined: it runs once before a loop, and would take registers from the loop.
    #[inline(never)]
    fn into_known<I: Known>(self) -> SendQueue<'q, I> {
        let state = self.state;
        // Aborts a batch that was forgotten.
        state.abort();
        let usable = if *state.gate.get_mut() == READY { state.enabled } else { SendOps::empty() };
        SendQueue { info: state.info(usable), state, interface: PhantomData }
    }
}

impl<I: Known> SendQueue<'_, I> {
    /// Posts the work that `fill` adds to a batch; nothing if `fill` fails or panics.
    ///
    /// The batch cannot be forgotten, and the state of the queue pair cannot change while it is borrowed. So nothing
    /// needs to be checked or recorded per post.
    ///
    /// # Errors
    /// [`PostError::NotReady`] unless the queue pair was brought to RTS; the error of `fill`; those of
    /// [`SendBatch::post`].
    #[doc(alias = "ibv_wr_start")]
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post(&mut self, fill: impl FnOnce(&mut SendBatch<'_, I>) -> Result<(), PostError>) -> Result<(), PostError> {
        // Loop-invariant, so the compiler can test it once for a whole loop.
        if self.info.usable.is_empty() {
            rare();
            return Err(PostError::NotReady { state: self.state.core.state() });
        }
        // SAFETY: no batch is open. `into_known` aborted a forgotten one when it made this queue, which is borrowed
        // mutably, and this method ends each batch that it starts. `with_interface`, through which all such queues are
        // made, has checked the interface. `info` is what `into_known` read from this queue. The state allows sends,
        // since `usable` is not empty.
        let mut batch = unsafe {
            self.state.open::<I>(self.info.target);
            SendBatch::new(self.state, self.info)
        };
        fill(&mut batch)?;
        batch.complete()
    }
}
