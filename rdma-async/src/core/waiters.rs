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
    use super::*;

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
}
