//! Work in flight, in the order of posting.

mod runs;

use std::ptr::NonNull;

use super::Operation;
use super::poll::Outcome;
use crate::PostError;
use crate::mr::Gather;

/// A ring of entries with consecutive sequence numbers, allocated once.
///
/// ```text
///   head ........ done ........ posted ........ tail
///   completed,    in flight     staged          next
///   not handed                  or pending:
///   out yet                     not posted yet
/// ```
///
/// There are at most `capacity` entries between `head` and `posted`, the size of the send queue. Pending entries are in
/// addition to these. While any exist, the ring counts as full.
///
/// Sequence numbers start at 1 and never repeat, so a zeroed or repeated completion names no entry.
pub(super) struct Ring<B> {
    /// At least one slot for each possible entry; a power of two. Slots outside `head..tail` have no buffer.
    slots: NonNull<[Slot<B>]>,
    /// The slots of `done` and `tail`. Slots are linked, so the fast path computes no index.
    done_slot: NonNull<Slot<B>>,
    tail_slot: NonNull<Slot<B>>,
    capacity: u32,
    /// Maximum number of pending entries, in addition to `capacity`.
    max_pending: u32,
    /// `head + capacity`: the upper bound of `posted`.
    limit: u64,
    done: u64,
    tail: u64,
    /// Entries of a batch that is not posted yet. Always 0 while entries are pending.
    staged: u32,
    /// Entries that wait for room; `tail - staged - pending` is `posted`.
    pending: u32,
    /// The list of each slot whose entry has one instead of a buffer. Allocated for the first of them.
    lists: Option<Box<Lists>>,
}

/// Lists of a ring, indexed like its slots.
struct Lists(Box<[Option<Gather>]>);

/// A piece of work in the ring.
pub(super) struct Slot<B> {
    next: NonNull<Slot<B>>,
    pub(super) buffer: Option<B>,
    pub(super) kind: Kind,
    outcome: Outcome,
}

/// What the ring knows of an entry, besides its memory and its outcome.
// The first four fields have one byte each, so the compiler writes constants of them with one store.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) operation: Operation,
    pub(super) signal: Signal,
    /// Whether the work is handed out only if it fails: it has no buffer, and no completion was requested.
    pub(super) silent: bool,
    /// Whether the outcome in the slot belongs to this entry. False when the entry is added.
    pub(super) has_outcome: bool,
    pub(super) user_data: u32,
}

/// Whether work is signaled, and how many entries before it are known to be unsignaled.
///
/// In one byte: 0 if it is not signaled, otherwise their number plus 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Signal(u8);

/// An entry that is handed out.
#[derive(Debug)]
pub(super) struct Done<B> {
    pub(super) sequence: u64,
    pub(super) buffer: Option<B>,
    pub(super) list: Option<Gather>,
    pub(super) operation: Operation,
    pub(super) user_data: u32,
    pub(super) outcome: Outcome,
}

impl Signal {
    /// Of an entry before which none is known to be unsignaled.
    #[inline(always)]
    pub(super) const fn of(signaled: bool) -> Self {
        Signal(signaled as u8)
    }

    /// Of a signaled entry after `unsignaled` unsignaled ones. Counts at most 254 of them.
    #[inline(always)]
    fn after(unsignaled: u64) -> Self {
        Signal(unsignaled.min(254) as u8 + 1)
    }

    #[inline(always)]
    pub(super) fn is_some(self) -> bool {
        self.0 != 0
    }

    /// Whether the entry is signaled, and the `entries` before it are known to be unsignaled.
    #[inline(always)]
    fn covers(self, entries: u64) -> bool {
        entries < self.0.into()
    }
}

impl Kind {
    #[inline(always)]
    pub(super) const fn signaled(operation: Operation) -> Self {
        Kind { operation, signal: Signal::of(true), silent: false, has_outcome: false, user_data: 0 }
    }

    #[inline(always)]
    pub(super) const fn unsignaled(operation: Operation) -> Self {
        Kind { signal: Signal::of(false), ..Kind::signaled(operation) }
    }

    #[inline(always)]
    pub(super) const fn with_user_data(self, user_data: u32) -> Self {
        Kind { user_data, ..self }
    }
}

/// Upper limit of ring capacities, more than any device supports.
const MAX_CAPACITY: u32 = 1 << 31;

