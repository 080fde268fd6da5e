//! Waiting for completions.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use rdma_safe::{CompletionChannel, CompletionQueue};

use super::alarm::Alarm;
use crate::clock::Clock;
use crate::plan::Plan;

/// Looks that find nothing between two at the clock.
const LOOKS: u32 = 1024;
/// The same for one who waits without a deadline. Each alarm takes as long as an eighth of a small message.
const ALARM: Duration = Duration::from_secs(1);
/// How often one who sleeps looks whether everything is to end.
const NAP: Duration = Duration::from_millis(100);

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
    /// Only for those who wait as perftest does: see [`Waiter::is_as_perftest`].
    alarm: Option<Alarm>,
}

impl<'s> Waiter<'s> {
    /// For queues that report over the channel of `cq`, if they are to.
    pub(super) fn new(plan: &Plan, cq: &CompletionQueue, clock: Clock, shared: &'s Shared) -> Result<Self> {
        let as_perftest = plan.compat && plan.events;
        if as_perftest {
            cq.channel().map_or(Ok(()), |channel| channel.set_blocking(true))?;
        }
        let alarm = as_perftest.then(|| Alarm::new(ALARM)).transpose()?;
        Ok(Waiter {
            shared,
            channel: cq.channel().cloned(),
            yield_cpu: plan.yield_cpu,
            clock,
            patience: plan.patience,
            idle: 0,
            since: 0,
            armed: false,
            alarm,
        })
    }

    /// Whether events are waited for as perftest does, in order to be compared with it: before each look, whether that is
    /// needed or not. The queues have to be armed before the first message.
    #[inline]
    pub(super) fn is_as_perftest(&self) -> bool {
        self.alarm.is_some()
    }

    /// Waits for an event of `cq` and arms it again; `false` when `over` says that there is nothing more to wait for.
    #[inline]
    pub(super) fn event(&mut self, cq: &mut CompletionQueue, what: &str, over: impl Fn() -> bool) -> Result<bool> {
        // As many system calls as perftest makes. The alarm sees to it that this ends.
        loop {
            match self.channel.as_ref().map(CompletionChannel::try_event) {
                Some(Ok(Some(_))) => break,
                Some(Ok(None)) | None => {}
                Some(Err(error)) => return Err(error.into()),
            }
            if over() {
                return Ok(false);
            }
            self.idle += LOOKS;
            self.check(what)?;
        }
        self.idle = 0;
        cq.arm(false)?;
        Ok(true)
    }

    /// Something was found.
    #[inline]
    pub(super) fn found(&mut self) {
        self.idle = 0;
    }

    /// Nothing was found in `cqs`: waits a little, or until they report something. `what` is waited for.
    #[inline]
    pub(super) fn nothing(&mut self, cqs: &mut [&mut CompletionQueue], what: &str) -> Result<()> {
        // Who waits as perftest does has had an event that came of completions already taken, and sleeps in `event`.
        if self.channel.is_some() && !self.is_as_perftest() {
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
        if self.idle <= LOOKS {
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
        self.idle = LOOKS;
        Ok(())
    }

    fn sleep(&mut self, cqs: &mut [&mut CompletionQueue], what: &str) -> Result<()> {
        if !self.armed {
            for cq in cqs {
                cq.arm(false)?;
            }
            self.armed = true;
            // What completed before that causes no event, and has to be looked for once more.
            return Ok(());
        }
        if self.channel.as_ref().map_or(Ok(None), |channel| channel.wait(NAP))?.is_some() {
            self.armed = false;
            return Ok(());
        }
        self.idle += LOOKS;
        self.check(what)
    }
}
