//! Room in the send queue of a connection.

use std::mem;
use std::task::Waker;

use crate::core::{Ticket, Waiters};

/// The operations of a connection in flight, and the tasks that wait until there are fewer.
pub(crate) struct Room {
    /// Size of the send queue.
    size: u32,
    /// Operations that are posted and whose results are not known yet.
    in_flight: u32,
    /// An operation may be posted at once if fewer are in flight: `size`, or 0 while tasks wait and after the end.
    admits: u32,
    is_closed: bool,
    waiters: Waiters,
}

impl Room {
    pub(crate) fn new(size: u32) -> Self {
        Room { size, in_flight: 0, admits: size, is_closed: false, waiters: Waiters::default() }
    }

    /// Whether an operation can be posted at once: there is room, no earlier operation waits for it, and the connection has not
    /// ended.
    #[inline(always)]
    pub(crate) fn admits(&self) -> bool {
        self.in_flight < self.admits
    }

    /// Whether the send queue is full.
    pub(crate) fn is_full(&self) -> bool {
        self.in_flight >= self.size
    }

    /// Number of operations that the task which is admitted can post: it leaves a place for each other task that was notified, but
    /// takes at least one.
    pub(crate) fn share(&self) -> usize {
        let left = self.size.saturating_sub(self.in_flight) as usize;
        left.saturating_sub(self.waiters.notified()).max(1)
    }

    /// Whether no operation is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Counts operations that were posted.
    #[inline(always)]
    pub(crate) fn posted(&mut self, operations: u32) {
        self.in_flight += operations;
    }

    /// Counts a completion. Returns false after [`Room::give_up`].
    #[inline(always)]
    pub(crate) fn completed(&mut self) -> bool {
        let rest = self.in_flight.checked_sub(1);
        self.in_flight = rest.unwrap_or(0);
        rest.is_some()
    }

    /// Forgets the operations in flight. Their late completions are ignored. Returns whether there were any.
    pub(crate) fn give_up(&mut self) -> bool {
        mem::take(&mut self.in_flight) != 0
    }

    /// Adds a task at the end of the line.
    pub(crate) fn join(&mut self, waker: Waker) -> Ticket {
        self.admits = 0;
        self.waiters.join(waker)
    }

    /// Makes a notified task the first one that waits.
    pub(crate) fn rejoin(&mut self, ticket: &Ticket, waker: Waker) {
        self.admits = 0;
        self.waiters.rejoin(ticket, waker);
    }

    /// Whether the task was notified.
    pub(crate) fn is_notified(&self, ticket: &Ticket) -> bool {
        self.waiters.is_notified(ticket)
    }

    /// Replaces the waker of a task that waits. Returns the waker to drop.
    pub(crate) fn set_waker(&mut self, ticket: &Ticket, waker: Waker) -> Waker {
        self.waiters.set_waker(ticket, waker)
    }

    /// Notifies the first task, if any waits. Returns the waker to wake.
    #[inline(always)]
    #[must_use]
    pub(crate) fn notify(&mut self) -> Option<Waker> {
        let waker = self.waiters.notify()?;
        self.update();
        Some(waker)
    }

    /// A task leaves the line. Returns whether it was notified, and the waker to drop.
    pub(crate) fn leave(&mut self, ticket: Ticket) -> (bool, Option<Waker>) {
        let left = self.waiters.leave(ticket);
        self.update();
        left
    }

    /// The connection has ended.
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
        self.update();
    }

    fn update(&mut self) {
        self.admits = if self.is_closed || !self.waiters.is_empty() { 0 } else { self.size };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waker() -> Waker {
        Waker::noop().clone()
    }

    #[test]
    fn nobody_overtakes_a_task_that_waits() {
        let mut room = Room::new(2);
        room.posted(2);
        assert!(!room.admits() && room.is_full());
        let [first, second] = [(); 2].map(|()| room.join(waker()));
        assert!(room.completed() && !room.admits() && !room.is_full());
        assert!(room.notify().is_some() && room.is_notified(&first) && !room.admits(), "the second one waits");
        assert!(room.completed() && room.notify().is_some() && room.admits());
        assert_eq!(room.share(), 1, "the other notified task has a place");
        room.rejoin(&first, waker());
        assert!(!room.admits());
        assert!(matches!(room.leave(first), (false, Some(_))) && room.admits());
        assert!(matches!(room.leave(second), (true, None)) && room.admits());
        assert_eq!(room.share(), 2);
    }

    #[test]
    fn there_is_no_room_after_the_end() {
        let mut room = Room::new(2);
        room.posted(1);
        let ticket = room.join(waker());
        room.close();
        assert!(room.notify().is_some() && !room.admits());
        room.leave(ticket);
        assert!(!room.admits() && room.completed() && room.is_idle() && !room.completed());
    }
}
