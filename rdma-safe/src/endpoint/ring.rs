//! Work in flight, in the order in which it was posted.

use std::mem::MaybeUninit;

/// A ring of entries with consecutive sequence numbers, allocated once.
///
/// ```text
///   head ........ done ........ posted ........ tail
///   completed,    in flight     staged:         next
///   not handed                  not posted yet
///   out yet
/// ```
///
/// Sequence numbers start at 1 and never repeat, so that neither a completion of zeros nor a repeated one names an entry.
pub(crate) struct Ring<T> {
    slots: Box<[MaybeUninit<T>]>,
    /// `slots.len() - 1`, where the length is a power of two.
    mask: usize,
    /// At most `slots.len()`.
    capacity: u64,
    head: u64,
    done: u64,
    posted: u64,
    tail: u64,
}

impl<T> Ring<T> {
    pub(crate) fn new(capacity: u32) -> Self {
        // No device has queues as deep as that; the length must stay a power of two.
        let capacity = capacity.min(1 << 31);
        let slots: Box<[_]> = (0..capacity.next_power_of_two()).map(|_| MaybeUninit::uninit()).collect();
        Ring { mask: slots.len() - 1, slots, capacity: capacity.into(), head: 1, done: 1, posted: 1, tail: 1 }
    }

    /// The number that the next entry gets.
    #[inline(always)]
    pub(crate) fn next_sequence(&self) -> u64 {
        self.tail
    }

    #[inline(always)]
    pub(crate) fn is_full(&self) -> bool {
        self.tail - self.head >= self.capacity
    }

    /// Entries that were posted and have not completed.
    #[inline(always)]
    pub(crate) fn in_flight(&self) -> u64 {
        self.posted - self.done
    }

    /// Whether there is an entry to be handed out.
    #[inline(always)]
    pub(crate) fn has_completed(&self) -> bool {
        self.head < self.done
    }

    /// As [`Ring::stage`]; gives the entry back when the ring is full.
    #[cfg(test)]
    fn push(&mut self, entry: T) -> Result<u64, T> {
        if self.is_full() {
            return Err(entry);
        }
        // SAFETY: it is not full.
        Ok(unsafe { self.stage(entry) })
    }

    /// Stages an entry, and returns its number.
    ///
    /// # Safety
    /// The ring must not be full.
    #[inline(always)]
    pub(crate) unsafe fn stage(&mut self, entry: T) -> u64 {
        let sequence = self.tail;
        self.slot(sequence).write(entry);
        self.tail += 1;
        sequence
    }

    /// Says that what was staged has been posted.
    #[inline(always)]
    pub(crate) fn commit(&mut self) {
        self.posted = self.tail;
    }

    /// Says that of what was staged the first `count` entries have been posted.
    pub(crate) fn commit_first(&mut self, count: u32) {
        self.posted = self.tail.min(self.posted + u64::from(count));
    }

    /// Takes back the newest entry that is staged.
    pub(crate) fn unstage(&mut self) -> Option<T> {
        if self.tail == self.posted {
            return None;
        }
        self.tail -= 1;
        let sequence = self.tail;
        // SAFETY: `head <= posted <= sequence < tail` before the decrement, so the slot holds an entry; now it counts as
        // empty.
        Some(unsafe { self.slot(sequence).assume_init_read() })
    }

    /// Whether anything is staged.
    #[inline(always)]
    pub(crate) fn has_staged(&self) -> bool {
        self.tail != self.posted
    }

