//! Connecting and posting. [`EndpointMut`](super::EndpointMut) has the same methods.

use std::time::{Duration, Instant};

use super::{Batch, BatchError, Endpoint, FailedWork, Rejected, Transfer, Work, WorkId};
use crate::explain::Explanation;
use crate::interface::Interface;
use crate::{Buffer, ConnectOptions, PostError, ProtectionDomain, QueuePair, QueuePairAddress, RemoteMemory, Result};

impl<I: Interface> Endpoint<I> {
    /// The address that a peer needs to connect to this endpoint. Exchange it out of band.
    #[must_use]
    #[inline]
    pub fn address(&self) -> QueuePairAddress {
        self.poster.address
    }

    /// Connects to the peer at `remote`: [`QueuePair::connect`]. Send only after the peer has connected as
    /// well.
    ///
    /// An endpoint connects once. After work has failed, the connection is lost: take the buffers back with
    /// [`close`](Self::close), and connect a new endpoint.
    ///
    /// # Errors
    /// Like [`QueuePair::connect`].
    #[inline]
    pub fn connect(&mut self, remote: &QueuePairAddress) -> Result<()> {
        self.connect_with(remote, &ConnectOptions::default())
    }

    /// Like [`connect`](Self::connect), with options.
    ///
    /// # Errors
    /// Like [`QueuePair::connect`].
    #[inline]
    pub fn connect_with(&mut self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
        self.poster.connect_with(remote, options)
    }

    /// Posts a receive: the next message of the peer goes into `buffer`, up to its capacity.
    ///
    /// Receives can be posted as soon as the endpoint is built. Post them before the peer sends.
    ///
    /// # Errors
    /// [`Rejected`] returns the buffer.
    #[inline(always)]
    pub fn receive(&mut self, buffer: Buffer) -> Result<WorkId, Rejected> {
        self.poster.receive(buffer)
    }

    /// Posts one piece of work: the one way to post anything but receives.
    ///
    /// [`send`](Self::send), [`send_inline`](Self::send_inline), [`write`](Self::write) and [`read`](Self::read)
    /// are shorthands. [`batch`](Self::batch) posts several pieces with one doorbell.
    ///
    /// # Errors
    /// [`Rejected`] returns the buffer.
    #[inline]
    pub fn post(&mut self, work: Work<'_>) -> Result<WorkId, Rejected> {
        self.poster.post(work)
    }

    /// Sends the bytes of `buffer` up to its length: shorthand for [`Work::send`].
    ///
    /// # Errors
    /// Like [`post`](Self::post).
    #[inline(always)]
    pub fn send(&mut self, buffer: Buffer) -> Result<WorkId, Rejected> {
        self.transfer(Transfer::Send, buffer, 0)
    }

    /// Sends bytes that are copied during posting: shorthand for [`Work::send_inline`].
    ///
    /// # Errors
    /// [`PostError::InlineTooLong`] if there are more than
    /// [`EndpointBuilder::inline_data`](crate::EndpointBuilder::inline_data) bytes; the errors of
    /// [`post`](Self::post).
    #[inline]
    pub fn send_inline(&mut self, bytes: &[u8]) -> Result<WorkId, PostError> {
        self.poster.send_inline(bytes)
    }

    /// Writes the bytes of `buffer` up to its length to the start of `remote`: shorthand for [`Work::write`].
    ///
    /// # Errors
    /// Like [`post`](Self::post); [`PostError::RemoteTooShort`].
    #[inline(always)]
    pub fn write(&mut self, buffer: Buffer, remote: RemoteMemory) -> Result<WorkId, Rejected> {
        self.transfer(Transfer::Write(remote), buffer, 0)
    }

    /// Reads from the start of `remote` into `buffer`: shorthand for [`Work::read`]. The length of `buffer` is the
    /// number of bytes.
    ///
    /// # Errors
    /// Like [`post`](Self::post); [`PostError::RemoteTooShort`].
    #[inline(always)]
    pub fn read(&mut self, buffer: Buffer, remote: RemoteMemory) -> Result<WorkId, Rejected> {
        self.transfer(Transfer::Read(remote), buffer, 0)
    }

    /// Sends, writes or reads one buffer. The completion returns `user_data`, as with [`Work::user_data`].
    ///
    /// It takes the fast path of [`send`](Self::send), which [`post`](Self::post) does not.
    ///
    /// # Errors
    /// Like [`post`](Self::post); [`PostError::RemoteTooShort`].
    #[inline(always)]
    pub fn transfer(&mut self, transfer: Transfer, buffer: Buffer, user_data: u32) -> Result<WorkId, Rejected> {
        self.poster.transfer(transfer, buffer, user_data)
    }

