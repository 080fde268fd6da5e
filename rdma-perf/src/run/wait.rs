//! Waiting for completions.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use rdma_safe::{CompletionChannel, CompletionQueue};

use super::alarm::Alarm;
use crate::clock::Clock;
use crate::plan::{Metric, Plan};

/// Looks that find nothing between two at the clock.
const LOOKS: u32 = 1024;
/// How often one who sleeps looks whether everything is to end.
const NAP: Duration = Duration::from_millis(100);
/// The same for one who does as perftest does. Each alarm takes as long as an eighth of a small message.
const ALARM: Duration = Duration::from_secs(1);

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
    /// Sees to it that reading the channel, which blocks, ends. Without one the channel does not block.
    alarm: Option<Alarm>,
    as_perftest: bool,
    yield_cpu: bool,
    clock: Clock,
    patience: Duration,
    /// Looks that found nothing since one did.
    idle: u32,
    /// When the first of them was, in ticks.
    since: u64,
    /// The queues report the next completion.
    armed: bool,
    /// Arm them at each event, as they are going to be found empty before the next sleep.
    rearm: bool,
}

impl<'s> Waiter<'s> {
    /// For queues that report over the channel of `cq`, if they are to.
    pub(super) fn new(plan: &Plan, cq: &CompletionQueue, clock: Clock, shared: &'s Shared) -> Result<Self> {
        let as_perftest = plan.compat && plan.events;
        let channel = cq.channel().cloned();
        let alarm = match &channel {
            None => None,
            Some(_) if as_perftest => Some(Alarm::new(ALARM)?),
            // Where the user may have no more timers, each sleep takes a system call more.
            Some(_) => Alarm::new(NAP).ok(),
        };
        channel.as_ref().map_or(Ok(()), |channel| channel.set_blocking(alarm.is_some()))?;
        Ok(Waiter {
            shared,
            channel,
            alarm,
            as_perftest,
            yield_cpu: plan.yield_cpu,
            clock,
            patience: plan.patience,
            idle: 0,
            since: 0,
            armed: false,
            // With one message in flight they are often not looked at again before the next one.
            rearm: plan.metric == Metric::Bw,
        })
    }

    /// Whether events are waited for as perftest does, in order to be compared with it: before each look, whether that is
    /// needed or not. The queues have to be armed before the first message.
    #[inline]
    pub(super) fn is_as_perftest(&self) -> bool {
        self.as_perftest
    }

    /// Waits for an event of `cq` and arms it again; `false` when `over` says that there is nothing more to wait for.
    #[inline(always)]
    pub(super) fn event(&mut self, cq: &mut CompletionQueue, what: &str, over: impl Fn() -> bool) -> Result<bool> {
        // As many system calls as perftest makes.
        while !self.read()? {
            if over() {
                return Ok(false);
            }
            self.interrupted(what)?;
        }
        cq.arm(false)?;
        Ok(true)
    }

    /// Something was found.
    #[inline]
    pub(super) fn found(&mut self) {
        self.idle = 0;
    }

    /// Whether who finds nothing is to sleep, and not to look again and again.
    #[inline]
    pub(super) fn sleeps(&self) -> bool {
        // Who waits as perftest does has had an event that came of completions already taken, and sleeps in `event`.
        self.channel.is_some() && !self.as_perftest
    }

    /// Nothing was found in `cqs`: waits a little, or until they report something. `what` is waited for.
    #[inline]
    pub(super) fn nothing(&mut self, cqs: &mut [&mut CompletionQueue], what: &str) -> Result<()> {
        if self.sleeps() { self.sleep(cqs, what) } else { self.spin(what) }
    }

    /// Nothing was found: waits a little.
    #[inline]
    pub(super) fn spin(&mut self, what: &str) -> Result<()> {
        if self.yield_cpu {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        self.idle += 1;
        if self.idle % LOOKS == 0 { self.check(what) } else { Ok(()) }
    }

    /// Nothing was found in `cqs`: waits until they report something.
    #[inline]
    pub(super) fn sleep(&mut self, cqs: &mut [&mut CompletionQueue], what: &str) -> Result<()> {
        if !self.armed {
            // What completed before that causes no event, and has to be looked for once more.
            return self.arm(cqs);
        }
        let reported = match (&self.channel, &self.alarm) {
            (Some(channel), None) => channel.wait(NAP)?.is_some(),
            _ => self.read()?,
        };
        if !reported {
            return self.interrupted(what);
        }
        self.armed = false;
        // Who finds nothing next can then sleep without another look.
        if self.rearm { self.arm(cqs) } else { Ok(()) }
    }

    #[inline]
    fn arm(&mut self, cqs: &mut [&mut CompletionQueue]) -> Result<()> {
        for cq in cqs {
            cq.arm(false)?;
        }
        self.armed = true;
        Ok(())
    }

    /// Waits for an event; `false` when the alarm came first.
    #[inline(always)]
    fn read(&self) -> Result<bool> {
        match &self.channel {
            Some(channel) => Ok(channel.try_event()?.is_some()),
            None => Ok(false),
        }
    }

    /// A wait ended without an event.
    #[cold]
    fn interrupted(&mut self, what: &str) -> Result<()> {
        self.idle += LOOKS;
        self.check(what)
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
}