/// Number of slots of a ring with this capacity: a power of two.
pub(super) fn slot_count(capacity: u32) -> usize {
    capacity.min(MAX_CAPACITY).next_power_of_two() as usize
}

// SAFETY: the ring owns its slots, and through them the buffers.
unsafe impl<B: Send> Send for Ring<B> {}
// SAFETY: a shared reference gives access only to numbers.
unsafe impl<B: Sync> Sync for Ring<B> {}

impl<B> Ring<B> {
    /// `mark` is added to each sequence number. It is 0 or a high bit.
    pub(super) fn new(capacity: u32, mark: u64, kind: Kind) -> Self {
        Ring::with_pending(capacity, 0, mark, kind)
    }

    /// Like [`Ring::new`], with room for pending entries in addition to `capacity`.
    pub(super) fn with_pending(capacity: u32, max_pending: u32, mark: u64, kind: Kind) -> Self {
        let capacity = capacity.min(MAX_CAPACITY);
        let max_pending = max_pending.min(MAX_CAPACITY - capacity);
        let slots: Box<[_]> = (0..slot_count(capacity + max_pending)).map(|_| Slot::empty(kind)).collect();
        let slots = NonNull::from(Box::leak(slots));
        let first_slot: NonNull<Slot<B>> = slots.cast();
        for index in 0..slots.len() {
            // SAFETY: both are below the length, and nothing else refers to the slots.
            unsafe { (*first_slot.add(index).as_ptr()).next = first_slot.add((index + 1) & (slots.len() - 1)) }
        }
        let first = mark + 1;
        Ring {
            slots,
            done_slot: first_slot,
            tail_slot: first_slot,
            capacity,
            max_pending,
            limit: first + u64::from(capacity),
            done: first,
            tail: first,
            staged: 0,
            pending: 0,
            lists: None,
        }
    }

    /// The sequence number of the next entry.
    #[inline(always)]
    pub(super) fn next_sequence(&self) -> u64 {
        self.tail
    }

    #[inline(always)]
    pub(super) fn is_full(&self) -> bool {
        // `tail` may exceed `limit` while entries are pending.
        self.tail >= self.limit
    }

    /// Sequence number from which on a batch adds no work.
    ///
    /// While entries are pending it is 0, because work of a batch would overtake them.
    #[inline(always)]
    pub(super) fn batch_limit(&self) -> u64 {
        if self.pending == 0 { self.limit } else { 0 }
    }

    /// Whether the next entry would be refused: there is no room, and the maximum number of entries is pending.
    ///
    /// Always false for a ring without capacity, which never gains room.
    pub(super) fn would_refuse(&self) -> bool {
        self.capacity != 0 && (self.is_full() || self.pending > 0) && self.pending == self.max_pending
    }

    /// Number of entries that a batch can add, if nothing is staged or pending.
    #[inline(always)]
    pub(super) fn room_if_open(&self) -> u64 {
        self.limit.saturating_sub(self.tail)
    }

    /// Number of entries that a batch can add. 0 while a forgotten batch has staged entries.
    #[inline(always)]
    pub(super) fn room(&self) -> u64 {
        if self.staged == 0 && self.pending == 0 { self.room_if_open() } else { 0 }
    }

    /// The error for a full ring of sends, for the endpoint with that queue pair.
    #[inline(always)]
    pub(super) fn full_error(&self, qp_num: u32) -> PostError {
        PostError::EndpointFull { qp_num, send_depth: self.capacity(), pending_sends: self.max_pending() }
    }

    /// Maximum number of entries, without pending ones.
    #[inline(always)]
    pub(super) fn capacity(&self) -> u32 {
        self.capacity
    }

    fn head(&self) -> u64 {
        self.limit - u64::from(self.capacity)
    }

    /// The sequence number of the next entry that is posted.
    pub(super) fn posted(&self) -> u64 {
        self.tail - u64::from(self.staged) - u64::from(self.pending)
    }

    /// Sequence number of the oldest entry in flight, or of the next entry if none is in flight.
    #[inline(always)]
    pub(super) fn oldest(&self) -> u64 {
        self.done
    }

    /// Number of entries that were posted or are pending, and have not completed.
    #[inline]
    pub(super) fn in_flight(&self) -> u64 {
        self.tail - u64::from(self.staged) - self.done
    }

