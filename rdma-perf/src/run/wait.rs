//! Waiting for completions, by polling or by events.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use rdma_safe::cq::Poller;
use rdma_safe::interface::Known;
use rdma_safe::{CompletionChannel, CompletionQueue};

use super::alarm::Alarm;
use crate::clock::Clock;
use crate::interrupt::Interrupted;
use crate::plan::{Metric, Plan};

/// Empty polls between two checks of the clock.
const POLLS_PER_CHECK: u32 = 1024;
/// How often a sleeping thread checks whether to stop.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The same interval with `--compat perftest`. Each alarm takes as long as an eighth of a small message.
const COMPAT_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// State shared by the threads of a run and their supervisor.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Set when all threads are to fail at once.
    pub(crate) abort: AtomicBool,
    /// Set when no more messages are to be posted.
    pub(crate) stop: AtomicBool,
    /// Messages completed by all threads.
    pub(crate) progress: AtomicU64,
}

/// Nothing has completed within `--timeout`.
#[derive(Debug, thiserror::Error)]
#[error(
    "no {what} for {seconds} s: the peer has stopped, is gone, or cannot be reached (firewall for UDP 4791, GID, MTU); --timeout \
     sets how long to wait"
)]
pub(super) struct PeerTimeout {
    what: String,
    seconds: f64,
}

impl PeerTimeout {
    pub(super) fn new(what: &str, seconds: f64) -> Self {
        PeerTimeout { what: what.to_owned(), seconds }
    }
}

/// Waits between polls of the same completion queues, and fails if nothing completes within the timeout.
pub(super) struct Waiter<'s> {
    shared: &'s Shared,
    /// Channel on which an idle thread sleeps.
    channel: Option<CompletionChannel>,
    /// Channel on which an event is awaited before each poll, as perftest does; then `channel` is `None`.
    event_before_poll: Option<CompletionChannel>,
    /// Interrupts blocking reads of the channel. Without an alarm the channel does not block.
    alarm: Option<Alarm>,
    yield_cpu: bool,
    clock: Clock,
    timeout: Duration,
    /// Empty polls since the last completion.
    empty_polls: u32,
    /// Time of the first empty poll, in ticks.
    idle_since: u64,
    /// Whether the queues report their next completion.
    armed: bool,
    /// Whether to arm the queues right after each event, because they are polled empty before the next sleep.
    rearm: bool,
}

impl<'s> Waiter<'s> {
    /// For queues that report events on the channel of `cq`, if it has one.
    pub(super) fn new(plan: &Plan, cq: &CompletionQueue, clock: Clock, shared: &'s Shared) -> Result<Self> {
        let as_perftest = plan.compat && plan.events;
        let channel = cq.channel().cloned();
        let alarm = match &channel {
            None => None,
            Some(_) if as_perftest => Some(Alarm::new(COMPAT_CHECK_INTERVAL)?),
            // If the user's timers are exhausted, each sleep takes one more system call.
            Some(_) => Alarm::new(CHECK_INTERVAL).ok(),
        };
        channel.as_ref().map_or(Ok(()), |channel| channel.set_blocking(alarm.is_some()))?;
        let (channel, event_before_poll) = if as_perftest { (None, channel) } else { (channel, None) };
        Ok(Waiter {
            shared,
            channel,
            event_before_poll,
            alarm,
            yield_cpu: plan.yield_cpu,
            clock,
            timeout: plan.timeout,
            empty_polls: 0,
            idle_since: 0,
            armed: false,
            // With one message in flight, the queues are often not polled again before the next message.
            rearm: plan.metric == Metric::Bw,
        })
    }

    /// Called before a poll. With `--compat perftest --events` it waits for an event and arms the queue again, as
    /// perftest does. Returns `false` once `over` returns true. The queues must be armed before the first message.
    #[inline(always)]
    pub(super) fn wait_for_event<C: Known>(
        &mut self,
        poller: &mut Poller<'_, C>,
        what: &str,
        over: impl Fn() -> bool,
    ) -> Result<bool> {
        // As many system calls as perftest makes.
        while let Some(channel) = &self.event_before_poll {
            if channel.try_event()?.is_some() {
                poller.arm(false)?;
                break;
            }
            if over() {
                return Ok(false);
            }
            self.woken_without_event(what)?;
        }
        Ok(true)
    }

    /// Resets the timeout after a completion.
    #[inline]
    pub(super) fn reset(&mut self) {
        self.empty_polls = 0;
    }

    /// Whether an idle thread sleeps instead of polling.
    #[inline]
    fn sleeps(&self) -> bool {
        self.channel.is_some()
    }

    /// Waits after an empty poll, until the next poll or event. `what` describes the awaited completion in errors.
    #[inline]
    pub(super) fn wait<C: Known>(&mut self, pollers: &mut [&mut Poller<'_, C>], what: &str) -> Result<()> {
        if self.sleeps() { self.sleep(pollers, what) } else { self.spin(what) }
    }

    /// Waits briefly after an empty poll.
    #[inline]
    fn spin(&mut self, what: &str) -> Result<()> {
        if self.yield_cpu {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        self.empty_polls += 1;
        if self.empty_polls % POLLS_PER_CHECK == 0 { self.check(what) } else { Ok(()) }
    }

    /// Sleeps until `pollers` report an event. The first call only arms them.
    #[inline]
    pub(super) fn sleep<C: Known>(&mut self, pollers: &mut [&mut Poller<'_, C>], what: &str) -> Result<()> {
        if !self.armed {
            // Completions from before arming cause no event, so another poll is needed.
            return self.arm(pollers);
        }
        let reported = match &self.channel {
            Some(channel) if self.alarm.is_some() => channel.try_event()?.is_some(),
            Some(channel) => channel.wait(CHECK_INTERVAL)?.is_some(),
            None => false,
        };
        if !reported {
            return self.woken_without_event(what);
        }
        self.armed = false;
        // The next sleep then needs no arming and no extra poll.
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

    /// Called when a wait ended without an event.
    #[cold]
    fn woken_without_event(&mut self, what: &str) -> Result<()> {
        self.empty_polls += POLLS_PER_CHECK;
        self.check(what)
    }

    #[cold]
    fn check(&mut self, what: &str) -> Result<()> {
        if self.shared.abort.load(Ordering::Relaxed) {
            return Err(Interrupted.into());
        }
        let now = self.clock.now();
        if self.empty_polls <= POLLS_PER_CHECK {
            self.idle_since = now;
        }
        if self.clock.nanos(now.saturating_sub(self.idle_since)) > self.timeout.as_nanos() as f64 {
            return Err(PeerTimeout::new(what, self.timeout.as_secs_f64()).into());
        }
        // Avoids overflow. The next check still finds more than one interval of empty polls.
        self.empty_polls = POLLS_PER_CHECK;
        Ok(())
    }
}
