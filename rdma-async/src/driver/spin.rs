//! When to spin, and when to sleep.

use std::time::{Duration, Instant};

/// What a driver does while there are no completions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Idle {
    /// Spins for some microseconds, then sleeps. The default.
    ///
    /// On soft0, the time starts again whenever the driver's thread has moved packets, since it then works for the device. That
    /// ends after a millisecond without a completion.
    ///
    /// It spins only as long as that has recently paid off. It pauses while other threads keep taking its processor, or when one
    /// has taken it for long: until the pause is over, it sleeps at once.
    #[default]
    Adaptive,
    /// Sleeps at once. Tasks do not look for completions either, so all wait for events.
    Sleep,
    /// Never sleeps. For a thread that has a processor to itself.
    Spin,
}

/// Decides after a fruitless sweep whether to sweep again or to sleep.
#[derive(Debug)]
pub(crate) struct Spin {
    idle: Idle,
    /// Whether a phase or a sleep has begun since the driver had something to do. A sweep that finds work looks at this flag only.
    waits: bool,
    /// The end of the current phase, once one has begun.
    until: Option<Instant>,
    /// The latest end of the current phase, if packets keep moving.
    latest: Option<Instant>,
    /// Length of the next phase.
    length: Duration,
    slept_at: Option<Instant>,
    /// The last check of the current phase.
    checked: Option<Instant>,
    /// [`moved_packets`] at the last check.
    packets: u32,
    /// The usage that later ones are compared with. It is read when a phase begins, unless one is there that is at most as old as
    /// [`USAGE_AGE`]. It is replaced after a wasted phase and after a long time between two checks, and dropped after a sleep.
    usage: Option<Usage>,
    /// Phases in a row that found nothing, each with a preemption since its begin or since the one before.
    wasted: u32,
    pause: Pause,
}

/// A time without spinning, because others need the processor.
#[derive(Debug)]
struct Pause {
    /// The end of the last one.
    until: Option<Instant>,
    /// Length of the next one after wasted phases. Doubles until a phase pays off.
    after_waste: Duration,
    /// Length of the last one after a [loss](LOST). Doubles if the next loss follows soon.
    after_loss: Duration,
    lost_at: Option<Instant>,
}

/// How much this thread has used the processor.
#[derive(Clone, Copy, Debug)]
struct Usage {
    at: Instant,
    /// How often other threads took the processor from it, also after sched_yield(2): getrusage(2), `ru_nivcsw`.
    preempted: i64,
    /// How long it had the processor: clock_gettime(2). The times of getrusage(2) lag by up to a timer tick.
    ran: Duration,
}

/// Longest phase: about what a sleep costs, with the wake-up.
const LONGEST: Duration = Duration::from_micros(50);
const SHORTEST: Duration = Duration::from_micros(2);

/// Longest time for which moving packets prolong a phase. Meanwhile, some MiB pass through shared memory.
const MOVING: Duration = Duration::from_millis(1);

/// Wasted phases in a row before a pause. A few may be due to timers and other short work, which leave time to spin.
const WASTED: u32 = 8;

/// A *loss* is at least this long without the processor. Then another thread computes, which has the processor for milliseconds at
/// a time. A driver that sleeps gets it back sooner than one that spins: the kernel prefers threads that it has just woken.
const LOST: Duration = Duration::from_micros(500);

/// Age from which a [`Usage`] is replaced. It costs a system call.
const USAGE_AGE: Duration = Duration::from_millis(1);

/// First pause after wasted phases, and after a loss.
const AFTER_WASTE: Duration = Duration::from_millis(1);
const AFTER_LOSS: Duration = Duration::from_millis(4);

/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_millis(64);

impl Default for Pause {
    fn default() -> Self {
        Pause { until: None, after_waste: AFTER_WASTE, after_loss: AFTER_LOSS, lost_at: None }
    }
}

