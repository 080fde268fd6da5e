//! The pool.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use rdma_safe::error::Verb;
use rdma_safe::{Buffer, ProtectionDomain};

use crate::allocator::{Allocator, BUDGETS, Shortage, Waiting};
use crate::arena::Arenas;
use crate::block::Taken;
use crate::cache::{COMMON, HEAPS};
use crate::local::{self, with_cache};
use crate::statistics::Statistics;
use crate::{Error, Result, block_size, class};

type Buffers = Allocator<Buffer, Arenas>;

/// The use of a buffer. Each has a share of the pool that the others cannot use.
///
/// A budget uses its share first, and then the common memory. The variants differ only in their shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Budget {
    /// Messages that keep a protocol going, such as credits and acknowledgements.
    Control,
    /// Posted receives.
    Receives,
    /// Messages to send.
    Sends,
    /// Large transfers.
    Bulk,
}

impl Budget {
    /// All budgets.
    pub const ALL: [Budget; BUDGETS] = [Budget::Control, Budget::Receives, Budget::Sends, Budget::Bulk];
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Budget::Control => "control messages",
            Budget::Receives => "receives",
            Budget::Sends => "sends",
            Budget::Bulk => "bulk transfers",
        })
    }
}

/// Options of a pool. Made by [`Pool::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct PoolBuilder {
    pd: ProtectionDomain,
    shares: [usize; BUDGETS],
    common: usize,
    step: usize,
    huge_pages: bool,
}

impl PoolBuilder {
    /// Guarantees `bytes` to a budget; by default none. They are registered when the pool is built.
    ///
    /// The share is rounded up to a [block size](crate::block_size), so it has room for a buffer of `bytes`. Each buffer takes a
    /// block: twenty buffers of 100 bytes take twenty blocks of 112 bytes.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # rdma_safe::soft::install()?;
    /// # let pd = rdma_safe::Device::first()?.open()?.alloc_pd()?;
    /// use rdma_pool::{Budget, Pool, block_size};
    ///
    /// let block = block_size(100).expect("not above 64 MiB");
    /// let pool = Pool::builder(&pd).share(Budget::Receives, 20 * block).common(0).build()?;
    /// let receives: Vec<_> = std::iter::from_fn(|| pool.try_get(Budget::Receives, 100).ok()).collect();
    /// assert!(receives.len() >= 20);
    /// # Ok(())
    /// # }
    /// ```
    pub fn share(mut self, budget: Budget, bytes: usize) -> Self {
        self.shares[budget as usize] = block_size(bytes).filter(|_| bytes > 0).unwrap_or(bytes);
        self
    }

    /// Limits the memory that all budgets use beyond their shares to `bytes`; by default 64 MiB. It is registered as needed.
    ///
    /// A limit is not rounded: a buffer of `bytes` fits only if that is a [block size](crate::block_size).
    pub fn common(mut self, bytes: usize) -> Self {
        self.common = bytes;
        self
    }

    /// Registers common memory `bytes` at a time; by default 4 MiB. Near the limit of locked memory (`ulimit -l`) the steps
    /// become shorter.
    pub fn step(mut self, bytes: usize) -> Self {
        self.step = bytes;
        self
    }

    /// Whether arenas of a multiple of 2 MiB use huge pages if there are any free; by default they do.
    pub fn huge_pages(mut self, huge_pages: bool) -> Self {
        self.huge_pages = huge_pages;
        self
    }

    /// Registers the shares and makes the pool.
    ///
    /// # Errors
    /// [`Error::Register`] when a share cannot be registered, with `ENOMEM` when it exceeds the limit of locked memory.
    pub fn build(self) -> Result<Pool> {
        static NUMBER: AtomicUsize = AtomicUsize::new(1);
        let PoolBuilder { pd, shares, common, step, huge_pages } = self;
        local::watch_forks().map_err(|errno| {
            let device = pd.context().device_name().to_owned();
            Error::Register(rdma_safe::Error::Verb { verb: Verb::PthreadAtfork, device, errno })
        })?;
        let shared = Arc::new_cyclic(|pool| {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let source = Arenas { pd, huge_pages, pool: Weak::clone(pool), number };
            Shared { allocator: Buffers::new(source, shares, common, step), number, this: Weak::clone(pool) }
        });
        shared.allocator.reserve().map_err(Error::Register)?;
        Ok(Pool(shared))
    }
}

