//! Detection of programs that poll all the time. The server thread leaves the device to them.

use std::time::Duration;

use super::core::Sources;
use super::lock::Device;
use super::server::{WaitSet, Woken};
use crate::check;
use crate::transport::Time;

/// Interval of checks whether the program still polls. A program without a poll in this time has stopped.
pub(super) const IDLE_CHECK: Duration = Duration::from_micros(400);

/// Shortest time over which polls are counted, as every packet wakes the thread.
const MIN_SAMPLE: Duration = Duration::from_micros(200);

/// Longest average interval of polls of a program that polls all the time.
///
/// A task that handles a packet of short messages polls every 10 µs or so.
pub(super) const MAX_POLL_INTERVAL: Duration = Duration::from_micros(15);

/// Shortest average interval of waits of a program that polls all the time. Each wait ends the idling.
const MIN_WAIT_INTERVAL: Duration = Duration::from_micros(200);

/// Polls after which a program that was about to wait polls again. One that sleeps has polled once or twice since it has armed.
const POLLS_AFTER_WAIT: u32 = 64;

/// Factor of [`MAX_POLL_INTERVAL`] under the checker.
const CHECKED: u32 = 2;

/// First and longest time for which polls are ignored after a program has stopped polling without arming. The time doubles.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(64));

/// Detects programs that poll all the time.
pub(super) struct PollDetector {
    /// Counts of [`Device::polls`] and [`Wake::waits`](super::server::Wake::waits), and when they were read.
    polls: u32,
    waits: u32,
    since: Time,
    /// How long polls are ignored next. Programs that wait for memory to change poll at times, but make no progress while they
    /// wait.
    backoff: Duration,
    ignores_until: Time,
}

impl PollDetector {
    pub(super) fn new(device: &Device) -> PollDetector {
        PollDetector {
            polls: device.polls(),
            waits: device.server.waits(),
            since: device.now(),
            backoff: BACKOFF.0,
            ignores_until: Time(0),
        }
    }

    /// Whether a program polls all the time. One that sleeps, or often waits for events, does not.
    pub(super) fn is_polled(&mut self, device: &Device) -> bool {
        let (polls, now) = (device.polls(), device.now());
        let elapsed = Duration::from_nanos(now.0.saturating_sub(self.since.0));
        if elapsed < MIN_SAMPLE {
            return false;
        }
        let (more, waits) = (polls.wrapping_sub(self.polls), device.server.waits());
        let waited = waits.wrapping_sub(self.waits);
        (self.polls, self.waits, self.since) = (polls, waits, now);
        // The checker makes each poll and post take longer.
        let interval = if check::is_active() { CHECKED * MAX_POLL_INTERVAL } else { MAX_POLL_INTERVAL };
        let sleeps = polls.wrapping_sub(device.server.polls_at_wait()) < POLLS_AFTER_WAIT;
        !sleeps && MIN_WAIT_INTERVAL * waited <= elapsed && interval * more >= elapsed && now >= self.ignores_until
    }

    /// Stays idle while the program polls, which makes the device progress.
    pub(super) fn idle(&mut self, device: &Device, wait_set: &mut WaitSet) {
        let wake = &device.server;
        let start = device.now();
        {
            let mut core = device.lock_in_turn();
            if !wake.begin_idle(self.waits) {
                return;
            }
            device.end_locked(&mut core);
            // From here on packets do not wake the thread. Peers wake it if they get no answer: `Outbox::kick`.
            core.disarm_wakeups();
            wait_set.fill_idle(&core, wake);
        }
        let (mut polls, mut sweeps) = (device.polls(), device.sweeps());
        let was_woken = loop {
            match wait_set.nap(device, IDLE_CHECK) {
                Woken::Program => break true,
                Woken::Peer => {
                    let mut core = device.lock_in_turn();
                    if wait_set.has_host_event() {
                        core.handle_host_events(device.now());
                    }
                    core.progress_from(device.now(), Sources::All);
                    core.disarm_wakeups();
                }
                Woken::Timeout if device.polls() == polls => break false,
                Woken::Timeout => {
                    // Other threads keep the device locked for all polls, and posts may wait.
                    if sweeps == device.sweeps() {
                        device.lock_in_turn().send(device.now());
                    }
                    (polls, sweeps) = (device.polls(), device.sweeps());
                }
            }
        };
        wake.leave_idle();
        let now = device.now();
        (self.polls, self.waits, self.since) = (device.polls(), wake.waits(), now);
        if now >= start + self.backoff {
            self.backoff = BACKOFF.0;
        }
        if !was_woken {
            self.ignores_until = now + self.backoff;
            self.backoff = (2 * self.backoff).min(BACKOFF.1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls all the time until the next sample. Returns whether the detector sees that.
    fn is_polled(device: &Device, detector: &mut PollDetector) -> bool {
        while device.now() < detector.since + MIN_SAMPLE {
            std::hint::spin_loop();
        }
        device.count_polls(1 << 30);
        detector.is_polled(device)
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_program_that_often_waits_for_events_is_not_one_that_polls_all_the_time() {
        // This device has no server thread.
        let device = Device::new().unwrap();
        let mut detector = PollDetector::new(&device);
        assert!(is_polled(&device, &mut detector));
        (0..1 << 20).for_each(|_| device.begin_wait());
        assert!(!is_polled(&device, &mut detector));
        assert!(is_polled(&device, &mut detector), "it has not waited since the last sample");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_program_that_sleeps_now_does_not_poll_all_the_time() {
        let device = Device::new().unwrap();
        let mut detector = PollDetector::new(&device);
        while device.now() < detector.since + MIN_SAMPLE {
            std::hint::spin_loop();
        }
        device.count_polls(1 << 30);
        device.begin_wait();
        device.count_polls(2);
        assert!(!detector.is_polled(&device));
        assert!(is_polled(&device, &mut detector));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn the_server_does_not_idle_if_the_program_was_about_to_wait_since_the_sample() {
        let device = Device::new().unwrap();
        let mut detector = PollDetector::new(&device);
        for waits in [true, false] {
            assert!(is_polled(&device, &mut detector));
            if waits {
                device.begin_wait();
            }
            detector.idle(&device, &mut WaitSet::new());
            assert_eq!(detector.has_idled(), !waits);
            assert!(!device.server.is_idle());
            detector = PollDetector::new(&device);
        }
    }

    impl PollDetector {
        /// Whether the server was idle until the program had stopped polling.
        fn has_idled(&self) -> bool {
            self.ignores_until > Time(0)
        }
    }
}
