//! Sends that wait for room in the send queue.

use super::batch::{add_buffer, add_inline};
use super::completion::{Rejected, WorkId};
use super::lists::add_list;
use super::poll::Outcome;
use super::ring::{Kind, Signal};
use super::work::{ATOMIC, Data, Verb};
use super::{Poster, UnsignaledRun, Work};
use crate::interface::Interface;
use crate::{Inline, PostError, SendFlags, Sge, WorkRequest};

/// The work requests of pending sends, whose buffers are in the ring. Allocated with the endpoint.
pub(super) struct Pending {
    /// One slot for each send that may be pending, indexed by sequence number modulo their count.
    slots: Box<[PendingSlot]>,
}

struct PendingSlot {
    verb: Verb,
    imm: Option<u32>,
    flags: SendFlags,
    /// Storage for inline data, used by work without a buffer. The first `inline_len` bytes are valid.
    inline: Box<[u8]>,
    inline_len: usize,
}

/// Work without its buffer.
#[derive(Clone, Copy)]
pub(super) struct WorkParts<'a> {
    verb: Verb,
    imm: Option<u32>,
    flags: SendFlags,
    user_data: u32,
    inline: &'a [u8],
}

impl<'a> WorkParts<'a> {
    #[inline(always)]
    pub(super) fn of(work: &Work<'a>) -> Self {
        let inline = match work.data {
            Data::Inline(bytes) => bytes,
            Data::Buffer(_) | Data::List(_) => &[],
        };
        WorkParts { verb: work.verb, imm: work.imm, flags: work.flags, user_data: work.user_data, inline }
    }
}

impl Pending {
    /// `None` if no sends may be pending.
    pub(super) fn new(max: u32, inline_len: u32) -> Option<Box<Self>> {
        if max == 0 {
            return None;
        }
        let slot = |_| PendingSlot {
            verb: Verb::Send,
            imm: None,
            flags: SendFlags::empty(),
            inline: vec![0; inline_len as usize].into_boxed_slice(),
            inline_len: 0,
        };
        Some(Box::new(Pending { slots: (0..max).map(slot).collect() }))
    }

    /// The slot of a sequence number. Pending sends have consecutive numbers, so no two of them share a slot.
    fn slot(&mut self, sequence: u64) -> Option<&mut PendingSlot> {
        let index = sequence.checked_rem(self.slots.len() as u64)?;
        self.slots.get_mut(index as usize)
    }
}

impl PendingSlot {
    /// `None` if there is no room for the inline data.
    fn put(&mut self, verb: Verb, imm: Option<u32>, flags: SendFlags, inline: &[u8]) -> Option<()> {
        self.inline.get_mut(..inline.len())?.copy_from_slice(inline);
        (self.verb, self.imm, self.flags, self.inline_len) = (verb, imm, flags, inline.len());
        Some(())
    }
}

impl<I: Interface> Poster<I> {
    /// Queues work that found the send queue full, if the endpoint allows pending sends.
    #[cold]
    #[inline(never)]
    pub(super) fn queue_pending(&mut self, parts: WorkParts<'_>, rejected: Rejected) -> Result<WorkId, Rejected> {
        let is_full = matches!(rejected.error, PostError::EndpointFull { .. });
        if !is_full || self.live.sends.pending() >= self.live.sends.max_pending().into() {
            return Err(rejected);
        }
        let WorkParts { verb, imm, flags, user_data, inline } = parts;
        let data = match (rejected.buffer, rejected.list) {
            (Some(buffer), _) => Data::Buffer(buffer),
            (None, Some(list)) => Data::List(list),
            (None, None) => Data::Inline(inline),
        };
        let mut work = Work { verb, data, imm, flags, user_data };
        // Reports errors of the work now rather than when it is posted.
        if let Err(error) = self.batch().and_then(|batch| batch.validate(&mut work)) {
            return Err(work.reject(error));
        }
        if let (Data::Buffer(buffer), true) = (&mut work.data, verb.is_atomic()) {
            buffer.set_len_within(ATOMIC as u32);
        }
        let sequence = self.live.sends.next_sequence();
        let run = if self.run.end == sequence { self.run.len } else { 0 };
        let asked = flags.contains(SendFlags::SIGNALED);
        let signaled = asked || run + 1 >= self.settings.max_unsignaled;
        let silent = !asked && matches!(work.data, Data::Inline(_));
        let kind =
            Kind { operation: verb.operation(), signal: Signal::of(signaled), silent, has_outcome: false, user_data };
        let mut flags = flags;
        flags.set(SendFlags::SIGNALED, signaled);
        let slot = self.pending.as_mut().and_then(|pending| pending.slot(sequence));
        if slot.and_then(|slot| slot.put(verb, imm, flags, inline)).is_none() {
            // Cannot happen: there is a slot, and `validate` has checked the length of the inline data.
            let error = self.live.sends.full_error(self.live.qp.number());
            return Err(work.reject(error));
        }
        self.run = UnsignaledRun { len: if signaled { 0 } else { run + 1 }, end: sequence + 1 };
        let (buffer, list) = match work.data {
            Data::Buffer(buffer) => (Some(buffer), None),
            Data::List(list) => (None, Some(list)),
            Data::Inline(_) => (None, None),
        };
        self.live.sends.add_pending(buffer, list, kind);
        // The gates stay shut while sends are pending, so no send overtakes them and each poll posts those that there is room for.
        self.open_gates();
        Ok(WorkId(sequence))
    }

