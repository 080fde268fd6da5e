//! The owned door: buffers move in with work and come back with its completion.

mod batch;
mod builder;
mod completion;
mod connect;
mod ring;
mod work;

use std::fmt;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use crate::cq::rare;
use crate::{
    Buffer, CompletionChannel, CompletionQueue, Error, Poll, PollError, PostError, ProtectionDomain, QueuePair,
    RemoteMemory, Result, SendBatch, Sge, WcFlags, WcOpcode, WcStatus, WorkCompletion, WorkRequest,
};
use ring::Ring;

pub use batch::Batch;
pub use builder::EndpointBuilder;
pub use completion::{Completion, FailedWork, Operation, Rejected, Unposted, WorkId};
pub use connect::{ConnectOptions, QueuePairAddress};
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
    local: QueuePairAddress,
    signals: Signals,
    /// A posting failed, and whether the provider has its work is not known.
    poisoned: bool,
    /// `qp` was taken.
    destroyed: bool,
}

/// What is fixed when an endpoint is built.
struct Settings {
    port: u8,
    gid_index: Option<u8>,
    is_ethernet: bool,
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

/// What a look at the queue has found.
enum Look {
    Empty,
    /// Completions, which are in the rings now.
    Noted,
    /// The completion of the oldest work. Others may be in the rings.
    Found(Completion),
}

/// What there is to say of a receive that has completed.
#[derive(Clone, Copy)]
struct Arrival {
    outcome: Outcome,
    operation: Operation,
    imm: Option<u32>,
    invalidated_rkey: Option<u32>,
}

#[derive(Clone, Copy)]
struct Outcome {
    status: WcStatus,
    vendor_error: u32,
    byte_len: u32,
    timestamp: Option<u64>,
}

impl Outcome {
    /// Of work that a later completion released: it was done before that.
    const DONE: Outcome = Outcome { status: WcStatus::SUCCESS, vendor_error: 0, byte_len: 0, timestamp: None };

    /// Bytes are counted where `has_length`.
    #[inline(always)]
    fn of(completion: &WorkCompletion<'_>, has_length: bool) -> Self {
        let status = completion.status();
        if status != WcStatus::SUCCESS {
            return Outcome { status, vendor_error: completion.vendor_error(), ..Outcome::DONE };
        }
        let byte_len = if has_length { completion.byte_len().unwrap_or(0) } else { 0 };
        Outcome { byte_len, timestamp: completion.completion_timestamp(), ..Outcome::DONE }
    }
}

impl Endpoint {
    /// Starts describing an endpoint in this domain.
    pub fn builder(pd: &ProtectionDomain) -> EndpointBuilder<'_> {
        EndpointBuilder::new(pd)
    }

