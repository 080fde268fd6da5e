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
    /// It spins only as long as that has recently paid off. It pauses while other threads keep taking its processor.
    #[default]
    Adaptive,
    /// Sleeps at once.
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
    /// [`moved_packets`] at the last check.
    packets: u32,
    preempted: i64,
    /// Phases in a row that found nothing, each with a preemption since the one before or the last sleep.
    wasted: u32,
    /// No spinning until then, because others need the processor.
    pause_until: Option<Instant>,
    pause: Duration,
}

/// Longest phase: about what a sleep costs, with the wake-up.
const LONGEST: Duration = Duration::from_micros(50);
const SHORTEST: Duration = Duration::from_micros(2);

/// Longest time for which moving packets prolong a phase. Meanwhile, some MiB pass through shared memory.
const MOVING: Duration = Duration::from_millis(1);

/// Wasted phases in a row before a pause. A few may be due to timers and other short work, which leave time to spin.
const WASTED: u32 = 8;

/// Shortest and longest time without spinning after a preemption.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(64)];

impl Spin {
    pub(crate) fn new(idle: Idle) -> Self {
        Spin {
            idle,
            waits: false,
            until: None,
            latest: None,
            length: LONGEST,
            slept_at: None,
            packets: 0,
            preempted: preemptions(),
            wasted: 0,
            pause_until: None,
            pause: PAUSES[0],
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
        if self.until.take().is_some_and(|until| Instant::now() <= until) {
            (self.wasted, self.pause) = (0, PAUSES[0]);
        }
        self.woke();
    }

    /// Counts a phase that found nothing. `preempted` is how often other threads took the processor until `now`.
    fn wasted(&mut self, preempted: i64, now: Instant) {
        if std::mem::replace(&mut self.preempted, preempted) == preempted {
            self.wasted = 0;
            return;
        }
        self.wasted += 1;
        if self.wasted == WASTED {
            self.wasted = 0;
            self.pause_until = Some(now + self.pause);
            self.pause = (self.pause * 2).min(PAUSES[1]);
        }
    }

    /// Adapts the length: a phase would have paid off if it had replaced the sleep that has just ended.
    fn woke(&mut self) {
        let Some(slept_at) = self.slept_at.take() else { return };
        // Preemptions before the sleep say nothing about the next phase.
        self.preempted = preemptions();
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
            if self.pause_until.is_some_and(|until| now < until) {
                return false;
            }
            (self.waits, self.until, self.latest) = (true, Some(now + self.length), None);
            return true;
        };
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
            self.wasted(preemptions(), now);
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

/// How often other threads took the processor from this thread, also after sched_yield(2): getrusage(2), `ru_nivcsw`.
fn preemptions() -> i64 {
    // SAFETY: an all-zero `rusage` is valid, and `getrusage` only writes to it.
    unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
        usage.ru_nivcsw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Wastes phases, each with a preemption. Returns the time after the last one.
    fn waste(spin: &mut Spin, phases: u32, mut now: Instant) -> Instant {
        for _ in 0..phases {
            now += LONGEST;
            spin.wasted(spin.preempted + 1, now);
        }
        now
    }

    #[test]
    #[cfg_attr(miri, ignore = "it calls getrusage")]
    fn it_pauses_after_enough_wasted_phases_in_a_row_and_longer_each_time() {
        let mut spin = Spin::new(Idle::Adaptive);
        let mut now = waste(&mut spin, WASTED - 1, Instant::now());
        assert_eq!(spin.pause_until, None);
        spin.wasted(spin.preempted, now);
        now = waste(&mut spin, WASTED - 1, now);
        assert_eq!(spin.pause_until, None, "a phase without a preemption was between them");
        spin.wasted(spin.preempted, now);
        for millis in [1, 2, 4, 8, 16, 32, 64, 64] {
            now = waste(&mut spin, WASTED, now);
            assert_eq!(spin.pause_until, Some(now + Duration::from_millis(millis)));
            waste(&mut spin, 1, now);
            assert_eq!(spin.pause_until, Some(now + Duration::from_millis(millis)), "the next pause needs as many");
            spin.wasted(spin.preempted, now);
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
            assert_eq!(spin.pause, if is_in_time { PAUSES[0] } else { 4 * PAUSES[0] });
            let paused = spin.pause_until;
            waste(&mut spin, 1, now);
            assert_eq!(spin.pause_until == paused, is_in_time);
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
        spin.preempted = -1;
        spin.sleeps();
        spin.worked();
        assert!(spin.preempted >= 0);
    }
}
