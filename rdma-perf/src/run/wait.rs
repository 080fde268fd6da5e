//! Waiting for completions.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use rdma_safe::{CompletionChannel, CompletionQueue};

use crate::clock::Clock;
use crate::plan::Plan;

/// What the threads of a run and the one that supervises them tell each other.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Everything is to end, unfinished.
    pub(crate) abort: AtomicBool,
    /// The user wants no more messages.
    pub(crate) stop: AtomicBool,
    /// Messages done by all threads.
    pub(crate) progress: AtomicU64,
}

/// Ended because another thread or the peer failed, or the user wants it.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Interrupted;

/// Waits between looks at the same completion queues, and gives up when nothing has happened for too long.
pub(super) struct Waiter<'s> {
    shared: &'s Shared,
    channel: Option<CompletionChannel>,
    yield_cpu: bool,
    clock: Clock,
    patience: Duration,
    /// Looks that found nothing since one did.
    idle: u32,
    /// When the first of them was, in ticks.
    since: u64,
    /// The queues report the next completion.
    armed: bool,
}

impl<'s> Waiter<'s> {
    /// For queues that report over the channel of `cq`, if they are to.
    pub(super) fn new(plan: &Plan, cq: &CompletionQueue, clock: Clock, shared: &'s Shared) -> Self {
        Waiter {
            shared,
            channel: cq.channel().cloned(),
            yield_cpu: plan.yield_cpu,
            clock,
            patience: plan.patience,
            idle: 0,
            since: 0,
            armed: false,
        }
    }

    /// Something was found.
    #[inline]
    pub(super) fn found(&mut self) {
        self.idle = 0;
    }

    /// Nothing was found in `cqs`: waits a little, or until they report something. `what` is waited for.
    #[inline]
    pub(super) fn nothing(&mut self, cqs: &mut [&mut CompletionQueue], what: &str) -> Result<()> {
        /// Looks between two at the clock.
        const LOOKS: u32 = 1024;

        if self.channel.is_some() {
            return self.sleep(cqs, what);
        }
        if self.yield_cpu {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        self.idle += 1;
        if self.idle % LOOKS == 0 { self.check(what) } else { Ok(()) }
    }

    #[cold]
    fn check(&mut self, what: &str) -> Result<()> {
        if self.shared.abort.load(Ordering::Relaxed) {
            return Err(Interrupted.into());
        }
        let now = self.clock.now();
        if self.idle <= 1024 {
            self.since = now;
        }
        if self.clock.nanos(now.saturating_sub(self.since)) > self.patience.as_nanos() as f64 {
            bail!(
                "no {what} for {} s: the peer has stopped, is gone, or cannot be reached (firewall for UDP 4791, GID, MTU); \
                 --timeout sets how long to wait",
                self.patience.as_secs_f64()
            );
        }
        // Not to wrap around; the first looks are counted apart.
        self.idle = 1024;
        Ok(())
    }

    fn sleep(&mut self, cqs: &mut [&mut CompletionQueue], what: &str) -> Result<()> {
        /// How often to look whether everything is to end.
        const NAP: Duration = Duration::from_millis(100);

        let Some(channel) = &self.channel else { return Ok(()) };
        if !self.armed {
            for cq in cqs {
                cq.arm(false)?;
            }
            self.armed = true;
            // What completed before that causes no event, and has to be looked for once more.
            return Ok(());
        }
        if channel.wait(NAP)?.is_some() {
            self.armed = false;
            return Ok(());
        }
        self.idle += 1024;
        self.check(what)
    }
}
