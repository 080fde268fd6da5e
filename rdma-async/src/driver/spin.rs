//! When to spin, and when to sleep.

use std::time::{Duration, Instant};

/// What a driver does while there are no completions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Idle {
    /// Spins for some microseconds, then sleeps. The default.
    ///
    /// It spins only as long as that has recently paid off, and not while more threads are ready than there are processors.
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
    /// The end of the current phase, once one has begun.
    until: Option<Instant>,
    /// Length of the next phase.
    length: Duration,
    slept_at: Option<Instant>,
    preempted: i64,
    /// No spinning until then, because others need the processor.
    pause_until: Option<Instant>,
    pause: Duration,
}

/// Longest phase: about what a sleep costs, with the wake-up.
const LONGEST: Duration = Duration::from_micros(50);
const SHORTEST: Duration = Duration::from_micros(2);

/// Shortest and longest time without spinning after a preemption.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(64)];

impl Spin {
    pub(crate) fn new(idle: Idle) -> Self {
        Spin {
            idle,
            until: None,
            length: LONGEST,
            slept_at: None,
            preempted: preemptions(),
            pause_until: None,
            pause: PAUSES[0],
        }
    }

    /// The driver had something to do.
    #[inline(always)]
    pub(crate) fn worked(&mut self) {
        self.until = None;
        if self.slept_at.is_some() {
            self.woke();
        }
    }

    /// Adapts the length: a phase pays off if it would have replaced the sleep that has just ended.
    #[cold]
    fn woke(&mut self) {
        let Some(slept_at) = self.slept_at.take() else { return };
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
        let now = Instant::now();
        let Some(until) = self.until else {
            if self.pause_until.is_some_and(|until| now < until) {
                return false;
            }
            self.until = Some(now + self.length);
            return true;
        };
        if now < until {
            return true;
        }
        let preempted = preemptions();
        if std::mem::replace(&mut self.preempted, preempted) != preempted {
            self.pause_until = Some(now + self.pause);
            self.pause = (self.pause * 2).min(PAUSES[1]);
        } else {
            self.pause = (self.pause / 2).max(PAUSES[0]);
        }
        false
    }

    /// The driver sleeps now.
    pub(crate) fn sleeps(&mut self) {
        self.until = None;
        // The other ways have no length to adapt.
        if self.idle == Idle::Adaptive {
            self.slept_at = Some(Instant::now());
        }
    }
}

/// How often the kernel has taken the processor from this thread: getrusage(2), `ru_nivcsw`.
fn preemptions() -> i64 {
    // SAFETY: an all-zero `rusage` is valid, and `getrusage` only writes to it.
    unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
        usage.ru_nivcsw
    }
}
