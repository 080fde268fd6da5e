//! Several pieces of work, one doorbell.

use std::fmt;
use std::mem::ManuallyDrop;

use super::datagram::{Kept, Peer};
use super::gates::Gates;
use super::ring::{Kind, Ring};
use super::work::{ATOMIC, Data, Verb};
use super::{Poster, Rejected, Run, Unposted, Work, WorkId};
use crate::interface::Interface;
use crate::qp::Shared;
use crate::{Buffer, Inline, PostError, ProtectionDomain, SendBatch, SendFlags, Sge, WorkRequest};

/// Work to post at once. Dropping it posts nothing, and drops the buffers that were moved in.
///
/// Made by [`Endpoint::batch`](crate::Endpoint::batch).
#[must_use = "dropping a batch posts nothing; call `post`"]
pub struct Batch<'e> {
    /// Taken by `drop` and by `post`, which ends the batch.
    raw: ManuallyDrop<SendBatch<'e>>,
    qp: &'e Shared,
    sends: &'e mut Ring<Buffer>,
    /// Sequence number from which on no work is added.
    limit: u64,
    pd: &'e ProtectionDomain,
    /// As it will be when this is posted.
    run: Run,
    endpoint_run: &'e mut Run,
    /// Shut as long as this is, and when it is forgotten.
    gates: &'e mut Gates,
    gates_before: Gates,
    poisoned: &'e mut bool,
    max_unsignaled: u32,
    max_message: u32,
    datagrams: Option<&'e mut Kept>,
}

impl<'e> Batch<'e> {
    #[inline(always)]
    pub(super) fn new<I: Interface>(endpoint: &'e mut Poster<I>) -> Result<Self, PostError> {
        if endpoint.poisoned {
            return Err(PostError::Poisoned);
        }
        if endpoint.live.sends.has_staged() || endpoint.live.sends.pending() != 0 {
            endpoint.open_gates();
            if endpoint.poisoned {
                return Err(PostError::Poisoned);
            }
        }
        let end = endpoint.live.sends.next_sequence();
        let run = if endpoint.run.end == end { endpoint.run.len } else { 0 };
        let (queue, qp) = endpoint.live.qp.send_and_shared();
        Ok(Batch {
            raw: ManuallyDrop::new(queue.batch()?),
            qp,
            gates_before: std::mem::replace(&mut endpoint.gates, Gates::SHUT),
            gates: &mut endpoint.gates,
            limit: endpoint.live.sends.batch_limit(),
            sends: &mut endpoint.live.sends,
            pd: &endpoint.pd,
            run: Run { len: run, end },
            endpoint_run: &mut endpoint.run,
            poisoned: &mut endpoint.poisoned,
            max_unsignaled: endpoint.settings.max_unsignaled,
            max_message: endpoint.settings.max_message,
            datagrams: endpoint.live.datagrams.as_deref_mut(),
        })
    }
}

