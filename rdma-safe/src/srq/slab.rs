//! Buffers of shared receives, found by the `wr_id` of their completions.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::Buffer;

/// Buffers in a shared receive queue, each in a slot.
///
/// One thread posts and inserts buffers. Any thread that polls takes them out, in any order.
pub(crate) struct Slab {
    slots: Box<[Slot]>,
    /// Top of the stack of slots that were emptied and that the poster does not know of yet, linked by [`Slot::next`].
    emptied: AtomicU32,
}

struct Slot {
    /// Ticket of the receive that owns the buffer; [`EMPTY`] if there is none.
    ticket: AtomicU64,
    /// The next slot in a stack of empty slots.
    next: AtomicU32,
    buffer: UnsafeCell<Option<Buffer>>,
}

/// State of the poster: the empty slots that it knows of, and its number of postings.
#[derive(Debug)]
pub(crate) struct Vacancies {
    top: u32,
    posted: u64,
}

impl Vacancies {
    /// A placeholder that belongs to no slab.
    pub(crate) const NONE: Vacancies = Vacancies { top: NONE, posted: 0 };
}

/// Marks tickets: both bits are set, unlike in the `wr_id` of a ring.
const TICKET_BITS: u64 = 0b11 << 62;
const EMPTY: u64 = 0;
const NONE: u32 = u32::MAX;
/// Number of bits of a slot index. Queues of devices are not longer.
const INDEX_BITS: u32 = 31;
/// Mask of the posting counter between mark and index, by which a repeated completion is detected.
const COUNT_MASK: u64 = (1 << (62 - INDEX_BITS)) - 1;

// SAFETY: a buffer is accessed only by the poster while the slot is empty, and by the thread that has changed the
// ticket of its receive to `EMPTY`, which only one thread can do. Both hand over with release and acquire, see `insert`
// and `take`.
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
        wr_id & TICKET_BITS == TICKET_BITS
    }

    /// Stores a buffer that is about to be posted, and returns the ticket for its `wr_id`.
    ///
    /// Returns the buffer if there is no room.
    ///
    /// # Safety
    /// `vacancies` must have been created with this slab.
    #[inline]
    pub(crate) unsafe fn insert(&self, vacancies: &mut Vacancies, buffer: Buffer) -> Result<u64, Buffer> {
        if vacancies.top == NONE {
            // Takes the whole stack, so that no slot can be pushed again between reading the top and removing it (ABA
            // problem).
            vacancies.top = self.emptied.swap(NONE, Ordering::Acquire);
        }
        let index = vacancies.top;
        let Some(slot) = self.slots.get(index as usize) else { return Err(buffer) };
        vacancies.top = slot.next.load(Ordering::Relaxed);
        vacancies.posted += 1;
        let ticket = TICKET_BITS | (vacancies.posted & COUNT_MASK) << INDEX_BITS | u64::from(index);
        // SAFETY: the slot is empty and among the vacancies, which have one owner, so no other thread accesses it.
        unsafe { *slot.buffer.get() = Some(buffer) };
        slot.ticket.store(ticket, Ordering::Release);
        Ok(ticket)
    }

    /// Takes the buffer of the receive with this ticket; `None` when there is no such receive.
    #[inline]
    pub(crate) fn take(&self, ticket: u64) -> Option<Buffer> {
        let index = (ticket & ((1 << INDEX_BITS) - 1)) as u32;
        let slot = self.slots.get(index as usize)?;
        if !Self::is_ticket(ticket) {
            return None;
        }
        slot.ticket.compare_exchange(ticket, EMPTY, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // SAFETY: the thread that has emptied the slot is the only one to access it until the slot is among the
        // vacancies again.
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

    /// Maximum number of buffers.
    pub(crate) fn depth(&self) -> u32 {
        // `new` takes a 32-bit value.
        self.slots.len() as u32
    }

    /// Number of buffers. Scans all slots.
    pub(crate) fn len(&self) -> usize {
        self.slots.iter().filter(|slot| slot.ticket.load(Ordering::Relaxed) != EMPTY).count()
    }

    /// All remaining buffers.
    pub(crate) fn into_buffers(self) -> Vec<Buffer> {
        self.slots.into_iter().filter_map(|slot| slot.buffer.into_inner()).collect()
    }
}