impl Pause {
    fn includes(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    fn begin_after_waste(&mut self, now: Instant) {
        self.until = Some(now + self.after_waste);
        self.after_waste = (2 * self.after_waste).min(LONGEST_PAUSE);
    }

    fn begin_after_loss(&mut self, now: Instant) {
        // A single loss may be due to a short task.
        let is_next = self.lost_at.is_some_and(|lost_at| now < lost_at + 3 * self.after_loss);
        self.after_loss = if is_next { (2 * self.after_loss).min(LONGEST_PAUSE) } else { AFTER_LOSS };
        (self.lost_at, self.until) = (Some(now), Some(now + self.after_loss));
    }
}

impl Spin {
    pub(crate) fn new(idle: Idle) -> Self {
        Spin {
            idle,
            waits: false,
            until: None,
            latest: None,
            length: LONGEST,
            slept_at: None,
            checked: None,
            packets: 0,
            usage: None,
            wasted: 0,
            pause: Pause::default(),
        }
    }

    /// The driver had something to do.
    #[inline(always)]
    pub(crate) fn worked(&mut self) {
        if self.waits {
            self.found();
        }
    }

    /// Ends a phase or a sleep in which work has arrived. A phase pays off if that was before its end.
    #[cold]
    fn found(&mut self) {
        self.waits = false;
        if let Some(until) = self.until.take() {
            let now = Instant::now();
            if now <= until {
                (self.wasted, self.pause.after_waste) = (0, AFTER_WASTE);
            } else {
                self.begin_pause_after_loss(now, Usage::of_thread);
            }
        }
        self.woke();
    }

    /// Begins a pause if the last check of the phase is long ago, and this is a [loss](LOST). Returns whether it is.
    fn begin_pause_after_loss(&mut self, now: Instant, usage: impl FnOnce(Instant) -> Usage) -> bool {
        if self.checked.take().is_none_or(|checked| now < checked + LOST) {
            return false;
        }
        let usage = usage(now);
        let has_lost = self.usage.replace(usage).is_some_and(|before| usage.has_lost(before));
        if has_lost {
            self.wasted = 0;
            self.pause.begin_after_loss(now);
        }
        has_lost
    }

    /// Counts a phase that found nothing. `usage` is that of now.
    fn wasted(&mut self, usage: Usage) {
        if self.usage.replace(usage).is_none_or(|before| before.preempted == usage.preempted) {
            self.wasted = 0;
            return;
        }
        self.wasted += 1;
        if self.wasted == WASTED {
            self.wasted = 0;
            self.pause.begin_after_waste(usage.at);
        }
    }

    /// Adapts the length: a phase would have paid off if it had replaced the sleep that has just ended.
    fn woke(&mut self) {
        let Some(slept_at) = self.slept_at.take() else { return };
        // Preemptions before the sleep say nothing about the next phase.
        self.usage = None;
        if slept_at.elapsed() < LONGEST * 2 {
            self.length = LONGEST;
        } else {
            self.length = (self.length / 2).max(SHORTEST);
        }
    }

    /// Whether to sweep again rather than to sleep, after a sweep that found nothing.
    pub(crate) fn spins(&mut self) -> bool {
        match self.idle {
            Idle::Spin => return true,
            Idle::Sleep => return false,
            Idle::Adaptive => {}
        }
        let (now, packets) = (Instant::now(), moved_packets());
        let has_moved = std::mem::replace(&mut self.packets, packets) != packets;
        let Some(until) = self.until else {
            if self.pause.includes(now) {
                return false;
            }
            (self.waits, self.until, self.latest) = (true, Some(now + self.length), None);
            self.checked = Some(now);
            // A sleep that ended without work is no loss.
            if self.slept_at.is_some() || self.usage.is_none_or(|usage| now >= usage.at + USAGE_AGE) {
                self.usage = Some(Usage::of_thread(now));
            }
            return true;
        };
        if self.begin_pause_after_loss(now, Usage::of_thread) {
            self.until = None;
            return false;
        }
        self.checked = Some(now);
        if has_moved && now < *self.latest.get_or_insert(now + MOVING) {
            self.until = Some(now + self.length);
            return true;
        }
        if now < until {
            return true;
        }
        self.until = None;
        // A phase that has moved packets was of use to the peer.
        if self.latest.is_none_or(|latest| latest <= now) {
            self.wasted(Usage::of_thread(now));
        }
        false
    }

