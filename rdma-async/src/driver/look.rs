//! A task that has posted an operation polls once for its completion.

use std::sync::atomic::{AtomicI32, Ordering};
use std::task::Waker;

use rdma_safe::endpoint::{FailedPoll, Rejected, Transferred};
use rdma_safe::{Buffer, PollError, WorkId};

use super::connections::{Connections, find};
use super::member::Ended;
use super::state::{BATCH, State, not_posted};
use crate::connection::Inner;
use crate::core::Slot;
use crate::effects::Effects;
use crate::operation::Step;
use crate::{Failed, Request, Sharing};

/// Decides which operations look.
///
/// A look that finds the completion saves the driver's turn and the wake-up. Whether it does depends on the device, and on what
/// else is in flight. So looks become rare while they find nothing.
#[derive(Debug)]
pub(crate) struct Looks {
    /// If it is positive, so many of the next operations look. If it is `-n`, the next `n + 1` do not. [`NEVER`] if none does.
    next: AtomicI32,
}

/// What decides how often looks pause. The lock of the queue protects it.
#[derive(Debug, Default)]
pub(super) struct Misses {
    /// After the last miss, `pause + 1` operations do not look.
    pause: i32,
    /// [`Counts::found`](super::connections::Counts) at the last miss.
    found: u64,
}

/// Most looks in a row. Then one operation waits for the driver, so that tasks yield. Tokio's limit is the same.
const MOST: i32 = 128;

/// A look that finds nothing is worth it after so many that have found their completion.
const WORTH: u64 = 8;

const LONGEST_PAUSE: i32 = 1023;

const NEVER: i32 = i32::MIN;

impl Looks {
    pub(crate) fn new(is_allowed: bool) -> Self {
        Looks { next: AtomicI32::new(if is_allowed { 0 } else { NEVER }) }
    }

    /// Whether the next operation looks.
    #[inline(always)]
    pub(crate) fn take(&self) -> bool {
        // Threads that count at the same time lose a count, which does not matter.
        let next = self.next.load(Ordering::Relaxed);
        if next <= 0 {
            if next != NEVER {
                self.next.store(if next == 0 { MOST } else { next + 1 }, Ordering::Relaxed);
            }
            return false;
        }
        self.next.store(next - 1, Ordering::Relaxed);
        true
    }

    /// A look has not found its completion. `found` counts all looks that have.
    fn missed(&self, misses: &mut Misses, found: u64) {
        let is_worth_it = found - misses.found >= WORTH;
        misses.found = found;
        misses.pause = if is_worth_it { 0 } else { (2 * misses.pause + 1).min(LONGEST_PAUSE) };
        self.next.store(-misses.pause, Ordering::Relaxed);
    }
}

/// Why a look has not found a completion.
enum Missed<R> {
    /// Nothing was posted: there is no room, or the connection has ended.
    NotPosted(R),
    Refused(Box<Failed>),
    /// It is in flight. There may be tasks to wake and memory to drop.
    InFlight(Slot, Option<Box<Effects>>),
}

/// What the poll for an operation in flight has found.
enum Polled {
    Nothing,
    /// A completion, which the set keeps. It may be that of this operation's failure. There is no event for it any more.
    Kept,
    Failed(PollError),
}

