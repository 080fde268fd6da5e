//! Received messages.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rdma_safe::{Buffer, Completion, EndpointKey, Operation};

use crate::connection::Inner;
use crate::core::Ticket;
use crate::driver::member::Ended;
use crate::driver::queue::Queue;
use crate::driver::state::{Origin, Received};
use crate::{Result, Sharing, Threads, coop};

/// A received message. Its memory goes back to the receive queue of its connection when it is dropped.
///
/// While tasks keep as many messages as the connection has [receives](crate::Connector::receives), the peer has to wait.
/// To keep the bytes longer, copy them: `message.to_vec()`.
pub struct Message<S: Sharing = Threads> {
    arrived: Arrived,
    /// `None` once the receive is posted again.
    queue: Option<S::Rc<Queue<S>>>,
    key: EndpointKey,
}

/// A message as the device has delivered it.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) buffer: Option<Buffer>,
    addition: Addition,
}

/// Data that the device reports with a message, beside its bytes.
#[derive(Clone, Copy, Debug)]
enum Addition {
    Nothing,
    Immediate(u32),
    /// A key that the peer has invalidated.
    Invalidated(u32),
    /// The peer has written so many bytes to other memory.
    Written {
        bytes: u32,
        immediate: u32,
    },
}

impl Arrived {
    /// A message without an addition.
    #[inline(always)]
    pub(crate) fn plain(buffer: Buffer) -> Self {
        Arrived { buffer: Some(buffer), addition: Addition::Nothing }
    }
}

impl From<Completion> for Arrived {
    fn from(done: Completion) -> Self {
        let addition = match (done.operation, done.imm(), done.invalidated_rkey()) {
            (Operation::ReceiveWrite, immediate, _) => {
                Addition::Written { bytes: done.byte_len, immediate: immediate.unwrap_or(0) }
            }
            (_, Some(immediate), _) => Addition::Immediate(immediate),
            (_, None, Some(key)) => Addition::Invalidated(key),
            (_, None, None) => Addition::Nothing,
        };
        Arrived { buffer: done.buffer, addition }
    }
}

impl<S: Sharing> Message<S> {
    #[inline(always)]
    pub(crate) fn new(queue: S::Rc<Queue<S>>, key: EndpointKey, arrived: Arrived) -> Self {
        Message { arrived, queue: Some(queue), key }
    }

    /// The immediate data that the peer has sent.
    #[must_use]
    pub fn immediate(&self) -> Option<u32> {
        match self.arrived.addition {
            Addition::Immediate(immediate) | Addition::Written { immediate, .. } => Some(immediate),
            Addition::Nothing | Addition::Invalidated(_) => None,
        }
    }

    /// The key that the peer has invalidated.
    #[must_use]
    pub fn invalidated_rkey(&self) -> Option<u32> {
        if let Addition::Invalidated(key) = self.arrived.addition { Some(key) } else { None }
    }

    /// The number of bytes that the peer has written to exposed memory with
    /// [`write_with_immediate`](crate::Connection::write_with_immediate). `None` if this is a message that was sent.
    #[must_use]
    pub fn bytes_written(&self) -> Option<u32> {
        if let Addition::Written { bytes, .. } = self.arrived.addition { Some(bytes) } else { None }
    }

    /// Posts the receive again, as a drop of the message does. Returns its memory if the connection no longer needs it.
    ///
    /// For callers that hold a lock. Dropping memory wakes tasks that wait for it, and their wakers may take that lock.
    pub fn repost(mut self) -> Option<Buffer> {
        self.give_back()
    }

    fn give_back(&mut self) -> Option<Buffer> {
        let buffer = self.arrived.buffer.take();
        self.queue.take()?.give_back(self.key, buffer)
    }
}

impl<S: Sharing> Deref for Message<S> {
    type Target = [u8];

    #[inline(always)]
    fn deref(&self) -> &[u8] {
        self.arrived.buffer.as_deref().unwrap_or(&[])
    }
}

impl<S: Sharing> AsRef<[u8]> for Message<S> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

#[cfg(feature = "bytes")]
impl From<Message> for bytes::Bytes {
    /// The bytes without a copy. The memory goes back to the connection with the last clone.
    fn from(message: Message) -> Self {
        bytes::Bytes::from_owner(message)
    }
}

impl<S: Sharing> Drop for Message<S> {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl<S: Sharing> fmt::Debug for Message<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("len", &self.len())
            .field("immediate", &self.immediate())
            .finish_non_exhaustive()
    }
}