impl Batch<'_> {
    /// Adds a piece of work.
    ///
    /// # Errors
    /// [`Rejected`] gives the buffer back; the batch is as before then. [`PostError::EndpointFull`] means that completions
    /// have to be taken first. Work of a batch never waits, whatever [`EndpointBuilder::pending_sends`] is. It is also refused
    /// while other work is pending, which it would overtake.
    ///
    /// [`EndpointBuilder::pending_sends`]: crate::EndpointBuilder::pending_sends
    #[inline(always)]
    pub fn add(&mut self, work: Work<'_>) -> Result<WorkId, Rejected> {
        let Work { verb, data, imm, flags } = work;
        match data {
            Data::Buffer(mut buffer) => match self.try_add_buffer(&verb, &buffer, imm, flags) {
                Ok(()) => {
                    if verb.is_atomic() {
                        // It holds the eight bytes of the result then.
                        buffer.set_len_within(ATOMIC as u32);
                    }
                    Ok(self.stage(Some(buffer), &verb, flags))
                }
                Err(error) => Err(Rejected { error, buffer: Some(buffer) }),
            },
            Data::Inline(bytes) => match self.try_add_inline(&verb, bytes, imm, flags) {
                Ok(()) => Ok(self.stage(None, &verb, flags)),
                Err(error) => Err(Rejected { error, buffer: None }),
            },
        }
    }

    /// Adds work whose buffer the caller then stages.
    #[inline(always)]
    fn try_add_buffer(
        &mut self,
        verb: &Verb,
        buffer: &Buffer,
        imm: Option<u32>,
        flags: SendFlags,
    ) -> Result<(), PostError> {
        let wr = self.admit(verb, buffer.len(), buffer.capacity(), flags)?;
        if !buffer.is_of(self.pd) {
            return Err(PostError::ForeignBuffer);
        }
        let sge = verb.sge(buffer);
        // SAFETY: the memory belongs to the buffer alone, which the caller moves into the ring before anything else happens. It
        // stays there until the work has completed, or the queue pair was destroyed, or, if the batch is not posted, `drop`.
        // Nothing of this process is harmed by a write to `remote`: memory that is registered with remote access is exposed,
        // of which there are no references, or was registered by an `unsafe` call that says so.
        unsafe { add_buffer(&mut self.raw, wr, verb, imm, sge) }
    }

    /// Adds work that the caller then stages.
    #[inline(always)]
    fn try_add_inline(
        &mut self,
        verb: &Verb,
        bytes: &[u8],
        imm: Option<u32>,
        flags: SendFlags,
    ) -> Result<(), PostError> {
        let wr = self.admit(verb, bytes.len(), bytes.len(), flags)?;
        // SAFETY: the bytes are copied in the call. As to the peer's memory, see `try_add_buffer`.
        unsafe { add_inline(&mut self.raw, wr, verb, imm, Inline(bytes)) }
    }

    /// Checks that work could be posted if there were room, by building its work request and aborting it.
    pub(super) fn rehearse(mut self, work: &Work<'_>) -> Result<(), PostError> {
        let Work { verb, data, imm, flags } = work;
        let (len, capacity) = match data {
            Data::Buffer(buffer) => (buffer.len(), buffer.capacity()),
            Data::Inline(bytes) => (bytes.len(), bytes.len()),
        };
        verb.check(len, capacity, self.max_message)?;
        let wr = WorkRequest::new(0).with(*flags);
        match data {
            Data::Buffer(buffer) if !buffer.is_of(self.pd) => Err(PostError::ForeignBuffer),
            // SAFETY: nothing is posted: this batch ends here, which aborts it.
            Data::Buffer(buffer) => unsafe { add_buffer(&mut self.raw, wr, verb, *imm, verb.sge(buffer)) },
            // SAFETY: as above.
            Data::Inline(bytes) => unsafe { add_inline(&mut self.raw, wr, verb, *imm, Inline(bytes)) },
        }
    }

    /// As [`Batch::add`], of an endpoint for datagrams.
    #[inline]
    pub(super) fn add_datagram(&mut self, work: Work<'_>, peer: &Peer) -> Result<WorkId, Rejected> {
        if let Err(error) = self.try_add_datagram(&work, peer) {
            return Err(Rejected { error, buffer: work.into_buffer() });
        }
        let (verb, flags) = (work.verb, work.flags);
        let id = self.stage(work.into_buffer(), &verb, flags);
        if let Some(kept) = &mut self.datagrams {
            kept.keep(id.0, peer.handle());
        }
        Ok(id)
    }

    /// Adds a datagram, whose buffer and handle the caller then keeps.
    #[inline]
    fn try_add_datagram(&mut self, work: &Work<'_>, peer: &Peer) -> Result<(), PostError> {
        let Verb::Send = work.verb else { return Err(PostError::NotEnabled { op: work.verb.operations() }) };
        if !peer.is_of(self.pd) {
            return Err(PostError::ForeignPeer);
        }
        let (len, capacity) = match &work.data {
            Data::Buffer(buffer) if !buffer.is_of(self.pd) => return Err(PostError::ForeignBuffer),
            Data::Buffer(buffer) => (buffer.len(), buffer.capacity()),
            Data::Inline(bytes) => (bytes.len(), bytes.len()),
        };
        let wr = self.admit(&work.verb, len, capacity, work.flags)?;
        let to = peer.target();
        // SAFETY: as to memory, see `try_add_buffer`. The handle is kept in its place until the next send there, which is after
        // this one has completed, or until the queue pair was destroyed.
        unsafe {
            match (&work.data, work.imm) {
                (Data::Buffer(buffer), None) => self.raw.send_to(wr, to, buffer.sge()),
                (Data::Buffer(buffer), Some(imm)) => self.raw.send_imm_to(wr, to, imm, buffer.sge()),
                (Data::Inline(bytes), None) => self.raw.send_to(wr, to, Inline(bytes)),
                (Data::Inline(bytes), Some(imm)) => self.raw.send_imm_to(wr, to, imm, Inline(bytes)),
            }
        }
    }

    /// Checks room and lengths.
    #[inline(always)]
    fn admit(&self, verb: &Verb, len: usize, capacity: usize, flags: SendFlags) -> Result<WorkRequest, PostError> {
        if self.sends.next_sequence() >= self.limit {
            return Err(self.sends.full(self.qp.number()));
        }
        verb.check(len, capacity, self.max_message)?;
        let flags = if self.is_signaled(flags) { flags | SendFlags::SIGNALED } else { flags };
        Ok(WorkRequest::new(self.sends.next_sequence()).with(flags))
    }

    /// Whether work with these flags is signaled: because they say so, or because it is time.
    #[inline(always)]
    fn is_signaled(&self, flags: SendFlags) -> bool {
        flags.contains(SendFlags::SIGNALED) || self.run.len + 1 >= self.max_unsignaled
    }

    /// Stages what was just added.
    #[inline(always)]
    fn stage(&mut self, buffer: Option<Buffer>, verb: &Verb, flags: SendFlags) -> WorkId {
        let signaled = self.is_signaled(flags);
        let silent = !flags.contains(SendFlags::SIGNALED) && buffer.is_none();
        let sequence = self.sends.stage(buffer, Kind { operation: verb.operation(), signaled, silent });
        self.run = Run { len: if signaled { 0 } else { self.run.len + 1 }, end: sequence + 1 };
        WorkId(sequence)
    }

    /// How many pieces it holds.
    #[must_use]
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.raw.len()
    }

    /// Whether it holds none.
    #[must_use]
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Posts all of it. An empty batch does nothing.
    ///
    /// # Errors
    /// [`Unposted`] gives the buffers back that the provider has surely not taken. If it has taken part of the batch, or does
    /// not say, the endpoint takes no more work and goes into error: the other buffers come back as their work flushes, or
    /// from [`Endpoint::close`](crate::Endpoint::close).
    #[inline(always)]
    pub fn post(self) -> Result<(), Unposted> {
        // Not dropped: there is nothing to take back then.
        let this = &mut *ManuallyDrop::new(self);
        // SAFETY: `drop`, the only other one to take it, does not run.
        match unsafe { ManuallyDrop::take(&mut this.raw) }.post() {
            Ok(()) => {
                this.sends.commit();
                *this.endpoint_run = this.run;
                *this.gates = this.gates_before;
                Ok(())
            }
            Err(error) => {
                let unposted = failed(this.qp, this.sends, this.poisoned, error);
                if !*this.poisoned {
                    *this.gates = this.gates_before;
                }
                Err(unposted)
            }
        }
    }
}

