//! Operations in progress.

use std::fmt;
use std::future::Future;
use std::mem::{self, ManuallyDrop};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rdma_safe::Buffer;

use crate::connection::Inner;
use crate::core::{Slot, Ticket};
use crate::driver::member::Ended;
use crate::driver::queue::Queue;
use crate::driver::state::{Done, Unposted};
use crate::{Error, Failed, Request, Sharing, coop};

/// An operation of a [`Connection`](crate::Connection) or of [`Datagrams`](crate::Datagrams). Its result is its memory.
///
/// It is posted when the future is first polled. Dropped before that, or while it waits for room, it is not posted. Dropped
/// later, it goes on without the future, and its memory is dropped when the device no longer uses it.
///
/// A send, write or read of one buffer may be ready at the first poll: it looks for its completion itself, as long as looks find
/// some. A look that finds other completions wakes the tasks that wait for them. So a waker may run while an operation is polled.
/// Code that polls while it holds a lock which a waker takes uses an [`OwnedOperation`], which does not look.
///
/// # Errors
/// [`Failed`], with the memory unless the device may still use it.
#[must_use = "a future does nothing unless it is polled"]
pub struct Operation<'c, S: Sharing, R: Request> {
    connection: &'c Inner<S>,
    progress: Progress<R>,
}

/// An [`Operation`] that borrows nothing, for futures and protocols that store their operations. It leaves its completion to the
/// driver.
///
/// It counts as a handle of its connection.
///
/// # Errors
/// Like [`Operation`].
#[must_use = "a future does nothing unless it is polled"]
pub struct OwnedOperation<S: Sharing, R: Request> {
    connection: S::Rc<Inner<S>>,
    progress: Progress<R>,
}

/// How far an operation is.
struct Progress<R> {
    /// A step is taken out before the next one is stored. `drop` handles the last.
    step: ManuallyDrop<Step<R>>,
}

pub(crate) enum Step<R> {
    New(R),
    /// Waits for room in the send queue.
    Waiting(R, Ticket),
    InFlight(Slot),
    /// It cannot be posted.
    Refused(Box<Failed>),
    Finished,
}

impl<'c, S: Sharing, R: Request> Operation<'c, S, R> {
    #[inline(always)]
    pub(crate) fn new(connection: &'c Inner<S>, request: R) -> Self {
        Operation { connection, progress: Progress::new(Step::New(request)) }
    }

    /// An operation that fails when it is polled.
    pub(crate) fn refused(connection: &'c Inner<S>, failed: Failed) -> Self {
        Operation { connection, progress: Progress::new(Step::Refused(Box::new(failed))) }
    }

    /// Waits only until the operation is posted. Its memory is dropped when it has completed.
    ///
    /// For messages whose arrival the peer confirms by a reply: this saves the wake-up for the completion. If the operation
    /// fails later, the connection fails.
    #[inline(always)]
    pub fn posted(self) -> Posting<'c, S, R> {
        Posting(self)
    }
}

impl<S: Sharing, R: Request> OwnedOperation<S, R> {
    pub(crate) fn new(connection: S::Rc<Inner<S>>, request: R) -> Self {
        OwnedOperation { connection, progress: Progress::new(Step::New(request)) }
    }
}

impl<S: Sharing, R: Request> Future for Operation<'_, S, R> {
    type Output = Result<R::Memory, Failed>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let connection = self.connection;
        if R::IS_TRANSFER && matches!(*self.progress.step, Step::New(_)) && connection.queue.looks.take() {
            if let Some(buffer) = self.progress.post_and_look(connection) {
                return Poll::Ready(R::memory(Done::Buffer(buffer)).map_err(|done| failed(&connection.queue, done)));
            }
            if matches!(*self.progress.step, Step::New(_) | Step::Refused(_)) {
                return self.progress.poll_slowly(connection, context);
            }
        }
        self.progress.poll(connection, context)
    }
}

impl<S: Sharing, R: Request> Future for OwnedOperation<S, R> {
    type Output = Result<R::Memory, Failed>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        this.progress.poll(&this.connection, context)
    }
}

/// The future of [`Operation::posted`].
///
/// # Errors
/// [`Failed`], with the memory.
#[must_use = "a future does nothing unless it is polled"]
pub struct Posting<'c, S: Sharing, R: Request>(Operation<'c, S, R>);

impl<S: Sharing, R: Request> Future for Posting<'_, S, R> {
    type Output = Result<(), Failed>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let coop = ready!(coop::poll_proceed(context));
        let connection = self.0.connection;
        match ready!(self.0.progress.post(connection, false, context)) {
            Ok(_) => {
                coop.made_progress();
                Poll::Ready(Ok(()))
            }
            Err(failed) => Poll::Ready(Err(failed)),
        }
    }
}

/// The error of an operation that has not succeeded.
#[cold]
#[inline(never)]
pub(crate) fn failed<S: Sharing>(queue: &Queue<S>, done: Done) -> Failed {
    match done {
        Done::Failed(failed) => {
            let error = Ended::of(&failed).error();
            Failed::of_work(failed, error)
        }
        Done::Removed => Failed::new(queue.removed().error()),
        // An operation returns the kind of memory that it has posted.
        Done::Buffer(_) | Done::Gather(_) => Failed::new(Error::Closed),
    }
}

impl<S: Sharing, R: Request> Drop for Operation<'_, S, R> {
    #[inline]
    fn drop(&mut self) {
        self.progress.end(self.connection);
    }
}

impl<S: Sharing, R: Request> Drop for OwnedOperation<S, R> {
    fn drop(&mut self) {
        self.progress.end(&self.connection);
    }
}