    /// Whether an entry with this number is in flight. Nothing may be staged or pending.
    #[inline(always)]
    pub(super) fn is_in_flight(&self, sequence: u64) -> bool {
        // A number before `done` wraps to a high one.
        sequence.wrapping_sub(self.done) < self.tail - self.done
    }

    /// Number of entries that wait for room.
    #[inline]
    pub(super) fn pending(&self) -> u64 {
        self.pending.into()
    }

    /// Maximum number of pending entries.
    #[inline(always)]
    pub(super) fn max_pending(&self) -> u32 {
        self.max_pending
    }

    /// Whether there is an entry to hand out.
    #[inline]
    pub(super) fn has_completed(&self) -> bool {
        self.head() != self.done
    }

    /// Whether any entry is staged.
    #[inline]
    pub(super) fn has_staged(&self) -> bool {
        self.staged != 0
    }

    /// Index of the slot of a sequence number.
    fn index(&self, sequence: u64) -> usize {
        // The first sequence number is `mark + 1`, whose slot is the first.
        sequence.wrapping_sub(1) as usize & (self.slots.len() - 1)
    }

    /// Adds a posted entry with the number [`Ring::next_sequence`].
    ///
    /// There must be room and no staged entry; otherwise the ring becomes inconsistent.
    #[inline(always)]
    pub(super) fn push(&mut self, buffer: Option<B>, kind: Kind) {
        // SAFETY: it points to one of the slots, and no reference to it exists.
        let slot = unsafe { self.tail_slot.as_mut() };
        // There is no old buffer, so there is nothing to drop.
        std::mem::forget(std::mem::replace(&mut slot.buffer, buffer));
        slot.kind = kind;
        self.tail_slot = slot.next;
        self.tail += 1;
    }

    /// Like [`Ring::push`], in a ring whose entries all have the kind that it was created with. `has_outcome` is false
    /// again when an entry is handed out.
    #[inline(always)]
    pub(super) fn push_same_kind(&mut self, buffer: B) {
        // SAFETY: it points to one of the slots, and no reference to it exists.
        let slot = unsafe { self.tail_slot.as_mut() };
        // There is no old buffer, so there is nothing to drop.
        std::mem::forget(slot.buffer.replace(buffer));
        self.tail_slot = slot.next;
        self.tail += 1;
    }

    /// Adds an entry that is to be posted, and returns its number. There must be room.
    #[inline(always)]
    pub(super) fn stage(&mut self, buffer: Option<B>, kind: Kind) -> u64 {
        self.staged += 1;
        let sequence = self.tail;
        self.push(buffer, kind);
        sequence
    }

    /// Allocates room for the lists of all entries, unless there is.
    pub(super) fn reserve_lists(&mut self) {
        let slots = self.slots.len();
        self.lists.get_or_insert_with(|| Box::new(Lists((0..slots).map(|_| None).collect())));
    }

    /// Like [`Ring::push`], for an entry with a list, after [`Ring::reserve_lists`]. Returns its number.
    pub(super) fn push_list(&mut self, list: Gather, kind: Kind) -> u64 {
        let (sequence, index) = (self.tail, self.index(self.tail));
        match self.lists.as_mut().and_then(|lists| lists.0.get_mut(index)) {
            Some(slot) => *slot = Some(list),
            // Not reached after `reserve_lists`. The memory may be in flight, so it is not freed.
            None => std::mem::forget(list),
        }
        self.push(None, kind);
        sequence
    }

    /// Like [`Ring::stage`], for an entry with a list.
    pub(super) fn stage_list(&mut self, list: Gather, kind: Kind) -> u64 {
        self.staged += 1;
        self.push_list(list, kind)
    }

    /// The list of an entry, if it has one.
    pub(super) fn list_mut(&mut self, sequence: u64) -> Option<&mut Gather> {
        let index = self.index(sequence);
        self.lists.as_mut()?.0.get_mut(index)?.as_mut()
    }

    fn take_list(&mut self, sequence: u64) -> Option<Gather> {
        let index = self.index(sequence);
        self.lists.as_mut()?.0.get_mut(index)?.take()
    }

    /// Marks all staged entries as posted.
    #[inline(always)]
    pub(super) fn commit(&mut self) {
        self.staged = 0;
    }