    /// What a peer needs to connect to this end. Exchange it out of band.
    #[must_use]
    pub fn address(&self) -> QueuePairAddress {
        self.local
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
        // Left by a batch that was forgotten.
        self.sends.roll_back();
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

    /// Takes one piece of work that is done, if there is any. It never waits.
    ///
    /// Work of each direction comes in the order in which it was posted; no order is kept between the two.
    ///
    /// # Errors
    /// [`PollError`] when the provider failed: the endpoint is of no more use, and the buffers come back from
    /// [`Endpoint::close`].
    #[inline(always)]
    pub fn poll(&mut self) -> Result<Option<Completion>, PollError> {
        // A second time only when what there was, was silent.
        loop {
            if self.sends.has_completed() || self.receives.has_completed() {
                if let Some(completion) = self.pop() {
                    return Ok(Some(completion));
                }
            }
            match self.look() {
                Ok(Look::Noted) => {}
                Ok(Look::Empty) => return Ok(None),
                Ok(Look::Found(completion)) => return Ok(Some(completion)),
                Err(error) => return Err(error),
            }
        }
    }

    /// Looks at the queue when nothing is left of the last look.
    #[inline(always)]
    fn look(&mut self) -> Result<Look, PollError> {
        let Endpoint { cq, sends, receives, poisoned, .. } = self;
        let mut poll = cq.poll();
        let first = match poll.next() {
            Ok(Some(first)) => first,
            Ok(None) => return Ok(Look::Empty),
            Err(error) => return Err(error),
        };
        // The usual case: it is of the oldest work, and goes to the caller without a stop in the ring.
        let id = WorkId(first.wr_id());
        let completion = match id.is_receive() {
            false if first.status() == WcStatus::SUCCESS => sends
                .take_if(id.sequence(), |sent| !sent.silent)
                .map(|sent| Completion::of_send(id, Outcome::of(&first, sent.has_length()), sent)),
            false => None,
            true => receives.take_if(id.sequence(), |_| true).map(|mut posted| {
                let arrival = posted.finish(&first);
                Completion::of_receive(id, arrival, posted.buffer)
            }),
        };
        let Some(completion) = completion else {
            if !note(sends, receives, first) {
                *poisoned = true;
                return Err(PollError::Unexpected { wr_id: id.0 });
            }
            return note_rest(poll, sends, receives, poisoned).map(|()| Look::Noted);
        };
        match note_rest(poll, sends, receives, poisoned) {
            Ok(()) => Ok(Look::Found(completion)),
            Err(error) => {
                rare();
                // It is handed out later; so it stays in the ring, as nothing was added meanwhile.
                let Completion { status, vendor_error, byte_len, timestamp, .. } = completion;
                let outcome = Outcome { status, vendor_error, byte_len, timestamp };
                let len = completion.buffer.as_ref().map_or(0, |buffer| buffer.len());
                if id.is_receive() {
                    let Completion { operation, imm, invalidated_rkey, .. } = completion;
                    std::mem::forget(completion);
                    // SAFETY: the entry was just taken, and what it was taken as is forgotten.
                    let posted = unsafe { receives.untake() };
                    posted.arrival = Some(Arrival { outcome, operation, imm, invalidated_rkey });
                    posted.buffer.set_len_within(len);
                } else {
                    std::mem::forget(completion);
                    // SAFETY: as above.
                    unsafe { sends.untake() }.outcome = Some(outcome);
                }
                Err(error)
            }
        }
    }

    /// Waits for a piece of work to be done, at most for `timeout`.
    ///
    /// It spins, or, when the endpoint was built with [`EndpointBuilder::events`], sleeps until there is an event.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::Poll`]; [`Error::Channel`].
    #[inline]
    pub fn wait(&mut self, timeout: Duration) -> Result<Completion> {
        // Before a look at the clock, which costs as much as a poll.
        match self.poll() {
            Ok(Some(completion)) => Ok(completion),
            Ok(None) => self.wait_longer(timeout),
            Err(error) => Err(error.into()),
        }
    }

    #[inline(never)]
    fn wait_longer(&mut self, timeout: Duration) -> Result<Completion> {
        let start = Instant::now();
        let mut armed = false;
        loop {
            if let Some(completion) = self.poll()? {
                return Ok(completion);
            }
            if self.cq.channel().is_some() && !armed {
                // What completed before arming causes no event, so the queue has to be looked at once more.
                self.cq.arm(false)?;
                armed = true;
                continue;
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(Error::Timeout { waited: timeout });
            }
            match self.cq.channel() {
                // Events of other queues do not count, should the channel be shared with any.
                Some(channel) => armed = channel.wait(left)? != Some(self.cq.id()),
                None => std::hint::spin_loop(),
            }
        }
    }

    /// The channel that becomes readable when work is done, if the endpoint was built with
    /// [`EndpointBuilder::events`]: for `epoll(7)` and async runtimes. [`Endpoint::arm`] it first. It is the endpoint's own:
    /// events of other queues that are made to report over it get lost.
    #[must_use]
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.cq.channel()
    }

