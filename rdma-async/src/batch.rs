//! Several operations that are posted together.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rdma_safe::{Buffer, RemoteMemory, Work};

use crate::connection::Inner;
use crate::core::Ticket;
use crate::driver::batch::{Item, Next};
use crate::operation::failed;
use crate::{Error, Sharing, coop};

/// Operations of a [`Connection`](crate::Connection) that are posted with one doorbell. Made by
/// [`Connection::batch`](crate::Connection::batch).
///
/// Awaiting it posts the operations in order, and returns their buffers in the same order. One doorbell and one wake-up serve the
/// whole batch. The peer sees the operations in order, too. An empty batch is ready at once.
///
/// ```no_run
/// # use rdma_safe::{Buffer, RemoteMemory};
/// # async fn example(
/// #     connection: rdma_async::Connection, values: Vec<Buffer>, place: RemoteMemory, notice: Buffer,
/// # ) -> rdma_async::Result<()> {
/// let mut batch = connection.batch();
/// for (index, value) in values.into_iter().enumerate() {
///     batch = batch.write(value, place.slice(index as u64 * 4096, 4096)?);
/// }
/// let buffers = batch.send(notice).await?;
/// # Ok(())
/// # }
/// ```
///
/// A batch that is longer than the free part of the send queue is posted in parts, and other operations may come between them.
/// Dropping it before the first poll posts nothing. After that, posted operations go on, and the others are not posted.
///
/// A batch holds its buffers until it is posted. Bound its length, so that the pool has memory for other tasks.
///
/// Lists, atomics and datagrams are posted one at a time.
///
/// # Errors
/// [`FailedBatch`], with the buffers. If an operation cannot be posted, for example because its buffer is of another protection
/// domain, the operations after it are not posted.
#[must_use = "a batch posts nothing unless it is polled"]
pub struct Batch<'c, S: Sharing> {
    connection: &'c Inner<S>,
    items: Vec<Item>,
    /// Number of posted items, which come first.
    posted: usize,
    /// Why the rest is not posted.
    error: Option<Error>,
    /// While it waits for room.
    ticket: Option<Ticket>,
}

impl<'c, S: Sharing> Batch<'c, S> {
    pub(crate) fn new(connection: &'c Inner<S>) -> Self {
        Batch { connection, items: Vec::new(), posted: 0, error: None, ticket: None }
    }

    /// Adds a [send](crate::Connection::send).
    pub fn send(self, buffer: Buffer) -> Self {
        self.add(Item::Send(buffer))
    }

    /// Adds a [send with immediate data](crate::Connection::send_with_immediate).
    pub fn send_with_immediate(self, buffer: Buffer, immediate: u32) -> Self {
        self.add(Item::Work(Work::send(buffer).imm(immediate)))
    }

    /// Adds a [write](crate::Connection::write).
    pub fn write(self, buffer: Buffer, remote: RemoteMemory) -> Self {
        self.add(Item::Work(Work::write(buffer, remote)))
    }

    /// Adds a [write with immediate data](crate::Connection::write_with_immediate).
    pub fn write_with_immediate(self, buffer: Buffer, remote: RemoteMemory, immediate: u32) -> Self {
        self.add(Item::Work(Work::write(buffer, remote).imm(immediate)))
    }

    /// Adds a [read](crate::Connection::read).
    pub fn read(self, buffer: Buffer, remote: RemoteMemory) -> Self {
        self.add(Item::Work(Work::read(buffer, remote)))
    }

