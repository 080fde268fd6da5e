//! Running a driver.

use std::fmt;
use std::future::{Future, poll_fn};
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use rdma_safe::EndpointKey;

use super::Shared;
use super::poller::Poller;
use super::queue::Queue;
use super::spin::{Idle, Spin};
use super::state::BATCH;
use crate::effects::Effects;
use crate::sync::{AtomicBool, Ordering};
use crate::{Result, Sharing};

/// Runs a driver. Dropping it stops the driver.
///
/// [`Driver::thread`](crate::Driver::thread) and `Driver::tokio` do this already, and `run_async_io` does it on smol. On another
/// runtime, spawn [`run_with`](Runner::run_with) as a task.
#[must_use = "dropping the runner stops its driver"]
pub struct Runner<S: Sharing> {
    shared: S::Rc<Shared<S>>,
    /// A copy of the driver's queues.
    queues: Vec<S::Rc<Queue<S>>>,
    effects: Effects,
    spin: Spin,
    /// Whether the last turn has asked to sleep.
    sleeps: bool,
    /// Whether this thread has slept since, and already has the events that have woken it.
    slept: bool,
    /// Turns until the driver looks for events of descriptors.
    turns: u32,
    tokens: Vec<u64>,
    changed: Vec<(S::Rc<Queue<S>>, EndpointKey)>,
}

/// What to do after a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "the driver sleeps only when a turn says so"]
pub enum Turn {
    /// Let other tasks run, and call [`Runner::turn`] again.
    Again,
    /// Call [`Runner::turn`] once the descriptor is readable.
    Sleep,
    /// The driver has ended.
    Stopped,
}

/// A busy driver looks for events of descriptors once in so many turns.
const CHECK_EVENTS_EVERY: u32 = 64;

/// Further sweeps of a turn that spins: about a microsecond.
const BURST: u32 = 8;

/// Most batches of completions to take in a row from one queue.
const BATCHES: usize = 8;

/// Takes completions from a queue. Returns whether there were any.
#[inline(always)]
fn take_from<S: Sharing>(queue: &Queue<S>, effects: &mut Effects) -> bool {
    let swept = queue.sweep(effects);
    if swept == BATCH {
        take_more_from(queue, effects);
    }
    swept != 0
}

/// Takes further batches from a queue that had a full one.
#[inline(never)]
fn take_more_from<S: Sharing>(queue: &Queue<S>, effects: &mut Effects) {
    for _ in 1..BATCHES {
        if queue.sweep(effects) < BATCH {
            break;
        }
    }
}

#[inline(never)]
fn take_from_all<S: Sharing>(queues: &[S::Rc<Queue<S>>], effects: &mut Effects) -> bool {
    queues.iter().fold(false, |found, queue| take_from(queue, effects) | found)
}

impl<S: Sharing> Runner<S> {
    pub(super) fn new(shared: S::Rc<Shared<S>>, idle: Idle) -> Self {
        Runner {
            shared,
            queues: Vec::new(),
            effects: Effects::default(),
            spin: Spin::new(idle),
            sleeps: false,
            slept: false,
            // The first turn looks.
            turns: 1,
            tokens: Vec::new(),
            changed: Vec::new(),
        }
    }

    /// Takes completions and events, and wakes the tasks. Never blocks, and is bounded.
    #[inline]
    pub fn turn(&mut self) -> Turn {
        self.turns -= 1;
        if self.turns == 0 && !self.check_events() {
            return Turn::Stopped;
        }
        if self.sweep() {
            self.spin.worked();
            return Turn::Again;
        }
        self.idle()
    }

    /// Takes completions from all queues. Returns whether there were any.
    #[inline]
    fn sweep(&mut self) -> bool {
        // Most drivers have one queue.
        match &self.queues[..] {
            [queue] => take_from(queue, &mut self.effects),
            queues => take_from_all::<S>(queues, &mut self.effects),
        }
    }

