//! Connections.

use std::fmt;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::task::Poll;
use std::time::Duration;

use rdma_pool::{Budget, Pool};
use rdma_safe::cm::Address;
use rdma_safe::{Buffer, EndpointKey, Gather, ProtectionDomain, RemoteMemory, Work};

use crate::driver::queue::Queue;
use crate::operation::{Operation, OwnedOperation};
use crate::receive::{Arrived, Message, Receive, Receiver};
use crate::request::{List, OneBuffer, ReadOne, Request, SendOne, WriteOne};
use crate::{Batch, Deadline, Driver, Error, Result, Sharing, Threads, trace};

/// A reliable connection, for any number of tasks.
///
/// A buffer *moves* into an operation and comes back with its result. When a future is dropped, its operation goes on without
/// it: the device keeps the memory, which returns to its pool when the operation has completed.
///
/// Cloning gives another handle of the same connection. When the last handle is dropped, operations in flight may complete
/// within [`linger`](crate::Connector::linger), and then the connection ends. [`Connection::close`] waits for that.
///
/// # Waiting
///
/// An operation that finds the send queue full waits for room, in order of arrival. This is no error. A message waits in the
/// receive queue of the connection until a task takes it. While all receives hold messages, the device of the peer holds
/// further ones back, and tries again.
pub struct Connection<S: Sharing = Threads> {
    pub(crate) inner: S::Rc<Inner<S>>,
}

/// What the handles of a connection or of a socket for datagrams share.
pub(crate) struct Inner<S: Sharing> {
    pub(crate) queue: S::Rc<Queue<S>>,
    pub(crate) key: EndpointKey,
    pub(crate) pool: Pool,
    pub(crate) pd: ProtectionDomain,
    pub(crate) facts: Facts,
    pub(crate) linger: Duration,
    /// Keeps the driver running.
    pub(crate) driver: Driver<S>,
}

/// Addresses and private data from the handshake of a connection.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) local: Option<Address>,
    pub(crate) peer: Option<Address>,
    pub(crate) private_data: Vec<u8>,
}

impl<S: Sharing> Clone for Connection<S> {
    fn clone(&self) -> Self {
        Connection { inner: self.inner.clone() }
    }
}

