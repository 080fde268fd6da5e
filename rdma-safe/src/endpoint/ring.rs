//! Work in flight, in the order in which it was posted.

use std::ptr::NonNull;

use super::Operation;
use super::poll::Outcome;
use crate::PostError;

/// A ring of entries with consecutive sequence numbers, allocated once.
///
/// ```text
///   head ........ done ........ posted ........ tail
///   completed,    in flight     staged          next
///   not handed                  or pending:
///   out yet                     not posted yet
/// ```
///
/// There are at most `capacity` entries between `head` and `posted`, which is what the send queue has room for. Pending entries
/// come on top. While there are any, the ring counts as full.
///
/// Sequence numbers start at 1 and never repeat, so that neither a completion of zeros nor a repeated one names an entry.
pub(super) struct Ring<B> {
    /// At least one for each entry that there can be, a power of two. Those before `head` and from `tail` have no buffer.
    slots: NonNull<[Slot<B>]>,
    /// The slots of `done` and `tail`: each knows the one after it, so that none is looked up by its number.
    done_slot: NonNull<Slot<B>>,
    tail_slot: NonNull<Slot<B>>,
    capacity: u64,
    /// Maximum number of pending entries, on top of `capacity`.
    most_pending: u64,
    /// `head + capacity`: the most that `posted` may be.
    limit: u64,
    done: u64,
    tail: u64,
    /// Entries of a batch that is not posted yet; 0 while entries are pending.
    staged: u64,
    /// Entries that wait for room; `tail - staged - pending` is `posted`.
    pending: u64,
}

/// What is kept of a piece of work.
pub(super) struct Slot<B> {
    next: NonNull<Slot<B>>,
    pub(super) buffer: Option<B>,
    pub(super) kind: Kind,
    /// Whether `outcome` is of this entry.
    noted: bool,
    outcome: Outcome,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) operation: Operation,
    /// It has a completion of its own.
    pub(super) signaled: bool,
    /// Nobody waits for it unless it fails: it has no buffer, and its caller did not ask for a completion.
    pub(super) silent: bool,
}

/// An entry that is handed out.
#[derive(Debug)]
pub(super) struct Done<B> {
    pub(super) sequence: u64,
    pub(super) buffer: Option<B>,
    pub(super) operation: Operation,
    pub(super) outcome: Outcome,
}

impl Kind {
    #[inline(always)]
    pub(super) const fn signaled(operation: Operation) -> Self {
        Kind { operation, signaled: true, silent: false }
    }
}

/// No device has queues as deep as that.
const LONGEST: u32 = 1 << 31;

/// How many places a ring of this capacity has: a power of two.
pub(super) fn places_of(capacity: u32) -> usize {
    capacity.min(LONGEST).next_power_of_two() as usize
}

// SAFETY: the slots are its own, and by them the buffers.
unsafe impl<B: Send> Send for Ring<B> {}
// SAFETY: through a shared reference there are only numbers to be read.
unsafe impl<B: Sync> Sync for Ring<B> {}

impl<B> Ring<B> {
    /// `mark` is added to each number: 0, or a high bit.
    pub(super) fn new(capacity: u32, mark: u64, kind: Kind) -> Self {
        Ring::with_pending(capacity, 0, mark, kind)
    }

    /// Like [`Ring::new`], with room for pending entries on top of `capacity`.
    pub(super) fn with_pending(capacity: u32, most_pending: u32, mark: u64, kind: Kind) -> Self {
        let capacity = capacity.min(LONGEST);
        let most_pending = most_pending.min(LONGEST - capacity);
        let slots: Box<[_]> = (0..places_of(capacity + most_pending)).map(|_| Slot::empty(kind)).collect();
        let slots = NonNull::from(Box::leak(slots));
        let first_slot: NonNull<Slot<B>> = slots.cast();
        for index in 0..slots.len() {
            // SAFETY: both are below the length, and nothing else refers to the slots.
            unsafe { (*first_slot.add(index).as_ptr()).next = first_slot.add((index + 1) & (slots.len() - 1)) }
        }
        let (first, capacity) = (mark + 1, u64::from(capacity));
        Ring {
            slots,
            done_slot: first_slot,
            tail_slot: first_slot,
            capacity,
            most_pending: most_pending.into(),
            limit: first + capacity,
            done: first,
            tail: first,
            staged: 0,
            pending: 0,
        }
    }

    /// The number that the next entry gets.
    #[inline(always)]
    pub(super) fn next_sequence(&self) -> u64 {
        self.tail
    }

    #[inline(always)]
    pub(super) fn is_full(&self) -> bool {
        // `tail` may be beyond `limit` while entries are pending.
        self.tail >= self.limit
    }

    /// Sequence number from which on a batch adds no work.
    ///
    /// While entries are pending a batch adds none, as it would overtake them.
    #[inline(always)]
    pub(super) fn batch_limit(&self) -> u64 {
        if self.pending == 0 { self.limit } else { 0 }
    }

