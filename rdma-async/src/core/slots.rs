//! Operations in flight, each with the task that awaits it.

use std::task::Waker;
use std::{mem, ptr};

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
    /// In flight, with the number of its connection and the task that awaits it.
    Awaited(u32, Waker),
    /// In flight, with the number of its connection. Its future was dropped.
    Abandoned(u32),
    /// Completed. Its future has not taken the result yet.
    Completed(T),
}

/// The end of the list of free entries.
const NONE: u32 = u32::MAX;

impl Slot {
    /// A number that no slot has.
    pub(crate) const NONE: Slot = Slot(NONE);

    /// The slot with this number.
    #[inline(always)]
    pub(crate) fn of(number: u32) -> Self {
        Slot(number)
    }

    #[inline(always)]
    pub(crate) fn number(self) -> u32 {
        self.0
    }
}

impl<T> Slots<T> {
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Slots { entries: Vec::with_capacity(capacity), free: NONE }
    }

    /// Number of entries that are in use.
    pub(crate) fn len(&self) -> usize {
        self.entries.iter().filter(|entry| !matches!(entry, Entry::Free(_))).count()
    }

    /// Adds an operation of a connection that is to be posted.
    #[inline(always)]
    pub(crate) fn insert(&mut self, connection: u32, waker: Waker) -> Slot {
        let index = self.free;
        match self.entries.get_mut(index as usize) {
            Some(entry) => {
                if let Entry::Free(next) = *entry {
                    self.free = next;
                }
                // A free entry has nothing to drop.
                mem::forget(mem::replace(entry, Entry::Awaited(connection, waker)));
                Slot(index)
            }
            None => self.grow(connection, waker),
        }
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self, connection: u32, waker: Waker) -> Slot {
        // A device has fewer work requests in flight than that.
        let index = self.entries.len() as u32;
        self.entries.push(Entry::Awaited(connection, waker));
        Slot(index)
    }

    /// Stores the result of an operation. Called once for each. Returns the task to wake, or the result if nobody awaits it.
    #[inline(always)]
    pub(crate) fn complete(&mut self, slot: Slot, result: T) -> Result<Waker, T> {
        let Some(entry) = self.entries.get_mut(slot.0 as usize) else { return Err(result) };
        let Entry::Awaited(_, waker) = entry else {
            self.complete_abandoned(slot);
            return Err(result);
        };
        // SAFETY: the entry is overwritten without a drop, so the waker has one owner. Nothing between the two can panic.
        // `mem::replace` would copy the entry to the stack.
        let waker = unsafe { ptr::read(waker) };
        // SAFETY: `entry` is a valid, exclusive reference. Its waker was moved out, and the rest needs no drop.
        unsafe { ptr::write(entry, Entry::Completed(result)) };
        Ok(waker)
    }

    #[cold]
    #[inline(never)]
    fn complete_abandoned(&mut self, slot: Slot) {
        match self.entries.get_mut(slot.0 as usize) {
            Some(entry @ Entry::Abandoned(_)) => {
                *entry = Entry::Free(self.free);
                self.free = slot.0;
            }
            Some(_) => debug_assert!(false, "an operation completes once"),
            None => {}
        }
    }

    /// The slots of the operations in flight.
    pub(crate) fn in_flight(&self) -> Vec<Slot> {
        self.in_flight_where(|_| true)
    }

    /// The slots of the operations of one connection that are in flight.
    pub(crate) fn in_flight_of(&self, connection: u32) -> Vec<Slot> {
        self.in_flight_where(|other| other == connection)
    }

    fn in_flight_where(&self, is_wanted: impl Fn(u32) -> bool) -> Vec<Slot> {
        let is_found = |entry: &Entry<T>| match entry {
            Entry::Awaited(connection, _) | Entry::Abandoned(connection) => is_wanted(*connection),
            Entry::Free(_) | Entry::Completed(_) => false,
        };
        let found = self.entries.iter().zip(0..).filter(|(entry, _)| is_found(entry));
        found.map(|(_, index)| Slot(index)).collect()
    }

    /// Takes the result, which frees the slot.
    ///
    /// If there is none yet, returns whether another waker has to be stored with [`Slots::take_or_store`]. To clone a waker can
    /// run code of the user, so the caller first releases its lock.
    #[inline]
    pub(crate) fn take(&mut self, slot: Slot, waker: &Waker) -> Result<T, bool> {
        if let Some(result) = self.take_completed(slot) {
            return Ok(result);
        }
        match self.entries.get(slot.0 as usize) {
            Some(Entry::Awaited(_, current)) => Err(!current.will_wake(waker)),
            _ => Err(false),
        }
    }

    /// Takes the result, or stores the waker. Returns the waker to drop.
    pub(crate) fn take_or_store(&mut self, slot: Slot, waker: Waker) -> (Option<T>, Waker) {
        match self.entries.get_mut(slot.0 as usize) {
            Some(Entry::Awaited(_, current)) => (None, mem::replace(current, waker)),
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
        match entry {
            Entry::Awaited(connection, _) => {
                let abandoned = Entry::Abandoned(*connection);
                let Entry::Awaited(_, waker) = mem::replace(entry, abandoned) else { return (None, None) };
                (None, Some(waker))
            }
            Entry::Completed(_) => (self.take_completed(slot), None),
            Entry::Abandoned(_) | Entry::Free(_) => (None, None),
        }
    }

    /// Removes an operation that is not posted after all. The caller drops the waker without the lock.
    pub(crate) fn cancel(&mut self, slot: Slot) -> Option<Waker> {
        let entry = self.entries.get_mut(slot.0 as usize).filter(|entry| matches!(entry, Entry::Awaited(..)))?;
        let Entry::Awaited(_, waker) = mem::replace(entry, Entry::Free(self.free)) else { return None };
        self.free = slot.0;
        Some(waker)
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
            let slot = slots.insert(0, waker.clone());
            assert!(is_pending(slots.take(slot, &waker)));
            let waiter = slots.complete(slot, round).expect("its future waits");
            waiter.wake();
            assert_eq!(slots.take(slot, &waker), Ok(round));
        }
        assert_eq!((slots.entries.len(), slots.len(), woken.0.load(Ordering::Relaxed)), (1, 0, 3));
    }

    #[test]
    fn the_result_of_an_abandoned_operation_is_returned_to_be_dropped() {
        let mut slots = Slots::with_capacity(0);
        let (early, late) = (slots.insert(0, Waker::noop().clone()), slots.insert(0, Waker::noop().clone()));
        assert!(matches!(slots.abandon(early), (None, Some(_))));
        assert!(matches!(slots.complete(early, "early"), Err("early")));
        assert!(slots.complete(late, "late").is_ok());
        assert!(matches!(slots.abandon(late), (Some("late"), None)));
        assert_eq!(slots.len(), 0);
    }

    #[test]
    fn another_task_takes_over() {
        let mut slots = Slots::with_capacity(0);
        let [first, second] = [(); 2].map(|()| Arc::new(Count::default()));
        let slot = slots.insert(0, Waker::from(first.clone()));
        let other = Waker::from(second.clone());
        assert_eq!(slots.take(slot, &other), Err(true));
        assert_eq!(slots.take_or_store(slot, other.clone()).0, None);
        assert!(is_pending(slots.take(slot, &other)));
        let waker = slots.complete(slot, ()).unwrap();
        waker.wake();
        assert_eq!([first, second].map(|count| count.0.load(Ordering::Relaxed)), [0, 1]);
        // It may also complete before the waker is stored.
        assert_eq!(slots.take_or_store(slot, other).0, Some(()));
        assert_eq!(slots.len(), 0);
    }

    /// An operation of the random test, whose result is its memory.
    struct Operation {
        slot: Slot,
        connection: u32,
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
                match (random.below(6), operations.get_mut(chosen)) {
                    (0 | 1, _) => {
                        let (task, waker) = Task::new();
                        let connection = random.below(3) as u32;
                        let slot = slots.insert(connection, waker.clone());
                        let (task, memory) = (Some((task, waker)), Arc::new(number));
                        operations.push(Operation { slot, connection, memory, is_completed: false, task });
                    }
                    (2, Some(Operation { slot, memory, is_completed: is_completed @ false, task, .. })) => {
                        *is_completed = true;
                        match (slots.complete(*slot, memory.clone()), task) {
                            (Ok(waker), Some((task, _))) => {
                                waker.wake();
                                assert_eq!(task.wakes(), 1);
                            }
                            (Err(result), None) => {
                                assert!(Arc::ptr_eq(&result, memory));
                                drop(result);
                                assert_eq!(Arc::strong_count(&operations.swap_remove(chosen).memory), 1);
                            }
                            _ => panic!("the wrong one was told"),
                        }
                    }
                    (3, Some(Operation { slot, memory, is_completed, task: Some((task, waker)), .. })) => {
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
                    (4, Some(Operation { slot, memory, is_completed, task, .. })) if task.is_some() => {
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
                    (5, Some(Operation { slot, is_completed: false, task: Some((task, _)), .. })) => {
                        // It was not posted.
                        assert!(slots.cancel(*slot).is_some());
                        let task = task.clone();
                        drop(operations.swap_remove(chosen));
                        assert_eq!(Arc::strong_count(&task), 1);
                    }
                    _ => {}
                }
                most = most.max(operations.len());
                assert_eq!(slots.len(), operations.len());
                let in_flight = |of: Option<u32>| {
                    let wanted = operations.iter().filter(|operation| !operation.is_completed);
                    let wanted = wanted.filter(|operation| of.is_none_or(|of| of == operation.connection));
                    let mut wanted: Vec<_> = wanted.map(|operation| operation.slot.number()).collect();
                    wanted.sort_unstable();
                    wanted
                };
                let numbers = |slots: Vec<Slot>| slots.into_iter().map(Slot::number).collect::<Vec<_>>();
                assert_eq!(numbers(slots.in_flight()), in_flight(None));
                assert_eq!(numbers(slots.in_flight_of(1)), in_flight(Some(1)));
            }
            assert_eq!(slots.entries.len(), most, "slots are reused");
        }
    }
}
