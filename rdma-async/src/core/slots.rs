//! Operations in flight, each with the task that awaits it.

use std::mem;
use std::task::Waker;

/// A table of operations in flight. It allocates only when it grows.
///
/// A future owns its slot until it has taken the result. A future that is dropped earlier leaves the slot to the operation,
/// whose result is then dropped.
pub(crate) struct Slots<T> {
    entries: Vec<Entry<T>>,
    /// Head of the list of free entries.
    free: u32,
}

/// The number of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Slot(u32);

enum Entry<T> {
    /// The next free entry.
    Free(u32),
    /// In flight, with the task that awaits it.
    Awaited(Waker),
    /// In flight. Its future was dropped.
    Abandoned,
    /// Completed. Its future has not taken the result yet.
    Completed(T),
}

/// What to do for a completed operation.
#[must_use]
pub(crate) enum Finished<T> {
    /// Wake the task that awaits it.
    Wake(Waker),
    /// Drop the result, since nobody awaits it.
    Drop(T),
}

/// The end of the list of free entries.
const NONE: u32 = u32::MAX;

impl Slot {
    /// A number that no slot has.
    pub(crate) const NONE: Slot = Slot(NONE);
}

impl<T> Slots<T> {
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Slots { entries: Vec::with_capacity(capacity), free: NONE }
    }

    /// Number of entries that are in use.
    pub(crate) fn len(&self) -> usize {
        self.entries.iter().filter(|entry| !matches!(entry, Entry::Free(_))).count()
    }

    /// Adds an operation that was just posted.
    #[inline]
    pub(crate) fn insert(&mut self, waker: Waker) -> Slot {
        let index = self.free;
        match self.entries.get_mut(index as usize) {
            Some(entry) => {
                if let Entry::Free(next) = *entry {
                    self.free = next;
                }
                *entry = Entry::Awaited(waker);
                Slot(index)
            }
            None => self.grow(waker),
        }
    }

    #[cold]
    fn grow(&mut self, waker: Waker) -> Slot {
        // A device has fewer work requests in flight than that.
        let index = self.entries.len() as u32;
        self.entries.push(Entry::Awaited(waker));
        Slot(index)
    }

    /// Stores the result of an operation. Called once for each.
    #[inline(always)]
    pub(crate) fn complete(&mut self, slot: Slot, result: T) -> Finished<T> {
        let Some(entry) = self.entries.get_mut(slot.0 as usize) else { return Finished::Drop(result) };
        if !matches!(entry, Entry::Awaited(_)) {
            return self.complete_abandoned(slot, result);
        }
        match mem::replace(entry, Entry::Completed(result)) {
            Entry::Awaited(waker) => Finished::Wake(waker),
            _ => unreachable!("matched above"),
        }
    }

    #[cold]
    #[inline(never)]
    fn complete_abandoned(&mut self, slot: Slot, result: T) -> Finished<T> {
        match self.entries.get_mut(slot.0 as usize) {
            Some(entry @ Entry::Abandoned) => {
                *entry = Entry::Free(self.free);
                self.free = slot.0;
            }
            _ => debug_assert!(false, "an operation completes once"),
        }
        Finished::Drop(result)
    }

    /// Takes the result, which frees the slot.
    ///
    /// If there is none yet, returns whether another waker has to be stored with [`Slots::take_or_store`]. To clone a waker can
    /// run code of the user, so the caller first releases its lock.
    #[inline]
    pub(crate) fn take(&mut self, slot: Slot, waker: &Waker) -> Result<T, bool> {
        match self.entries.get(slot.0 as usize) {
            Some(Entry::Completed(_)) => self.take_completed(slot).ok_or(false),
            Some(Entry::Awaited(current)) => Err(!current.will_wake(waker)),
            _ => Err(false),
        }
    }

    /// Takes the result, or stores the waker. Returns the waker to drop.
    pub(crate) fn take_or_store(&mut self, slot: Slot, waker: Waker) -> (Option<T>, Waker) {
        match self.entries.get_mut(slot.0 as usize) {
            Some(Entry::Awaited(current)) => (None, mem::replace(current, waker)),
            _ => (self.take_completed(slot), waker),
        }
    }

    #[inline(always)]
    fn take_completed(&mut self, slot: Slot) -> Option<T> {
        let entry = self.entries.get_mut(slot.0 as usize).filter(|entry| matches!(entry, Entry::Completed(_)))?;
        let Entry::Completed(result) = mem::replace(entry, Entry::Free(self.free)) else { return None };
        self.free = slot.0;
        Some(result)
    }

    /// Gives up the slot of a future that is dropped. The caller drops the result and the waker without the lock.
    pub(crate) fn abandon(&mut self, slot: Slot) -> (Option<T>, Option<Waker>) {
        let Some(entry) = self.entries.get_mut(slot.0 as usize) else { return (None, None) };
        match mem::replace(entry, Entry::Abandoned) {
            Entry::Awaited(waker) => (None, Some(waker)),
            Entry::Completed(result) => {
                *entry = Entry::Free(self.free);
                self.free = slot.0;
                (Some(result), None)
            }
            before => {
                *entry = before;
                (None, None)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;
    use crate::core::random::Random;
    use crate::core::testing::{SEEDS, STEPS, Task};

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether the operation goes on, and has the waker already. Under Miri, equal wakers can have different tables.
    fn is_pending<T>(taken: Result<T, bool>) -> bool {
        taken.is_err_and(|is_other| !is_other || cfg!(miri))
    }

    #[test]
    fn a_result_reaches_its_future_and_frees_the_slot() {
        let mut slots = Slots::with_capacity(1);
        let woken = Arc::new(Count::default());
        let waker = Waker::from(woken.clone());
        for round in 0..3 {
            let slot = slots.insert(waker.clone());
            assert!(is_pending(slots.take(slot, &waker)));
            let Finished::Wake(waiter) = slots.complete(slot, round) else { panic!("its future waits") };
            waiter.wake();
            assert_eq!(slots.take(slot, &waker), Ok(round));
        }
        assert_eq!((slots.entries.len(), slots.len(), woken.0.load(Ordering::Relaxed)), (1, 0, 3));
    }

    #[test]
    fn the_result_of_an_abandoned_operation_is_returned_to_be_dropped() {
        let mut slots = Slots::with_capacity(0);
        let (early, late) = (slots.insert(Waker::noop().clone()), slots.insert(Waker::noop().clone()));
        assert!(matches!(slots.abandon(early), (None, Some(_))));
        assert!(matches!(slots.complete(early, "early"), Finished::Drop("early")));
        assert!(matches!(slots.complete(late, "late"), Finished::Wake(_)));
        assert!(matches!(slots.abandon(late), (Some("late"), None)));
        assert_eq!(slots.len(), 0);
    }

    #[test]
    fn another_task_takes_over() {
        let mut slots = Slots::with_capacity(0);
        let [first, second] = [(); 2].map(|()| Arc::new(Count::default()));
        let slot = slots.insert(Waker::from(first.clone()));
        let other = Waker::from(second.clone());
        assert_eq!(slots.take(slot, &other), Err(true));
        assert_eq!(slots.take_or_store(slot, other.clone()).0, None);
        assert!(is_pending(slots.take(slot, &other)));
        let Finished::Wake(waker) = slots.complete(slot, ()) else { panic!() };
        waker.wake();
        assert_eq!([first, second].map(|count| count.0.load(Ordering::Relaxed)), [0, 1]);
        // It may also complete before the waker is stored.
        assert_eq!(slots.take_or_store(slot, other).0, Some(()));
        assert_eq!(slots.len(), 0);
    }

    /// An operation of the random test, whose result is its memory.
    struct Operation {
        slot: Slot,
        memory: Arc<usize>,
        is_completed: bool,
        /// The task that awaits it, unless its future was dropped.
        task: Option<(Arc<Task>, Waker)>,
    }

    #[test]
    fn random_operations_agree_with_a_model() {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let (mut slots, mut operations) = (Slots::with_capacity(0), Vec::<Operation>::new());
            let mut most = 0;
            for number in 0..STEPS {
                let chosen = random.index(operations.len().max(1));
                match (random.below(5), operations.get_mut(chosen)) {
                    (0 | 1, _) => {
                        let (task, waker) = Task::new();
                        let slot = slots.insert(waker.clone());
                        let task = Some((task, waker));
                        operations.push(Operation { slot, memory: Arc::new(number), is_completed: false, task });
                    }
                    (2, Some(Operation { slot, memory, is_completed: is_completed @ false, task })) => {
                        *is_completed = true;
                        match (slots.complete(*slot, memory.clone()), task) {
                            (Finished::Wake(waker), Some((task, _))) => {
                                waker.wake();
                                assert_eq!(task.wakes(), 1);
                            }
                            (Finished::Drop(result), None) => {
                                assert!(Arc::ptr_eq(&result, memory));
                                drop(result);
                                assert_eq!(Arc::strong_count(&operations.swap_remove(chosen).memory), 1);
                            }
                            _ => panic!("the wrong one was told"),
                        }
                    }
                    (3, Some(Operation { slot, memory, is_completed, task: Some((task, waker)) })) => {
                        match slots.take(*slot, waker) {
                            Ok(result) => {
                                assert!(*is_completed && Arc::ptr_eq(&result, memory));
                                drop(operations.swap_remove(chosen));
                            }
                            Err(is_other) => {
                                assert!(!*is_completed && is_pending(Err::<(), _>(is_other)));
                                // Another task takes over, and the first one is not kept.
                                let (next, other) = Task::new();
                                assert!(slots.take(*slot, &other) == Err(true));
                                drop(slots.take_or_store(*slot, other.clone()));
                                *waker = other;
                                assert_eq!(Arc::strong_count(&std::mem::replace(task, next)), 1);
                            }
                        }
                    }
                    (4, Some(Operation { slot, memory, is_completed, task })) if task.is_some() => {
                        let (task, waker) = task.take().unwrap();
                        drop(waker);
                        let (result, waker) = slots.abandon(*slot);
                        assert_eq!((result.is_some(), waker.is_some()), (*is_completed, !*is_completed));
                        assert!(result.is_none_or(|result| Arc::ptr_eq(&result, memory)));
                        drop(waker);
                        assert_eq!(Arc::strong_count(&task), 1);
                        if *is_completed {
                            assert_eq!(Arc::strong_count(&operations.swap_remove(chosen).memory), 1);
                        }
                    }
                    _ => {}
                }
                most = most.max(operations.len());
                assert_eq!(slots.len(), operations.len());
            }
            assert_eq!(slots.entries.len(), most, "slots are reused");
        }
    }
}