    /// Drops what is staged.
    #[inline]
    pub(crate) fn roll_back(&mut self) {
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

    /// Completes every entry up to `sequence`, and returns that one; `None` when it is not in flight.
    #[inline(always)]
    pub(crate) fn complete(&mut self, sequence: u64) -> Option<&mut T> {
        self.complete_if(sequence, |_, _| true)
    }

    /// As [`Ring::complete`], unless `fits` refuses the entry, given the oldest one in flight.
    #[inline(always)]
    pub(crate) fn complete_if(&mut self, sequence: u64, fits: impl FnOnce(&T, u64) -> bool) -> Option<&mut T> {
        let done = self.done;
        if sequence < done || sequence >= self.posted {
            return None;
        }
        // SAFETY: `head <= done <= sequence < posted <= tail`, so the slot holds an entry.
        let entry = unsafe { self.slot(sequence).assume_init_mut() };
        if !fits(entry, done) {
            return None;
        }
        self.done = sequence + 1;
        // SAFETY: as above; borrowed anew, since `done` could not be set while `entry` was.
        Some(unsafe { self.slot(sequence).assume_init_mut() })
    }

    /// Entries in flight before `sequence`.
    pub(crate) fn each_before(&mut self, sequence: u64, mut each: impl FnMut(&mut T)) {
        for earlier in self.done..sequence.min(self.posted) {
            // SAFETY: `head <= done <= earlier < posted <= tail`, so the slot holds an entry.
            each(unsafe { self.slot(earlier).assume_init_mut() });
        }
    }

    /// As [`Ring::complete`], where every entry has a completion of its own: `None` unless it is the oldest in flight.
    #[inline(always)]
    pub(crate) fn complete_oldest(&mut self, sequence: u64) -> Option<&mut T> {
        if sequence == self.done { self.complete(sequence) } else { None }
    }

    /// Hands out the oldest entry if it has completed.
    #[inline(always)]
    pub(crate) fn pop_completed(&mut self) -> Option<(u64, T)> {
        if self.head == self.done {
            return None;
        }
        let sequence = self.head;
        self.head += 1;
        // SAFETY: `head < done <= posted <= tail` before the increment, so the slot holds an entry; now it counts as empty.
        Some((sequence, unsafe { self.slot(sequence).assume_init_read() }))
    }

    /// Completes the oldest entry in flight and hands it out, if it is the one of that number, none that has completed waits
    /// to be handed out, and `fits` agrees.
    #[inline(always)]
    pub(crate) fn take_if(&mut self, sequence: u64, fits: impl FnOnce(&T) -> bool) -> Option<T> {
        if sequence != self.done || self.head != sequence || sequence == self.posted {
            return None;
        }
        // SAFETY: `head == sequence < posted <= tail`, so the slot holds an entry.
        let entry = unsafe { self.slot(sequence).assume_init_ref() };
        if !fits(entry) {
            return None;
        }
        self.done = sequence + 1;
        self.head = sequence + 1;
        // SAFETY: as above; now the slot counts as empty.
        Some(unsafe { self.slot(sequence).assume_init_read() })
    }

    /// Undoes what [`Ring::take_if`] has just done, but for the completion: the entry is to be handed out.
    ///
    /// # Safety
    /// Nothing must have happened to the ring since, and what was taken must be forgotten.
    #[inline(always)]
    pub(crate) unsafe fn untake(&mut self) -> &mut T {
        self.head -= 1;
        // SAFETY: the entry was read from the slot, which was not written since; the copy is forgotten.
        unsafe { self.slot(self.head).assume_init_mut() }
    }

    /// Passes over the oldest entries that have completed, as long as `skip` says so. They are not dropped.
    #[inline(always)]
    pub(crate) fn skip_completed(&mut self, skip: impl Fn(&T) -> bool) {
        while self.head != self.done {
            let sequence = self.head;
            // SAFETY: `head < done <= posted <= tail`, so the slot holds an entry.
            if !skip(unsafe { self.slot(sequence).assume_init_ref() }) {
                break;
            }
            self.head += 1;
        }
    }

    /// Hands out the oldest entry, whether it has completed, is in flight or staged.
    pub(crate) fn pop_oldest(&mut self) -> Option<T> {
        if self.head == self.tail {
            return None;
        }
        self.posted = self.posted.max(self.head + 1);
        self.done = self.done.max(self.head + 1);
        self.pop_completed().map(|(_, entry)| entry)
    }

    /// Forgets all entries without dropping them.
    pub(crate) fn leak(&mut self) {
        (self.head, self.done, self.posted) = (self.tail, self.tail, self.tail);
    }

    #[inline(always)]
    fn slot(&mut self, sequence: u64) -> &mut MaybeUninit<T> {
        let index = sequence as usize & self.mask;
        // SAFETY: the mask is one less than the length, so the index is below it.
        unsafe { self.slots.get_unchecked_mut(index) }
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        while self.pop_oldest().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;
    use std::rc::Rc;

    #[test]
    fn one_completion_releases_every_entry_up_to_it() {
        let mut ring = Ring::new(4);
        for value in 10..14 {
            ring.push(value).unwrap();
        }
        ring.commit();
        assert_eq!(ring.push(14), Err(14), "a full ring gives the entry back");
        assert_eq!(ring.complete(3), Some(&mut 12));
        assert_eq!(ring.complete(3), None, "a repeated completion names nothing");
        assert_eq!(ring.complete(5), None, "neither does one of the future");
        assert_eq!(ring.pop_completed(), Some((1, 10)));
        assert_eq!(ring.pop_completed(), Some((2, 11)));
        assert_eq!(ring.pop_completed(), Some((3, 12)));
        assert_eq!(ring.pop_completed(), None, "the fourth is in flight");
        assert_eq!(ring.in_flight(), 1);
    }

    #[test]
    fn a_completion_of_zeros_names_no_entry() {
        let mut ring = Ring::new(2);
        ring.push(()).unwrap();
        ring.commit();
        assert_eq!(ring.complete(0), None);
    }

    #[test]
    fn where_every_entry_completes_none_can_be_skipped() {
        let mut ring = Ring::new(4);
        ring.push('a').unwrap();
        ring.push('b').unwrap();
        ring.commit();
        assert_eq!(ring.complete_oldest(2), None);
        assert_eq!(ring.complete_oldest(1), Some(&mut 'a'));
        assert_eq!(ring.complete_oldest(2), Some(&mut 'b'));
    }

    #[test]
    fn the_oldest_entry_is_taken_at_once_and_can_stay_after_all() {
        let mut ring = Ring::new(2);
        ring.push('a').unwrap();
        ring.push('b').unwrap();
        ring.commit();
        assert_eq!(ring.take_if(2, |_| true), None, "there is an older one");
        assert_eq!(ring.take_if(1, |_| false), None);
        assert_eq!(ring.take_if(1, |_| true), Some('a'));
        // SAFETY: it was just taken, and there is nothing to forget of a `char`.
        *unsafe { ring.untake() } = 'c';
        assert_eq!(ring.take_if(2, |_| true), None, "one is to be handed out before");
        assert_eq!(ring.pop_completed(), Some((1, 'c')));
        assert_eq!(ring.take_if(2, |_| true), Some('b'));
        assert_eq!(ring.take_if(3, |_| true), None, "nothing is in flight");
    }

    #[test]
    fn what_is_staged_can_be_taken_back_and_cannot_complete() {
        let mut ring = Ring::new(4);
        for value in ['a', 'b', 'c'] {
            ring.push(value).unwrap();
        }
        assert_eq!(ring.complete(1), None, "nothing is posted");
        assert_eq!(ring.in_flight(), 0);
        ring.commit_first(1);
        assert_eq!(ring.unstage(), Some('c'));
        ring.roll_back();
        assert_eq!(ring.unstage(), None, "the first is posted");
        assert_eq!(ring.push('d'), Ok(2));
        ring.commit();
        assert_eq!(ring.complete(2), Some(&mut 'd'));
        assert_eq!(ring.pop_completed(), Some((1, 'a')));
    }

    #[test]
    fn every_entry_is_dropped_once_or_leaked() {
        let witness = Rc::new(());
        let mut ring = Ring::new(3);
        for _ in 0..3 {
            ring.push(Rc::clone(&witness)).unwrap();
        }
        ring.commit_first(2);
        ring.complete(1).unwrap();
        drop(ring.pop_completed());
        assert_eq!(Rc::strong_count(&witness), 3);
        drop(ring);
        assert_eq!(Rc::strong_count(&witness), 1);

        let mut ring = Ring::new(1);
        ring.push(Rc::clone(&witness)).unwrap();
        ring.leak();
        drop(ring);
        assert_eq!(Rc::strong_count(&witness), 2);
        // SAFETY: takes the place of the leaked reference, so that the test itself does not leak.
        unsafe { Rc::decrement_strong_count(Rc::as_ptr(&witness)) };
    }

    /// Against a model, over a fixed stream of pseudo-random steps and capacities that are no powers of two.
    #[test]
    fn it_behaves_like_a_queue() {
        let mut random = 0x2545_f491_4f6c_dd1d_u64;
        let mut next = move |bound: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % bound
        };
        for capacity in [1, 2, 3, 5, 8, 13] {
            let mut ring = Ring::new(capacity);
            let (mut completed, mut in_flight) = (VecDeque::new(), VecDeque::new());
            for _ in 0..if cfg!(miri) { 100 } else { 5000 } {
                match next(4) {
                    0 | 1 => {
                        let value = Box::new(next(1000));
                        let room = completed.len() + in_flight.len() < capacity as usize;
                        match ring.push(value.clone()) {
                            Ok(sequence) => {
                                ring.commit();
                                assert!(room);
                                in_flight.push_back((sequence, value));
                            }
                            Err(_) => assert!(!room),
                        }
                    }
                    2 if !in_flight.is_empty() => {
                        let upto = next(in_flight.len() as u64) as usize;
                        let (sequence, value) = in_flight[upto].clone();
                        assert_eq!(ring.complete(sequence), Some(&mut value.clone()));
                        completed.extend(in_flight.drain(..=upto));
                    }
                    _ => assert_eq!(ring.pop_completed(), completed.pop_front()),
                }
                assert_eq!(ring.in_flight(), in_flight.len() as u64);
            }
        }
    }
}
