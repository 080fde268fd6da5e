//! Endpoints for datagrams.

mod identity;
mod multicast;
mod peer;
mod slots;

use std::ops::Deref;
use std::time::Duration;

pub use identity::DatagramIdentity;
pub use peer::{DatagramSender, Peer};
pub(super) use slots::DatagramSlots;

use super::{Armed, Batch, BatchError, Completion, Endpoint, FailedWork, Rejected, Work, WorkId};
use crate::address::AddressVector;
use crate::mr::Gather;
use crate::{
    Buffer, CompletionChannel, ConnectOptions, PollError, PostError, ProtectionDomain, QueuePair, QueuePairAddress,
    Result,
};

/// Exchanges datagrams with any number of peers, without `unsafe`: an [`Endpoint`] over a UD queue pair.
///
/// A datagram fits in one packet ([`DatagramEndpoint::max_datagram`]). Datagrams may be lost or reordered without an
/// error: the completion of a send says only that the datagram was sent. Work, buffers and completions are as with an
/// [`Endpoint`], plus a [`Peer`] for each send and a [`DatagramSender`] for each receive. The header that the device puts
/// before each datagram ([`Grh`](crate::address::Grh)) is removed, so buffers hold only the payload.
/// [`DatagramEndpoint::attach_mcast`] subscribes to multicast groups.
///
/// ```no_run
/// # fn exchange(_: rdma_safe::QueuePairAddress) -> rdma_safe::QueuePairAddress { unimplemented!() }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use rdma_safe::{Device, Endpoint};
///
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// // Both ends use the same queue key.
/// let mut endpoint = Endpoint::builder(&pd).inline_data(64).build_datagrams(0x1234)?;
/// endpoint.receive(pd.allocate(1024)?)?; // datagrams that arrive earlier are lost
/// let remote = exchange(endpoint.address());
/// let peer = endpoint.peer(&remote)?;
/// endpoint.send_inline(b"hello", &peer)?;
/// loop {
///     let done = endpoint.wait(Duration::from_secs(5))?.ok()?;
///     if let Some(sender) = done.sender {
///         println!("{:?} from {:?}", done.work.buffer.as_deref(), sender);
///         endpoint.send_inline(b"and to you", &endpoint.peer_of(&sender)?)?;
///         break;
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DatagramEndpoint {
    endpoint: Endpoint,
    port: u8,
    qkey: u32,
}

/// Completed work of a [`DatagramEndpoint`].
#[derive(Debug)]
#[non_exhaustive]
#[must_use = "dropping a completion drops its buffer"]
pub struct DatagramCompletion {
    /// The completed work and its buffer.
    pub work: Completion,
    /// The sender, for a receive that succeeded.
    pub sender: Option<DatagramSender>,
}

impl DatagramCompletion {
    /// The completion if it succeeded.
    ///
    /// # Errors
    /// [`FailedWork`], which holds the completion and with it the buffer.
    pub fn ok(self) -> Result<DatagramCompletion, FailedWork> {
        let DatagramCompletion { work, sender } = self;
        Ok(DatagramCompletion { work: work.ok()?, sender })
    }
}

impl DatagramEndpoint {
    pub(super) fn new(endpoint: Endpoint, port: u8, qkey: u32) -> Self {
        DatagramEndpoint { endpoint, port, qkey }
    }

    /// The address that a peer needs to send to this endpoint, together with [`DatagramEndpoint::qkey`].
    ///
    /// Exchange both out of band.
    #[must_use]
    pub fn address(&self) -> QueuePairAddress {
        self.endpoint.address()
    }

    /// What the connection manager needs to know of this endpoint.
    #[must_use]
    pub fn identity(&self) -> DatagramIdentity {
        let qp = self.queue_pair();
        DatagramIdentity::new(self.pd(), self.port, qp.number(), self.qkey, qp.local())
    }

    /// Queue key. Received datagrams with another key are dropped.
    #[must_use]
    pub fn qkey(&self) -> u32 {
        self.qkey
    }

    /// Port of the device, counted from 1.
    #[must_use]
    pub fn port(&self) -> u8 {
        self.port
    }

