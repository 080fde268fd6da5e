//! Adding and handing out many entries at once.
//!
//! The position in the ring is kept in local variables meanwhile, and stored once at the end.

use std::mem::{self, ManuallyDrop};
use std::ptr::NonNull;

use super::{Kind, Ring, Slot};

impl<B> Ring<B> {
    /// Number of entries that a batch can add.
    #[inline(always)]
    pub(in crate::endpoint) fn room(&self) -> u64 {
        self.batch_limit().saturating_sub(self.tail)
    }

    /// Begins to stage many entries. Nothing may be staged or pending.
    #[inline(always)]
    pub(in crate::endpoint) fn stage_many(&mut self) -> Staging<'_, B> {
        Staging { tail: self.tail, tail_slot: self.tail_slot, ring: self }
    }

    /// Whether an entry with this number is in flight. Nothing may be staged or pending.
    #[inline(always)]
    pub(in crate::endpoint) fn is_in_flight(&self, sequence: u64) -> bool {
        // A number before `done` wraps to a high one.
        sequence.wrapping_sub(self.done) < self.tail - self.done
    }

    /// Hands out the oldest entries in flight up to `last`, which have succeeded. At most `max`, which is not 0. Returns their number.
    ///
    /// Stops before an entry without a buffer, and before a signaled one that is not the last. `last` must be in flight. All earlier
    /// completed entries must have been handed out, and nothing may be staged.
    #[inline(always)]
    pub(in crate::endpoint) fn take_run(&mut self, last: u64, max: usize, mut f: impl FnMut(u64, Kind, B)) -> usize {
        let before_last = last.wrapping_sub(self.done);
        let count = before_last.min(max as u64);
        let mut run = Run { slot: self.done_slot, taken: 0, ring: self };
        for _ in 0..count {
            if run.kind().signaled || !run.take(&mut f) {
                return run.taken as usize;
            }
        }
        if count < max as u64 {
            run.take(&mut f);
        }
        run.taken as usize
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

    /// Decides which entries are signaled: the last one, and the last one of each `run` entries before it. There must be entries.
    ///
    /// Passes each entry to `f`, with its number and whether it is signaled.
    #[inline(always)]
    pub(in crate::endpoint) fn signal_runs(&mut self, run: u32, mut f: impl FnMut(u64, &B, bool)) {
        let (mut slot, mut sequence) = (self.ring.tail_slot, self.ring.tail);
        let mut end = self.tail.min(sequence + u64::from(run));
        loop {
            while sequence + 1 != end {
                // SAFETY: the slots from `ring.tail_slot` to `tail_slot` have buffers. Nothing else refers to them.
                let entry = unsafe { slot.as_ref() };
                // SAFETY: `push` has stored a buffer.
                f(sequence, unsafe { entry.buffer.as_ref().unwrap_unchecked() }, false);
                (slot, sequence) = (entry.next, sequence + 1);
            }
            // SAFETY: as above.
            let entry = unsafe { slot.as_mut() };
            entry.kind.signaled = true;
            // SAFETY: as above.
            f(sequence, unsafe { entry.buffer.as_ref().unwrap_unchecked() }, true);
            (slot, sequence) = (entry.next, sequence + 1);
            if sequence == self.tail {
                return;
            }
            end = self.tail.min(sequence + u64::from(run));
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

/// Entries that are being handed out.
struct Run<'r, B> {
    ring: &'r mut Ring<B>,
    /// The slot of the next one.
    slot: NonNull<Slot<B>>,
    /// Number of those that were handed out.
    taken: u64,
}

impl<B> Run<'_, B> {
    /// The kind of the next entry.
    #[inline(always)]
    fn kind(&self) -> Kind {
        // SAFETY: it points to one of the slots, and no exclusive reference to it exists.
        unsafe { self.slot.as_ref() }.kind
    }

    /// Hands out the next entry. Returns `false` if it has no buffer.
    #[inline(always)]
    fn take(&mut self, f: &mut impl FnMut(u64, Kind, B)) -> bool {
        // SAFETY: it points to one of the slots, and no reference to it exists.
        let slot = unsafe { self.slot.as_mut() };
        let Some(buffer) = slot.buffer.take() else { return false };
        let (sequence, kind) = (self.ring.done + self.taken, slot.kind);
        self.slot = slot.next;
        self.taken += 1;
        f(sequence, kind, buffer);
        true
    }
}

impl<B> Drop for Run<'_, B> {
    #[inline(always)]
    fn drop(&mut self) {
        self.ring.done_slot = self.slot;
        self.ring.done += self.taken;
        self.ring.limit += self.taken;
    }
}