impl<R: Request> Progress<R> {
    #[inline(always)]
    fn new(step: Step<R>) -> Self {
        Progress { step: ManuallyDrop::new(step) }
    }

    #[inline(always)]
    fn poll<S: Sharing>(&mut self, connection: &Inner<S>, context: &Context<'_>) -> Poll<Result<R::Memory, Failed>> {
        if let Step::InFlight(slot) = *self.step {
            let queue = &connection.queue;
            return match queue.take(slot, context) {
                None => Poll::Pending,
                Some(done) => {
                    self.step = ManuallyDrop::new(Step::Finished);
                    Poll::Ready(R::memory(done).map_err(|done| failed(queue, done)))
                }
            };
        }
        match ready!(self.post(connection, true, context)) {
            Ok(slot) => {
                self.step = ManuallyDrop::new(Step::InFlight(slot));
                Poll::Pending
            }
            Err(failed) => Poll::Ready(Err(failed)),
        }
    }

    /// There is no room, or posting has failed.
    #[cold]
    #[inline(never)]
    fn poll_slowly<S: Sharing>(
        &mut self,
        connection: &Inner<S>,
        context: &Context<'_>,
    ) -> Poll<Result<R::Memory, Failed>> {
        let slot = ready!(self.post_slowly(connection, true, context))?;
        self.step = ManuallyDrop::new(Step::InFlight(slot));
        Poll::Pending
    }

    /// Posts a new operation, and looks once for its completion.
    #[inline(always)]
    fn post_and_look<S: Sharing>(&mut self, connection: &Inner<S>) -> Option<Buffer> {
        let Step::New(request) = mem::replace(&mut *self.step, Step::Finished) else { return None };
        connection.post_and_look(request, &mut self.step)
    }

    /// Posts the operation, or waits for room. Pending while it waits.
    #[inline(always)]
    fn post<S: Sharing>(
        &mut self,
        connection: &Inner<S>,
        awaited: bool,
        context: &Context<'_>,
    ) -> Poll<Result<Slot, Failed>> {
        if matches!(*self.step, Step::New(_)) {
            // Cloned without the lock, since that can run code of the user.
            let waker = awaited.then(|| context.waker().clone());
            if let Some(slot) = connection.post(&mut self.step, waker) {
                return Poll::Ready(Ok(slot));
            }
        }
        self.post_slowly(connection, awaited, context)
    }

    /// There is no room, posting has failed, or it was polled before.
    #[cold]
    #[inline(never)]
    fn post_slowly<S: Sharing>(
        &mut self,
        connection: &Inner<S>,
        awaited: bool,
        context: &Context<'_>,
    ) -> Poll<Result<Slot, Failed>> {
        let Inner { queue, key, .. } = connection;
        // Before the step is taken, since `clone` can panic.
        let waker = context.waker().clone();
        match mem::replace(&mut *self.step, Step::Finished) {
            Step::New(request) => self.posted_or_waits(queue.post_or_wait(*key, request, None, awaited, waker)),
            Step::Waiting(request, ticket) => {
                self.posted_or_waits(queue.post_or_wait(*key, request, Some(ticket), awaited, waker))
            }
            Step::Refused(failed) => {
                if let Some(ended) = Ended::of_doubt(&failed.error) {
                    queue.end(*key, &ended);
                }
                Poll::Ready(Err(*failed))
            }
            // It was polled before `posted` was called. Nobody takes its result now.
            Step::InFlight(slot) => {
                queue.abandon(slot);
                Poll::Ready(Ok(slot))
            }
            Step::Finished => Poll::Pending,
        }
    }

    #[inline(always)]
    fn posted_or_waits(&mut self, posted: Result<Slot, Unposted<R>>) -> Poll<Result<Slot, Failed>> {
        match posted {
            Ok(slot) => Poll::Ready(Ok(slot)),
            Err(Unposted::Failed(failed)) => Poll::Ready(Err(failed)),
            Err(Unposted::Waiting(request, ticket)) => {
                self.step = ManuallyDrop::new(Step::Waiting(request, ticket));
                Poll::Pending
            }
        }
    }

    /// Its future is dropped.
    #[inline(always)]
    fn end<S: Sharing>(&mut self, connection: &Inner<S>) {
        if !matches!(*self.step, Step::Finished) {
            self.cancel(connection);
        }
    }

    #[cold]
    #[inline(never)]
    fn cancel<S: Sharing>(&mut self, connection: &Inner<S>) {
        let Inner { queue, key, .. } = connection;
        match mem::replace(&mut *self.step, Step::Finished) {
            Step::Waiting(request, ticket) => {
                queue.leave_room(*key, ticket);
                drop(request);
            }
            Step::InFlight(slot) => queue.abandon(slot),
            Step::New(_) | Step::Refused(_) | Step::Finished => {}
        }
    }

    /// For `Debug`.
    fn name(&self) -> &'static str {
        match *self.step {
            Step::New(_) => "not posted",
            Step::Waiting(..) => "waits for room",
            Step::InFlight(_) => "in flight",
            Step::Refused(_) => "refused",
            Step::Finished => "finished",
        }
    }
}

impl<S: Sharing, R: Request> Unpin for Operation<'_, S, R> {}

impl<S: Sharing, R: Request> Unpin for OwnedOperation<S, R> {}

impl<S: Sharing, R: Request> fmt::Debug for Operation<'_, S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("state", &self.progress.name()).finish_non_exhaustive()
    }
}

impl<S: Sharing, R: Request> fmt::Debug for OwnedOperation<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedOperation").field("state", &self.progress.name()).finish_non_exhaustive()
    }
}

impl<S: Sharing, R: Request> fmt::Debug for Posting<'_, S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Posting").field(&self.0).finish()
    }
}