/// The future of [`Connection::receive`](crate::Connection::receive).
///
/// # Errors
/// [`Error::Failed`](crate::Error::Failed) and [`Error::DriverStopped`](crate::Error::DriverStopped), after the messages that have
/// arrived.
#[must_use = "a future does nothing unless it is polled"]
pub struct Receive<'c, S: Sharing>(Reader<'c, S>);

impl<'c, S: Sharing> Receive<'c, S> {
    #[inline(always)]
    pub(crate) fn new(connection: &'c Inner<S>) -> Self {
        Receive(Reader::new(connection))
    }
}

impl<S: Sharing> Future for Receive<'_, S> {
    type Output = Result<Option<Message<S>>>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match ready!(self.0.poll(context)) {
            Ok((message, ())) => Poll::Ready(Ok(Some(message))),
            Err(ended) => Poll::Ready(at_end(ended)),
        }
    }
}

/// Takes the messages of a connection, by [`Receiver::poll_receive`].
///
/// For futures and protocols that store their place in the queue of readers. Made by
/// [`Connection::receiver`](crate::Connection::receiver), and counts as a handle of the connection.
pub struct Receiver<S: Sharing = Threads> {
    connection: S::Rc<Inner<S>>,
    ticket: Option<Ticket>,
}

impl<S: Sharing> Receiver<S> {
    pub(crate) fn new(connection: S::Rc<Inner<S>>) -> Self {
        Receiver { connection, ticket: None }
    }

    /// The next message, or `None` when the peer has ended the connection. Pending until there is one.
    ///
    /// Unlike [`Connection::receive`](crate::Connection::receive), it does not count for the
    /// [budget of a task](https://docs.rs/tokio/latest/tokio/task/coop/index.html) of tokio.
    ///
    /// # Errors
    /// Like [`Receive`].
    pub fn poll_receive(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Message<S>>>> {
        let Receiver { connection, ticket } = self;
        // Before the ticket is taken, since `clone` can panic.
        let waker = context.waker().clone();
        match connection.queue.receive::<()>(connection.key, ticket.take(), waker) {
            Received::Message(arrived, ()) => Poll::Ready(Ok(Some(connection.message(arrived)))),
            Received::Waiting(waiting) => {
                *ticket = Some(waiting);
                Poll::Pending
            }
            Received::Ended(ended) => Poll::Ready(at_end(ended)),
        }
    }
}

impl<S: Sharing> Drop for Receiver<S> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.connection.queue.leave_readers(self.connection.key, ticket);
        }
    }
}

impl<S: Sharing> fmt::Debug for Receiver<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").field("waits", &self.ticket.is_some()).finish_non_exhaustive()
    }
}

/// What a reader learns at the end of a connection.
fn at_end<S: Sharing>(ended: Ended) -> Result<Option<Message<S>>> {
    match ended {
        Ended::Disconnected | Ended::Closed => Ok(None),
        ended => Err(ended.error()),
    }
}

/// A task that waits for a message.
pub(crate) struct Reader<'c, S: Sharing> {
    connection: &'c Inner<S>,
    ticket: Option<Ticket>,
}

impl<'c, S: Sharing> Reader<'c, S> {
    #[inline(always)]
    pub(crate) fn new(connection: &'c Inner<S>) -> Self {
        Reader { connection, ticket: None }
    }

    /// Whether it has to wait.
    pub(crate) fn waits(&self) -> bool {
        self.ticket.is_some()
    }

    /// The next message, with its sender if that is asked for.
    #[inline(always)]
    pub(crate) fn poll<F: Origin>(&mut self, context: &mut Context<'_>) -> Poll<Result<(Message<S>, F), Ended>> {
        let coop = ready!(coop::poll_proceed(context));
        let connection = self.connection;
        // Before the ticket is taken, since `clone` can panic.
        let waker = context.waker().clone();
        let ticket = self.ticket.take();
        match connection.queue.receive(connection.key, ticket, waker) {
            Received::Message(arrived, from) => {
                coop.made_progress();
                Poll::Ready(Ok((connection.message(arrived), from)))
            }
            Received::Waiting(ticket) => {
                self.ticket = Some(ticket);
                Poll::Pending
            }
            Received::Ended(ended) => Poll::Ready(Err(ended)),
        }
    }
}

impl<S: Sharing> Drop for Reader<'_, S> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.connection.queue.leave_readers(self.connection.key, ticket);
        }
    }
}

impl<S: Sharing> fmt::Debug for Receive<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receive").field("waits", &self.0.waits()).finish_non_exhaustive()
    }
}
