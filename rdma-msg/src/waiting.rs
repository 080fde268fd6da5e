//! Tasks that wait in order of arrival.

use std::collections::VecDeque;
use std::mem;
use std::task::Waker;

/// Tasks that wait for the same thing, in order of arrival. Only the first may go on.
#[derive(Default)]
pub(crate) struct Line {
    tasks: VecDeque<Task>,
    next: u64,
}

struct Task {
    place: Place,
    /// `None` if the task was woken and was not polled since, or is being polled.
    waker: Option<Waker>,
}

/// The place of a task. Its future gives it back by [`Line::leave`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place(u64);

impl Line {
    /// Whether no task waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Whether a task may go on: it is the first, or it has no place and no task waits.
    pub(crate) fn is_next(&self, place: Option<Place>) -> bool {
        self.tasks.front().map(|first| first.place) == place
    }

    /// Stores the waker of a task, if there is one. The task joins the line unless it has a place.
    ///
    /// Returns its place and a waker to drop.
    pub(crate) fn wait(&mut self, place: Option<Place>, waker: Option<Waker>) -> (Place, Option<Waker>) {
        let known = place.and_then(|place| self.tasks.iter_mut().find(|task| task.place == place));
        if let Some(task) = known {
            let before = if waker.is_some() { mem::replace(&mut task.waker, waker) } else { None };
            return (task.place, before);
        }
        let place = Place(self.next);
        self.next += 1;
        self.tasks.push_back(Task { place, waker });
        (place, None)
    }

    /// A task no longer waits. Returns its waker, to drop.
    pub(crate) fn leave(&mut self, place: Place) -> Option<Waker> {
        let index = self.tasks.iter().position(|task| task.place == place)?;
        self.tasks.remove(index)?.waker
    }

    /// The waker of the first task, unless it was woken already.
    pub(crate) fn wake_first(&mut self) -> Option<Waker> {
        self.tasks.front_mut()?.waker.take()
    }

    /// The wakers of all tasks that were not woken already.
    pub(crate) fn wake_all(&mut self) -> impl Iterator<Item = Waker> {
        self.tasks.iter_mut().filter_map(|task| task.waker.take())
    }
}

/// Wakers to call when no lock is held. Two need no allocation: usually one task sends and one receives.
#[derive(Default)]
pub(crate) struct Wakers {
    first: [Option<Waker>; 2],
    more: Vec<Waker>,
}

impl Wakers {
    pub(crate) fn is_empty(&self) -> bool {
        self.first[0].is_none()
    }

    /// All wakers, in order.
    pub(crate) fn into_all(self) -> impl Iterator<Item = Waker> {
        self.first.into_iter().flatten().chain(self.more)
    }
}

impl Extend<Waker> for Wakers {
    fn extend<I: IntoIterator<Item = Waker>>(&mut self, wakers: I) {
        for waker in wakers {
            match self.first.iter_mut().find(|place| place.is_none()) {
                Some(place) => *place = Some(waker),
                None => self.more.push(waker),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::Wake;

    use super::*;

    fn waker() -> Option<Waker> {
        Some(Waker::noop().clone())
    }

    #[test]
    fn only_the_first_task_goes_on() {
        let mut line = Line::default();
        assert!(line.is_next(None));
        let [first, second] = [(); 2].map(|()| line.wait(None, waker()).0);
        assert!(!line.is_next(None) && line.is_next(Some(first)) && !line.is_next(Some(second)));
        assert!(line.wake_first().is_some() && line.wake_first().is_none(), "a task is woken once");
        assert_eq!(line.wait(Some(first), waker()).0, first, "and keeps its place");
        assert_eq!(line.wake_all().count(), 2);
        assert!(line.leave(first).is_none(), "its waker was taken");
        assert!(line.is_next(Some(second)));
        line.wait(Some(second), waker());
        assert!(line.leave(second).is_some() && line.is_next(None));
    }

    #[test]
    fn all_wakers_are_called_in_order() {
        for count in 0..5 {
            let alarms: Vec<_> = (0..count).map(|_| Arc::new(Alarm::default())).collect();
            let mut wakers = Wakers::default();
            alarms.iter().for_each(|alarm| wakers.extend([Waker::from(alarm.clone())]));
            assert_eq!(wakers.is_empty(), count == 0);
            for (waker, alarm) in wakers.into_all().zip(&alarms) {
                waker.wake();
                assert!(alarm.0.load(Ordering::Relaxed));
            }
            assert!(alarms.iter().all(|alarm| alarm.0.load(Ordering::Relaxed)));
        }
    }

    #[derive(Default)]
    struct Alarm(AtomicBool);

    impl Wake for Alarm {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}
