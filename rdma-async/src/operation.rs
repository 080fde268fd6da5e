//! Operations in progress.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll};

use rdma_safe::{Buffer, Completion, Gather, Work};

use crate::connection::Inner;
use crate::core::{Slot, Ticket};
use crate::driver::member::Ended;
use crate::driver::state::Posted;
use crate::{Error, Failed, Sharing};

/// An operation of a [`Connection`](crate::Connection). Its result is its memory: a [`Buffer`] or a [`Gather`].
///
/// It is posted when the future is first polled. Dropped before that, or while it waits for room, it is not posted. Dropped
/// later, it goes on without the future, and its memory is dropped when the device no longer uses it.
///
/// # Errors
/// [`Failed`], with the memory unless the device may still use it.
#[must_use = "a future does nothing unless it is polled"]
pub struct Operation<'c, S: Sharing, M> {
    connection: &'c Inner<S>,
    state: State,
    memory: PhantomData<fn() -> M>,
}

enum State {
    New(Work<'static>),
    /// Waits for room in the send queue.
    Waiting(Work<'static>, Ticket),
    InFlight(Slot),
    Finished,
}

/// The memory of an operation.
pub trait Memory: sealed::Sealed + Sized {
    /// The memory of completed work; `None` if it had other memory.
    #[doc(hidden)]
    fn of(completion: Completion) -> Option<Self>;
}

impl Memory for Buffer {
    #[inline(always)]
    fn of(completion: Completion) -> Option<Self> {
        completion.buffer
    }
}

impl Memory for Gather {
    #[inline(always)]
    fn of(completion: Completion) -> Option<Self> {
        completion.list
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for rdma_safe::Buffer {}
    impl Sealed for rdma_safe::Gather {}
}

impl<'c, S: Sharing, M> Operation<'c, S, M> {
    #[inline(always)]
    pub(crate) fn new(connection: &'c Inner<S>, work: Work<'static>) -> Self {
        Operation { connection, state: State::New(work), memory: PhantomData }
    }

    /// Waits only until the operation is posted. Its memory is dropped when it has completed.
    ///
    /// For messages whose arrival the peer confirms by a reply: this saves the wake-up for the completion. If the operation
    /// fails later, the connection fails.
    #[inline(always)]
    pub fn posted(self) -> Posting<'c, S, M> {
        Posting(self)
    }
}

impl<S: Sharing, M: Memory> Future for Operation<'_, S, M> {
    type Output = Result<M, Failed>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Inner { queue, key, .. } = self.connection;
        if let State::InFlight(slot) = self.state {
            return match queue.take(slot, context) {
                None => Poll::Pending,
                Some(taken) => {
                    self.state = State::Finished;
                    let Some(completion) = taken else { return Poll::Ready(Err(Failed::new(queue.removed().error()))) };
                    Poll::Ready(result(completion))
                }
            };
        }
        let posted = match mem::replace(&mut self.state, State::Finished) {
            State::New(work) => queue.post(*key, work, true, context),
            State::Waiting(work, ticket) => queue.post_waiting(*key, work, ticket, true, context),
            State::InFlight(_) | State::Finished => return Poll::Pending,
        };
        match posted {
            Posted::InFlight(slot) => {
                self.state = State::InFlight(slot);
                Poll::Pending
            }
            Posted::Full(work, ticket) => {
                self.state = State::Waiting(work, ticket);
                Poll::Pending
            }
            Posted::Failed(failed) => Poll::Ready(Err(failed)),
        }
    }
}

/// The future of [`Operation::posted`].
///
/// # Errors
/// [`Failed`], with the memory.
#[must_use = "a future does nothing unless it is polled"]
#[derive(Debug)]
pub struct Posting<'c, S: Sharing, M>(Operation<'c, S, M>);

impl<S: Sharing, M> Future for Posting<'_, S, M> {
    type Output = Result<(), Failed>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Inner { queue, key, .. } = self.0.connection;
        let posted = match mem::replace(&mut self.0.state, State::Finished) {
            State::New(work) => queue.post(*key, work, false, context),
            State::Waiting(work, ticket) => queue.post_waiting(*key, work, ticket, false, context),
            State::InFlight(_) | State::Finished => return Poll::Pending,
        };
        match posted {
            Posted::InFlight(_) => Poll::Ready(Ok(())),
            Posted::Full(work, ticket) => {
                self.0.state = State::Waiting(work, ticket);
                Poll::Pending
            }
            Posted::Failed(failed) => Poll::Ready(Err(failed)),
        }
    }
}

/// The result of a completed operation.
#[inline(always)]
fn result<M: Memory>(completion: Completion) -> Result<M, Failed> {
    match completion.ok() {
        Ok(completion) => M::of(completion).ok_or_else(|| Failed::new(Error::Closed)),
        Err(failed) => {
            let error = Ended::of(&failed).error();
            Err(Failed::of_work(failed, error))
        }
    }
}

impl<S: Sharing, M> Drop for Operation<'_, S, M> {
    #[inline]
    fn drop(&mut self) {
        if !matches!(self.state, State::Finished) {
            self.cancel();
        }
    }
}

impl<S: Sharing, M> Operation<'_, S, M> {
    #[cold]
    #[inline(never)]
    fn cancel(&mut self) {
        let Inner { queue, key, .. } = self.connection;
        match mem::replace(&mut self.state, State::Finished) {
            State::Waiting(work, ticket) => {
                queue.leave_room(*key, ticket);
                drop(work);
            }
            State::InFlight(slot) => queue.abandon(slot),
            State::New(_) | State::Finished => {}
        }
    }
}

impl<S: Sharing, M> Unpin for Operation<'_, S, M> {}

impl<S: Sharing, M> fmt::Debug for Operation<'_, S, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::New(_) => "not posted",
            State::Waiting(..) => "waits for room",
            State::InFlight(_) => "in flight",
            State::Finished => "finished",
        };
        f.debug_struct("Operation").field("state", &state).finish_non_exhaustive()
    }
}