    /// The driver sleeps now.
    pub(crate) fn sleeps(&mut self) {
        self.until = None;
        // The other ways have no length to adapt.
        if self.idle == Idle::Adaptive {
            (self.waits, self.slept_at) = (true, Some(Instant::now()));
        }
    }
}

/// Packets that this thread has moved for soft0. It may jump when the driver runs on another thread, which only prolongs a phase.
pub(super) fn moved_packets() -> u32 {
    #[cfg(feature = "soft")]
    return rdma_safe::soft::packets_of_thread();
    #[cfg(not(feature = "soft"))]
    0
}

impl Usage {
    fn of_thread(at: Instant) -> Self {
        // Under Valgrind, which hides the vDSO, the function of rustix crashes.
        // SAFETY: an all-zero `timespec` and `rusage` are valid, and each call only writes to the one that it gets.
        let (ran, usage) = unsafe {
            let mut ran = std::mem::zeroed::<libc::timespec>();
            libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut ran);
            let mut usage = std::mem::zeroed::<libc::rusage>();
            libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
            (ran, usage)
        };
        let ran = Duration::from_secs(ran.tv_sec.unsigned_abs()) + Duration::from_nanos(ran.tv_nsec.unsigned_abs());
        Usage { at, preempted: usage.ru_nivcsw, ran }
    }

