//! Batches: several pieces of work posted with one doorbell.

use std::fmt;
use std::mem::ManuallyDrop;

use super::datagram::{DatagramSlots, Peer};
use super::gates::Gates;
use super::lists::add_list;
use super::ring::{Kind, Ring, Signal};
use super::work::{ATOMIC, Data, Verb};
use super::{BatchError, Operation, Poster, Rejected, UnsignaledRun, Work, WorkId};
use crate::interface::Interface;
use crate::qp::Core;
use crate::{Buffer, Inline, PostError, ProtectionDomain, SendBatch, SendFlags, Sge, WorkRequest};

/// Work to be posted with one doorbell. Dropping it posts nothing, and drops the buffers that were moved in.
///
/// Made by [`Endpoint::batch`](crate::Endpoint::batch).
#[must_use = "dropping a batch posts nothing; call `post`"]
pub struct Batch<'e> {
    /// Dropped by `drop`, unless `post` has ended it.
    pub(super) raw: ManuallyDrop<SendBatch<'e>>,
    pub(super) sends: &'e mut Ring<Buffer>,
    /// Sequence number from which on no work can be added.
    limit: u64,
    pub(super) pd: &'e ProtectionDomain,
    /// Value of `endpoint_run` once this batch is posted.
    pub(super) run: UnsignaledRun,
    endpoint_run: &'e mut UnsignaledRun,
    /// Shut while this batch exists, and after it was forgotten.
    gates: &'e mut Gates,
    gates_before: Gates,
    poisoned: &'e mut bool,
    max_unsignaled: u32,
    pub(super) max_message: u32,
    datagrams: Option<&'e mut DatagramSlots>,
}