    /// Marks the first `count` staged entries as posted.
    pub(super) fn commit_first(&mut self, count: u32) {
        self.staged = self.staged.saturating_sub(count);
    }

    /// Removes the newest staged entry, if there is any, and returns its buffer or list, if it has one.
    pub(super) fn pop_staged(&mut self) -> Option<(Option<B>, Option<Gather>)> {
        self.staged = self.staged.checked_sub(1)?;
        self.tail -= 1;
        self.tail_slot = self.slot_ptr(self.tail);
        Some((self.slot(self.tail).buffer.take(), self.take_list(self.tail)))
    }

    /// Drops all staged entries.
    #[inline]
    pub(super) fn roll_back(&mut self) {
        if self.has_staged() {
            self.drop_staged();
        }
    }

    // `extern "C"` because it does not unwind. With a Rust call, the callers would keep the work that they post in
    // memory.
    #[allow(improper_ctypes_definitions)]
    #[cold]
    #[inline(never)]
    extern "C" fn drop_staged(&mut self) {
        while self.pop_staged().is_some() {}
    }

    /// Sets the user data of an entry that is not handed out yet. Returns whether there is one with this number.
    pub(super) fn set_user_data(&mut self, sequence: u64, user_data: u32) -> bool {
        let exists = (self.head()..self.tail).contains(&sequence);
        if exists {
            self.slot(sequence).kind.user_data = user_data;
        }
        exists
    }

    /// The kind of the oldest entry in flight. Without meaning if there is none.
    #[inline(always)]
    pub(super) fn oldest_kind(&self) -> Kind {
        // SAFETY: it points to one of the slots, and no exclusive reference to it exists.
        unsafe { self.done_slot.as_ref() }.kind
    }

    /// Hands out the oldest entry in flight, which has completed.
    ///
    /// `None` if it has no buffer or does not exist. All earlier completed entries must have been handed out, and
    /// nothing may be staged.
    #[inline(always)]
    pub(super) fn take_oldest(&mut self) -> Option<B> {
        // SAFETY: it points to one of the slots, and no reference to it exists.
        let slot = unsafe { self.done_slot.as_mut() };
        let buffer = slot.buffer.take()?;
        self.done_slot = slot.next;
        self.done += 1;
        self.limit += 1;
        Some(buffer)
    }

    /// Completes all entries up to `sequence`, the last of them with `outcome`.
    ///
    /// Returns `false` if that entry is not in flight, or if an earlier entry is signaled.
    pub(super) fn complete(&mut self, sequence: u64, outcome: impl FnOnce(&mut Slot<B>) -> Outcome) -> bool {
        if sequence < self.done || sequence >= self.posted() {
            return false;
        }
        if (self.done..sequence).any(|earlier| self.slot(earlier).kind.signal.is_some()) {
            return false;
        }
        let slot = self.slot(sequence);
        let outcome = outcome(slot);
        slot.set_outcome(outcome);
        self.done = sequence + 1;
        self.done_slot = self.slot_ptr(self.done);
        true
    }

    /// Like [`Ring::complete`], but all these entries complete with `outcome`.
    pub(super) fn complete_all(&mut self, sequence: u64, outcome: Outcome) -> bool {
        let first = self.done;
        if !self.complete(sequence, |_| outcome) {
            return false;
        }
        for earlier in first..sequence {
            self.slot(earlier).set_outcome(outcome);
        }
        true
    }

    /// Completes all entries before `sequence`: with `outcome`, or as succeeded.
    ///
    /// Returns `false` unless these entries are posted, and those in flight are unsignaled.
    pub(super) fn complete_before(&mut self, sequence: u64, outcome: Option<Outcome>) -> bool {
        let first = self.done;
        if sequence < first || sequence > self.posted() {
            return false;
        }
        if (first..sequence).any(|earlier| self.slot(earlier).kind.signal.is_some()) {
            return false;
        }
        if let Some(outcome) = outcome {
            (first..sequence).for_each(|earlier| self.slot(earlier).set_outcome(outcome));
        }
        (self.done, self.done_slot) = (sequence, self.slot_ptr(sequence));
        true
    }