    /// Posts the pending work that there is room for.
    ///
    /// If the provider reports a full queue, the rest is posted after the next completion. After any other failure the endpoint
    /// goes into error, and work that was not posted completes as flushed.
    #[cold]
    #[inline(never)]
    pub(super) fn post_pending(&mut self) {
        let (count, first) = self.live.sends.postable();
        if count == 0 || self.poisoned {
            return;
        }
        let posted = self.try_post_pending(first, count);
        let taken = match posted {
            Ok(()) => count,
            Err(PostError::QueueFull { posted } | PostError::Refused { posted, .. }) => posted.into(),
            // The provider may have taken any part of it, so the buffers stay until the queue pair is destroyed.
            Err(PostError::MaybePosted { .. }) => count,
            Err(_) => 0,
        };
        self.live.sends.mark_posted(taken);
        let Err(error) = posted else { return };
        if !matches!(error, PostError::QueueFull { .. }) || !self.live.sends.awaits_completion() {
            self.poison();
        }
    }

    fn try_post_pending(&mut self, first: u64, count: u64) -> Result<(), PostError> {
        let Some(pending) = &mut self.pending else { return Err(PostError::EndpointFailed) };
        let mut raw = self.live.qp.send_batch()?;
        for sequence in first..first + count {
            let Some(PendingSlot { verb, imm, flags, inline, inline_len }) = pending.slot(sequence) else {
                return Err(PostError::EndpointFailed);
            };
            let inline = inline.get(..*inline_len).unwrap_or(&[]);
            let wr = WorkRequest::new(sequence).with_flags(*flags);
            if let Some(list) = self.live.sends.list_mut(sequence) {
                // SAFETY: as below, and `validate` has checked that the work may access the memory of the list.
                unsafe { add_list(&mut raw, wr, verb, *imm, list.sges())? };
                continue;
            }
            // SAFETY: the memory belongs to the buffer alone. The buffer is in the ring and stays there until the work
            // has completed or the queue pair is destroyed: an entry that may have been posted leaves the ring in no
            // other way. Inline data is copied during the call. For the peer's memory, see `Batch::try_add_buffer`.
            unsafe {
                match self.live.sends.buffer(sequence) {
                    Some(buffer) => add_buffer(&mut raw, wr, verb, *imm, verb.sge(buffer))?,
                    None => add_inline(&mut raw, wr, verb, *imm, Inline(inline))?,
                }
            }
        }
        raw.post()
    }

    /// Completes the pending work of a failed endpoint as flushed, after all earlier work has completed.
    #[cold]
    #[inline(never)]
    pub(super) fn flush_pending(&mut self) {
        self.live.sends.complete_pending(Outcome::flushed(self.live.peer_left));
    }
}

impl Verb {
    /// The scatter/gather element for work on `buffer`.
    #[inline(always)]
    pub(super) fn sge(&self, buffer: &crate::Buffer) -> Sge {
        if self.is_atomic() { Sge { len: ATOMIC as u32, ..buffer.sge() } } else { buffer.sge() }
    }
}