    /// Waits only until all operations are posted, like [`Operation::posted`](crate::Operation::posted). Their buffers are dropped
    /// when they have completed.
    pub fn posted(self) -> PostingBatch<'c, S> {
        PostingBatch(self)
    }

    fn add(mut self, item: Item) -> Self {
        self.items.push(item);
        self
    }

    /// Number of operations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there is no operation.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Whether there is something to post.
    fn has_work(&self) -> bool {
        self.error.is_none() && self.posted < self.items.len()
    }

    /// Posts operations. Pending while the rest waits for room.
    fn post(&mut self, awaited: bool, context: &Context<'_>) -> Poll<()> {
        let Inner { queue, key, .. } = self.connection;
        // Before the ticket is taken, since `clone` can panic.
        let waker = context.waker().clone();
        let posted = queue.post_batch(*key, &mut self.items[self.posted..], self.ticket.take(), awaited, waker);
        self.posted += posted.count;
        match posted.next {
            Next::Completion => Poll::Ready(()),
            Next::Room(ticket) => {
                self.ticket = Some(ticket);
                Poll::Pending
            }
            Next::Failed(error) => {
                self.error = Some(error);
                Poll::Ready(())
            }
        }
    }

    /// The result, once no operation is awaited.
    fn finish(&mut self) -> Result<Vec<Buffer>, FailedBatch> {
        let has_succeeded = |item: &&Item| matches!(item, Item::Returned(_) | Item::InFlight(_));
        let succeeded = self.items[..self.posted].iter().take_while(has_succeeded).count();
        let (mut buffers, mut error) = (Vec::with_capacity(self.items.len()), None);
        for item in mem::take(&mut self.items) {
            match item {
                Item::Returned(buffer) | Item::Send(buffer) => buffers.push(buffer),
                Item::Work(work) => buffers.extend(work.into_memory().0),
                Item::Ended(done) => {
                    let failed = failed(&self.connection.queue, done);
                    buffers.extend(failed.buffer);
                    error.get_or_insert(failed.error);
                }
                Item::InFlight(_) | Item::InDoubt => {}
            }
        }
        self.posted = 0;
        match error.or(self.error.take()) {
            Some(error) => Err(FailedBatch { error, succeeded, buffers }),
            None => Ok(buffers),
        }
    }
}

impl<S: Sharing> Future for Batch<'_, S> {
    type Output = Result<Vec<Buffer>, FailedBatch>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if this.has_work() {
            ready!(this.post(true, context));
            if this.error.is_none() {
                // The last operation has the waker.
                return Poll::Pending;
            }
        }
        match this.connection.queue.take_batch(&mut this.items[..this.posted], context) {
            true => Poll::Ready(this.finish()),
            false => Poll::Pending,
        }
    }
}

/// The future of [`Batch::posted`].
///
/// # Errors
/// [`FailedBatch`], with the buffers of the operations that were not posted.
#[must_use = "a batch posts nothing unless it is polled"]
pub struct PostingBatch<'c, S: Sharing>(Batch<'c, S>);

impl<S: Sharing> Future for PostingBatch<'_, S> {
    type Output = Result<(), FailedBatch>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let coop = ready!(coop::poll_proceed(context));
        if self.0.has_work() {
            ready!(self.0.post(false, context));
        }
        coop.made_progress();
        // A poll before `posted` was called leaves slots. Their results are dropped.
        let posted = self.0.posted;
        self.0.connection.queue.abandon_batch(&mut self.0.items[..posted]);
        Poll::Ready(self.0.finish().map(drop))
    }
}

impl<S: Sharing> fmt::Debug for PostingBatch<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PostingBatch").field(&self.0).finish()
    }
}

impl<S: Sharing> Drop for Batch<'_, S> {
    fn drop(&mut self) {
        let Inner { queue, key, .. } = self.connection;
        queue.abandon_batch(&mut self.items[..self.posted]);
        if let Some(ticket) = self.ticket.take() {
            queue.leave_room(*key, ticket);
        }
    }
}

impl<S: Sharing> Unpin for Batch<'_, S> {}

impl<S: Sharing> fmt::Debug for Batch<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").field("len", &self.len()).field("posted", &self.posted).finish_non_exhaustive()
    }
}

/// A batch that has failed, at least in part.
#[non_exhaustive]
pub struct FailedBatch {
    /// The error of the first operation that did not succeed.
    pub error: Error,
    /// Number of operations before that one. After [`Batch::posted`] they are posted, and may still fail.
    pub succeeded: usize,
    /// The buffers that have come back, in the order of their operations. The device may still use the others, which then return to
    /// their pool. After [`Batch::posted`] these are the buffers of the operations that were not posted.
    pub buffers: Vec<Buffer>,
}

impl fmt::Debug for FailedBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FailedBatch")
            .field("error", &self.error)
            .field("succeeded", &self.succeeded)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for FailedBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after {} operations of the batch: {}", self.succeeded, self.error)
    }
}

impl std::error::Error for FailedBatch {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl From<FailedBatch> for Error {
    /// Drops the buffers.
    fn from(failed: FailedBatch) -> Self {
        failed.error
    }
}
