//! The owned door for datagrams.

mod kept;
mod multicast;
mod peer;

use std::ops::Deref;
use std::time::Duration;

pub(super) use kept::Kept;
pub(crate) use peer::Arrival;
pub use peer::{Peer, Sender};

use super::{Armed, Batch, Completion, Endpoint, FailedWork, Rejected, Unposted, Work, WorkId};
use crate::{
    AddressVector, Buffer, CompletionChannel, ConnectOptions, PollError, PostError, ProtectionDomain, QueuePair,
    QueuePairAddress, Result,
};

/// Sends datagrams to any number of peers, and receives theirs, without `unsafe`: an [`Endpoint`] over a UD queue pair.
///
/// A datagram is one packet at most ([`DatagramEndpoint::max_datagram`]). It may get lost or be overtaken, and nobody is told; that
/// it was sent says no more than that. Work, buffers and completions are as those of an [`Endpoint`], with a [`Peer`] for each
/// send, and a [`Sender`] with each receive. The header that a device puts before each datagram ([`Grh`](crate::Grh)) is taken off:
/// buffers hold the payload only. What is sent to a multicast group comes here after [`DatagramEndpoint::attach_mcast`].
///
/// ```no_run
/// # fn exchange(_: rdma_safe::QueuePairAddress) -> rdma_safe::QueuePairAddress { unimplemented!() }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use rdma_safe::{Device, Endpoint};
///
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// // Both ends have the same queue key.
/// let mut endpoint = Endpoint::builder(&pd).inline_data(64).build_datagrams(0x1234)?;
/// endpoint.receive(pd.allocate(1024)?)?; // what arrives before is lost
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

/// Work of a [`DatagramEndpoint`] that is done.
#[derive(Debug)]
#[non_exhaustive]
#[must_use = "dropping a completion drops its buffer"]
pub struct DatagramCompletion {
    /// What it was, and its buffer.
    pub work: Completion,
    /// Of a receive that succeeded: from whom.
    pub sender: Option<Sender>,
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

    /// What a peer needs to send to this end, beside [`DatagramEndpoint::qkey`]. Exchange it out of band.
    #[must_use]
    pub fn address(&self) -> QueuePairAddress {
        self.endpoint.address()
    }

    /// Queue key: datagrams that have another one are dropped.
    #[must_use]
    pub fn qkey(&self) -> u32 {
        self.qkey
    }

    /// The port that it sends and receives by, counted from 1.
    #[must_use]
    pub fn port(&self) -> u8 {
        self.port
    }

    /// Bytes that a datagram can have: the MTU of the port as the endpoint was built.
    #[must_use]
    pub fn max_datagram(&self) -> u32 {
        self.queue_pair().max_datagram().unwrap_or(0)
    }

    /// The peer at `remote`, which has the same queue key unless [`Peer::with_qkey`] says otherwise.
    ///
    /// # Errors
    /// Those of [`ProtectionDomain::address_handle`].
    pub fn peer(&self, remote: &QueuePairAddress) -> Result<Peer> {
        self.peer_with(remote, &ConnectOptions::default())
    }

    /// As [`DatagramEndpoint::peer`]. Of `options` those count that an address has: service level, traffic class, hop limit and
    /// flow label.
    ///
    /// # Errors
    /// As there.
    pub fn peer_with(&self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<Peer> {
        self.peer_at(&self.queue_pair().address_of(remote, options)?, remote.qp_num)
    }

    /// The peer `qp_num` behind the port that `address` leads to.
    ///
    /// # Errors
    /// Those of [`ProtectionDomain::address_handle`].
    pub fn peer_at(&self, address: &AddressVector, qp_num: u32) -> Result<Peer> {
        Ok(Peer::new(self.pd().address_handle(address)?, qp_num, self.qkey))
    }

    /// The peer that has sent a datagram, to answer it: `ibv_init_ah_from_wc(3)`. It makes an address handle, which costs a system
    /// call on most devices: keep what is answered more than once ([`Sender`] is `Eq` and `Hash`).
    ///
    /// # Errors
    /// Those of [`Context::sender_address`](crate::Context::sender_address) and [`ProtectionDomain::address_handle`].
    pub fn peer_of(&self, sender: &Sender) -> Result<Peer> {
        let address = self.pd().context().address_of_arrival(self.port, &sender.route, sender.grh())?;
        self.peer_at(&address, sender.qp_num())
    }

    /// Posts a receive: a datagram goes into `buffer`, up to its capacity. One that is longer fails the receive, or is dropped.
    ///
    /// # Errors
    /// [`Rejected`] gives the buffer back.
    #[inline]
    pub fn receive(&mut self, buffer: Buffer) -> Result<WorkId, Rejected> {
        self.endpoint.receive(buffer)
    }

    /// Sends the bytes of `buffer` up to its length.
    ///
    /// # Errors
    /// [`Rejected`] gives the buffer back: with [`PostError::DatagramTooLong`], [`PostError::ForeignPeer`], or as
    /// [`Endpoint::post`].
    #[inline]
    pub fn send(&mut self, buffer: Buffer, peer: &Peer) -> Result<WorkId, Rejected> {
        self.post(Work::send(buffer), peer)
    }

    /// Sends bytes that are copied as they are posted, as many as
    /// [`EndpointBuilder::inline_data`](crate::EndpointBuilder::inline_data) says.
    ///
    /// # Errors
    /// [`PostError::InlineTooLong`]; as [`DatagramEndpoint::send`].
    #[inline]
    pub fn send_inline(&mut self, bytes: &[u8], peer: &Peer) -> Result<WorkId, PostError> {
        self.post(Work::send_inline(bytes), peer).map_err(|rejected| rejected.error)
    }

    /// Posts a send, which can have immediate data, be unsignaled or solicited.
    ///
    /// # Errors
    /// As [`DatagramEndpoint::send`]; [`PostError::NotEnabled`] for work that is not a send.
    #[inline]
    pub fn post(&mut self, work: Work<'_>, peer: &Peer) -> Result<WorkId, Rejected> {
        let mut batch = match self.batch() {
            Ok(batch) => batch,
            Err(error) => return Err(Rejected { error, buffer: work.into_buffer() }),
        };
        let id = batch.add(work, peer)?;
        match batch.post() {
            Ok(()) => Ok(id),
            Err(Unposted { error, mut buffers }) => Err(Rejected { error, buffer: buffers.pop() }),
        }
    }

    /// Begins a batch of sends, to the same peer or different ones, to be posted with one doorbell.
    ///
    /// # Errors
    /// [`PostError::Poisoned`].
    #[inline]
    pub fn batch(&mut self) -> Result<DatagramBatch<'_>, PostError> {
        Ok(DatagramBatch(self.endpoint.batch()?))
    }