    /// Maximum size of a datagram in bytes: the MTU of the port when the endpoint was built.
    #[must_use]
    pub fn max_datagram(&self) -> u32 {
        self.queue_pair().max_datagram().unwrap_or(0)
    }

    /// The peer at `remote`, with this endpoint's queue key unless [`Peer::with_qkey`] changes it.
    ///
    /// # Errors
    /// The errors of [`ProtectionDomain::address_handle`].
    pub fn peer(&self, remote: &QueuePairAddress) -> Result<Peer> {
        self.peer_with(remote, &ConnectOptions::default())
    }

    /// Like [`DatagramEndpoint::peer`], with options.
    ///
    /// Only the options of an address apply: service level, traffic class, hop limit and flow label.
    ///
    /// # Errors
    /// Like [`DatagramEndpoint::peer`].
    pub fn peer_with(&self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<Peer> {
        self.peer_at(&self.queue_pair().address_of(remote, options)?, remote.qp_num)
    }

    /// The queue pair `qp_num` behind the port at `address`.
    ///
    /// # Errors
    /// The errors of [`ProtectionDomain::address_handle`].
    pub fn peer_at(&self, address: &AddressVector, qp_num: u32) -> Result<Peer> {
        self.identity().peer_at(address, qp_num)
    }

    /// The sender of a datagram as a peer, to reply to it: `ibv_init_ah_from_wc(3)`.
    ///
    /// The path to the sender of a multicast starts at the GID of this endpoint, since the C function does not support multicasts.
    ///
    /// This creates an address handle, which costs a system call on most devices. Cache the peer to reply more than
    /// once ([`DatagramSender`] is `Eq` and `Hash`).
    ///
    /// # Errors
    /// [`AddressError::OtherPort`](crate::address::AddressError::OtherPort), and the errors of
    /// [`Context::sender_address`](crate::Context::sender_address) and [`ProtectionDomain::address_handle`].
    pub fn peer_of(&self, sender: &DatagramSender) -> Result<Peer> {
        self.identity().peer_of(sender)
    }

    /// Posts a receive: a datagram goes into `buffer`, up to its capacity.
    ///
    /// A longer datagram fails the receive or is dropped.
    ///
    /// # Errors
    /// [`Rejected`] returns the buffer.
    #[inline]
    pub fn receive(&mut self, buffer: Buffer) -> Result<WorkId, Rejected> {
        self.endpoint.receive(buffer)
    }

    /// Posts a receive into several buffers: [`Endpoint::receive_list`].
    ///
    /// # Errors
    /// Those of [`Endpoint::receive_list`].
    pub fn receive_list(&mut self, list: impl Into<Gather>) -> Result<WorkId, Rejected> {
        self.endpoint.receive_list(list)
    }

    /// Sends the bytes of `buffer` up to its length: shorthand for [`post`](Self::post) of [`Work::send`].
    ///
    /// # Errors
    /// [`Rejected`] returns the buffer: with [`PostError::DatagramTooLong`], [`PostError::ForeignPeer`], or an error of
    /// [`Endpoint::post`].
    #[inline]
    pub fn send(&mut self, buffer: Buffer, peer: &Peer) -> Result<WorkId, Rejected> {
        self.post(Work::send(buffer), peer)
    }

    /// Sends bytes that are copied during posting: shorthand for [`post`](Self::post) of [`Work::send_inline`].
    ///
    /// Up to [`EndpointBuilder::inline_data`](crate::EndpointBuilder::inline_data) bytes.
    ///
    /// # Errors
    /// [`PostError::InlineTooLong`]; the errors of [`DatagramEndpoint::send`].
    #[inline]
    pub fn send_inline(&mut self, bytes: &[u8], peer: &Peer) -> Result<WorkId, PostError> {
        self.post(Work::send_inline(bytes), peer).map_err(|rejected| rejected.error)
    }

    /// Posts a send, optionally with immediate data, unsignaled or solicited.
    ///
    /// # Errors
    /// Like [`DatagramEndpoint::send`]; [`PostError::NotEnabled`] for work that is not a send.
    #[inline]
    pub fn post(&mut self, work: Work<'_>, peer: &Peer) -> Result<WorkId, Rejected> {
        self.endpoint.poster.post_to(work, peer)
    }

    /// Begins a batch of sends to any peers, posted with one doorbell.
    ///
    /// # Errors
    /// [`PostError::EndpointFailed`].
    #[inline]
    pub fn batch(&mut self) -> Result<DatagramBatch<'_>, PostError> {
        Ok(DatagramBatch(self.endpoint.batch()?))
    }

