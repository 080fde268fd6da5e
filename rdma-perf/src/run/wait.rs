//! Waiting for completions.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use rdma_safe::{CompletionChannel, CompletionQueue, Known, Poller};

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

/// Nothing has come for too long.
#[derive(Debug, thiserror::Error)]
#[error(
    "no {what} for {seconds} s: the peer has stopped, is gone, or cannot be reached (firewall for UDP 4791, GID, MTU); --timeout \
     sets how long to wait"
)]
pub(super) struct Silence {
    what: String,
    seconds: f64,
}

impl Silence {
    pub(super) fn new(what: &str, seconds: f64) -> Self {
        Silence { what: what.to_owned(), seconds }
    }
}

/// Waits between looks at the same completion queues, and gives up when nothing has happened for too long.
pub(super) struct Waiter<'s> {
    shared: &'s Shared,
    /// Where who finds nothing sleeps.
    channel: Option<CompletionChannel>,
    /// Instead of it, where an event is awaited before each look, needed or not, as perftest does.
    before_looks: Option<CompletionChannel>,
    /// Sees to it that reading the channel, which blocks, ends. Without one the channel does not block.
    alarm: Option<Alarm>,
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
        let (channel, before_looks) = if as_perftest { (None, channel) } else { (channel, None) };
        Ok(Waiter {
            shared,
            channel,
            before_looks,
            alarm,
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

    /// Comes before a look at a queue: where events are awaited as perftest does, in order to be compared with it, waits for one
    /// and arms the queue again. `false` when `over` says that there is nothing more to wait for. The queues have to be armed
    /// before the first message.
    #[inline(always)]
    pub(super) fn event<C: Known>(
        &mut self,
        poller: &mut Poller<'_, C>,
        what: &str,
        over: impl Fn() -> bool,
    ) -> Result<bool> {
        // As many system calls as perftest makes.
        while let Some(channel) = &self.before_looks {
            if channel.try_event()?.is_some() {
                poller.arm(false)?;
                break;
            }
            if over() {
                return Ok(false);
            }
            self.interrupted(what)?;
        }
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
        self.channel.is_some()
    }

    /// Nothing was found by `pollers`: waits a little, or until they report something. `what` is waited for.
    #[inline]
    pub(super) fn nothing<C: Known>(&mut self, pollers: &mut [&mut Poller<'_, C>], what: &str) -> Result<()> {
        if self.sleeps() { self.sleep(pollers, what) } else { self.spin(what) }
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

    /// Nothing was found by `pollers`: waits until they report something.
    #[inline]
    pub(super) fn sleep<C: Known>(&mut self, pollers: &mut [&mut Poller<'_, C>], what: &str) -> Result<()> {
        if !self.armed {
            // What completed before that causes no event, and has to be looked for once more.
            return self.arm(pollers);
        }
        let reported = match &self.channel {
            Some(channel) if self.alarm.is_some() => channel.try_event()?.is_some(),
            Some(channel) => channel.wait(NAP)?.is_some(),
            None => false,
        };
        if !reported {
            return self.interrupted(what);
        }
        self.armed = false;
        // Who finds nothing next can then sleep without another look.
        if self.rearm { self.arm(pollers) } else { Ok(()) }
    }

    #[inline]
    fn arm<C: Known>(&mut self, pollers: &mut [&mut Poller<'_, C>]) -> Result<()> {
        for poller in pollers {
            poller.arm(false)?;
        }
        self.armed = true;
        Ok(())
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
            return Err(Silence::new(what, self.patience.as_secs_f64()).into());
        }
        // Not to wrap around; the first looks are counted apart.
        self.idle = LOOKS;
        Ok(())
    }
}
