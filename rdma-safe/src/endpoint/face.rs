//! What an endpoint offers whoever posts to it, be it on its own or in a set.

use super::{Batch, Endpoint, EndpointMut, FailedWork, Rejected, Work, WorkId};
use crate::interface::Interface;
use crate::{
    Buffer, ConnectOptions, Explanation, PostError, ProtectionDomain, QueuePair, QueuePairAddress, RemoteMemory, Result,
};

/// Both have a `poster`.
macro_rules! face {
    ([$($generics:tt)*] $name:ty) => {
        impl<$($generics)*> $name {
            /// What a peer needs to connect to this end. Exchange it out of band.
            #[must_use]
            #[inline]
            pub fn address(&self) -> QueuePairAddress {
                self.poster.address
            }

            /// Connects to the peer at `remote`: [`QueuePair::connect`]. Send only when the peer has done so, too.
            ///
            /// # Errors
            /// As there.
            #[inline]
            pub fn connect(&mut self, remote: &QueuePairAddress) -> Result<()> {
                self.connect_with(remote, &ConnectOptions::default())
            }

            /// As [`connect`](Self::connect), with options.
            ///
            /// # Errors
            /// As there.
            #[inline]
            pub fn connect_with(&mut self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
                self.poster.connect_with(remote, options)
            }

            /// Posts a receive: the next message of the peer goes into `buffer`, up to its capacity.
            ///
            /// Possible as soon as the endpoint is built; post before the peer sends.
            ///
            /// # Errors
            /// [`Rejected`] gives the buffer back.
            #[inline(always)]
            pub fn receive(&mut self, buffer: Buffer) -> Result<WorkId, Rejected> {
                self.poster.receive(buffer)
            }

            /// Posts one piece of work.
            ///
            /// # Errors
            /// [`Rejected`] gives the buffer back.
            #[inline]
            pub fn post(&mut self, work: Work<'_>) -> Result<WorkId, Rejected> {
                self.poster.post(work)
            }

            /// Sends the bytes of `buffer` up to its length: [`Work::send`].
            ///
            /// # Errors
            /// As [`post`](Self::post).
            #[inline(always)]
            pub fn send(&mut self, buffer: Buffer) -> Result<WorkId, Rejected> {
                self.poster.send(buffer)
            }

            /// Sends bytes that are copied as they are posted: [`Work::send_inline`].
            ///
            /// # Errors
            /// [`PostError::InlineTooLong`] when they are more than
            /// [`EndpointBuilder::inline_data`](crate::EndpointBuilder::inline_data); as [`post`](Self::post).
            #[inline]
            pub fn send_inline(&mut self, bytes: &[u8]) -> Result<WorkId, PostError> {
                self.poster.send_inline(bytes)
            }

            /// Writes the bytes of `buffer` up to its length to the start of `remote`: [`Work::write`].
            ///
            /// # Errors
            /// As [`post`](Self::post); [`PostError::RemoteTooShort`].
            #[inline(always)]
            pub fn write(&mut self, buffer: Buffer, remote: RemoteMemory) -> Result<WorkId, Rejected> {
                self.poster.write(buffer, remote)
            }

            /// Reads from the start of `remote` into `buffer`, as many bytes as its length: [`Work::read`].
            ///
            /// # Errors
            /// As [`post`](Self::post); [`PostError::RemoteTooShort`].
            #[inline(always)]
            pub fn read(&mut self, buffer: Buffer, remote: RemoteMemory) -> Result<WorkId, Rejected> {
                self.poster.read(buffer, remote)
            }

            /// Begins a batch of work to be posted with one doorbell.
            ///
            /// # Errors
            /// [`PostError::NotReady`] before [`connect`](Self::connect); [`PostError::Poisoned`].
            #[inline]
            pub fn batch(&mut self) -> Result<Batch<'_>, PostError> {
                self.poster.batch()
            }

            /// Work posted by [`post`](Self::post), [`batch`](Self::batch) and the like, and not done, including pending work.
            #[must_use]
            #[inline]
            pub fn sends_in_flight(&self) -> u64 {
                self.poster.live.sends.in_flight()
            }

            /// The part of these sends that waits for room:
            /// [`EndpointBuilder::pending_sends`](crate::EndpointBuilder::pending_sends).
            #[must_use]
            #[inline]
            pub fn pending_sends(&self) -> u64 {
                self.poster.live.sends.pending()
            }

            /// Receives posted and not done.
            #[must_use]
            #[inline]
            pub fn receives_in_flight(&self) -> u64 {
                self.poster.live.receives.in_flight()
            }

            /// The domain whose buffers it takes.
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

            /// Why work of this endpoint failed. It asks the queue pair and the port, and so takes system calls.
            #[must_use]
            #[inline]
            pub fn explain(&self, failed: &FailedWork) -> Explanation {
                failed.explain_by(self.queue_pair())
            }
        }
    };
}

face!([I: Interface] Endpoint<I>);
face!([] EndpointMut<'_>);
