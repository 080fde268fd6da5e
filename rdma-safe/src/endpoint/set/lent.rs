//! Endpoints that a set lends.

use std::fmt;
use std::time::Duration;

use super::super::{Batch, BatchError, FailedWork, Peer, Poster, Rejected, Transfer, Work, WorkId};
use crate::explain::Explanation;
use crate::qp::{QueuePairAttributes, QueuePairState};
use crate::{Buffer, ConnectOptions, PostError, ProtectionDomain, QueuePair, QueuePairAddress, RemoteMemory, Result};

/// An endpoint of an [`EndpointSet`](crate::EndpointSet), lent for connecting and posting.
///
/// It has the methods of an [`Endpoint`](crate::Endpoint) except polling, which the set does. An endpoint for datagrams has
/// [`send_to`](Self::send_to) instead of `send` and `transfer`.
pub struct EndpointMut<'s> {
    pub(in crate::endpoint) poster: &'s mut Poster,
    pub(super) index: u32,
    /// The set's note of an endpoint to check.
    pub(super) unchecked: &'s mut Option<u32>,
}

impl EndpointMut<'_> {
    /// Calls `f`. If the gate for polls is then shut, there may be work to hand out, and the set checks the endpoint.
    #[inline(always)]
    pub(in crate::endpoint) fn with_poster<R>(&mut self, f: impl FnOnce(&mut Poster) -> R) -> R {
        let result = f(self.poster);
        if !self.poster.gates.poll {
            *self.unchecked = Some(self.index);
        }
        result
    }

    /// Modifies the queue pair, as a connection manager requires.
    pub(crate) fn advance(&mut self, attributes: &QueuePairAttributes) -> Result<()> {
        self.with_poster(|poster| poster.advance(attributes))
    }

    /// Moves the queue pair to the error state: its work is flushed, and its peer can use neither receives nor memory.
    ///
    /// # Errors
    /// Those of [`QueuePair::modify`].
    #[inline]
    pub fn stop(&mut self) -> Result<()> {
        self.advance(&QueuePairAttributes::new().set_state(QueuePairState::ERR))
    }

    /// Pauses the keepalive until the peer has confirmed the connection.
    pub(crate) fn pause_keepalive(&mut self) {
        self.poster.pause_keepalive();
    }

    /// Resumes the keepalive.
    pub(crate) fn resume_keepalive(&mut self) {
        self.poster.resume_keepalive();
    }

    /// The peer has ended the connection, so work that is flushed from now on has this cause.
    pub(crate) fn note_peer_left(&mut self) {
        self.poster.live.peer_left = true;
    }

    /// The address that a peer needs to connect to this endpoint: [`Endpoint::address`](crate::Endpoint::address).
    #[must_use]
    #[inline]
    pub fn address(&self) -> QueuePairAddress {
        self.poster.address
    }

    /// Connects to the peer at `remote`: [`Endpoint::connect`](crate::Endpoint::connect).
    ///
    /// # Errors
    /// Those of [`Endpoint::connect`](crate::Endpoint::connect).
    #[inline]
    pub fn connect(&mut self, remote: &QueuePairAddress) -> Result<()> {
        self.connect_with(remote, &ConnectOptions::default())
    }

    /// Like [`connect`](Self::connect), with options: [`Endpoint::connect_with`](crate::Endpoint::connect_with).
    ///
    /// # Errors
    /// Those of [`Endpoint::connect_with`](crate::Endpoint::connect_with).
    #[inline]
    pub fn connect_with(&mut self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
        self.with_poster(|poster| poster.connect_with(remote, options))
    }

    /// Posts a receive; the next message of the peer goes into `buffer`:
    /// [`Endpoint::receive`](crate::Endpoint::receive).
    ///
    /// # Errors
    /// Those of [`Endpoint::receive`](crate::Endpoint::receive).
    #[inline(always)]
    pub fn receive(&mut self, buffer: Buffer) -> Result<WorkId, Rejected> {
        self.with_poster(|poster| poster.receive(buffer))
    }

    /// Posts one piece of work: [`Endpoint::post`](crate::Endpoint::post).
    ///
    /// # Errors
    /// Those of [`Endpoint::post`](crate::Endpoint::post).
    #[inline]
    pub fn post(&mut self, work: Work<'_>) -> Result<WorkId, Rejected> {
        self.with_poster(|poster| poster.post(work))
    }

    /// Sends, writes or reads a buffer: [`Endpoint::transfer`](crate::Endpoint::transfer).
    ///
    /// # Errors
    /// Those of [`Endpoint::transfer`](crate::Endpoint::transfer).
    #[inline(always)]
    pub fn transfer(&mut self, transfer: Transfer, buffer: Buffer, user_data: u32) -> Result<WorkId, Rejected> {
        self.with_poster(|poster| poster.transfer(transfer, buffer, user_data))
    }

    /// Sends the bytes of `buffer` up to its length: [`Endpoint::send`](crate::Endpoint::send).
    ///
    /// # Errors
    /// Those of [`Endpoint::send`](crate::Endpoint::send).
    #[inline(always)]
    pub fn send(&mut self, buffer: Buffer) -> Result<WorkId, Rejected> {
        self.transfer(Transfer::Send, buffer, 0)
    }

    /// Sends bytes that are copied during posting: [`Endpoint::send_inline`](crate::Endpoint::send_inline).
    ///
    /// # Errors
    /// Those of [`Endpoint::send_inline`](crate::Endpoint::send_inline).
    #[inline]
    pub fn send_inline(&mut self, bytes: &[u8]) -> Result<WorkId, PostError> {
        self.with_poster(|poster| poster.send_inline(bytes))
    }

    /// Writes the bytes of `buffer` up to its length to the start of `remote`:
    /// [`Endpoint::write`](crate::Endpoint::write).
    ///
    /// # Errors
    /// Those of [`Endpoint::write`](crate::Endpoint::write).
    #[inline(always)]
    pub fn write(&mut self, buffer: Buffer, remote: RemoteMemory) -> Result<WorkId, Rejected> {
        self.transfer(Transfer::Write(remote), buffer, 0)
    }

    /// Reads from the start of `remote` into `buffer`: [`Endpoint::read`](crate::Endpoint::read).
    ///
    /// # Errors
    /// Those of [`Endpoint::read`](crate::Endpoint::read).
    #[inline(always)]
    pub fn read(&mut self, buffer: Buffer, remote: RemoteMemory) -> Result<WorkId, Rejected> {
        self.transfer(Transfer::Read(remote), buffer, 0)
    }

    /// Sends the bytes of `buffer` as a datagram: [`DatagramEndpoint::send`](crate::DatagramEndpoint::send).
    ///
    /// # Errors
    /// Those of [`DatagramEndpoint::send`](crate::DatagramEndpoint::send); [`PostError::NotDatagram`] for a connection.
    #[inline]
    pub fn send_to(&mut self, buffer: Buffer, peer: &Peer) -> Result<WorkId, Rejected> {
        self.post_to(Work::send(buffer), peer)
    }

    /// Posts a send of a datagram: [`DatagramEndpoint::post`](crate::DatagramEndpoint::post).
    ///
    /// # Errors
    /// Those of [`DatagramEndpoint::post`](crate::DatagramEndpoint::post); [`PostError::NotDatagram`] for a connection.
    #[inline]
    pub fn post_to(&mut self, work: Work<'_>, peer: &Peer) -> Result<WorkId, Rejected> {
        self.with_poster(|poster| poster.post_to(work, peer))
    }

    /// Sends many buffers with one doorbell: [`Endpoint::send_many`](crate::Endpoint::send_many).
    ///
    /// # Errors
    /// Those of [`Endpoint::send_many`](crate::Endpoint::send_many).
    #[inline(always)]
    pub fn send_many(&mut self, buffers: impl IntoIterator<Item = Buffer>) -> Result<usize, BatchError> {
        self.send_many_with_user_data(buffers.into_iter().map(|buffer| (buffer, 0)))
    }

    /// Sends many buffers, with a number for each completion:
    /// [`Endpoint::send_many_with_user_data`](crate::Endpoint::send_many_with_user_data).
    ///
    /// # Errors
    /// Those of [`Endpoint::send_many_with_user_data`](crate::Endpoint::send_many_with_user_data).
    #[inline(always)]
    pub fn send_many_with_user_data(
        &mut self,
        buffers: impl IntoIterator<Item = (Buffer, u32)>,
    ) -> Result<usize, BatchError> {
        self.with_poster(|poster| poster.send_many(buffers))
    }

    /// Begins a batch of work to be posted with one doorbell: [`Endpoint::batch`](crate::Endpoint::batch).
    ///
    /// # Errors
    /// Those of [`Endpoint::batch`](crate::Endpoint::batch).
    #[inline]
    pub fn batch(&mut self) -> Result<Batch<'_>, PostError> {
        // The user may forget it.
        *self.unchecked = Some(self.index);
        self.poster.batch()
    }

    /// Number of sends, writes, reads and atomics that are posted or pending, and not completed:
    /// [`Endpoint::sends_in_flight`](crate::Endpoint::sends_in_flight).
    #[must_use]
    #[inline]
    pub fn sends_in_flight(&self) -> u64 {
        self.poster.live.sends.in_flight()
    }

    /// The part of these sends that is pending: [`Endpoint::pending_sends`](crate::Endpoint::pending_sends).
    #[must_use]
    #[inline]
    pub fn pending_sends(&self) -> u64 {
        self.poster.live.sends.pending()
    }

    /// Number of receives that are posted and not completed:
    /// [`Endpoint::receives_in_flight`](crate::Endpoint::receives_in_flight).
    #[must_use]
    #[inline]
    pub fn receives_in_flight(&self) -> u64 {
        self.poster.live.receives.in_flight()
    }

    /// The domain that buffers must belong to: [`Endpoint::pd`](crate::Endpoint::pd).
    #[must_use]
    #[inline]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.poster.pd
    }

    /// Read-only access to the queue pair: [`Endpoint::queue_pair`](crate::Endpoint::queue_pair).
    #[must_use]
    #[inline]
    pub fn queue_pair(&self) -> &QueuePair {
        &self.poster.live.qp
    }

    /// Time within which the set reports that the peer is gone: [`Endpoint::keepalive`](crate::Endpoint::keepalive).
    #[must_use]
    #[inline]
    pub fn keepalive(&self) -> Option<Duration> {
        self.poster.live.keepalive.as_ref().map(|keepalive| keepalive.within())
    }

    /// Explains why work of this endpoint failed: [`Endpoint::explain`](crate::Endpoint::explain).
    #[must_use]
    #[inline]
    pub fn explain(&self, failed: &FailedWork) -> Explanation {
        failed.explain_by(self.queue_pair())
    }
}

impl fmt::Debug for EndpointMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndpointMut")
            .field("queue_pair", self.queue_pair())
            .field("sends_in_flight", &self.sends_in_flight())
            .field("receives_in_flight", &self.receives_in_flight())
            .finish_non_exhaustive()
    }
}