impl<S: Sharing> Connection<S> {
    /// Sends the bytes of `buffer` as one message. Ready when the peer's device has acknowledged it.
    ///
    /// If the peer ends the connection before, the send fails, although the message may have arrived.
    #[inline]
    pub fn send(&self, buffer: Buffer) -> Operation<'_, S, SendOne> {
        self.start(SendOne(buffer))
    }

    /// Like [`Connection::send`], for futures and protocols that store the operation.
    pub fn send_owned(&self, buffer: Buffer) -> OwnedOperation<S, SendOne> {
        OwnedOperation::new(self.inner.clone(), SendOne(buffer))
    }

    /// Like [`Connection::send`], with 32 bits of immediate data for [`Message::immediate`].
    #[inline]
    pub fn send_with_immediate(&self, buffer: Buffer, immediate: u32) -> Operation<'_, S, OneBuffer> {
        self.start(OneBuffer(Work::send(buffer).imm(immediate)))
    }

    /// Sends several buffers, or parts of shared ones, as one message.
    #[inline]
    pub fn send_list(&self, list: impl Into<Gather>) -> Operation<'_, S, List> {
        self.start(List(Work::send_list(list), PhantomData))
    }

    /// Sends the bytes of `buffer`, and invalidates `rkey` at the peer.
    #[inline]
    pub fn send_and_invalidate(&self, buffer: Buffer, rkey: u32) -> Operation<'_, S, OneBuffer> {
        self.start(OneBuffer(Work::send_invalidate(buffer, rkey)))
    }

    /// Writes the bytes of `buffer` to the peer's memory. The peer is not notified.
    #[inline]
    pub fn write(&self, buffer: Buffer, remote: RemoteMemory) -> Operation<'_, S, WriteOne> {
        self.start(WriteOne(buffer, remote))
    }

    /// Like [`Connection::write`], and notifies the peer by a message without bytes: [`Message::immediate`].
    #[inline]
    pub fn write_with_immediate(
        &self,
        buffer: Buffer,
        remote: RemoteMemory,
        immediate: u32,
    ) -> Operation<'_, S, OneBuffer> {
        self.start(OneBuffer(Work::write(buffer, remote).imm(immediate)))
    }

    /// Like [`Connection::write`], for futures and protocols that store the operation.
    pub fn write_owned(&self, buffer: Buffer, remote: RemoteMemory) -> OwnedOperation<S, WriteOne> {
        OwnedOperation::new(self.inner.clone(), WriteOne(buffer, remote))
    }

    /// Writes several buffers, one after another, to the peer's memory.
    #[inline]
    pub fn write_list(&self, list: impl Into<Gather>, remote: RemoteMemory) -> Operation<'_, S, List> {
        self.start(List(Work::write_list(list, remote), PhantomData))
    }

    /// Like [`Connection::write_list`], for futures and protocols that store the operation.
    pub fn write_list_owned(&self, list: impl Into<Gather>, remote: RemoteMemory) -> OwnedOperation<S, List> {
        OwnedOperation::new(self.inner.clone(), List(Work::write_list(list, remote), PhantomData))
    }

    /// Reads as many bytes of the peer's memory as `buffer` is long.
    #[inline]
    pub fn read(&self, buffer: Buffer, remote: RemoteMemory) -> Operation<'_, S, ReadOne> {
        self.start(ReadOne(buffer, remote))
    }

    /// Like [`Connection::read`], for futures and protocols that store the operation.
    pub fn read_owned(&self, buffer: Buffer, remote: RemoteMemory) -> OwnedOperation<S, ReadOne> {
        OwnedOperation::new(self.inner.clone(), ReadOne(buffer, remote))
    }

    /// Reads the peer's memory into several buffers.
    #[inline]
    pub fn read_list(&self, list: impl Into<Gather>, remote: RemoteMemory) -> Operation<'_, S, List> {
        self.start(List(Work::read_list(list, remote), PhantomData))
    }

    /// Replaces the peer's 64-bit word at `remote` by `swap` if it equals `compare`. Returns the old value.
    ///
    /// # Errors
    /// The errors of other operations; [`Error::Memory`] when there is no room for the old value.
    pub async fn compare_swap(&self, remote: RemoteMemory, compare: u64, swap: u64) -> Result<u64> {
        let operand = self.inner.pool.get_async(Budget::Control, 8).await?;
        old_value(&self.start(OneBuffer(Work::compare_swap(operand, remote, compare, swap))).await?)
    }

    /// Adds `add` to the peer's 64-bit word at `remote`. Returns the old value.
    ///
    /// # Errors
    /// Like [`Connection::compare_swap`].
    pub async fn fetch_add(&self, remote: RemoteMemory, add: u64) -> Result<u64> {
        let operand = self.inner.pool.get_async(Budget::Control, 8).await?;
        old_value(&self.start(OneBuffer(Work::fetch_add(operand, remote, add))).await?)
    }

    /// Starts a batch of operations to post together.
    pub fn batch(&self) -> Batch<'_, S> {
        Batch::new(&self.inner)
    }

    #[inline(always)]
    fn start<R: Request>(&self, request: R) -> Operation<'_, S, R> {
        Operation::new(&self.inner, request)
    }

    /// The next message; `None` when the peer has ended the connection.
    ///
    /// Dropping the future loses no message. Messages that arrived before the end of the connection come first.
    #[inline]
    pub fn receive(&self) -> Receive<'_, S> {
        Receive::new(&self.inner)
    }

    /// The next message, if it has arrived. Never waits.
    ///
    /// `None` does not tell whether the connection has ended; [`Connection::receive`] does. Use both to answer waiting requests
    /// with one [`Batch`]:
    ///
    /// ```no_run
    /// # fn answer(request: &[u8]) -> Vec<u8> { request.to_vec() }
    /// # async fn serve(connection: rdma_async::Connection) -> rdma_async::Result<()> {
    /// while let Some(request) = connection.receive().await? {
    ///     // Bounded, so that replies do not wait and other tasks run.
    ///     let mut batch = connection.batch().send(connection.buffer_of(&answer(&request)).await?);
    ///     while batch.len() < 16 {
    ///         let Some(request) = connection.try_receive() else { break };
    ///         batch = batch.send(connection.buffer_of(&answer(&request)).await?);
    ///     }
    ///     batch.posted().await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A task that is dropped meanwhile loses the requests that it has taken. While `posted` waits for room, no request is
    /// taken, so a client should have fewer requests under way than the service has
    /// [receives](crate::ListenerBuilder::receives). The pool needs memory for such a batch of each connection.
    pub fn try_receive(&self) -> Option<Message<S>> {
        self.inner.queue.try_receive(self.inner.key).map(|message| self.inner.message(message))
    }

    /// Takes messages by a function that is polled, for futures and protocols that store their place in the queue of readers.
    #[must_use]
    pub fn receiver(&self) -> Receiver<S> {
        Receiver::new(self.inner.clone())
    }

    /// Reserves further [shared receives](crate::SharedReceives): the peer may send `messages` more. False if fewer are free, if
    /// the connection has its own receives, or if it has ended.
    #[must_use]
    pub fn reserve_receives(&self, messages: u32) -> bool {
        self.inner.queue.reserve_receives(self.inner.key, messages)
    }

    /// Releases shared receives for other connections. The caller guarantees that the peer now sends `messages` fewer. Receives of
    /// messages that are kept are not released.
    pub fn release_receives(&self, messages: u32) {
        self.inner.queue.release_receives(self.inner.key, messages);
    }

    /// A deadline that the driver keeps, for protocols that work with any runtime.
    #[must_use]
    pub fn deadline(&self) -> Deadline<S> {
        Deadline::new(&self.inner.driver.shared.events)
    }

    /// A buffer of `len` bytes to send, once there is one.
    ///
    /// # Errors
    /// [`Error::Memory`] when `len` exceeds what the pool has.
    #[inline]
    pub async fn buffer(&self, len: usize) -> Result<Buffer> {
        self.inner.buffer(len).await
    }

    /// A buffer with these bytes to send, once there is one.
    ///
    /// # Errors
    /// Like [`Connection::buffer`].
    pub async fn buffer_of(&self, bytes: &[u8]) -> Result<Buffer> {
        self.inner.buffer_of(bytes).await
    }

    /// The pool of registered memory that the connections of the driver share.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.inner.pool
    }

    /// The domain in which buffers for this connection are registered.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.inner.pd
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &Driver<S> {
        &self.inner.driver
    }

    /// The address of this end.
    #[must_use]
    pub fn local_address(&self) -> Option<Address> {
        self.inner.facts.local
    }

    /// The address of the peer.
    #[must_use]
    pub fn peer_address(&self) -> Option<Address> {
        self.inner.facts.peer
    }

    /// The private data of the peer's request or reply, padded with zeros.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.inner.facts.private_data
    }

    /// Number of messages that tasks have taken and not dropped yet.
    ///
    /// Each occupies one of the [receives](crate::Connector::receives) of the connection.
    #[must_use]
    pub fn messages_kept(&self) -> u32 {
        self.inner.queue.kept(self.inner.key)
    }

    /// Keeps something, such as memory that the peer may access, until the connection is gone. Then drops it.
    ///
    /// The connection can last for some time after its last handle is dropped: see [`linger`](crate::Connector::linger).
    pub fn attach(&self, kept: impl Send + 'static) {
        let unused = self.inner.queue.attach(self.inner.key, Box::new(kept));
        drop(unused);
    }

    /// Ends the connection, once the operations in flight have completed or the time to linger is over.
    ///
    /// Then waits until the peer has confirmed the end, for [`timeout`](crate::Connector::timeout) at most. A connection that has
    /// failed ends at once.
    ///
    /// From now on, operations of all handles fail with [`Error::Closed`]. Dropping the future does not stop the closing.
    pub async fn close(&self) {
        self.inner.close().await;
    }
}