    /// Sends many buffers with one doorbell and few completion queue entries. Returns how many were sent.
    ///
    /// Stops when the send queue is full, and leaves the other buffers in the iterator. Returns 0 while sends are
    /// [pending](crate::EndpointBuilder::pending_sends), and makes no send pending.
    ///
    /// Each buffer has its own completion, in the order of sending. The device reports them in groups of at most half the send
    /// queue. Take them with [`poll_each`](Endpoint::poll_each): for a group, it costs less than [`poll`](Endpoint::poll).
    ///
    /// A buffer of more than 1 MiB begins a second batch. In that batch, the device reports each send.
    ///
    /// ```no_run
    /// # use rdma_safe::{Buffer, Endpoint};
    /// // Returns the buffers that wait for room.
    /// fn send(endpoint: &mut Endpoint, values: Vec<Buffer>) -> rdma_safe::Result<Vec<Buffer>> {
    ///     let mut unsent = values.into_iter();
    ///     endpoint.send_many(&mut unsent)?; // the error has buffers, too: this drops them
    ///     Ok(unsent.collect())
    /// }
    /// ```
    ///
    /// # Errors
    /// [`BatchError`], with the buffers that were taken from the iterator and not sent. If a buffer is refused, those before it are
    /// sent. If the provider takes only a part, or does not say what it has taken, the error is [`PostError::MaybePosted`]. The
    /// endpoint then takes no more work, and [`Endpoint::close`] returns the buffers of that part.
    #[inline(always)]
    pub fn send_many(&mut self, buffers: impl IntoIterator<Item = Buffer>) -> Result<usize, BatchError> {
        self.send_many_with_user_data(buffers.into_iter().map(|buffer| (buffer, 0)))
    }

    /// Like [`send_many`](Self::send_many). Each buffer comes with a number that its completion returns, as with
    /// [`Work::user_data`].
    ///
    /// # Errors
    /// Like [`send_many`](Self::send_many).
    #[inline(always)]
    pub fn send_many_with_user_data(
        &mut self,
        buffers: impl IntoIterator<Item = (Buffer, u32)>,
    ) -> Result<usize, BatchError> {
        self.poster.send_many(buffers)
    }

    /// Begins a batch of work to be posted with one doorbell.
    ///
    /// A doorbell is a write to the device, over PCIe for hardware. On the processor, each piece of a batch takes about 35
    /// instructions more than a single post, so batch only where doorbells take longer than that. For sends,
    /// [`send_many`](Self::send_many) takes about as many as single posts.
    ///
    /// # Errors
    /// [`PostError::NotReady`] before [`connect`](Self::connect); [`PostError::EndpointFailed`].
    #[inline]
    pub fn batch(&mut self) -> Result<Batch<'_>, PostError> {
        self.poster.batch()
    }

    /// Number of sends, writes, reads and atomics that are posted or pending, and not completed.
    #[must_use]
    #[inline]
    pub fn sends_in_flight(&self) -> u64 {
        self.poster.live.sends.in_flight()
    }

    /// The part of these sends that is pending:
    /// [`EndpointBuilder::pending_sends`](crate::EndpointBuilder::pending_sends).
    #[must_use]
    #[inline]
    pub fn pending_sends(&self) -> u64 {
        self.poster.live.sends.pending()
    }

    /// Number of receives that are posted and not completed.
    #[must_use]
    #[inline]
    pub fn receives_in_flight(&self) -> u64 {
        self.poster.live.receives.in_flight()
    }

    /// The domain that buffers must belong to.
    #[must_use]
    #[inline]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.poster.pd
    }

    /// Read-only access to the queue pair.
    #[must_use]
    #[inline]
    pub fn queue_pair(&self) -> &QueuePair {
        &self.poster.live.qp
    }

    /// Time within which the endpoint reports that its peer is gone: [`EndpointBuilder::keepalive`].
    ///
    /// [`EndpointBuilder::keepalive`]: crate::EndpointBuilder::keepalive
    #[must_use]
    #[inline]
    pub fn keepalive(&self) -> Option<Duration> {
        self.poster.live.keepalive.as_ref().map(|keepalive| keepalive.within())
    }

    /// Time by which to call [`poll`](Self::poll) and [`arm`](Self::arm) again, even if there is no event.
    ///
    /// For programs that sleep until [`channel`](Self::channel) is readable. [`wait`](Self::wait) does this itself. `None`
    /// without a keepalive, before the connection, and after it has failed. It changes with each call of `arm`.
    #[must_use]
    #[inline]
    pub fn keepalive_due(&self) -> Option<Instant> {
        self.poster.keepalive_due()
    }

    /// Explains why work of this endpoint failed. Queries the queue pair and the port, with system calls.
    #[must_use]
    #[inline]
    pub fn explain(&self, failed: &FailedWork) -> Explanation {
        failed.explain_by(self.queue_pair())
    }
}