    /// Takes one piece of completed work, if there is any: [`Endpoint::poll`].
    ///
    /// # Errors
    /// Like [`Endpoint::poll`].
    #[inline]
    pub fn poll(&mut self) -> Result<Option<DatagramCompletion>, PollError> {
        let polled = self.endpoint.poll()?;
        Ok(polled.map(|work| self.complete(work)))
    }

    /// Waits until a piece of work has completed, for `timeout` at most: [`Endpoint::wait`].
    ///
    /// # Errors
    /// Like [`Endpoint::wait`].
    #[inline]
    pub fn wait(&mut self, timeout: Duration) -> Result<DatagramCompletion> {
        let work = self.endpoint.wait(timeout)?;
        Ok(self.complete(work))
    }

    #[inline]
    fn complete(&self, work: Completion) -> DatagramCompletion {
        let slots = self.endpoint.poster.live.datagrams.as_deref();
        let sender = slots.and_then(|slots| slots.sender_of(&work));
        DatagramCompletion { work, sender }
    }

    /// Requests an event for the next completion, unless completions are available already: [`Endpoint::arm`].
    ///
    /// # Errors
    /// Like [`Endpoint::arm`].
    pub fn arm(&mut self) -> Result<Armed> {
        self.endpoint.arm()
    }

    /// The channel that becomes readable when work completes: [`Endpoint::channel`].
    #[must_use]
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.endpoint.channel()
    }

    /// Number of sends that are posted and not completed.
    #[must_use]
    pub fn sends_in_flight(&self) -> u64 {
        self.endpoint.sends_in_flight()
    }

    /// Number of receives that are posted and not completed.
    #[must_use]
    pub fn receives_in_flight(&self) -> u64 {
        self.endpoint.receives_in_flight()
    }

    /// The domain that buffers and peers must belong to.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.endpoint.pd()
    }

    /// Read-only access to the queue pair.
    #[must_use]
    pub fn queue_pair(&self) -> &QueuePair {
        self.endpoint.queue_pair()
    }

    /// Destroys the queue pair and returns the buffers of all work that was not handed out: [`Endpoint::close`].
    ///
    /// # Errors
    /// Like [`Endpoint::close`].
    pub fn close(self) -> Result<Vec<Buffer>> {
        self.endpoint.close()
    }
}

/// Sends to be posted with one doorbell. Dropping it posts nothing, and drops the buffers that were moved in.
///
/// Made by [`DatagramEndpoint::batch`].
#[derive(Debug)]
#[must_use = "dropping a batch posts nothing; call `post`"]
pub struct DatagramBatch<'e>(Batch<'e>);

impl DatagramBatch<'_> {
    /// Adds a send.
    ///
    /// # Errors
    /// Like [`DatagramEndpoint::post`]; the batch is then unchanged. [`PostError::EndpointFull`] means that completions
    /// must be polled first.
    #[inline]
    pub fn add(&mut self, work: Work<'_>, peer: &Peer) -> Result<WorkId, Rejected> {
        self.0.add_datagram(work, peer)
    }

    /// Number of sends in the batch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the batch is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Posts the whole batch. An empty batch does nothing.
    ///
    /// # Errors
    /// Like [`Batch::post`].
    #[inline]
    pub fn post(self) -> Result<(), BatchError> {
        self.0.post()
    }
}

/// Dereferences to the completed work.
impl Deref for DatagramCompletion {
    type Target = Completion;

    fn deref(&self) -> &Completion {
        &self.work
    }
}