/// What the handles of a pool share. The buffers refer to it weakly.
pub(crate) struct Shared {
    pub(crate) allocator: Buffers,
    /// Differs from the number of every other pool of the process.
    pub(crate) number: usize,
    pub(crate) this: Weak<Shared>,
}

/// Registered memory by the buffer.
///
/// Cloning gives another handle of the same pool. The last handle deregisters all arenas that have no buffers in use. Each
/// of the others is deregistered with its last buffer.
#[derive(Clone)]
pub struct Pool(pub(crate) Arc<Shared>);

impl Pool {
    /// Starts building a pool of memory that is registered in `pd`.
    pub fn builder(pd: &ProtectionDomain) -> PoolBuilder {
        PoolBuilder { pd: pd.clone(), shares: [0; BUDGETS], common: 64 << 20, step: 4 << 20, huge_pages: true }
    }

    /// A buffer of `len` bytes for `budget`, without waiting for others to drop theirs.
    ///
    /// Its capacity is [`block_size(len)`](crate::block_size). Its bytes are those of earlier users. May register an arena.
    ///
    /// # Errors
    /// [`Error::Exhausted`], also while others wait in the same budget; [`Error::TooLong`]; [`Error::Register`];
    /// [`Error::Inherited`].
    #[inline]
    pub fn try_get(&self, budget: Budget, len: usize) -> Result<Buffer> {
        match self.cached(budget, len) {
            Some(buffer) => Ok(buffer),
            None => self.try_allocate(budget, len),
        }
    }

    #[cold]
    fn try_allocate(&self, budget: Budget, len: usize) -> Result<Buffer> {
        self.require_own()?;
        let class = self.class(budget, len)?;
        let found = with_cache(&self.0, |cache| self.0.allocator.try_take(cache, budget as usize, class));
        match found {
            Ok(found) => Ok(self.buffer(found, len)),
            Err(shortage) => Err(self.error(shortage, budget, len)),
        }
    }

    /// Like [`Pool::try_get`], but waits for others to drop their buffers, at most for `timeout`.
    ///
    /// The callers of a budget get their buffers in order of arrival, blocking or not.
    ///
    /// # Errors
    /// [`Error::Exhausted`] after the timeout; [`Error::TooLong`]; [`Error::Register`]; [`Error::Inherited`].
    pub fn get(&self, budget: Budget, len: usize, timeout: Duration) -> Result<Buffer> {
        if let Some(buffer) = self.cached(budget, len) {
            return Ok(buffer);
        }
        self.require_own()?;
        let class = self.class(budget, len)?;
        let found = match self.take_or_queue(budget, len, class, None)? {
            Ok(found) => Some(found),
            // A timeout beyond the range of the clock is none.
            Err(waiting) => waiting.wait(Instant::now().checked_add(timeout)),
        };
        found.map(|found| self.buffer(found, len)).ok_or(Error::Exhausted { budget, len })
    }

