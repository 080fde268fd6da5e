//! Explores the interleavings of a driver, tasks and a device, with loom.
//!
//! The driver is compiled again here, over the primitives of the model checker, its descriptor and a completion queue as small
//! state machines. loom reports an execution in which all threads wait, so a lost wake-up fails a test.

#![allow(unreachable_pub, reason = "items of the library are compiled as a part of a program")]

#[path = "../../src/core/mod.rs"]
#[allow(dead_code, reason = "the library uses more of it")]
mod core;
mod driver;
#[path = "../../src/effects.rs"]
#[allow(dead_code, reason = "the library uses more of it")]
mod effects;
#[path = "../../src/error.rs"]
#[allow(dead_code, reason = "the library uses more of it")]
mod error;
#[path = "../../src/sharing.rs"]
#[allow(dead_code, reason = "the library uses more of it")]
mod sharing;
mod sync;
#[path = "../../src/trace.rs"]
#[allow(dead_code, reason = "the library uses more of it")]
mod trace;

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use loom::thread;

use crate::core::{Slots, Ticket, Waiters};
use driver::Driver;
use driver::events::{Deadline, Events};
use error::{Error, Result};
use sharing::{Sharing, Threads};
use sync::{Condvar, Mutex, lock};

/// Explores all executions with at most `preemptions` preemptions. Few are enough to find most faults.
fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// A thread that waits until it is woken.
struct Parked {
    is_woken: Mutex<bool>,
    woken: Condvar,
}

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        *lock(&self.is_woken) = true;
        self.woken.notify_one();
    }
}

/// Waits on a thread other than the driver's.
fn wait<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
    let parked = Arc::new(Parked { is_woken: Mutex::new(false), woken: Condvar::new() });
    let waker = Waker::from(parked.clone());
    loop {
        if let Poll::Ready(result) = poll(&mut Context::from_waker(&waker)) {
            return result;
        }
        let mut is_woken = lock(&parked.is_woken);
        while !std::mem::take(&mut *is_woken) {
            is_woken = parked.woken.wait(is_woken).unwrap();
        }
    }
}

#[test]
fn a_task_of_block_on_is_woken_by_another_thread() {
    explore(4, || {
        let (_driver, mut runner) = Driver::new().unwrap();
        let result = Arc::new(Mutex::new((false, None::<Waker>)));
        let sender = result.clone();
        let other = thread::spawn(move || {
            let mut state = lock(&sender);
            state.0 = true;
            let waker = state.1.take();
            drop(state);
            waker.into_iter().for_each(Waker::wake);
        });
        runner.block_on(poll_fn(|context| {
            let mut state = lock(&result);
            state.1 = Some(context.waker().clone());
            if state.0 { Poll::Ready(()) } else { Poll::Pending }
        }));
        other.join().unwrap();
    });
}

#[test]
fn a_completion_wakes_a_driver_that_falls_asleep() {
    explore(3, || {
        let (driver, mut runner) = Driver::new().unwrap();
        let queue = driver.add_queue();
        let device = queue.clone();
        let mut posted = None;
        let mut completing = None;
        runner.block_on(poll_fn(|context| match posted {
            None => {
                let slot = queue.post(context);
                posted = Some(slot);
                let device = device.clone();
                completing = Some(thread::spawn(move || device.complete(slot)));
                Poll::Pending
            }
            Some(slot) => queue.take(slot, context),
        }));
        completing.unwrap().join().unwrap();
    });
}

#[test]
fn a_queue_that_is_added_while_the_driver_sleeps_is_served() {
    explore(3, || {
        let (driver, runner) = Driver::new().unwrap();
        let running = thread::spawn(move || runner.run());
        let queue = driver.add_queue();
        let mut posted = None;
        wait(|context| match posted {
            None => {
                let slot = queue.post(context);
                posted = Some(slot);
                // The queue may not be armed yet, so this need not raise an event.
                queue.complete(slot);
                Poll::Pending
            }
            Some(slot) => queue.take(slot, context),
        });
        drop(driver);
        running.join().unwrap();
    });
}

#[test]
fn a_driver_that_falls_asleep_ends_with_its_last_handle() {
    explore(4, || {
        let (driver, runner) = Driver::new().unwrap();
        let running = thread::spawn(move || runner.run());
        drop(driver);
        running.join().unwrap();
    });
}

