//! Completions of a classic queue, which `ibv_poll_cq` returns in batches.

use std::ops::ControlFlow;
use std::ptr::NonNull;

use rdma_sys::*;

/// Completions that `ibv_poll_cq` returned and that are not yet taken.
///
/// The counters are separate from the rows: the compiler must reload everything behind a pointer that the provider
/// gets.
pub(super) struct ClassicBatch {
    /// Array of `capacity` completions.
    pub(super) rows: NonNull<ibv_wc>,
    capacity: u32,
    /// Whether there are completions that are not yet taken.
    pub(super) left: bool,
    /// Index of the first completion that is not yet taken.
    pub(super) next: u32,
    /// Index after the last completion; at most `capacity`.
    pub(super) end: u32,
    /// Whether the last batch filled the array, so that the queue may hold more.
    pub(super) full: bool,
}

impl ClassicBatch {
    pub(super) const CAPACITY: u32 = 16;

    pub(super) fn empty() -> Self {
        ClassicBatch::with_capacity(0)
    }

    pub(super) fn new() -> Self {
        ClassicBatch::with_capacity(Self::CAPACITY)
    }

    fn with_capacity(capacity: u32) -> Self {
        let rows = vec![ibv_wc::zeroed(); capacity as usize].into_boxed_slice();
        ClassicBatch {
            rows: NonNull::from(Box::leak(rows)).cast(),
            capacity,
            left: false,
            next: 0,
            end: 0,
            full: false,
        }
    }

    /// Polls the next batch from a classic queue. Returns the number of completions, or a negative number.
    ///
    /// # Safety
    /// The queue must be valid, this must be made by [`ClassicBatch::new`], and all completions of the last batch must
    /// be taken.
    #[inline(always)]
    pub(super) unsafe fn refill(&mut self, cq: NonNull<ibv_cq>) -> i32 {
        // SAFETY: the queue is valid, and there is space for the requested number of completions.
        let taken = unsafe { ibv_poll_cq(cq.as_ptr(), Self::CAPACITY as i32, self.rows.as_ptr()) };
        if taken > 0 {
            // Limited to the capacity, even if a provider reports more.
            (self.left, self.next, self.end) = (true, 0, (taken as u32).min(Self::CAPACITY));
            self.full = taken as u32 >= Self::CAPACITY;
        }
        taken
    }

    /// Whether there is a completion that is not yet taken.
    #[inline(always)]
    pub(super) fn has_next(&self) -> bool {
        self.left
    }

    /// Takes the next completion.
    ///
    /// # Safety
    /// There must be one.
    #[inline(always)]
    pub(super) unsafe fn take(&mut self) -> &ibv_wc {
        let row = self.next as usize;
        self.next += 1;
        self.left = self.next != self.end;
        // SAFETY: `row` was less than `end`, which is at most `capacity`.
        unsafe { self.rows.add(row).as_ref() }
    }

    /// Polls the next batch like [`ClassicBatch::refill`] and takes its first completion. Returns the negative number
    /// on failure.
    ///
    /// # Safety
    /// Those of [`ClassicBatch::refill`].
    #[inline(always)]
    pub(super) unsafe fn take_first(&mut self, cq: NonNull<ibv_cq>) -> Result<Option<&ibv_wc>, i32> {
        // SAFETY: the caller's contract.
        let taken = unsafe { ibv_poll_cq(cq.as_ptr(), Self::CAPACITY as i32, self.rows.as_ptr()) };
        if taken != 1 {
            if taken <= 0 {
                return if taken == 0 { Ok(None) } else { Err(taken) };
            }
            (self.left, self.next, self.end) = (true, 1, (taken as u32).min(Self::CAPACITY));
        }
        // SAFETY: the provider has just filled the first row.
        Ok(Some(unsafe { self.rows.as_ref() }))
    }

    /// Calls `each` with the rows from `next` up to `end`, until it breaks or panics. The remaining rows stay in the
    /// batch.
    ///
    /// # Safety
    /// The rows must be filled and `rows` must be the array of this batch. `end` must be at most `capacity`, and `left`
    /// must be false.
    #[inline(always)]
    pub(super) unsafe fn visit(
        &mut self,
        rows: NonNull<ibv_wc>,
        next: u32,
        end: u32,
        each: &mut impl FnMut(&ibv_wc) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        /// Keeps the position in a register. It is stored only if rows are left.
        struct Position<'a> {
            batch: &'a mut ClassicBatch,
            next: u32,
            end: u32,
        }
        impl Drop for Position<'_> {
            #[inline(always)]
            fn drop(&mut self) {
                let Position { next, end, .. } = *self;
                (self.batch.left, self.batch.next, self.batch.end) = (next != end, next, end);
            }
        }
        let mut position = Position { batch: self, next, end };
        while position.next < position.end {
            let row = position.next as usize;
            position.next += 1;
            // SAFETY: the caller's contract; the provider writes the rows only during the next poll.
            each(unsafe { rows.add(row).as_ref() })?;
        }
        std::mem::forget(position);
        ControlFlow::Continue(())
    }
}

impl Drop for ClassicBatch {
    fn drop(&mut self) {
        // SAFETY: this is the box of `capacity` rows that was leaked when the batch was made.
        drop(unsafe { Box::from_raw(NonNull::slice_from_raw_parts(self.rows, self.capacity as usize).as_ptr()) });
    }
}
