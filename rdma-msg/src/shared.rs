//! What the handles of a channel share, and how its engine is run.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};
use std::task::{Wake, Waker};
use std::{fmt, mem};

use rdma_safe::fork::Creator;

use crate::engine::{Effects, Engine, Freed, Packer, Unpacker};
use crate::lent::Lent;

/// What the handles of a channel share.
///
/// The engine is run by the thread that has something for it: a task that sends or receives, the driver of the connection when it
/// wakes one of the engine's wakers, or a thread that drops a message. So credits do not wait for a task of the program.
pub(crate) struct Shared {
    /// `None` only while it is dropped.
    engine: Mutex<Option<Box<Engine>>>,
    /// The open packet, to which tasks add messages.
    pub(crate) packer: Lent<Packer>,
    /// The first packet that has arrived, of which tasks take messages.
    pub(crate) unpacker: Lent<Unpacker>,
    creator: Creator,
    /// The [`News`] for which to run the engine.
    news: AtomicU8,
    /// Packets whose receives are posted again, and which the engine has not counted yet.
    returned: AtomicU32,
    /// Run the engine once `returned` is at least this.
    wanted: AtomicU32,
    /// Whether there was a message when the engine was used last.
    has_message: AtomicBool,
}

/// What an engine is to look for: a set of bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct News(u8);

impl News {
    /// Packets have arrived.
    pub(crate) const PACKETS: News = News(1);
    /// A send or a read has completed, or there is memory for a read.
    pub(crate) const COMPLETIONS: News = News(2);
    /// A timer has fired.
    pub(crate) const TIMER: News = News(4);
    /// The last handle is dropped.
    const LEFT: News = News(8);

    /// Whether these include `other`.
    pub(crate) fn has(self, other: News) -> bool {
        self.0 & other.0 != 0
    }
}

/// Runs the engine for something when it is woken.
struct Runner {
    shared: Weak<Shared>,
    news: News,
}

/// The wakers of an engine, each for other [`News`].
pub(crate) struct OwnWakers {
    pub(crate) packets: Waker,
    pub(crate) completions: Waker,
    pub(crate) timer: Waker,
}

impl Wake for Runner {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(shared) = self.shared.upgrade() {
            shared.run(self.news);
        }
    }
}

impl Shared {
    /// Starts an engine, which `engine` makes with its wakers.
    pub(crate) fn new(engine: impl FnOnce(OwnWakers, Weak<Shared>) -> Engine) -> Arc<Self> {
        let waker = |this: &Weak<Shared>, news| Waker::from(Arc::new(Runner { shared: this.clone(), news }));
        let wakers = |this: &Weak<Shared>| OwnWakers {
            packets: waker(this, News::PACKETS),
            completions: waker(this, News::COMPLETIONS),
            timer: waker(this, News::TIMER),
        };
        let shared = Arc::new_cyclic(|this: &Weak<Shared>| Shared {
            engine: Mutex::new(Some(Box::new(engine(wakers(this), this.clone())))),
            packer: Lent::new(),
            unpacker: Lent::new(),
            creator: Creator::current(),
            news: AtomicU8::new(0),
            returned: AtomicU32::new(0),
            wanted: AtomicU32::new(1),
            has_message: AtomicBool::new(false),
        });
        shared.run(News::PACKETS);
        shared
    }