#[test]
fn the_timer_is_set_to_the_first_deadline_of_all_threads() {
    explore(3, || {
        let events = Arc::new(Events::<Threads>::new().unwrap());
        let now = Instant::now();
        let [early, late] = [100, 1000].map(|seconds| now + Duration::from_secs(seconds));
        let wait = |events: &Arc<Events<Threads>>, time| {
            let mut deadline = Deadline::<Threads>::new(events);
            assert!(deadline.poll(time, &mut Context::from_waker(Waker::noop())).is_pending());
            deadline
        };
        let other = events.clone();
        let others = thread::spawn(move || wait(&other, late));
        let _own = wait(&events, early);
        let _others = others.join().unwrap();
        assert!(events.poller.timer().is_some_and(|time| time <= early));
    });
}

#[test]
fn an_operation_completes_while_its_future_is_polled_or_dropped() {
    for is_dropped in [false, true] {
        explore(4, move || {
            let slots = Arc::new(Mutex::new(Slots::<Arc<()>>::with_capacity(1)));
            let memory = Arc::new(());
            let slot = lock(&slots).insert(0, Waker::noop().clone());
            let (driver, result) = (slots.clone(), memory.clone());
            let driver = thread::spawn(move || {
                let finished = lock(&driver).complete(slot, result);
                match finished {
                    Ok(waker) => waker.wake(),
                    Err(result) => drop(result),
                }
            });
            if is_dropped {
                drop(lock(&slots).abandon(slot));
            } else {
                // Another task than the one that has posted it.
                drop(wait(|context| {
                    let taken = lock(&slots).take(slot, context.waker());
                    let taken = match taken {
                        Ok(result) => Some(result),
                        Err(false) => None,
                        Err(true) => lock(&slots).take_or_store(slot, context.waker().clone()).0,
                    };
                    taken.map_or(Poll::Pending, Poll::Ready)
                }));
            }
            driver.join().unwrap();
            assert_eq!((lock(&slots).len(), Arc::strong_count(&memory)), (0, 1));
        });
    }
}

/// Messages of a connection, and the tasks that wait for them.
type Inbox = (u32, Waiters);

/// Waits for a message, like `Receive` of the crate.
fn receive(inbox: &Mutex<Inbox>, ticket: &mut Option<Ticket>, context: &Context<'_>) -> Poll<()> {
    let waker = context.waker().clone();
    let (messages, readers) = &mut *lock(inbox);
    if *messages > 0 {
        *messages -= 1;
        ticket.take().into_iter().for_each(|ticket| drop(readers.leave(ticket)));
        return Poll::Ready(());
    }
    match ticket {
        None => *ticket = Some(readers.join(waker)),
        Some(ticket) if readers.is_notified(ticket) => readers.rejoin(ticket, waker),
        Some(ticket) => drop(readers.set_waker(ticket, waker)),
    }
    Poll::Pending
}

#[test]
fn a_reader_that_is_dropped_passes_its_message_on() {
    explore(3, || {
        let inbox = Arc::new(Mutex::new((0, Waiters::default())));
        let (arrivals, dropped) = (inbox.clone(), inbox.clone());
        // Polled before the other reader, so it is the first that is notified.
        let mut ticket = None;
        let first = receive(&dropped, &mut ticket, &Context::from_waker(Waker::noop()));
        assert!(first.is_pending());
        let driver = thread::spawn(move || {
            let mut inbox = lock(&arrivals);
            inbox.0 += 1;
            let waker = inbox.1.notify();
            drop(inbox);
            waker.into_iter().for_each(Waker::wake);
        });
        let quitter = thread::spawn(move || {
            let mut inbox = lock(&dropped);
            let Some(ticket) = ticket else { unreachable!("it waits") };
            let (was_notified, _waker) = inbox.1.leave(ticket);
            let next = if was_notified && inbox.0 > 0 { inbox.1.notify() } else { None };
            drop(inbox);
            next.into_iter().for_each(Waker::wake);
        });
        let mut ticket = None;
        wait(|context| receive(&inbox, &mut ticket, context));
        driver.join().unwrap();
        quitter.join().unwrap();
        assert!(lock(&inbox).1.is_empty());
    });
}
