//! Buffers of shared receives, found by what their completions name.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::Buffer;

/// Buffers that are in a shared receive queue, each in a slot. One posts, and puts buffers in; whoever polls takes them out, in any
/// order and on any thread.
pub(crate) struct Slab {
    slots: Box<[Slot]>,
    /// The slot that was emptied last, of those that the poster does not know of yet: a stack, by [`Slot::next`].
    emptied: AtomicU32,
}

struct Slot {
    /// The ticket of the receive that holds the buffer; [`EMPTY`] otherwise.
    ticket: AtomicU64,
    /// The slot below this one in a stack of empty ones.
    next: AtomicU32,
    buffer: UnsafeCell<Option<Buffer>>,
}

/// What the one who posts keeps: the empty slots that it knows of, and how often it has posted.
#[derive(Debug)]
pub(crate) struct Vacancies {
    top: u32,
    posted: u64,
}

impl Vacancies {
    /// Of no slab.
    pub(crate) const NONE: Vacancies = Vacancies { top: NONE, posted: 0 };
}

/// Both bits of a ticket, which a `wr_id` of a ring does not have.
const MARK: u64 = 0b11 << 62;
const EMPTY: u64 = 0;
const NONE: u32 = u32::MAX;
/// Bits of a slot's index: queues of devices are not longer.
const INDEX_BITS: u32 = 31;
/// Between the mark and the index: which posting it was, so that a completion that is repeated names nothing.
const TURN: u64 = (1 << (62 - INDEX_BITS)) - 1;

// SAFETY: a buffer is reached only by the one who posts, while the slot is empty, and by the one who has changed the ticket from
// that of its receive to `EMPTY`, which only one can. Both hand over with release and acquire, see `insert` and `take`.
unsafe impl Sync for Slab {}

impl Slab {
    pub(crate) fn new(depth: u32) -> (Self, Vacancies) {
        let depth = depth.min(1 << INDEX_BITS);
        let below = |index: u32| if index == 0 { NONE } else { index - 1 };
        let slot = |index| Slot {
            ticket: AtomicU64::new(EMPTY),
            next: AtomicU32::new(below(index)),
            buffer: UnsafeCell::new(None),
        };
        let slots = (0..depth).map(slot).collect();
        (Slab { slots, emptied: AtomicU32::new(NONE) }, Vacancies { top: below(depth), posted: 0 })
    }

    /// Whether a `wr_id` is a ticket.
    #[inline(always)]
    pub(crate) fn is_ticket(wr_id: u64) -> bool {
        wr_id & MARK == MARK
    }

    /// Keeps a buffer that is about to be posted; the ticket is for its `wr_id`. Gives the buffer back where there is no room.
    ///
    /// # Safety
    /// `vacancies` must have been made with this slab.
    #[inline]
    pub(crate) unsafe fn insert(&self, vacancies: &mut Vacancies, buffer: Buffer) -> Result<u64, Buffer> {
        if vacancies.top == NONE {
            // All at once, so that nobody can push one again between a look at it and its removal.
            vacancies.top = self.emptied.swap(NONE, Ordering::Acquire);
        }
        let index = vacancies.top;
        let Some(slot) = self.slots.get(index as usize) else { return Err(buffer) };
        vacancies.top = slot.next.load(Ordering::Relaxed);
        vacancies.posted += 1;
        let ticket = MARK | (vacancies.posted & TURN) << INDEX_BITS | u64::from(index);
        // SAFETY: the slot is empty, and among the vacancies, of which there is one owner: nobody else looks into it.
        unsafe { *slot.buffer.get() = Some(buffer) };
        slot.ticket.store(ticket, Ordering::Release);
        Ok(ticket)
    }

    /// Takes the buffer of the receive with that ticket; `None` when there is no such receive (any more).
    #[inline]
    pub(crate) fn take(&self, ticket: u64) -> Option<Buffer> {
        let index = (ticket & ((1 << INDEX_BITS) - 1)) as u32;
        let slot = self.slots.get(index as usize)?;
        if !Self::is_ticket(ticket) {
            return None;
        }
        slot.ticket.compare_exchange(ticket, EMPTY, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // SAFETY: the one who has emptied the slot is the only one to look into it until it is among the vacancies again.
        let buffer = unsafe { (*slot.buffer.get()).take() };
        let mut top = self.emptied.load(Ordering::Relaxed);
        loop {
            slot.next.store(top, Ordering::Relaxed);
            match self.emptied.compare_exchange_weak(top, index, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return buffer,
                Err(other) => top = other,
            }
        }
    }

    /// How many buffers there is room for.
    pub(crate) fn depth(&self) -> u32 {
        // As `new` was given it.
        self.slots.len() as u32
    }

    /// How many buffers it holds, by looking at each slot.
    pub(crate) fn len(&self) -> usize {
        self.slots.iter().filter(|slot| slot.ticket.load(Ordering::Relaxed) != EMPTY).count()
    }

    /// All buffers that are left.
    pub(crate) fn into_buffers(self) -> Vec<Buffer> {
        self.slots.into_iter().filter_map(|slot| slot.buffer.into_inner()).collect()
    }
}