    /// Calls `f` with the engine, then does what the engine has to do, and wakes tasks.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Engine) -> R) -> R {
        self.with_if(f, |_| true)
    }

    /// Like [`Shared::with`]. If the result is not the last, this sends nothing that is due and wakes no task. Then the caller
    /// calls [`Shared::with`].
    pub(crate) fn with_if<R>(&self, f: impl FnOnce(&mut Engine) -> R, is_last: impl FnOnce(&R) -> bool) -> R {
        let mut guard = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        let engine = guard.as_mut().expect("only the drop takes it");
        self.recall(engine);
        let result = f(engine);
        let effects = if is_last(&result) { self.settle(engine) } else { None };
        drop(guard);
        run(effects);
        self.run_if_asked();
        result
    }

    /// Like [`Shared::with`], for destructors. Does nothing in a forked child, whose parent may have held the lock.
    pub(crate) fn with_own<R: Default>(&self, f: impl FnOnce(&mut Engine) -> R) -> R {
        if self.creator.is_parent() { R::default() } else { self.with(f) }
    }

    /// Runs the engine for `news`. If another thread is using it, that thread runs it afterwards.
    pub(crate) fn run(&self, news: News) {
        self.news.fetch_or(news.0, Ordering::SeqCst);
        self.run_if_asked();
    }

    fn run_if_asked(&self) {
        loop {
            // Pairs with itself in another thread: either the thread that unlocks the engine sees the news, or the thread that
            // brought them finds the lock free.
            fence(Ordering::SeqCst);
            let is_asked = self.news.load(Ordering::SeqCst) != 0
                || self.returned.load(Ordering::SeqCst) >= self.wanted.load(Ordering::SeqCst);
            if !is_asked || self.creator.is_parent() {
                return;
            }
            let mut guard = match self.engine.try_lock() {
                Ok(guard) => guard,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            let Some(engine) = guard.as_mut() else { return };
            let news = News(self.news.swap(0, Ordering::SeqCst));
            self.recall(engine);
            if news.has(News::LEFT) {
                engine.leave();
            }
            engine.run(news);
            let effects = self.settle(engine);
            drop(guard);
            run(effects);
        }
    }

    /// Takes the packets back from tasks, and counts returned receives. The engine was just locked.
    fn recall(&self, engine: &mut Engine) {
        if let Some(packer) = self.packer.recall() {
            engine.return_open(packer);
        }
        if let Some(unpacker) = self.unpacker.recall() {
            engine.return_packet(&unpacker);
        }
        if self.returned.load(Ordering::SeqCst) != 0 {
            engine.count_returned(self.returned.swap(0, Ordering::SeqCst));
        }
    }

    /// Sends what is due, and then lends packets to tasks. The caller unlocks the engine and runs the effects.
    fn settle(&self, engine: &mut Engine) -> Option<Effects> {
        engine.settle();
        self.wanted.store(engine.returns_wanted(), Ordering::SeqCst);
        self.has_message.store(engine.has_message(), Ordering::Relaxed);
        if let Some(packer) = engine.lend_open() {
            self.packer.lend(packer);
        }
        if let Some(unpacker) = engine.lend_packet() {
            self.unpacker.lend(unpacker);
        }
        engine.take_effects()
    }

    /// Whether a task that receives will probably find something.
    pub(crate) fn may_have_message(&self) -> bool {
        self.has_message.load(Ordering::Relaxed)
    }

    /// The receive of a packet is posted again.
    ///
    /// The engine is run only if it has to tell the peer now.
    pub(crate) fn returned(&self) {
        let returned = self.returned.fetch_add(1, Ordering::SeqCst) + 1;
        if returned >= self.wanted.load(Ordering::SeqCst) {
            self.run_if_asked();
        }
    }

    /// The last handle is dropped.
    pub(crate) fn leave(&self) {
        self.run(News::LEFT);
    }
}

/// Frees memory and wakes tasks. Both can run code of the user.
fn run(effects: Option<Effects>) {
    let Some(Effects { wakers, freed }) = effects else { return };
    // First, so that a task that waits for it finds its memory free. If that panics, tasks are woken all the same.
    let dropped = catch_unwind(AssertUnwindSafe(|| freed.map(Freed::release)));
    for waker in wakers.into_all() {
        // A waker that panics keeps no other task from going on.
        let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
    }
    if let Err(panic) = dropped {
        resume_unwind(panic);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.creator.is_parent() {
            // Another thread of the parent may have been changing it.
            mem::forget(self.engine.get_mut().unwrap_or_else(PoisonError::into_inner).take());
            mem::forget((self.packer.take_exclusive(), self.unpacker.take_exclusive()));
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}