/// Sorts out what was staged by a batch that the provider did not take, or not wholly.
#[cold]
#[inline(never)]
fn failed(qp: &Shared, sends: &mut Ring<Buffer>, poisoned: &mut bool, error: PostError) -> Unposted {
    let mut buffers = Vec::new();
    let taken = match error {
        PostError::QueueFull { posted } | PostError::Refused { posted, .. } => Some(posted),
        _ => None,
    };
    match taken {
        Some(posted) => {
            sends.commit_first(posted);
            buffers.extend(std::iter::from_fn(|| sends.unstage()).flatten());
            buffers.reverse();
        }
        None => sends.commit(),
    }
    if taken != Some(0) {
        // Work without a signaled one after it may be in the queue, that only a flush brings back.
        *poisoned = true;
        qp.fail();
    }
    Unposted { error, buffers }
}

impl Drop for Batch<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Aborts it first: then the device has nothing of these buffers.
        // SAFETY: taken here and in `post`, which does not drop the batch.
        unsafe { ManuallyDrop::drop(&mut self.raw) }
        self.sends.roll_back();
        *self.gates = self.gates_before;
    }
}

impl fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// # Safety
///
/// The contract of [`SendBatch`].
#[inline(always)]
pub(super) unsafe fn add_buffer(
    raw: &mut SendBatch<'_>,
    wr: WorkRequest,
    verb: &Verb,
    imm: Option<u32>,
    sge: Sge,
) -> Result<(), PostError> {
    // SAFETY: the caller's contract.
    unsafe {
        match (verb, imm) {
            (Verb::Send, None) => raw.send(wr, sge),
            (Verb::Send, Some(imm)) => raw.send_imm(wr, imm, sge),
            (Verb::SendInvalidate(rkey), _) => raw.send_invalidate(wr, *rkey, sge),
            (Verb::Write(remote), None) => raw.write(wr, *remote, sge),
            (Verb::Write(remote), Some(imm)) => raw.write_imm(wr, *remote, imm, sge),
            (Verb::Read(remote), _) => raw.read(wr, *remote, sge),
            (Verb::CompareSwap { remote, compare, swap }, _) => raw.compare_swap(wr, *remote, *compare, *swap, sge),
            (Verb::FetchAdd { remote, add }, _) => raw.fetch_add(wr, *remote, *add, sge),
        }
    }
}

/// # Safety
///
/// The contract of [`SendBatch`].
#[inline(always)]
pub(super) unsafe fn add_inline(
    raw: &mut SendBatch<'_>,
    wr: WorkRequest,
    verb: &Verb,
    imm: Option<u32>,
    data: Inline<'_>,
) -> Result<(), PostError> {
    // SAFETY: the caller's contract.
    unsafe {
        match (verb, imm) {
            (Verb::Send, None) => raw.send(wr, data),
            (Verb::Send, Some(imm)) => raw.send_imm(wr, imm, data),
            (Verb::Write(remote), None) => raw.write(wr, *remote, data),
            (Verb::Write(remote), Some(imm)) => raw.write_imm(wr, *remote, imm, data),
            // `Work` makes no other verb with inline data.
            _ => Err(PostError::InlineTooLong { len: data.0.len(), max: 0 }),
        }
    }
}