impl<'e> Batch<'e> {
    #[inline(always)]
    pub(super) fn new<I: Interface>(endpoint: &'e mut Poster<I>) -> Result<Self, PostError> {
        if endpoint.poisoned {
            return Err(PostError::EndpointFailed);
        }
        if endpoint.live.sends.has_staged() || endpoint.live.sends.pending() != 0 {
            endpoint.open_gates();
            if endpoint.poisoned {
                return Err(PostError::EndpointFailed);
            }
        }
        let end = endpoint.live.sends.next_sequence();
        let run = if endpoint.run.end == end { endpoint.run.len } else { 0 };
        Ok(Batch {
            raw: ManuallyDrop::new(endpoint.live.qp.send_batch()?),
            gates_before: std::mem::replace(&mut endpoint.gates, Gates::SHUT),
            gates: &mut endpoint.gates,
            limit: endpoint.live.sends.batch_limit(),
            sends: &mut endpoint.live.sends,
            pd: &endpoint.pd,
            run: UnsignaledRun { len: run, end },
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
    /// [`Rejected`] returns the buffer and leaves the batch unchanged. [`PostError::EndpointFull`] means that
    /// completions must be polled first. Work in a batch never waits, whatever [`EndpointBuilder::pending_sends`] is.
    /// It is also refused while other work is pending, because it would overtake that work.
    ///
    /// [`EndpointBuilder::pending_sends`]: crate::EndpointBuilder::pending_sends
    #[inline(always)]
    pub fn add(&mut self, work: Work<'_>) -> Result<WorkId, Rejected> {
        let Work { verb, data, imm, flags, user_data } = work;
        match data {
            Data::Buffer(mut buffer) => match self.try_add_buffer(&verb, &buffer, imm, flags) {
                Ok(()) => {
                    if verb.is_atomic() {
                        // After completion the buffer holds the 8 bytes of the result.
                        buffer.set_len_within(ATOMIC as u32);
                    }
                    Ok(self.stage(Some(buffer), &verb, flags, user_data))
                }
                Err(error) => Err(Rejected { error, buffer: Some(buffer), list: None }),
            },
            Data::Inline(bytes) => match self.try_add_inline(&verb, bytes, imm, flags) {
                Ok(()) => Ok(self.stage(None, &verb, flags, user_data)),
                Err(error) => Err(Rejected { error, buffer: None, list: None }),
            },
            Data::List(list) => self.add_list(verb, list, imm, flags, user_data),
        }
    }

    /// Adds work to the work requests. The caller then stages its buffer.
    #[inline(always)]
    fn try_add_buffer(
        &mut self,
        verb: &Verb,
        buffer: &Buffer,
        imm: Option<u32>,
        flags: SendFlags,
    ) -> Result<(), PostError> {
        // A buffer with this gate belongs to the domain, and is not too long for a message.
        let max_message = if buffer.gate() == self.gates_before.send {
            u32::MAX
        } else if buffer.is_of(self.pd) {
            self.max_message
        } else {
            return Err(PostError::ForeignBuffer);
        };
        let wr = self.prepare(verb, buffer.len(), buffer.capacity(), max_message, flags)?;
        let sge = verb.sge(buffer);
        // SAFETY: the memory belongs to the buffer alone, which the caller moves into the ring before anything else
        // happens. It stays there until the work has completed, the queue pair is destroyed, or, if the batch is not
        // posted, until `drop`. A write to `remote` breaks no reference in this process: memory that is registered with
        // remote access is exposed memory, which has no references, or was registered by an `unsafe` call whose
        // contract covers it.
        unsafe { add_buffer(&mut self.raw, wr, verb, imm, sge) }
    }

    /// Adds inline work to the work requests. The caller then stages it.
    #[inline(always)]
    fn try_add_inline(
        &mut self,
        verb: &Verb,
        bytes: &[u8],
        imm: Option<u32>,
        flags: SendFlags,
    ) -> Result<(), PostError> {
        let wr = self.prepare(verb, bytes.len(), bytes.len(), self.max_message, flags)?;
        // SAFETY: the bytes are copied during the call. For the peer's memory, see `try_add_buffer`.
        unsafe { add_inline(&mut self.raw, wr, verb, imm, Inline(bytes)) }
    }

    /// Checks that work could be posted if there were room. Builds its work request, then aborts it.
    pub(super) fn validate(mut self, work: &mut Work<'_>) -> Result<(), PostError> {
        let Work { verb, data, imm, flags, .. } = work;
        let (len, capacity) = match data {
            Data::Buffer(buffer) => (buffer.len(), buffer.capacity()),
            Data::Inline(bytes) => (bytes.len(), bytes.len()),
            Data::List(list) => (list.byte_len(), list.byte_len()),
        };
        verb.check(len, capacity, self.max_message)?;
        let wr = WorkRequest::new(0).with_flags(*flags);
        match data {
            Data::Buffer(buffer) if !buffer.is_of(self.pd) => Err(PostError::ForeignBuffer),
            // SAFETY: nothing is posted, because this batch is dropped here, which aborts it.
            Data::Buffer(buffer) => unsafe { add_buffer(&mut self.raw, wr, verb, *imm, verb.sge(buffer)) },
            // SAFETY: as above.
            Data::Inline(bytes) => unsafe { add_inline(&mut self.raw, wr, verb, *imm, Inline(bytes)) },
            Data::List(list) => {
                self.check_list(verb, list)?;
                // SAFETY: as above.
                unsafe { add_list(&mut self.raw, wr, verb, *imm, list.sges()) }
            }
        }
    }

    /// Like [`Batch::add`], for a datagram endpoint.
    #[inline]
    pub(super) fn add_datagram(&mut self, mut work: Work<'_>, peer: &Peer) -> Result<WorkId, Rejected> {
        if let Err(error) = self.try_add_datagram(&mut work, peer) {
            return Err(work.reject(error));
        }
        let (verb, flags, user_data) = (work.verb, work.flags, work.user_data);
        let id = match work.data {
            Data::Buffer(buffer) => self.stage(Some(buffer), &verb, flags, user_data),
            Data::Inline(_) => self.stage(None, &verb, flags, user_data),
            Data::List(list) => {
                self.sends.reserve_lists();
                self.stage_list(list, &verb, flags, user_data)
            }
        };
        if let Some(slots) = &mut self.datagrams {
            slots.keep_handle(id.0, peer.handle());
        }
        Ok(id)
    }

    /// Adds a datagram to the work requests. The caller then keeps its buffer and address handle.
    #[inline]
    fn try_add_datagram(&mut self, work: &mut Work<'_>, peer: &Peer) -> Result<(), PostError> {
        let Verb::Send = work.verb else { return Err(PostError::NotEnabled { op: work.verb.operations() }) };
        if !peer.is_of(self.pd) {
            return Err(PostError::ForeignPeer);
        }
        let (len, capacity) = match &work.data {
            Data::Buffer(buffer) if !buffer.is_of(self.pd) => return Err(PostError::ForeignBuffer),
            Data::Buffer(buffer) => (buffer.len(), buffer.capacity()),
            Data::Inline(bytes) => (bytes.len(), bytes.len()),
            Data::List(list) => {
                self.check_list(&work.verb, list)?;
                (list.byte_len(), list.byte_len())
            }
        };
        let wr = self.prepare(&work.verb, len, capacity, self.max_message, work.flags)?;
        let to = peer.target();
        // SAFETY: for memory, see `try_add_buffer`. The address handle stays in its slot until the next send in that
        // slot, which follows the completion of this one, or until the queue pair is destroyed.
        unsafe {
            match (&mut work.data, work.imm) {
                (Data::Buffer(buffer), None) => self.raw.send_to(wr, to, buffer.sge()),
                (Data::Buffer(buffer), Some(imm)) => self.raw.send_imm_to(wr, to, imm, buffer.sge()),
                (Data::Inline(bytes), None) => self.raw.send_to(wr, to, Inline(bytes)),
                (Data::Inline(bytes), Some(imm)) => self.raw.send_imm_to(wr, to, imm, Inline(bytes)),
                (Data::List(list), None) => self.raw.send_to(wr, to, list.sges()),
                (Data::List(list), Some(imm)) => self.raw.send_imm_to(wr, to, imm, list.sges()),
            }
        }
    }

    /// Checks room and lengths, and returns the header of the work request.
    #[inline(always)]
    pub(super) fn prepare(
        &self,
        verb: &Verb,
        len: usize,
        capacity: usize,
        max_message: u32,
        flags: SendFlags,
    ) -> Result<WorkRequest, PostError> {
        if self.sends.next_sequence() >= self.limit {
            return Err(self.sends.full_error(self.raw.core().number()));
        }
        verb.check(len, capacity, max_message)?;
        let flags = if self.is_signaled(flags) { flags | SendFlags::SIGNALED } else { flags };
        Ok(WorkRequest::new(self.sends.next_sequence()).with_flags(flags))
    }

    /// Whether work with these flags is signaled, by request or because the run of unsignaled sends is too long.
    #[inline(always)]
    pub(super) fn is_signaled(&self, flags: SendFlags) -> bool {
        flags.contains(SendFlags::SIGNALED) || self.run.len + 1 >= self.max_unsignaled
    }

    /// Stages the work that was just added.
    #[inline(always)]
    fn stage(&mut self, buffer: Option<Buffer>, verb: &Verb, flags: SendFlags, user_data: u32) -> WorkId {
        let signaled = self.is_signaled(flags);
        let silent = !flags.contains(SendFlags::SIGNALED) && buffer.is_none();
        let kind =
            Kind { operation: verb.operation(), signal: Signal::of(signaled), silent, has_outcome: false, user_data };
        let sequence = self.sends.stage(buffer, kind);
        self.run = UnsignaledRun { len: if signaled { 0 } else { self.run.len + 1 }, end: sequence + 1 };
        WorkId(sequence)
    }

    /// Adds work on a memory window, which has no buffer and is always signaled.
    #[inline]
    pub(super) fn add_window_work<R>(
        &mut self,
        operation: Operation,
        add: impl FnOnce(&mut SendBatch<'_>, WorkRequest) -> Result<R, PostError>,
    ) -> Result<(WorkId, R), PostError> {
        let sequence = self.sends.next_sequence();
        if sequence >= self.limit {
            return Err(self.sends.full_error(self.raw.core().number()));
        }
        let added = add(&mut self.raw, WorkRequest::new(sequence).signaled())?;
        self.sends.stage(None, Kind::signaled(operation));
        self.run = UnsignaledRun { len: 0, end: sequence + 1 };
        Ok((WorkId(sequence), added))
    }

    /// Number of pieces of work in the batch.
    #[must_use]
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.raw.len()
    }

    /// Whether the batch is empty.
    #[must_use]
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Posts the whole batch. An empty batch does nothing.
    ///
    /// # Errors
    /// [`BatchError`] returns the buffers that the provider surely has not taken. If the provider has taken part of the
    /// batch, or does not say, the endpoint goes into error and takes no more work. The other buffers come back as
    /// their work is flushed, or from [`Endpoint::close`](crate::Endpoint::close).
    #[inline(always)]
    pub fn post(self) -> Result<(), BatchError> {
        // Not dropped: after posting there is nothing to abort.
        let this = &mut *ManuallyDrop::new(self);
        // SAFETY: nothing is added to it afterwards, and `drop` does not run.
        match unsafe { this.raw.complete_in_place() } {
            Ok(()) => {
                this.sends.commit();
                *this.endpoint_run = this.run;
                *this.gates = this.gates_before;
                Ok(())
            }
            Err(error) => {
                let unposted = failed(this.raw.core(), this.sends, this.poisoned, error, this.raw.len());
                if !*this.poisoned {
                    *this.gates = this.gates_before;
                }
                Err(unposted)
            }
        }
    }
}

/// Handles the staged work of a batch that the provider took only in part, or not at all.
#[cold]
#[inline(never)]
fn failed(qp: &Core, sends: &mut Ring<Buffer>, poisoned: &mut bool, error: PostError, len: usize) -> BatchError {
    let failed = take_back_staged(sends, error, len);
    if failed.posted != 0 {
        *poisoned = true;
        qp.fail();
    }
    failed
}

/// Takes the work back that the provider surely did not take, of `len` pieces that are staged.
///
/// If any was posted, the caller brings the endpoint into error: the last one may be unsignaled, and then only a flush returns its
/// buffer.
#[cold]
#[inline(never)]
pub(super) fn take_back_staged(sends: &mut Ring<Buffer>, error: PostError, len: usize) -> BatchError {
    let (mut buffers, mut lists) = (Vec::new(), Vec::new());
    let posted = match error {
        PostError::QueueFull { posted } | PostError::Refused { posted, .. } => {
            sends.commit_first(posted);
            while let Some((buffer, list)) = sends.pop_staged() {
                buffers.extend(buffer);
                lists.extend(list);
            }
            buffers.reverse();
            lists.reverse();
            posted as usize
        }
        _ => {
            sends.commit();
            len
        }
    };
    BatchError { error, posted, buffers, lists }
}

impl Drop for Batch<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: taken here and in `post`, which does not drop the batch. Dropping `raw` first aborts the batch, so
        // the device does not use the buffers that `roll_back` drops.
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