    /// Decides what to do after a sweep that found nothing.
    fn idle(&mut self) -> Turn {
        if self.spin.spins() {
            self.shared.turns.spins.fetch_add(1, Ordering::Relaxed);
            // Letting other tasks run takes longer than a few sweeps.
            if (0..BURST).any(|_| self.sweep()) {
                self.spin.worked();
            }
            return Turn::Again;
        }
        let mut deadline = None;
        for queue in &self.queues {
            let (sleeps, due) = queue.arm(&mut self.effects);
            if !sleeps {
                return Turn::Again;
            }
            if due.is_some_and(|due| deadline.is_none_or(|deadline| due < deadline)) {
                deadline = due;
            }
        }
        if self.shared.events.set_timer(deadline).is_err() {
            // Without the timer, deadlines are met only by looking.
            return Turn::Again;
        }
        // Arming may have completed the end of the last connection.
        if !self.has_users() {
            return Turn::Stopped;
        }
        (self.turns, self.sleeps) = (1, true);
        self.spin.sleeps();
        self.shared.turns.sleeps.fetch_add(1, Ordering::Relaxed);
        Turn::Sleep
    }

    /// Looks for events of descriptors and for deadlines. Returns whether the driver goes on.
    #[cold]
    #[inline(never)]
    fn check_events(&mut self) -> bool {
        self.turns = CHECK_EVENTS_EVERY;
        self.count_wake();
        let has_events = std::mem::take(&mut self.slept) || self.wait(Some(Duration::ZERO)).is_ok();
        if !has_events || self.shared.stopped.load(Ordering::Acquire) {
            return false;
        }
        self.shared.queues(&mut self.queues);
        self.shared.events.dispatch(&self.tokens, &mut self.effects, &mut self.changed);
        self.tokens.clear();
        self.shared.events.expire(&mut self.effects);
        self.effects.run();
        while let Some((queue, key)) = self.changed.pop() {
            queue.check_connection(key);
        }
        for queue in &self.queues {
            queue.advance_leaving(&mut self.effects);
        }
        self.has_users()
    }

    /// Whether there are handles, or connections that are being closed and so have none.
    fn has_users(&self) -> bool {
        self.shared.has_handles.load(Ordering::Acquire) || self.queues.iter().any(|queue| queue.population().0 != 0)
    }

    fn count_wake(&mut self) {
        if std::mem::take(&mut self.sleeps) {
            self.shared.turns.wakes.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes the events of descriptors. Waits for one, at most for `timeout`.
    fn wait(&mut self, timeout: Option<Duration>) -> Result<()> {
        Ok(self.shared.events.poller.wait(timeout, &mut self.tokens)?)
    }

    /// Sleeps until there is an event.
    fn sleep(&mut self) -> Result<()> {
        self.wait(None)?;
        self.slept = true;
        Ok(())
    }

    /// Runs the driver on this thread until it ends.
    pub fn run(mut self) {
        loop {
            match self.turn() {
                Turn::Again => std::hint::spin_loop(),
                Turn::Sleep if self.sleep().is_ok() => {}
                Turn::Sleep | Turn::Stopped => return,
            }
        }
    }

    /// Runs the driver as a task until it ends, on any runtime that can wait for a descriptor.
    ///
    /// `readable` waits until the descriptor of the runner is readable. It may return early, at the cost of a turn. On compio:
    ///
    /// ```no_run
    /// use std::os::fd::AsFd;
    ///
    /// use compio::driver::SharedFd;
    /// use compio::driver::op::{Interest, PollOnce};
    /// use rdma_async::{Driver, Local, Runner};
    ///
    /// async fn run(runner: Runner<Local>) -> rdma_async::Result<()> {
    ///     let descriptor = SharedFd::new(runner.as_fd().try_clone_to_owned()?);
    ///     let poll = || PollOnce::new(descriptor.clone(), Interest::Readable);
    ///     runner.run_with(|| async { compio::runtime::submit(poll()).await.0.map(drop) }).await
    /// }
    ///
    /// # fn main() -> rdma_async::Result<()> {
    /// let (driver, runner) = Driver::builder().build::<Local>()?;
    /// compio::runtime::Runtime::new()?.block_on(async {
    ///     compio::runtime::spawn(run(runner)).detach();
    ///     // Connections with `driver`.
    /// });
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// On monoio, each type of socket can own the descriptor and wait for it:
    ///
    /// ```no_run
    /// use std::os::fd::AsFd;
    ///
    /// use monoio::net::UnixStream;
    /// use rdma_async::{Local, Runner};
    ///
    /// async fn run(runner: Runner<Local>) -> rdma_async::Result<()> {
    ///     let descriptor = UnixStream::from_std(runner.as_fd().try_clone_to_owned()?.into())?;
    ///     runner.run_with(|| descriptor.readable(false)).await
    /// }
    /// ```
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) with the error of `readable`. The driver then stops.
    pub async fn run_with<F>(mut self, mut readable: impl FnMut() -> F) -> Result<()>
    where
        F: Future<Output = std::io::Result<()>>,
    {
        loop {
            match self.turn() {
                Turn::Again => yield_now().await,
                Turn::Sleep => readable().await?,
                Turn::Stopped => return Ok(()),
            }
        }
    }

    /// Runs the driver on this thread until `future` is ready. This is an executor for one task.
    ///
    /// The driver works while the task waits, so neither other threads nor context switches are involved.
    pub fn block_on<F: Future>(&mut self, future: F) -> F::Output {
        let alarm = Arc::new(Alarm::new(&self.shared.events.poller));
        let waker = Waker::from(alarm.clone());
        let mut context = Context::from_waker(&waker);
        let mut future = pin!(future);
        loop {
            if alarm.take() {
                if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                    return output;
                }
            }
            // A driver without handles has nothing to do, but other threads can still wake the task.
            if self.turn() != Turn::Again && alarm.begin_sleep() {
                // If this fails, the loop spins.
                let _ = self.sleep();
                alarm.end_sleep();
            }
        }
    }
}