impl<S: Sharing> Inner<S> {
    /// Posts a transfer if there is room and no other task waits, and looks once for its completion. Otherwise, `step` says how far
    /// it is: in flight, new (not posted) or refused.
    ///
    /// Other completions may be in its way. Then it wakes the tasks that wait for them.
    #[inline(always)]
    pub(crate) fn post_and_look<R: Request>(&self, request: R, step: &mut Step<R>) -> Option<Buffer> {
        let found = S::with(&self.queue.state, |state| {
            // If this is another connection, the set has no endpoint with the key.
            let member = state.connections.members.get(self.key.index()).and_then(Option::as_deref);
            if !member.is_some_and(|member| member.room.admits()) {
                return Err(Missed::NotPosted(request));
            }
            let (transfer, buffer) = match request.into_transfer() {
                Ok(parts) => parts,
                Err(request) => return Err(Missed::NotPosted(request)),
            };
            match state.set.transfer_and_poll(self.key, transfer, buffer, Slot::NONE.number()) {
                Ok(Transferred::Completed(buffer)) => {
                    state.connections.counts.found += 1;
                    Ok(buffer)
                }
                Ok(Transferred::InFlight(id)) => Err(self.in_flight(state, id, Polled::Nothing)),
                Ok(Transferred::Kept(id)) => Err(self.in_flight(state, id, Polled::Kept)),
                Ok(Transferred::PollFailed(failed)) => {
                    let FailedPoll { id, error } = *failed;
                    Err(self.in_flight(state, id, Polled::Failed(error)))
                }
                Err(rejected) => Err(self.refused(state, *rejected)),
            }
        });
        match found {
            Ok(buffer) => Some(buffer),
            Err(missed) => {
                go_on(missed, step);
                None
            }
        }
    }

    /// Gives an operation in flight its slot, under the lock under which it was posted. Takes other completions.
    #[cold]
    #[inline(never)]
    fn in_flight<R>(&self, state: &mut State<S>, id: WorkId, polled: Polled) -> Missed<R> {
        let State { connections: Connections { members, slots, counts }, set, misses, .. } = state;
        let slot = slots.insert(self.key.index() as u32, Waker::noop().clone());
        let is_set = set.set_user_data(self.key, id, slot.number());
        debug_assert!(is_set, "nobody has taken the completion");
        if let Some(member) = find(members, self.key) {
            member.room.posted(1);
        }
        counts.posted += 1;
        self.queue.looks.missed(misses, counts.found);
        let mut effects: Option<Box<Effects>> = None;
        match polled {
            Polled::Nothing => {}
            Polled::Kept => {
                if state.sweep(effects.get_or_insert_default()) == BATCH {
                    // The set may keep more, as one completion can return many sends.
                    self.queue.events.poller.wake();
                }
            }
            Polled::Failed(error) => _ = state.poll_failed(error, effects.get_or_insert_default()),
        }
        Missed::InFlight(slot, effects)
    }

    #[cold]
    #[inline(never)]
    fn refused<R>(&self, state: &mut State<S>, rejected: Rejected) -> Missed<R> {
        let State { connections: Connections { members, slots, .. }, broken, .. } = state;
        Missed::Refused(Box::new(match find(members, self.key) {
            Some(member) => not_posted(member, slots, Slot::NONE, rejected).0,
            None => Failed { error: Ended::of_removed(broken).error(), ..Failed::rejected(rejected) },
        }))
    }
}