    /// Whether the next entry would be refused: there is no room, and no further entry may be pending.
    ///
    /// Never true of a ring without capacity, which makes no room later.
    pub(super) fn refuses(&self) -> bool {
        self.capacity != 0 && (self.is_full() || self.pending > 0) && self.pending == self.most_pending
    }

    /// The error when this ring of sends is full, for the endpoint with that queue pair.
    #[inline(always)]
    pub(super) fn full(&self, qp_num: u32) -> PostError {
        PostError::EndpointFull { qp_num, send_depth: self.capacity(), pending_sends: self.most_pending() }
    }

    /// Maximum number of entries, without pending ones.
    #[inline(always)]
    pub(super) fn capacity(&self) -> u32 {
        // As `new` was given them.
        self.capacity as u32
    }

    fn head(&self) -> u64 {
        self.limit - self.capacity
    }

    fn posted(&self) -> u64 {
        self.tail - self.staged - self.pending
    }

    /// The oldest entry in flight, if there is any.
    #[inline(always)]
    pub(super) fn oldest(&self) -> u64 {
        self.done
    }

    /// Entries that were posted or are pending, and have not completed.
    #[inline]
    pub(super) fn in_flight(&self) -> u64 {
        self.tail - self.staged - self.done
    }

    /// Entries that wait for room.
    #[inline]
    pub(super) fn pending(&self) -> u64 {
        self.pending
    }

    /// Maximum number of pending entries.
    #[inline(always)]
    pub(super) fn most_pending(&self) -> u32 {
        // As `new` was given them.
        self.most_pending as u32
    }

    /// Whether there is an entry to be handed out.
    #[inline]
    pub(super) fn has_completed(&self) -> bool {
        self.head() != self.done
    }

    /// Whether anything is staged.
    #[inline]
    pub(super) fn has_staged(&self) -> bool {
        self.staged != 0
    }

    /// Adds an entry that was posted, with the number that [`Ring::next_sequence`] says. There must be room and nothing staged, or
    /// the ring is in disorder.
    #[inline(always)]
    pub(super) fn push(&mut self, buffer: Option<B>, kind: Kind) {
        // SAFETY: it is one of the slots, of which there is no reference.
        let slot = unsafe { self.tail_slot.as_mut() };
        // Not dropped, for there is none.
        std::mem::forget(std::mem::replace(&mut slot.buffer, buffer));
        (slot.kind, slot.noted) = (kind, false);
        self.tail_slot = slot.next;
        self.tail += 1;
    }

    /// As [`Ring::push`], in a ring whose entries are all of the kind that slots are made of.
    #[inline(always)]
    pub(super) fn push_alike(&mut self, buffer: B) {
        // SAFETY: it is one of the slots, of which there is no reference.
        let slot = unsafe { self.tail_slot.as_mut() };
        // Not dropped, for there is none.
        std::mem::forget(slot.buffer.replace(buffer));
        self.tail_slot = slot.next;
        self.tail += 1;
    }

    /// Adds an entry that is to be posted. There must be room.
    #[inline(always)]
    pub(super) fn stage(&mut self, buffer: Option<B>, kind: Kind) -> u64 {
        self.staged += 1;
        let sequence = self.tail;
        self.push(buffer, kind);
        sequence
    }

    /// Says that what was staged has been posted.
    #[inline(always)]
    pub(super) fn commit(&mut self) {
        self.staged = 0;
    }

    /// Says that of what was staged the first `count` entries have been posted.
    pub(super) fn commit_first(&mut self, count: u32) {
        self.staged = self.staged.saturating_sub(count.into());
    }

    /// Takes back the newest entry that is staged, if any is: its buffer, if it has one.
    pub(super) fn unstage(&mut self) -> Option<Option<B>> {
        self.staged = self.staged.checked_sub(1)?;
        self.tail -= 1;
        self.tail_slot = self.place(self.tail);
        Some(self.slot(self.tail).buffer.take())
    }

    /// Drops what is staged.
    #[inline]
    pub(super) fn roll_back(&mut self) {
        if self.has_staged() {
            self.drop_staged();
        }
    }

    // Not a Rust call, which could unwind: for that the callers would keep what they are about to post in memory.
    #[allow(improper_ctypes_definitions)]
    #[cold]
    #[inline(never)]
    extern "C" fn drop_staged(&mut self) {
        while self.unstage().is_some() {}
    }

    /// Hands out the oldest entry in flight, which has completed. `None` if it has no buffer, or does not exist. Nothing that has
    /// completed before may be left to be handed out, and nothing be staged.
    #[inline(always)]
    pub(super) fn take_oldest(&mut self) -> Option<(B, Operation)> {
        // SAFETY: it is one of the slots, of which there is no reference.
        let slot = unsafe { self.done_slot.as_mut() };
        let buffer = slot.buffer.take()?;
        let operation = slot.kind.operation;
        self.done_slot = slot.next;
        self.done += 1;
        self.limit += 1;
        Some((buffer, operation))
    }