    /// Asks for an event at the next completion, and says whether there is one to wait for: `false` means that completions are
    /// there already, to be taken with [`Endpoint::poll`] before it is armed again.
    ///
    /// # Errors
    /// [`Error::NoChannel`] without [`EndpointBuilder::events`]; [`Error::Verb`]; [`Error::Poll`].
    #[inline]
    pub fn arm(&mut self) -> Result<bool> {
        if let Some(channel) = self.cq.channel() {
            while channel.try_event()?.is_some() {}
        }
        self.cq.arm(false)?;
        self.reap()?;
        Ok(!self.sends.has_completed() && !self.receives.has_completed())
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
    /// [`Error::Verb`] when the queue pair cannot be destroyed; the buffers are then leaked, as the device may still use
    /// them.
    pub fn close(mut self) -> Result<Vec<Buffer>> {
        self.destroy()?;
        let Endpoint { sends, receives, .. } = &mut self;
        let sends = std::iter::from_fn(|| sends.pop_oldest()).filter_map(|sent| sent.buffer);
        let receives = std::iter::from_fn(|| receives.pop_oldest()).map(|posted| posted.buffer);
        Ok(sends.chain(receives).collect())
    }

    /// Takes completions out of the queue and notes them in the rings, a limited number at a time.
    #[inline(always)]
    fn reap(&mut self) -> Result<(), PollError> {
        let Endpoint { cq, sends, receives, poisoned, .. } = self;
        note_rest(cq.poll(), sends, receives, poisoned)
    }

    /// Hands out work that is done.
    #[inline(always)]
    fn pop(&mut self) -> Option<Completion> {
        self.sends.skip_completed(|sent| sent.silent && sent.outcome.is_none_or(|it| it.status == WcStatus::SUCCESS));
        if let Some((sequence, sent)) = self.sends.pop_completed() {
            return Some(Completion::of_send(WorkId::send(sequence), sent.outcome.unwrap_or(Outcome::DONE), sent));
        }
        let (sequence, posted) = self.receives.pop_completed()?;
        let arrival = posted.arrival.unwrap_or(Arrival::UNKNOWN);
        Some(Completion::of_receive(WorkId::receive(sequence), arrival, posted.buffer))
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

impl Arrival {
    /// Of a receive that completed without a word: there is none, as each has a completion of its own.
    const UNKNOWN: Arrival =
        Arrival { outcome: Outcome::DONE, operation: Operation::Receive, imm: None, invalidated_rkey: None };
}

/// Notes what is left of a look at the queue, up to a limit.
#[inline(always)]
fn note_rest(
    mut poll: Poll<'_>,
    sends: &mut Ring<Sent>,
    receives: &mut Ring<Posted>,
    poisoned: &mut bool,
) -> Result<(), PollError> {
    const LIMIT: usize = 16;
    for _ in 0..LIMIT {
        let completion = match poll.next() {
            Ok(Some(completion)) => completion,
            Ok(None) => break,
            Err(error) => return Err(error),
        };
        let wr_id = completion.wr_id();
        if !note(sends, receives, completion) {
            *poisoned = true;
            return Err(PollError::Unexpected { wr_id });
        }
    }
    Ok(())
}

/// Notes a completion in its ring; `false` when it names work that is not in flight.
// Not a Rust call, which could unwind: for that the callers would keep a completion that they are about to hand out in
// memory. There is nothing here that panics.
#[allow(improper_ctypes_definitions)]
#[inline(never)]
extern "C" fn note(sends: &mut Ring<Sent>, receives: &mut Ring<Posted>, completion: WorkCompletion<'_>) -> bool {
    let id = WorkId(completion.wr_id());
    if id.is_receive() {
        let Some(posted) = receives.complete_oldest(id.sequence()) else { return false };
        posted.arrival = Some(posted.finish(&completion));
        return true;
    }
    if completion.status() == WcStatus::WR_FLUSH_ERR {
        // Not every provider flushes unsignaled work one by one: whether it was done is not known.
        let flushed = Outcome::of(&completion, false);
        sends.each_before(id.sequence(), |sent| sent.outcome = Some(flushed));
    }
    let Some(sent) = sends.complete_if(id.sequence(), |sent, oldest| sent.after < oldest) else { return false };
    sent.outcome = Some(Outcome::of(&completion, sent.has_length()));
    true
}

impl Completion {
    #[inline(always)]
    fn of_send(id: WorkId, outcome: Outcome, sent: Sent) -> Self {
        Completion {
            id,
            operation: sent.operation,
            status: outcome.status,
            vendor_error: outcome.vendor_error,
            buffer: sent.buffer,
            byte_len: outcome.byte_len,
            timestamp: outcome.timestamp,
            imm: None,
            invalidated_rkey: None,
        }
    }

    #[inline(always)]
    fn of_receive(id: WorkId, arrival: Arrival, buffer: Buffer) -> Self {
        Completion {
            id,
            operation: arrival.operation,
            status: arrival.outcome.status,
            vendor_error: arrival.outcome.vendor_error,
            buffer: Some(buffer),
            byte_len: arrival.outcome.byte_len,
            timestamp: arrival.outcome.timestamp,
            imm: arrival.imm,
            invalidated_rkey: arrival.invalidated_rkey,
        }
    }
}

impl Sent {
    /// Whether the length that its completion has means anything.
    #[inline(always)]
    fn has_length(&self) -> bool {
        matches!(self.operation, Operation::Read | Operation::Atomic)
    }
}

impl Posted {
    /// Sets the length of the buffer.
    #[inline(always)]
    fn finish(&mut self, completion: &WorkCompletion<'_>) -> Arrival {
        let mut arrival = Arrival { outcome: Outcome::of(completion, true), ..Arrival::UNKNOWN };
        if arrival.outcome.status == WcStatus::SUCCESS {
            let flags = completion.flags();
            if flags.contains(WcFlags::WITH_IMM) {
                arrival.imm = completion.imm_value();
            }
            if flags.contains(WcFlags::WITH_INV) {
                arrival.invalidated_rkey = completion.invalidated_rkey_value();
            }
            let mut len = arrival.outcome.byte_len as usize;
            if completion.opcode() == WcOpcode::RECV_RDMA_WITH_IMM {
                arrival.operation = Operation::ReceiveWrite;
                len = 0;
            }
            // A provider that claims more than it was given does not get the buffer to lie about it.
            self.buffer.set_len_within(len);
        }
        arrival
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
