//! Tasks that wait in order of arrival.

use std::collections::VecDeque;
use std::mem;
use std::task::Waker;

/// Tasks that wait for something of which there may be several, in order of arrival.
///
/// Each notification goes to one task. A task that is dropped after its notification has to pass it on.
#[derive(Default)]
pub(crate) struct Waiters {
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// Entries that wait.
    order: VecDeque<u32>,
}

/// The place of a task. Its future gives it back by [`Waiters::leave`].
#[derive(Debug)]
pub(crate) struct Ticket(u32);

enum Entry {
    Free,
    Waiting(Waker),
    Notified,
}

impl Waiters {
    /// Whether no task waits.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Number of tasks that were notified and have not acted on it yet.
    pub(crate) fn notified(&self) -> usize {
        self.entries.len() - self.free.len() - self.order.len()
    }

    /// Number of tasks that wait.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    /// Adds a task at the end.
    pub(crate) fn join(&mut self, waker: Waker) -> Ticket {
        let entry = Entry::Waiting(waker);
        let index = match self.free.pop() {
            Some(index) => {
                self.entries[index as usize] = entry;
                index
            }
            None => {
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            }
        };
        self.order.push_back(index);
        Ticket(index)
    }

    /// Whether the task was notified.
    #[inline(always)]
    pub(crate) fn is_notified(&self, ticket: &Ticket) -> bool {
        !matches!(self.entries[ticket.0 as usize], Entry::Waiting(_))
    }

    /// Replaces the waker of a task that waits. Returns the waker to drop.
    pub(crate) fn set_waker(&mut self, ticket: &Ticket, waker: Waker) -> Waker {
        match &mut self.entries[ticket.0 as usize] {
            Entry::Waiting(current) => mem::replace(current, waker),
            _ => waker,
        }
    }

    /// Makes a notified task the first one that waits.
    pub(crate) fn rejoin(&mut self, ticket: &Ticket, waker: Waker) {
        self.entries[ticket.0 as usize] = Entry::Waiting(waker);
        self.order.push_front(ticket.0);
    }

    /// Notifies the first task. Returns the waker to wake.
    #[inline(always)]
    #[must_use]
    pub(crate) fn notify(&mut self) -> Option<Waker> {
        let index = self.order.pop_front()?;
        match mem::replace(&mut self.entries[index as usize], Entry::Notified) {
            Entry::Waiting(waker) => Some(waker),
            _ => None,
        }
    }

    /// Gives back a place. Returns whether the task was notified, and the waker to drop.
    pub(crate) fn leave(&mut self, ticket: Ticket) -> (bool, Option<Waker>) {
        let left = mem::replace(&mut self.entries[ticket.0 as usize], Entry::Free);
        self.free.push(ticket.0);
        match left {
            Entry::Waiting(waker) => {
                if let Some(place) = self.order.iter().rposition(|index| *index == ticket.0) {
                    self.order.remove(place);
                }
                (false, Some(waker))
            }
            _ => (true, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::core::random::Random;
    use crate::core::testing::{SEEDS, STEPS, Task};

    fn waker() -> Waker {
        Waker::noop().clone()
    }

    #[test]
    fn tasks_are_notified_in_order_and_cancelled_ones_are_skipped() {
        let mut waiters = Waiters::default();
        let [first, second, third] = [(); 3].map(|()| waiters.join(waker()));
        assert!(matches!(waiters.leave(second), (false, Some(_))));
        assert_eq!(waiters.len(), 2);
        assert!(waiters.notify().is_some());
        assert!(waiters.is_notified(&first));
        assert!(!waiters.is_notified(&third));
        assert_eq!((waiters.notified(), waiters.len()), (1, 1));
        assert!(waiters.notify().is_some());
        assert!(waiters.notify().is_none());
        assert!(waiters.leave(first).0 && waiters.leave(third).0);
        assert_eq!((waiters.free.len(), waiters.entries.len(), waiters.is_empty()), (3, 3, true));
    }

    #[test]
    fn a_task_that_finds_nothing_waits_again_as_the_first() {
        let mut waiters = Waiters::default();
        let [first, second] = [(); 2].map(|()| waiters.join(waker()));
        assert!(waiters.notify().is_some());
        waiters.rejoin(&first, waker());
        assert!(waiters.notify().is_some());
        assert!(waiters.is_notified(&first));
        assert!(!waiters.is_notified(&second));
    }

    /// A task of the random test.
    struct Waiting {
        number: usize,
        ticket: Ticket,
        task: Arc<Task>,
        is_notified: bool,
    }

    #[test]
    fn random_tasks_agree_with_a_model() {
        for seed in SEEDS {
            let mut random = Random::new(seed);
            let (mut waiters, mut all) = (Waiters::default(), Vec::<Waiting>::new());
            // Numbers of the tasks that still wait, in order.
            let mut order = VecDeque::new();
            let mut most = 0;
            for number in 0..STEPS {
                let chosen = random.index(all.len().max(1));
                match (random.below(5), all.get_mut(chosen)) {
                    (0 | 1, _) => {
                        let (task, waker) = Task::new();
                        all.push(Waiting { number, ticket: waiters.join(waker), task, is_notified: false });
                        order.push_back(number);
                    }
                    (2, _) => {
                        let woken = waiters.notify();
                        assert_eq!(woken.is_some(), !order.is_empty());
                        let (Some(waker), Some(first)) = (woken, order.pop_front()) else { continue };
                        waker.wake();
                        let first = all.iter_mut().find(|waiting| waiting.number == first).unwrap();
                        assert_eq!((first.task.wakes(), Arc::strong_count(&first.task)), (1, 1));
                        first.is_notified = true;
                    }
                    (3, Some(Waiting { number, ticket, task, is_notified })) => {
                        let (next, waker) = Task::new();
                        match std::mem::take(is_notified) {
                            true => {
                                waiters.rejoin(ticket, waker);
                                order.push_front(*number);
                            }
                            false => drop(waiters.set_waker(ticket, waker)),
                        }
                        assert_eq!(Arc::strong_count(&std::mem::replace(task, next)), 1);
                    }
                    (4, Some(_)) => {
                        let Waiting { number, ticket, task, is_notified } = all.swap_remove(chosen);
                        let (was_notified, waker) = waiters.leave(ticket);
                        assert_eq!((was_notified, waker.is_some()), (is_notified, !is_notified));
                        drop(waker);
                        assert_eq!(Arc::strong_count(&task), 1);
                        order.retain(|other| *other != number);
                    }
                    _ => {}
                }
                most = most.max(all.len());
                assert_eq!((waiters.len(), waiters.is_empty()), (order.len(), order.is_empty()));
                assert!(all.iter().all(|waiting| waiters.is_notified(&waiting.ticket) == waiting.is_notified));
            }
            assert_eq!(waiters.entries.len(), most, "places are reused");
        }
    }
}