    /// Takes one piece of work that is done, if there is any: [`Endpoint::poll`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<DatagramCompletion>, PollError> {
        let polled = self.endpoint.poll()?;
        Ok(polled.map(|work| self.complete(work)))
    }

    /// Waits for a piece of work to be done, at most for `timeout`: [`Endpoint::wait`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn wait(&mut self, timeout: Duration) -> Result<DatagramCompletion> {
        let work = self.endpoint.wait(timeout)?;
        Ok(self.complete(work))
    }

    #[inline]
    fn complete(&self, work: Completion) -> DatagramCompletion {
        let is_arrival = work.id.is_receive() && work.status == crate::WcStatus::SUCCESS;
        let kept = self.endpoint.poster.live.datagrams.as_deref().filter(|_| is_arrival);
        let sender = kept.and_then(|kept| kept.sender(work.id.0));
        DatagramCompletion { work, sender }
    }

    /// Asks for an event at the next completion, unless completions are there already: [`Endpoint::arm`].
    ///
    /// # Errors
    /// As there.
    pub fn arm(&mut self) -> Result<Armed> {
        self.endpoint.arm()
    }

    /// The channel that becomes readable when work is done: [`Endpoint::channel`].
    #[must_use]
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.endpoint.channel()
    }

    /// Sends posted and not done.
    #[must_use]
    pub fn sends_in_flight(&self) -> u64 {
        self.endpoint.sends_in_flight()
    }

    /// Receives posted and not done.
    #[must_use]
    pub fn receives_in_flight(&self) -> u64 {
        self.endpoint.receives_in_flight()
    }

    /// The domain whose buffers and peers it takes.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        self.endpoint.pd()
    }

    /// Read-only access to the queue pair.
    #[must_use]
    pub fn queue_pair(&self) -> &QueuePair {
        self.endpoint.queue_pair()
    }

    /// Destroys the queue pair, and returns the buffers of all work that was not handed out: [`Endpoint::close`].
    ///
    /// # Errors
    /// As there.
    pub fn close(self) -> Result<Vec<Buffer>> {
        self.endpoint.close()
    }
}

/// Sends to post at once. Dropping it posts nothing, and drops the buffers that were moved in.
///
/// Made by [`DatagramEndpoint::batch`].
#[derive(Debug)]
#[must_use = "dropping a batch posts nothing; call `post`"]
pub struct DatagramBatch<'e>(Batch<'e>);

impl DatagramBatch<'_> {
    /// Adds a send.
    ///
    /// # Errors
    /// As [`DatagramEndpoint::post`]; the batch is as before then. [`PostError::EndpointFull`] means that completions have to
    /// be taken first.
    #[inline]
    pub fn add(&mut self, work: Work<'_>, peer: &Peer) -> Result<WorkId, Rejected> {
        self.0.add_datagram(work, peer)
    }

    /// How many sends it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it holds none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Posts all of it. An empty batch does nothing.
    ///
    /// # Errors
    /// As [`Batch::post`].
    #[inline]
    pub fn post(self) -> Result<(), Unposted> {
        self.0.post()
    }
}

/// What it was, and its buffer.
impl Deref for DatagramCompletion {
    type Target = Completion;

    fn deref(&self) -> &Completion {
        &self.work
    }
}