    /// Like [`Pool::get`], as a future of any runtime. Dropping it gives up the place in the queue.
    pub fn get_async(&self, budget: Budget, len: usize) -> Get<'_> {
        Get { pool: self, budget, len, waiting: None }
    }

    /// Bytes of each heap and counts of events. All are zero in a forked child that has inherited the pool.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        match self.0.allocator.is_inherited() {
            true => Statistics::default(),
            false => Statistics::new(self.0.allocator.statistics()),
        }
    }

    /// Returns an error in a forked child that has inherited the pool.
    #[inline]
    fn require_own(&self) -> Result<()> {
        if self.0.allocator.is_inherited() { Err(Error::Inherited) } else { Ok(()) }
    }

    fn class(&self, budget: Budget, len: usize) -> Result<usize> {
        class::of(len).ok_or_else(|| self.too_long(budget, len))
    }

    #[inline(always)]
    fn cached(&self, budget: Budget, len: usize) -> Option<Buffer> {
        let found = local::take(self.0.number, budget as usize, class::of_any(len))?;
        Some(self.buffer(found, len))
    }

    #[inline(always)]
    fn buffer(&self, taken: Taken<Buffer>, len: usize) -> Buffer {
        let mut buffer = taken.block;
        let set = buffer.set_len(len);
        debug_assert!(set.is_ok(), "the class is that of the length");
        buffer
    }

    fn take_or_queue(
        &self,
        budget: Budget,
        len: usize,
        class: usize,
        waker: Option<Waker>,
    ) -> Result<std::result::Result<Taken<Buffer>, Waiting<'_, Buffer, Arenas>>> {
        if class::size(class) > self.largest(budget) {
            return Err(self.too_long(budget, len));
        }
        let allocator = &self.0.allocator;
        with_cache(&self.0, |cache| allocator.take_or_queue(cache, budget as usize, class, waker))
            .map_err(Error::Register)
    }

    /// The size of the largest block that `budget` can get.
    fn largest(&self, budget: Budget) -> usize {
        class::at_most(self.0.allocator.largest(budget as usize)).map_or(0, class::size)
    }

    #[cold]
    fn too_long(&self, budget: Budget, len: usize) -> Error {
        Error::TooLong { budget, len, largest: self.largest(budget) }
    }

    #[cold]
    fn error(&self, shortage: Shortage<rdma_safe::Error>, budget: Budget, len: usize) -> Error {
        match shortage {
            Shortage::Exhausted if class::of(len).is_none_or(|class| class::size(class) > self.largest(budget)) => {
                self.too_long(budget, len)
            }
            Shortage::Exhausted => Error::Exhausted { budget, len },
            Shortage::Source(error) => Error::Register(error),
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("statistics", &self.statistics()).finish_non_exhaustive()
    }
}

/// The future of [`Pool::get_async`]. Its output is a [`Buffer`] or an error of [`Pool::get`], but never [`Error::Exhausted`].
///
/// Poll it until it is ready, or drop it, which passes on its place in the queue, or its buffer. A pending future that is no longer
/// polled keeps its place, and then the buffer that it is given, so callers behind it may wait as long. After
/// [`std::mem::forget`] they may wait for ever: the pool cannot tell such a future from one whose task has not run yet.
#[must_use = "a future does nothing unless it is polled"]
pub struct Get<'a> {
    pool: &'a Pool,
    budget: Budget,
    len: usize,
    waiting: Option<Waiting<'a, Buffer, Arenas>>,
}

impl Future for Get<'_> {
    type Output = Result<Buffer>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Get { pool, budget, len, .. } = *self;
        pool.require_own()?;
        if let Some(waiting) = &mut self.waiting {
            return match waiting.poll(context) {
                Some(found) => {
                    self.waiting = None;
                    Poll::Ready(Ok(pool.buffer(found, len)))
                }
                None => Poll::Pending,
            };
        }
        if let Some(buffer) = pool.cached(budget, len) {
            return Poll::Ready(Ok(buffer));
        }
        let class = pool.class(budget, len)?;
        match pool.take_or_queue(budget, len, class, Some(context.waker().clone()))? {
            Ok(found) => Poll::Ready(Ok(pool.buffer(found, len))),
            Err(waiting) => {
                self.waiting = Some(waiting);
                // The waiter may have been served before this returns.
                self.poll(context)
            }
        }
    }
}

impl fmt::Debug for Get<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Get { budget, len, waiting, .. } = self;
        let waits = waiting.is_some();
        f.debug_struct("Get").field("budget", budget).field("len", len).field("waits", &waits).finish_non_exhaustive()
    }
}

const _: () = assert!(COMMON == HEAPS - 1 && Budget::Bulk as usize == COMMON - 1);
