//! The owned door: buffers move in with work and come back with its completion.

mod batch;
mod builder;
mod completion;
mod poll;
mod ring;
mod work;

use std::fmt;
use std::mem::ManuallyDrop;

use crate::{
    Buffer, CompletionChannel, CompletionQueue, ConnectOptions, PostError, ProtectionDomain, QueuePair,
    QueuePairAddress, RemoteMemory, Result, SendBatch, Sge, WorkRequest,
};
use poll::{Arrival, Outcome};
use ring::Ring;

pub use batch::Batch;
pub use builder::EndpointBuilder;
pub use completion::{Completion, FailedWork, Operation, Rejected, Unposted, WorkId};
pub use work::Work;

/// A reliable connection whose user needs no `unsafe`.
///
/// A buffer that is posted is *moved* into the endpoint; it comes back with the completion of its work, so that nobody can
/// touch, free or post it in between. Work is kept in rings of fixed size, one for sends and one for receives, allocated
/// with the endpoint: posting and polling allocate nothing, and a full ring is back-pressure ([`PostError::QueueFull`]).
///
/// ```no_run
/// # fn exchange(_: rdma_safe::QueuePairAddress) -> rdma_safe::QueuePairAddress { unimplemented!() }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use rdma_safe::{Device, Endpoint};
///
/// let pd = Device::first()?.open()?.alloc_pd()?;
/// let mut endpoint = Endpoint::builder(&pd).build()?;
/// let (inbox, mut outbox) = pd.allocate(8192)?.into_split(4096)?;
///
/// endpoint.receive(inbox)?; // before the peer can send
/// let remote = exchange(endpoint.address()); // over TCP, a file, …
/// endpoint.connect(&remote)?;
///
/// outbox.fill_from(b"hello")?;
/// endpoint.send(outbox)?;
/// for _ in 0..2 {
///     let done = endpoint.wait(Duration::from_secs(5))?.ok()?;
///     println!("{:?}: {:?}", done.operation, done.buffer.as_deref());
/// }
/// # Ok(())
/// # }
/// ```
pub struct Endpoint {
    /// Destroyed in `drop`, before the rings.
    qp: ManuallyDrop<QueuePair>,
    cq: CompletionQueue,
    sends: Ring<Sent>,
    receives: Ring<Posted>,
    pd: ProtectionDomain,
    settings: Settings,
    address: QueuePairAddress,
    signals: Signals,
    /// A posting failed, and whether the provider has its work is not known.
    poisoned: bool,
    /// `qp` was taken.
    destroyed: bool,
}

/// What is fixed when an endpoint is built.
struct Settings {
    max_message: u32,
    /// Unsignaled sends in a row, before one is signaled anyway.
    max_unsignaled: u32,
}

/// Which sends were signaled, as far as later ones depend on it.
#[derive(Clone, Copy)]
struct Signals {
    /// Sends since the last signaled one.
    unsignaled: u32,
    /// Sequence number of the last signaled send; 0 before the first.
    last: u64,
}

struct Sent {
    buffer: Option<Buffer>,
    operation: Operation,
    /// [`Outcome::DONE`] unless noted.
    outcome: Option<Outcome>,
    /// Nobody waits for it unless it fails: it has no buffer, and was not signaled.
    silent: bool,
    /// The signaled send before it: its completion comes first, or was lost.
    after: u64,
}

struct Posted {
    buffer: Buffer,
    /// `None` for what has not completed.
    arrival: Option<Arrival>,
}

