//! A task that looks for the completion of its own operation, right after it has posted it.

use std::sync::atomic::{AtomicI32, Ordering};
use std::task::Waker;

use rdma_safe::endpoint::{Rejected, Transferred};
use rdma_safe::{Buffer, PollError, WorkId};

use super::connections::{Connections, find};
use super::state::{State, not_posted};
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
    /// How many of the next operations look. If it is negative, so many do not, nor does the one after them.
    next: AtomicI32,
    /// How many look after the one that has not: [`MOST`] or [`NONE`].
    row: i32,
    /// How many do not look after a look that has found nothing.
    pause: AtomicI32,
}

/// Most looks in a row. Then one operation waits for the driver, so that its task lets others run. Tokio lets a task complete as
/// many operations in a row.
const MOST: i32 = 128;

/// The tasks do not look.
const NONE: i32 = i32::MIN;

/// A look that finds nothing is worth it after so many that have found their completion.
const WORTH: i32 = 8;

const LONGEST_PAUSE: i32 = 1023;

// Threads that count at the same time lose counts, which does not matter.
impl Looks {
    pub(crate) fn new(is_allowed: bool) -> Self {
        let row = if is_allowed { MOST } else { NONE };
        Looks { next: AtomicI32::new(row.min(0)), row, pause: AtomicI32::new(0) }
    }

    /// Whether the next operation looks.
    #[inline(always)]
    pub(crate) fn take(&self) -> bool {
        let next = self.next.load(Ordering::Relaxed);
        if next <= 0 {
            self.next.store(if next == 0 { self.row } else { next + 1 }, Ordering::Relaxed);
            return false;
        }
        self.next.store(next - 1, Ordering::Relaxed);
        true
    }

    /// A look has not found its completion.
    #[cold]
    #[inline(never)]
    fn missed(&self) {
        let found = MOST - 1 - self.next.load(Ordering::Relaxed);
        let pause = if found < WORTH { 2 * self.pause.load(Ordering::Relaxed) + 1 } else { 0 };
        let pause = pause.min(LONGEST_PAUSE);
        self.pause.store(pause, Ordering::Relaxed);
        self.next.store(-pause, Ordering::Relaxed);
    }
}

/// Why a look has not found a completion.
enum Missed<R> {
    /// Nothing was posted: there is no room, or the connection has ended.
    NotPosted(R),
    Refused(Box<Failed>),
    /// It is in flight. If the poll has failed, there is an error.
    InFlight(Slot, Option<Box<PollError>>),
}

impl<S: Sharing> Inner<S> {
    /// Posts a transfer if there is room and no other task waits, and looks once for its completion. If it has not completed,
    /// `step` becomes what it is then: in flight, new or refused.
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
                Ok(Transferred::InFlight(id)) => Err(self.in_flight(state, id, None)),
                Ok(Transferred::PollFailed(failed)) => Err(self.in_flight(state, failed.0, Some(failed.1))),
                Err(rejected) => Err(self.refused(state, *rejected)),
            }
        });
        match found {
            Ok(buffer) => Some(buffer),
            Err(missed) => {
                self.missed(missed, step);
                None
            }
        }
    }

    /// Gives an operation in flight its slot, under the lock under which it was posted.
    #[cold]
    #[inline(never)]
    fn in_flight<R>(&self, state: &mut State<S>, id: WorkId, error: Option<PollError>) -> Missed<R> {
        let State { connections: Connections { members, slots, counts }, set, .. } = state;
        let slot = slots.insert(self.key.index() as u32, Waker::noop().clone());
        set.set_user_data(self.key, id, slot.number());
        if let Some(member) = find(members, self.key) {
            member.room.posted(1);
        }
        counts.posted += 1;
        Missed::InFlight(slot, error.map(Box::new))
    }

    #[cold]
    #[inline(never)]
    fn refused<R>(&self, state: &mut State<S>, rejected: Rejected) -> Missed<R> {
        let Connections { members, slots, .. } = &mut state.connections;
        Missed::Refused(Box::new(match find(members, self.key) {
            Some(member) => not_posted(member, slots, Slot::NONE, rejected).0,
            None => Failed::rejected(rejected),
        }))
    }

    #[cold]
    #[inline(never)]
    fn missed<R>(&self, missed: Missed<R>, step: &mut Step<R>) {
        let queue = &self.queue;
        match missed {
            Missed::NotPosted(request) => *step = Step::New(request),
            Missed::Refused(failed) => *step = Step::Refused(failed),
            Missed::InFlight(slot, error) => {
                *step = Step::InFlight(slot);
                queue.looks.missed();
                let mut effects = Effects::default();
                if let Some(error) = error {
                    S::with(&queue.state, |state| state.poll_failed(*error, &mut effects));
                }
                // The set may keep the completion that was in the way, for which there is no event any more.
                queue.sweep(&mut effects);
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
    use crate::driver::queue::tests::connected;
    use crate::{Connection, Error, Local};

    /// The operations that look, of the next `count`. `finds` says whether a look finds its completion.
    fn looks(looks: &Looks, count: i32, finds: bool) -> i32 {
        (0..count)
            .filter(|_| looks.take())
            .inspect(|_| {
                if !finds {
                    looks.missed()
                }
            })
            .count() as i32
    }

    #[test]
    fn one_operation_waits_after_so_many_looks() {
        let all = Looks::new(true);
        assert_eq!(looks(&all, 1, true), 0, "the first one waits, too");
        for _ in 0..3 {
            assert_eq!(looks(&all, MOST, true), MOST);
            assert_eq!(looks(&all, 1, true), 0);
        }
    }

    #[test]
    fn looks_that_find_nothing_become_rare() {
        let all = Looks::new(true);
        assert_eq!(looks(&all, LONGEST_PAUSE + 1, false), 9, "after 1, 3, 7 and so on");
        assert_eq!(looks(&all, 10 * (LONGEST_PAUSE + 2), false), 10);
        // They come back once they find something.
        while looks(&all, 1, true) == 0 {}
        assert_eq!(looks(&all, WORTH - 1, true), WORTH - 1);
        assert_eq!(looks(&all, 1, false), 1);
        assert_eq!(looks(&all, 1 + MOST, true), MOST);
    }

    #[test]
    fn a_driver_that_sleeps_at_once_has_tasks_that_do_not_look() {
        assert_eq!(looks(&Looks::new(false), 10_000, true), 0);
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
        client.inner.queue.begin_close(client.inner.key, Duration::ZERO);
        let Poll::Ready(Err(failed)) = look(&client, buffer) else { panic!("it was posted") };
        assert!(matches!(failed.error, Error::Closed) && failed.buffer.is_some());
        assert_eq!(client.driver().statistics().operations, 0);
    }
}