/// For runtimes that wait for the channels of the queues themselves.
#[cfg(feature = "tokio")]
impl<S: Sharing> Runner<S> {
    /// The queues that it sweeps. New ones come last, and none is removed before the driver stops.
    pub(crate) fn queues(&self) -> &[S::Rc<Queue<S>>] {
        &self.queues
    }

    /// Makes the next turn sweep without a look for events of descriptors: only channels of its queues have woken it.
    pub(crate) fn skip_check_of_events(&mut self) {
        self.turns = CHECK_EVENTS_EVERY;
        self.count_wake();
    }
}

/// Lets other tasks run.
pub(crate) async fn yield_now() {
    let mut has_yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// The waker of [`Runner::block_on`].
struct Alarm {
    is_raised: AtomicBool,
    sleeps: AtomicBool,
    poller: Arc<Poller>,
}

impl Alarm {
    /// The first poll needs no wake-up.
    fn new(poller: &Arc<Poller>) -> Self {
        Alarm { is_raised: AtomicBool::new(true), sleeps: AtomicBool::new(false), poller: poller.clone() }
    }

    #[inline(always)]
    fn take(&self) -> bool {
        self.is_raised.load(Ordering::Acquire) && self.is_raised.swap(false, Ordering::AcqRel)
    }

    /// Whether to sleep.
    fn begin_sleep(&self) -> bool {
        // Either this load sees the alarm, or `wake` sees the store: both are sequentially consistent.
        self.sleeps.store(true, Ordering::SeqCst);
        let sleeps = !self.is_raised.load(Ordering::SeqCst);
        if !sleeps {
            self.end_sleep();
        }
        sleeps
    }

    fn end_sleep(&self) {
        self.sleeps.store(false, Ordering::Relaxed);
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_raised.store(true, Ordering::SeqCst);
        if self.sleeps.load(Ordering::SeqCst) {
            self.poller.wake();
        }
    }
}

impl<S: Sharing> AsFd for Runner<S> {
    /// Readable when there is something to do, after [`Turn::Sleep`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.events.poller.as_fd()
    }
}

impl<S: Sharing> Drop for Runner<S> {
    fn drop(&mut self) {
        if !self.shared.events.is_inherited() {
            self.shared.stop();
        }
    }
}

impl<S: Sharing> fmt::Debug for Runner<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runner").field("spin", &self.spin).finish_non_exhaustive()
    }
}
