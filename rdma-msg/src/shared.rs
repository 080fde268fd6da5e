//! What the handles of a channel share, and how its engine is run.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};
use std::task::{Wake, Waker};
use std::{fmt, mem};

use rdma_safe::fork::Creator;

use crate::engine::{Effects, Engine};

/// What the handles of a channel share.
///
/// The engine is run by the thread that has something for it: a task that sends or receives, the driver of the connection when it
/// wakes the engine's waker, or a thread that drops a message. So credits and acknowledgements do not wait for a task of the
/// program.
pub(crate) struct Shared {
    /// `None` only while it is dropped.
    engine: Mutex<Option<Box<Engine>>>,
    creator: Creator,
    /// Whether to run the engine again.
    again: AtomicBool,
    /// Packets whose receives are posted again, and which the engine has not counted yet.
    returned: AtomicU32,
    /// Whether all handles are gone.
    left: AtomicBool,
    /// Whether a timer of the engine has fired.
    timer_fired: AtomicBool,
}

/// Runs the engine when it is woken.
struct Runner(Weak<Shared>);

/// Fires the timers of the engine when it is woken.
struct TimerWaker(Weak<Shared>);

/// The wakers of an engine.
pub(crate) struct OwnWakers {
    /// Runs the engine when the connection has something for it.
    pub(crate) run: Waker,
    /// Fires the timers of the engine.
    pub(crate) timer: Waker,
}

impl Wake for TimerWaker {
    fn wake(self: Arc<Self>) {
        if let Some(shared) = self.0.upgrade() {
            shared.timer_fired.store(true, Ordering::SeqCst);
            shared.run();
        }
    }
}

impl Wake for Runner {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(shared) = self.0.upgrade() {
            shared.run();
        }
    }
}

impl Shared {
    /// Starts an engine, which `engine` makes with its wakers.
    pub(crate) fn new(engine: impl FnOnce(OwnWakers, Weak<Shared>) -> Engine) -> Arc<Self> {
        let wakers = |this: &Weak<Shared>| OwnWakers {
            run: Waker::from(Arc::new(Runner(this.clone()))),
            timer: Waker::from(Arc::new(TimerWaker(this.clone()))),
        };
        let shared = Arc::new_cyclic(|this: &Weak<Shared>| Shared {
            engine: Mutex::new(Some(Box::new(engine(wakers(this), this.clone())))),
            creator: Creator::current(),
            again: AtomicBool::new(false),
            returned: AtomicU32::new(0),
            left: AtomicBool::new(false),
            timer_fired: AtomicBool::new(false),
        });
        shared.run();
        shared
    }

    /// Calls `f` with the engine, then does what the engine has to do, and wakes tasks.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Engine) -> R) -> R {
        let mut guard = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        let engine = guard.as_mut().expect("only the drop takes it");
        let result = f(engine);
        let effects = settle(engine);
        drop(guard);
        run(effects);
        self.run_if_asked();
        result
    }

    /// Like [`Shared::with`], for destructors. Does nothing in a forked child, whose parent may have held the lock.
    pub(crate) fn with_own<R: Default>(&self, f: impl FnOnce(&mut Engine) -> R) -> R {
        if self.creator.is_parent() { R::default() } else { self.with(f) }
    }

    /// Runs the engine. If another thread is using it, that thread runs it afterwards.
    pub(crate) fn run(&self) {
        self.again.store(true, Ordering::SeqCst);
        self.run_if_asked();
    }

    fn run_if_asked(&self) {
        loop {
            // Pairs with itself in another thread: either the thread that unlocks the engine sees the flag, or the thread that
            // set it finds the lock free.
            fence(Ordering::SeqCst);
            if !self.again.load(Ordering::SeqCst) || self.creator.is_parent() {
                return;
            }
            let mut guard = match self.engine.try_lock() {
                Ok(guard) => guard,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            let Some(engine) = guard.as_mut() else { return };
            self.again.store(false, Ordering::SeqCst);
            engine.count_returned(self.returned.swap(0, Ordering::SeqCst));
            if self.left.load(Ordering::SeqCst) {
                engine.leave();
            }
            engine.run();
            if self.timer_fired.swap(false, Ordering::SeqCst) {
                engine.on_timer();
            }
            let effects = settle(engine);
            drop(guard);
            run(effects);
        }
    }

    /// The receive of a packet is posted again.
    pub(crate) fn returned(&self) {
        self.returned.fetch_add(1, Ordering::SeqCst);
        self.run();
    }

    /// The last handle is dropped.
    pub(crate) fn leave(&self) {
        self.left.store(true, Ordering::SeqCst);
        self.run();
    }
}

/// Sends what is due. Returns what has to wait until the engine is unlocked.
fn settle(engine: &mut Engine) -> Option<Effects> {
    engine.settle();
    engine.take_effects()
}

/// Frees memory and wakes tasks. Both can run code of the user.
fn run(effects: Option<Effects>) {
    let Some(Effects { wakers, freed }) = effects else { return };
    // First, so that a task that waits for it finds its memory free.
    drop(freed);
    for waker in wakers.into_all() {
        // A waker that panics keeps no other task from going on.
        let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.creator.is_parent() {
            // Another thread of the parent may have been changing it.
            mem::forget(self.engine.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}