/// The value that an atomic operation has read.
fn old_value(operand: &Buffer) -> Result<u64> {
    operand.first_chunk().copied().map(u64::from_ne_bytes).ok_or(Error::Closed)
}

impl<S: Sharing> Drop for Inner<S> {
    fn drop(&mut self) {
        trace::closing(self.facts.peer);
        self.queue.begin_close(self.key, self.linger);
    }
}

impl<S: Sharing> fmt::Debug for Connection<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("facts", &self.inner.facts).finish_non_exhaustive()
    }
}

impl<S: Sharing> Inner<S> {
    /// Ends the endpoint, and waits for that.
    pub(crate) async fn close(&self) {
        let Inner { queue, key, linger, .. } = self;
        queue.begin_close(*key, *linger);
        poll_fn(|context| if queue.poll_closed(*key, context) { Poll::Ready(()) } else { Poll::Pending }).await;
    }

    /// A buffer to send.
    #[inline]
    pub(crate) async fn buffer(&self, len: usize) -> Result<Buffer> {
        Ok(self.pool.get_async(Budget::Sends, len).await?)
    }

    /// A buffer with these bytes to send.
    pub(crate) async fn buffer_of(&self, bytes: &[u8]) -> Result<Buffer> {
        let mut buffer = self.buffer(bytes.len()).await?;
        buffer.copy_from_slice(bytes);
        Ok(buffer)
    }

    /// A message that is being handed out.
    #[inline(always)]
    pub(crate) fn message(&self, arrived: Arrived) -> Message<S> {
        Message::new(self.queue.clone(), self.key, arrived)
    }
}

const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<Connection>();
    const fn is_sent<T: Send>() {}
    is_sent::<Operation<'_, Threads, SendOne>>();
    is_sent::<Batch<'_, Threads>>();
    is_sent::<Receive<'_, Threads>>();
};