    /// Hands out the oldest entry if it has completed. Skips silent entries that succeeded.
    pub(super) fn pop(&mut self) -> Option<Done<B>> {
        while self.has_completed() {
            let sequence = self.head();
            let Slot { buffer, kind, outcome, .. } = self.slot(sequence);
            // Without a recorded outcome, a later completion released the entry, which implies that it succeeded.
            let outcome = if std::mem::take(&mut kind.has_outcome) { *outcome } else { Outcome::DONE };
            let (buffer, operation) = (buffer.take(), outcome.operation.unwrap_or(kind.operation));
            let (user_data, passed) = (kind.user_data, kind.silent && outcome.is_success());
            self.limit += 1;
            if !passed {
                let list = self.take_list(sequence);
                return Some(Done { sequence, buffer, list, operation, user_data, outcome });
            }
        }
        None
    }

    /// Adds a pending entry. The ring must be full with nothing staged, and one more entry may be pending.
    pub(super) fn add_pending(&mut self, buffer: Option<B>, list: Option<Gather>, kind: Kind) -> u64 {
        debug_assert!((self.is_full() || self.pending > 0) && !self.has_staged() && self.pending < self.max_pending);
        self.pending += 1;
        if let Some(list) = list {
            return self.push_list(list, kind);
        }
        let sequence = self.tail;
        self.push(buffer, kind);
        sequence
    }

    /// Number of pending entries that can be posted now, and the sequence number of the first.
    pub(super) fn postable(&self) -> (u64, u64) {
        let posted = self.posted();
        (self.pending().min(self.limit.saturating_sub(posted)), posted)
    }

    /// The buffer of an entry.
    pub(super) fn buffer(&mut self, sequence: u64) -> Option<&B> {
        self.slot(sequence).buffer.as_ref()
    }

    /// Whether a signaled entry is in flight, so that a completion will arrive.
    pub(super) fn awaits_completion(&mut self) -> bool {
        (self.done..self.posted()).any(|sequence| self.slot(sequence).kind.signal.is_some())
    }

    /// Whether a posted entry is in flight.
    pub(super) fn has_posted(&self) -> bool {
        self.done != self.posted()
    }

    /// Marks the first `count` pending entries as posted.
    pub(super) fn mark_posted(&mut self, count: u64) {
        self.pending = self.pending().saturating_sub(count) as u32;
    }

    /// Completes all pending entries with `outcome`, unless earlier entries are still in flight.
    pub(super) fn complete_pending(&mut self, outcome: Outcome) {
        if self.pending == 0 || self.done != self.posted() {
            return;
        }
        for sequence in self.done..self.tail {
            self.slot(sequence).set_outcome(outcome);
        }
        (self.done, self.done_slot, self.pending) = (self.tail, self.tail_slot, 0);
    }

    /// Takes the buffers of all entries, oldest first: completed, in flight, staged and pending.
    pub(super) fn take_buffers(&mut self) -> impl Iterator<Item = B> + use<'_, B> {
        (self.head()..self.tail).filter_map(|sequence| self.slot(sequence).buffer.take())
    }

    /// Takes the lists of all entries.
    pub(super) fn take_lists(&mut self) -> impl Iterator<Item = Gather> + use<'_, B> {
        self.lists.iter_mut().flat_map(|lists| lists.0.iter_mut()).filter_map(Option::take)
    }

    fn slot(&mut self, sequence: u64) -> &mut Slot<B> {
        // SAFETY: it points to one of the slots, and the returned reference is the only one to it.
        unsafe { self.slot_ptr(sequence).as_mut() }
    }

    /// The slot of a sequence number.
    fn slot_ptr(&self, sequence: u64) -> NonNull<Slot<B>> {
        let index = self.index(sequence);
        // SAFETY: the index is below the length, which is a power of two.
        unsafe { self.slots.cast().add(index) }
    }
}

impl<B> Drop for Ring<B> {
    fn drop(&mut self) {
        // SAFETY: leaked by `new`, and freed only here. Nothing refers to the slots any more.
        drop(unsafe { Box::from_raw(self.slots.as_ptr()) });
    }
}

impl<B> Slot<B> {
    fn empty(kind: Kind) -> Self {
        Slot { next: NonNull::dangling(), buffer: None, kind, outcome: Outcome::DONE }
    }

    fn set_outcome(&mut self, outcome: Outcome) {
        (self.kind.has_outcome, self.outcome) = (true, outcome);
    }
}

#[cfg(test)]
mod tests;