#[cold]
#[inline(never)]
fn go_on<R>(missed: Missed<R>, step: &mut Step<R>) {
    match missed {
        Missed::NotPosted(request) => *step = Step::New(request),
        Missed::Refused(failed) => *step = Step::Refused(failed),
        Missed::InFlight(slot, effects) => {
            *step = Step::InFlight(slot);
            if let Some(mut effects) = effects {
                effects.run();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Poll, Wake};
    use std::time::{Duration, Instant};

    use rdma_safe::PostError;

    use super::*;
    use crate::driver::queue::tests::{connect, connected};
    use crate::{Connection, Error, Local};

    /// Looks of operations.
    struct Sequence {
        looks: Looks,
        misses: Misses,
        found: u64,
    }

    impl Sequence {
        fn new(is_allowed: bool) -> Self {
            Sequence { looks: Looks::new(is_allowed), misses: Misses::default(), found: 0 }
        }

        /// The looks of the next `count` operations, which find their completions or not.
        fn next(&mut self, count: i32, finds: bool) -> i32 {
            let mut looks = 0;
            for _ in 0..count {
                if self.looks.take() {
                    looks += 1;
                    if finds {
                        self.found += 1;
                    } else {
                        self.looks.missed(&mut self.misses, self.found);
                    }
                }
            }
            looks
        }
    }

    #[test]
    fn one_operation_waits_after_so_many_looks() {
        let mut all = Sequence::new(true);
        assert_eq!(all.next(1, true), 0, "the first one waits, too");
        for _ in 0..3 {
            assert_eq!(all.next(MOST, true), MOST);
            assert_eq!(all.next(1, true), 0);
        }
    }

    #[test]
    fn looks_that_find_nothing_become_rare() {
        let mut all = Sequence::new(true);
        assert_eq!(all.next(LONGEST_PAUSE + 1, false), 9, "after 1, 3, 7 and so on");
        assert_eq!(all.next(10 * (LONGEST_PAUSE + 2), false), 10);
        // They come back once they find something.
        while all.next(1, true) == 0 {}
        assert_eq!(all.next(WORTH as i32 - 1, true), WORTH as i32 - 1);
        assert_eq!(all.next(1, false), 1);
        assert_eq!(all.next(1 + MOST, true), MOST);
    }

    #[test]
    fn threads_that_miss_at_the_same_time_do_not_look_more_often() {
        let mut all = Sequence::new(true);
        let mut looks = 0;
        for _ in 0..10_000 {
            let both = [all.looks.take(), all.looks.take()];
            for _ in both.into_iter().filter(|looks| *looks) {
                looks += 1;
                all.looks.missed(&mut all.misses, all.found);
            }
        }
        assert!(looks < 60, "{looks}");
    }

    #[test]
    fn a_driver_that_sleeps_at_once_has_tasks_that_do_not_look() {
        assert_eq!(Sequence::new(false).next(10_000, true), 0);
    }

    #[derive(Default)]
    struct Alarm(AtomicBool);

    impl Wake for Alarm {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    /// Sends, with a look.
    fn look(connection: &Connection<Local>, buffer: Buffer) -> Poll<Result<Buffer, Failed>> {
        connection.inner.queue.looks.next.store(1, Ordering::Relaxed);
        poll(pin!(connection.send(buffer)))
    }

    #[test]
    #[cfg_attr(miri, ignore = "soft0 needs sockets")]
    fn a_look_wakes_the_tasks_of_other_completions() {
        let (_runner, [client, server]) = connected();
        let alarm = Arc::new(Alarm::default());
        let mut receive = pin!(server.receive());
        assert!(receive.as_mut().poll(&mut Context::from_waker(&alarm.clone().into())).is_pending());
        let start = Instant::now();
        while !alarm.0.load(Ordering::Relaxed) {
            assert!(start.elapsed() < Duration::from_secs(30), "nobody has woken the task");
            // The driver takes no turn.
            let Poll::Ready(buffer) = poll(pin!(client.buffer_of(b"a message"))) else { panic!("no memory") };
            let _ = look(&client, buffer.unwrap());
        }
        let Poll::Ready(Ok(Some(message))) = poll(receive) else { panic!("no message") };
        assert_eq!(*message, *b"a message");
    }

    #[test]
    #[cfg_attr(miri, ignore = "soft0 needs sockets")]
    fn an_operation_that_is_refused_gives_back_its_buffer() {
        let (mut runner, [client, _server]) = connected();
        let other = client.pd().context().alloc_pd().unwrap();
        let Poll::Ready(Err(failed)) = look(&client, other.allocate(8).unwrap()) else { panic!("it was posted") };
        let Error::Rdma(error) = &failed.error else { panic!("{failed:?}") };
        assert!(matches!(**error, rdma_safe::Error::Post(PostError::ForeignBuffer)) && failed.buffer.is_some());
        let buffer = runner.block_on(client.buffer(8)).unwrap();
        runner.block_on(client.close());
        let Poll::Ready(Err(failed)) = look(&client, buffer) else { panic!("it was posted") };
        assert!(matches!(failed.error, Error::Closed) && failed.buffer.is_some());
        // The same if another connection has its place.
        let others = connect(&mut runner, client.driver());
        let is_replaced = |other: &Connection<Local>| other.inner.key.index() == client.inner.key.index();
        assert!(others.iter().any(is_replaced), "a new connection has a free place");
        let Poll::Ready(Err(failed)) = look(&client, failed.buffer.unwrap()) else { panic!("it was posted") };
        assert!(matches!(failed.error, Error::Closed) && failed.buffer.is_some());
        assert_eq!(client.driver().statistics().operations, 0);
    }
}