    /// Completes every entry up to `sequence`, which alone ends with `outcome`. `false` when it is not in flight, or one before
    /// it is to have a completion of its own.
    pub(super) fn complete(&mut self, sequence: u64, outcome: impl FnOnce(&mut Slot<B>) -> Outcome) -> bool {
        if sequence < self.done || sequence >= self.posted() {
            return false;
        }
        if (self.done..sequence).any(|earlier| self.slot(earlier).kind.signaled) {
            return false;
        }
        let slot = self.slot(sequence);
        let outcome = outcome(slot);
        slot.note(outcome);
        self.done = sequence + 1;
        self.done_slot = self.place(self.done);
        true
    }

    /// Notes an outcome for the entries in flight before `sequence`.
    pub(super) fn note_before(&mut self, sequence: u64, outcome: Outcome) {
        for earlier in self.done..sequence.min(self.posted()) {
            self.slot(earlier).note(outcome);
        }
    }

    /// Hands out the oldest entry if it has completed, passing over those that are silent.
    pub(super) fn pop(&mut self) -> Option<Done<B>> {
        while self.has_completed() {
            let sequence = self.head();
            let Slot { buffer, kind, noted, outcome, .. } = self.slot(sequence);
            // A later completion released it: it was done before that.
            let outcome = if std::mem::take(noted) { *outcome } else { Outcome::DONE };
            let (buffer, operation) = (buffer.take(), outcome.operation.unwrap_or(kind.operation));
            let passed = kind.silent && outcome.is_success();
            self.limit += 1;
            if !passed {
                return Some(Done { sequence, buffer, operation, outcome });
            }
        }
        None
    }

    /// Adds a pending entry. The ring must be full, with nothing staged, and one more entry may be pending.
    pub(super) fn add_pending(&mut self, buffer: Option<B>, kind: Kind) -> u64 {
        debug_assert!((self.is_full() || self.pending > 0) && !self.has_staged() && self.pending < self.most_pending);
        self.pending += 1;
        let sequence = self.tail;
        self.push(buffer, kind);
        sequence
    }

    /// How many pending entries there is room for now, and the sequence number of the first.
    pub(super) fn admissible(&self) -> (u64, u64) {
        let posted = self.posted();
        (self.pending.min(self.limit.saturating_sub(posted)), posted)
    }

    /// The buffer of an entry.
    pub(super) fn buffer(&mut self, sequence: u64) -> Option<&B> {
        self.slot(sequence).buffer.as_ref()
    }

    /// Whether a signaled entry is in flight, so that a completion will arrive.
    pub(super) fn awaits_completion(&mut self) -> bool {
        (self.done..self.posted()).any(|sequence| self.slot(sequence).kind.signaled)
    }

    /// Marks the first `count` pending entries as posted.
    pub(super) fn admit(&mut self, count: u64) {
        self.pending = self.pending.saturating_sub(count);
    }

    /// Completes all pending entries with `outcome`, unless earlier entries are still in flight.
    pub(super) fn end_pending(&mut self, outcome: Outcome) {
        if self.pending == 0 || self.done != self.posted() {
            return;
        }
        for sequence in self.done..self.tail {
            self.slot(sequence).note(outcome);
        }
        (self.done, self.done_slot, self.pending) = (self.tail, self.tail_slot, 0);
    }

    /// Takes the buffers of all entries, oldest first, whether they have completed, are in flight, staged or pending.
    pub(super) fn take_buffers(&mut self) -> impl Iterator<Item = B> + use<'_, B> {
        (self.head()..self.tail).filter_map(|sequence| self.slot(sequence).buffer.take())
    }

    fn slot(&mut self, sequence: u64) -> &mut Slot<B> {
        // SAFETY: it is one of the slots, to which the reference that is returned is the only one.
        unsafe { self.place(sequence).as_mut() }
    }

    /// The slot of that number.
    fn place(&self, sequence: u64) -> NonNull<Slot<B>> {
        // Of the first number, one more than the mark, it is the first.
        let index = sequence.wrapping_sub(1) as usize & (self.slots.len() - 1);
        // SAFETY: below the length, which is a power of two.
        unsafe { self.slots.cast().add(index) }
    }
}

impl<B> Drop for Ring<B> {
    fn drop(&mut self) {
        // SAFETY: leaked by `new`, and freed here only. Nothing refers to the slots any more.
        drop(unsafe { Box::from_raw(self.slots.as_ptr()) });
    }
}

impl<B> Slot<B> {
    fn empty(kind: Kind) -> Self {
        Slot { next: NonNull::dangling(), buffer: None, kind, noted: false, outcome: Outcome::DONE }
    }

    fn note(&mut self, outcome: Outcome) {
        (self.noted, self.outcome) = (true, outcome);
    }
}

#[cfg(test)]
mod tests;
