//! Adding and handing out many entries at once.
//!
//! The position in the ring is kept in local variables meanwhile, and stored once at the end.

use std::mem::{self, ManuallyDrop};
use std::ptr::NonNull;

use super::{Kind, Ring, Signal, Slot};

impl<B> Ring<B> {
    /// Begins to stage many entries. Nothing may be staged or pending.
    #[inline(always)]
    pub(in crate::endpoint) fn stage_many(&mut self) -> Staging<'_, B> {
        Staging { tail: self.tail, tail_slot: self.tail_slot, ring: self }
    }

    /// Completes the entries up to `last`, which have succeeded, and begins to hand them out.
    ///
    /// `None` if `last` is not in flight or has no buffer, or unless those before it are known to be unsignaled. All earlier
    /// completed entries must have been handed out, and nothing may be staged or pending.
    #[inline(always)]
    pub(in crate::endpoint) fn complete_run(&mut self, last: u64) -> Option<Run<'_, B>> {
        if !self.is_in_flight(last) {
            return None;
        }
        let (next, slot) = (self.done, self.done_slot);
        // SAFETY: it points to one of the slots, and no exclusive reference to it exists.
        let entry = unsafe { self.slot_ptr(last).as_ref() };
        if entry.buffer.is_none() || !entry.kind.signal.covers(last - next) {
            return None;
        }
        (self.done, self.done_slot) = (last + 1, entry.next);
        Some(Run { next, slot, last, ring: self })
    }
}

/// Entries that are being staged. Dropping it drops them.
pub(in crate::endpoint) struct Staging<'r, B> {
    ring: &'r mut Ring<B>,
    tail: u64,
    tail_slot: NonNull<Slot<B>>,
}

impl<B> Staging<'_, B> {
    /// Number of entries.
    #[inline(always)]
    pub(in crate::endpoint) fn len(&self) -> u64 {
        self.tail - self.ring.tail
    }

    /// Adds an entry. There must be room.
    #[inline(always)]
    pub(in crate::endpoint) fn push(&mut self, buffer: B, kind: Kind) {
        // SAFETY: it points to one of the slots, and no reference to it exists.
        let slot = unsafe { self.tail_slot.as_mut() };
        // There is no old buffer, so there is nothing to drop.
        mem::forget(slot.buffer.replace(buffer));
        slot.kind = kind;
        self.tail_slot = slot.next;
        self.tail += 1;
    }

    /// Signals every `every`th entry and the last one.
    ///
    /// Passes each entry to `f`, with its number and whether it is signaled.
    // Two loops, so that the inner one has no other branch.
    #[inline(always)]
    pub(in crate::endpoint) fn signal_every(&mut self, every: u32, mut f: impl FnMut(u64, &B, bool)) {
        let (mut slot, mut sequence) = (self.ring.tail_slot, self.ring.tail);
        while sequence < self.tail {
            let first = sequence;
            let end = self.tail.min(first + u64::from(every));
            while sequence + 1 < end {
                // SAFETY: it points to one of the slots, since `slot` and `sequence` advance together. No exclusive reference to
                // the slot exists.
                let entry = unsafe { slot.as_ref() };
                // SAFETY: `push` has stored a buffer in each slot from `ring.tail` to `tail`, and `sequence` is one of them.
                f(sequence, unsafe { entry.buffer.as_ref().unwrap_unchecked() }, false);
                (slot, sequence) = (entry.next, sequence + 1);
            }
            // SAFETY: as above, and no other reference to the slot exists.
            let entry = unsafe { slot.as_mut() };
            entry.kind.signal = Signal::after(sequence - first);
            // SAFETY: as above.
            f(sequence, unsafe { entry.buffer.as_ref().unwrap_unchecked() }, true);
            (slot, sequence) = (entry.next, sequence + 1);
        }
    }

    /// Adds the entries to the ring, as posted.
    #[inline(always)]
    pub(in crate::endpoint) fn commit(self) {
        ManuallyDrop::new(self).store();
    }

    /// Adds the entries to the ring, as staged.
    #[cold]
    pub(in crate::endpoint) fn stage(self) {
        let mut this = ManuallyDrop::new(self);
        this.ring.staged = this.len() as u32;
        this.store();
    }

    #[inline(always)]
    fn store(&mut self) {
        (self.ring.tail, self.ring.tail_slot) = (self.tail, self.tail_slot);
    }
}

impl<B> Drop for Staging<'_, B> {
    #[inline(always)]
    fn drop(&mut self) {
        self.ring.staged = self.len() as u32;
        self.store();
        self.ring.roll_back();
    }
}

/// Completed entries that are being handed out. The others are handed out by [`Ring::pop`].
pub(in crate::endpoint) struct Run<'r, B> {
    ring: &'r mut Ring<B>,
    /// The number of the next entry, and its slot.
    next: u64,
    slot: NonNull<Slot<B>>,
    last: u64,
}

impl<B> Run<'_, B> {
    /// Number of entries that are left.
    #[inline(always)]
    pub(in crate::endpoint) fn len(&self) -> u64 {
        self.last + 1 - self.next
    }

    /// Passes entries to `f`, at most `max`.
    #[inline(always)]
    pub(in crate::endpoint) fn take(&mut self, max: u64, mut f: impl FnMut(u64, Kind, B)) {
        let end = self.next + self.len().min(max);
        while self.next != end {
            // SAFETY: it points to one of the slots, and no reference to it exists.
            let slot = unsafe { self.slot.as_mut() };
            debug_assert!(slot.buffer.is_some());
            // SAFETY: `complete_run` has found the last entry in flight, with a buffer. Those before it are covered by its signal,
            // so `signal_every` has gone over them, and they were added by `push`, with buffers. A buffer leaves its slot only when
            // its entry is handed out or rolled back, or when the queue pair is destroyed. Nobody polls for a destroyed one.
            let buffer = unsafe { slot.buffer.take().unwrap_unchecked() };
            let (sequence, kind) = (self.next, slot.kind);
            (self.next, self.slot) = (sequence + 1, slot.next);
            f(sequence, kind, buffer);
        }
    }
}

impl<B> Drop for Run<'_, B> {
    #[inline(always)]
    fn drop(&mut self) {
        self.ring.limit = self.next + u64::from(self.ring.capacity);
    }
}