    /// Whether other threads have had the processor for [`LOST`] since `before`.
    fn has_lost(&self, before: Usage) -> bool {
        // The driver may have moved to a thread that has run less.
        let ran = self.ran.checked_sub(before.ran);
        self.preempted != before.preempted && ran.is_some_and(|ran| self.at >= before.at + ran + LOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The usage that later ones are compared with.
    fn usage(spin: &mut Spin) -> &mut Usage {
        spin.usage.get_or_insert_with(|| Usage::of_thread(Instant::now()))
    }

    /// Wastes phases, each with a preemption. Returns the time after the last one.
    fn waste(spin: &mut Spin, phases: u32, mut now: Instant) -> Instant {
        for _ in 0..phases {
            now += LONGEST;
            let before = *usage(spin);
            spin.wasted(Usage { at: now, preempted: before.preempted + 1, ..before });
        }
        now
    }

    fn waste_without_preemption(spin: &mut Spin) {
        let usage = *usage(spin);
        spin.wasted(usage);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it calls getrusage")]
    fn it_pauses_after_enough_wasted_phases_in_a_row_and_longer_each_time() {
        let mut spin = Spin::new(Idle::Adaptive);
        let mut now = waste(&mut spin, WASTED - 1, Instant::now());
        assert_eq!(spin.pause.until, None);
        waste_without_preemption(&mut spin);
        now = waste(&mut spin, WASTED - 1, now);
        assert_eq!(spin.pause.until, None, "a phase without a preemption was between them");
        waste_without_preemption(&mut spin);
        for millis in [1, 2, 4, 8, 16, 32, 64, 64] {
            now = waste(&mut spin, WASTED, now);
            assert_eq!(spin.pause.until, Some(now + Duration::from_millis(millis)));
            waste(&mut spin, 1, now);
            assert_eq!(spin.pause.until, Some(now + Duration::from_millis(millis)), "the next pause needs as many");
            waste_without_preemption(&mut spin);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it calls getrusage")]
    fn a_phase_that_pays_off_makes_up_for_wasted_ones_unless_its_time_was_over() {
        for is_in_time in [true, false] {
            let mut spin = Spin::new(Idle::Adaptive);
            let now = waste(&mut spin, 3 * WASTED - 1, Instant::now());
            spin.waits = true;
            let left = Duration::from_secs(3600);
            spin.until =
                Some(if is_in_time { Instant::now() + left } else { Instant::now() - Duration::from_micros(1) });
            spin.worked();
            assert_eq!(spin.until, None);
            assert_eq!(spin.pause.after_waste, if is_in_time { AFTER_WASTE } else { 4 * AFTER_WASTE });
            let paused = spin.pause.until;
            waste(&mut spin, 1, now);
            assert_eq!(spin.pause.until == paused, is_in_time);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it calls getrusage")]
    fn a_phase_ends_with_a_pause_when_another_thread_has_had_the_processor_for_long() {
        for has_found in [false, true] {
            let mut spin = Spin::new(Idle::Adaptive);
            assert!(spin.spins());
            spin.checked = Some(Instant::now() - LOST);
            let before = usage(&mut spin);
            (before.at, before.preempted) = (before.at - Duration::from_secs(1), -1);
            if has_found {
                spin.until = spin.checked;
                spin.worked();
            } else {
                assert!(!spin.spins());
            }
            assert!(spin.pause.until.is_some() && spin.until.is_none());
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it calls getrusage")]
    fn only_long_preemptions_since_the_last_check_end_a_phase() {
        let mut spin = Spin::new(Idle::Adaptive);
        let (now, before) = (Instant::now(), Usage { ran: Duration::from_secs(1), ..*usage(&mut spin) });
        let at = now + 2 * LOST;
        let used = |preempted, ran| Usage {
            at: before.at + LOST,
            preempted: before.preempted + preempted,
            ran: before.ran + ran,
        };
        for (checked, now_used, expected) in [
            (now, used(1, Duration::ZERO), true),
            (at, used(1, Duration::ZERO), false),  // there was a check just before
            (now, used(0, Duration::ZERO), false), // it has slept
            (now, used(1, Duration::from_nanos(1)), false), // it was preempted for a shorter time
            (now, Usage { ran: Duration::ZERO, ..used(1, Duration::ZERO) }, false), // it has moved to another thread
        ] {
            (spin.checked, spin.usage, spin.pause) = (Some(checked), Some(before), Pause::default());
            assert_eq!(spin.begin_pause_after_loss(at, |_| now_used), expected, "{now_used:?}");
            assert_eq!(spin.pause.until.is_some(), expected);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it calls getrusage")]
    fn preemptions_long_before_a_phase_or_before_a_sleep_do_not_count() {
        for has_slept in [false, true] {
            let mut spin = Spin::new(Idle::Adaptive);
            let before = usage(&mut spin);
            before.preempted = -1;
            if !has_slept {
                before.at -= USAGE_AGE;
            }
            spin.slept_at = has_slept.then(Instant::now);
            assert!(spin.spins() && usage(&mut spin).preempted >= 0);
        }
    }

    #[test]
    fn pauses_become_longer_while_losses_follow_each_other() {
        let mut pause = Pause::default();
        let mut now = Instant::now();
        pause.begin_after_waste(now);
        for millis in [4, 8, 16, 32, 64, 64, 4, 8] {
            if millis == 4 {
                now += 2 * LONGEST_PAUSE;
            }
            pause.begin_after_loss(now);
            let length = Duration::from_millis(millis);
            assert!(pause.includes(now + length - Duration::from_nanos(1)) && !pause.includes(now + length));
            now += length;
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it calls getrusage")]
    fn a_phase_begins_again_when_the_device_has_moved_packets() {
        let mut spin = Spin::new(Idle::Adaptive);
        let over = Instant::now() - Duration::from_micros(1);
        (spin.until, spin.packets) = (Some(over), moved_packets().wrapping_sub(1));
        assert!(spin.spins() && spin.until.is_some_and(|until| until > over));
        spin.until = Some(over);
        assert!(!spin.spins(), "no packets since");
        (spin.until, spin.latest) = (Some(over), Some(over));
        spin.packets = spin.packets.wrapping_sub(1);
        assert!(!spin.spins(), "for too long");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it calls getrusage")]
    fn preemptions_before_a_sleep_do_not_count() {
        let mut spin = Spin::new(Idle::Adaptive);
        usage(&mut spin).preempted = -1;
        spin.sleeps();
        spin.worked();
        assert!(spin.usage.is_none());
    }
}