impl Endpoint {
    /// Starts describing an endpoint in this domain.
    pub fn builder(pd: &ProtectionDomain) -> EndpointBuilder<'_> {
        EndpointBuilder::new(pd)
    }

    /// What a peer needs to connect to this end. Exchange it out of band.
    #[must_use]
    pub fn address(&self) -> QueuePairAddress {
        self.address
    }

    /// Connects to the peer at `remote`: [`QueuePair::connect`].
    ///
    /// # Errors
    /// As there.
    pub fn connect(&mut self, remote: &QueuePairAddress) -> Result<()> {
        self.connect_with(remote, &ConnectOptions::default())
    }

    /// As [`Endpoint::connect`], with options.
    ///
    /// # Errors
    /// As [`Endpoint::connect`].
    pub fn connect_with(&mut self, remote: &QueuePairAddress, options: &ConnectOptions) -> Result<()> {
        self.qp.connect(remote, options)
    }

    /// The domain whose buffers it takes.
    #[must_use]
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Read-only access to the queue pair.
    #[must_use]
    pub fn queue_pair(&self) -> &QueuePair {
        &self.qp
    }

    /// Posts a receive: the next message of the peer goes into `buffer`, up to its capacity.
    ///
    /// Possible as soon as the endpoint is built; post before the peer sends.
    ///
    /// # Errors
    /// [`Rejected`] gives the buffer back.
    #[inline(always)]
    pub fn receive(&mut self, buffer: Buffer) -> Result<WorkId, Rejected> {
        match self.try_receive(&buffer) {
            Ok(()) => {}
            Err(error) if error.surely_not_posted() => return Err(Rejected { error, buffer: Some(buffer) }),
            Err(error) => return Err(self.receive_in_doubt(buffer, error)),
        }
        // SAFETY: `try_receive` has found it not full.
        let sequence = unsafe { self.receives.stage(Posted { buffer, arrival: None }) };
        self.receives.commit();
        Ok(WorkId::receive(sequence))
    }

    /// Posts a receive into `buffer`, which the caller then puts into the ring, unless it was surely not posted.
    #[inline(always)]
    fn try_receive(&mut self, buffer: &Buffer) -> Result<(), PostError> {
        if self.poisoned {
            return Err(PostError::Poisoned);
        }
        if !buffer.is_of(&self.pd) {
            return Err(PostError::ForeignBuffer);
        }
        if self.receives.is_full() {
            return Err(PostError::QueueFull { posted: 0 });
        }
        let sge = buffer.whole_sge(self.settings.max_message);
        let id = WorkId::receive(self.receives.next_sequence());
        // SAFETY: the memory belongs to the buffer alone, which the caller puts into the ring before anything else happens.
        // It stays there until the work has completed or the queue pair was destroyed: entries leave the ring by a
        // completion, or in `close` and `drop` after the destruction.
        unsafe { self.qp.receive(id.0, sge) }
    }

    /// The provider may have `buffer`.
    #[cold]
    #[inline(never)]
    fn receive_in_doubt(&mut self, buffer: Buffer, error: PostError) -> Rejected {
        // SAFETY: nothing but the posting has happened since `try_receive` has found it not full.
        unsafe { self.receives.stage(Posted { buffer, arrival: None }) };
        self.receives.commit();
        self.poisoned = true;
        self.qp.fail();
        Rejected { error, buffer: None }
    }

    /// Posts one piece of work.
    ///
    /// # Errors
    /// [`Rejected`] gives the buffer back.
    #[inline(always)]
    pub fn post(&mut self, work: Work<'_>) -> Result<WorkId, Rejected> {
        let mut batch = match self.batch() {
            Ok(batch) => batch,
            Err(error) => return Err(Rejected { error, buffer: work.into_buffer() }),
        };
        let id = batch.add(work)?;
        match batch.post() {
            Ok(()) => Ok(id),
            Err(Unposted { error, mut buffers }) => Err(Rejected { error, buffer: buffers.pop() }),
        }
    }

    /// Sends the bytes of `buffer` up to its length: [`Work::send`].
    ///
    /// # Errors
    /// As [`Endpoint::post`].
    #[inline(always)]
    pub fn send(&mut self, buffer: Buffer) -> Result<WorkId, Rejected> {
        // SAFETY: see `post_buffer`.
        self.post_buffer(buffer, Operation::Send, u64::MAX, |raw, wr, sge| unsafe { raw.send(wr, sge) })
    }

    /// Sends bytes that are copied as they are posted: [`Work::send_inline`].
    ///
    /// # Errors
    /// [`PostError::InlineTooLong`] when they are more than [`EndpointBuilder::inline_data`]; as [`Endpoint::post`].
    #[inline(always)]
    pub fn send_inline(&mut self, bytes: &[u8]) -> Result<WorkId, PostError> {
        self.post(Work::send_inline(bytes)).map_err(|rejected| rejected.error)
    }

    /// Writes the bytes of `buffer` up to its length to the start of `remote`: [`Work::write`].
    ///
    /// # Errors
    /// As [`Endpoint::post`]; [`PostError::RemoteTooShort`].
    #[inline(always)]
    pub fn write(&mut self, buffer: Buffer, remote: RemoteMemory) -> Result<WorkId, Rejected> {
        // SAFETY: see `post_buffer`.
        self.post_buffer(buffer, Operation::Write, remote.len, |raw, wr, sge| unsafe { raw.write(wr, remote, sge) })
    }

    /// Reads from the start of `remote` into `buffer`, as many bytes as its length: [`Work::read`].
    ///
    /// # Errors
    /// As [`Endpoint::post`]; [`PostError::RemoteTooShort`].
    #[inline(always)]
    pub fn read(&mut self, buffer: Buffer, remote: RemoteMemory) -> Result<WorkId, Rejected> {
        // SAFETY: see `post_buffer`.
        self.post_buffer(buffer, Operation::Read, remote.len, |raw, wr, sge| unsafe { raw.read(wr, remote, sge) })
    }

    /// What `post` does, for work whose kind is known where it is compiled: signaled, of a buffer, of which at most `room`
    /// bytes fit where it goes. `add` adds it to the batch.
    ///
    /// The memory belongs to the buffer alone, which goes into the ring before anything else happens, unless the provider has
    /// surely not taken the work. It stays there until the work has completed or the queue pair was destroyed. Nothing of this
    /// process is harmed by a write of the peer's memory: see `Batch::add`.
    #[inline(always)]
    fn post_buffer(
        &mut self,
        buffer: Buffer,
        operation: Operation,
        room: u64,
        add: impl FnOnce(&mut SendBatch<'_>, WorkRequest, Sge) -> Result<(), PostError>,
    ) -> Result<WorkId, Rejected> {
        match self.try_post(&buffer, room, add) {
            Ok(()) => Ok(self.stage_posted(buffer, operation)),
            Err(error) if error.surely_not_posted() => Err(Rejected { error, buffer: Some(buffer) }),
            Err(error) => Err(self.send_in_doubt(buffer, operation, error)),
        }
    }

    /// Takes back what a batch that was forgotten has left: the work from the provider, then the buffers.
    #[inline(always)]
    fn abandon(&mut self) {
        if self.sends.has_staged() {
            self.roll_back();
        }
    }

    // Not a Rust call, for the reason that `Ring::drop_staged` is none.
    #[allow(improper_ctypes_definitions)]
    #[cold]
    #[inline(never)]
    extern "C" fn roll_back(&mut self) {
        self.qp.abort_sends();
        self.sends.roll_back();
    }

    #[inline(always)]
    fn try_post(
        &mut self,
        buffer: &Buffer,
        room: u64,
        add: impl FnOnce(&mut SendBatch<'_>, WorkRequest, Sge) -> Result<(), PostError>,
    ) -> Result<(), PostError> {
        if self.poisoned {
            return Err(PostError::Poisoned);
        }
        self.abandon();
        let (queue, _) = self.qp.send_and_shared();
        let mut batch = queue.batch()?;
        if self.sends.is_full() {
            return Err(PostError::QueueFull { posted: 0 });
        }
        let len = buffer.len();
        if len > self.settings.max_message as usize {
            return Err(PostError::MessageTooLong { len, max: self.settings.max_message });
        }
        if len as u64 > room {
            return Err(PostError::RemoteTooShort { len, remote: room });
        }
        if !buffer.is_of(&self.pd) {
            return Err(PostError::ForeignBuffer);
        }
        let id = WorkId::send(self.sends.next_sequence());
        add(&mut batch, WorkRequest::new(id.0).signaled(), buffer.sge())?;
        batch.post()
    }

    /// Puts the buffer of work that `try_post` has posted into the ring.
    #[inline(always)]
    fn stage_posted(&mut self, buffer: Buffer, operation: Operation) -> WorkId {
        let after = self.signals.last;
        let sent = Sent { buffer: Some(buffer), operation, outcome: None, silent: false, after };
        // SAFETY: `try_post` has found it not full, and nothing but the posting has happened since.
        let sequence = unsafe { self.sends.stage(sent) };
        self.sends.commit();
        self.signals = Signals { unsignaled: 0, last: sequence };
        WorkId::send(sequence)
    }

    /// The provider may have `buffer`.
    #[cold]
    #[inline(never)]
    fn send_in_doubt(&mut self, buffer: Buffer, operation: Operation, error: PostError) -> Rejected {
        self.stage_posted(buffer, operation);
        self.poisoned = true;
        self.qp.fail();
        Rejected { error, buffer: None }
    }

    /// Begins a batch of work to be posted with one doorbell.
    ///
    /// # Errors
    /// [`PostError::NotReady`] before [`Endpoint::connect`]; [`PostError::Poisoned`].
    #[inline(always)]
    pub fn batch(&mut self) -> Result<Batch<'_>, PostError> {
        Batch::new(self)
    }

    /// The channel that becomes readable when work is done, if the endpoint was built with
    /// [`EndpointBuilder::events`]: for `epoll(7)` and async runtimes. [`Endpoint::arm`] it first. It is the endpoint's own:
    /// events of other queues that are made to report over it get lost.
    #[must_use]
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.cq.channel()
    }

    /// Work posted by [`Endpoint::post`], [`Endpoint::batch`] and the like, and not done.
    #[must_use]
    #[inline]
    pub fn sends_in_flight(&self) -> u64 {
        self.sends.in_flight()
    }

    /// Receives posted and not done.
    #[must_use]
    #[inline]
    pub fn receives_in_flight(&self) -> u64 {
        self.receives.in_flight()
    }

    /// Destroys the queue pair, and returns the buffers of all work that was not handed out, done or not.
    ///
    /// # Errors
    /// [`Error::Verb`](crate::Error::Verb) when the queue pair cannot be destroyed; the buffers are then leaked, as the device
    /// may still use them.
    pub fn close(mut self) -> Result<Vec<Buffer>> {
        self.destroy()?;
        let Endpoint { sends, receives, .. } = &mut self;
        let sends = std::iter::from_fn(|| sends.pop_oldest()).filter_map(|sent| sent.buffer);
        let receives = std::iter::from_fn(|| receives.pop_oldest()).map(|posted| posted.buffer);
        Ok(sends.chain(receives).collect())
    }

    /// Destroys the queue pair, once.
    fn destroy(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.destroyed, true) {
            return Ok(());
        }
        // SAFETY: `destroyed` was false, so it has not been taken. It is not used after: `close` and `drop`, the only
        // callers, end the endpoint.
        let qp = unsafe { ManuallyDrop::take(&mut self.qp) };
        let result = qp.destroy();
        if result.is_err() {
            // The device may still read and write the buffers.
            self.sends.leak();
            self.receives.leak();
        }
        result
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("queue_pair", &*self.qp)
            .field("sends_in_flight", &self.sends.in_flight())
            .field("receives_in_flight", &self.receives.in_flight())
            .finish_non_exhaustive()
    }
}
