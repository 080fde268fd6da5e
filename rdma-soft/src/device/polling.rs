//! Progress of the device in threads of the program, which poll and post.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use rdma_sys::IBV_QPS_ERR;

use super::core::{Core, Sources};
use super::lock::{Device, Locked};
use super::observe;
use super::poll_detector::MAX_POLL_INTERVAL;
use crate::check;
use crate::transport::Time;

/// Packets that count as a poll. They take a few microseconds, less than the time between the polls of a program that polls all the
/// time.
///
/// Fewer packets do not count: programs that wait for memory to change send one packet and do not poll.
pub(super) const PACKETS: u32 = 4;

/// Empty polls since the last packet, about 10 µs of them, after which peers on this host are woken to answer.
const UNANSWERED_POLLS: u32 = 128;

/// Empty polls since the last packet, wait or yield after which the thread yields the processor.
const IDLE_POLLS: u32 = 32;

/// The same limit if a packet came with the last yield: the peer shares this processor.
const IDLE_POLLS_IF_SHARED: u32 = 4;

/// If a yield takes so long, another program has had the processor. A packet that has come meanwhile may not have needed the yield.
const LONG_YIELD: Duration = Duration::from_micros(100);

/// This part of a yield counts as one poll: the thread could not poll meanwhile, and usually polls again next. It is less than
/// [`MAX_POLL_INTERVAL`], so a program that only polls and yields counts as polling all the time.
const YIELD_PER_POLL: Duration = Duration::from_micros(8);

const _: () = assert!(YIELD_PER_POLL.as_nanos() < MAX_POLL_INTERVAL.as_nanos());

/// A poll that reads a UDP socket takes a system call, and counts as this many of [`IDLE_POLLS`].
const UDP_WEIGHT: u32 = 8;

thread_local! {
    /// See [`packets_of_thread`].
    static PACKETS_OF_THREAD: Cell<u32> = const { Cell::new(0) };
}

/// Packets that soft0 has sent and received while this thread polled or posted. The number wraps around.
///
/// A poll without a completion may have moved data: a part of a long message, or the reply to a read of the peer. A program that
/// polls for a limited time can go on while this number changes. If it sleeps, another thread has to move the rest. Limit that
/// time, too. Other connections also move packets.
#[must_use]
pub fn packets_of_thread() -> u32 {
    PACKETS_OF_THREAD.get()
}

/// Statistics of the program's polls.
#[derive(Debug, Default)]
pub(super) struct Polling {
    /// Polls, and what counts as polls, approximately. The server stays idle while the program polls all the time.
    count: AtomicU32,
    /// See [`Device::sweeps`]. Written with the device locked.
    sweeps: AtomicU32,
    /// Empty polls since the last packet, approximately.
    unanswered: AtomicU32,
    /// Empty polls since the last packet, wait or yield, approximately. One that reads a UDP socket counts as [`UDP_WEIGHT`] polls.
    idle: AtomicU32,
    /// Whether there was a short yield since the last poll.
    has_yielded: AtomicBool,
    /// Whether a packet came with the last yield.
    is_shared: AtomicBool,
}

/// What to do after a poll that has received nothing.
struct Empty {
    /// Wake the peers, which do not answer.
    kicks: bool,
    /// Yield the processor, which a peer may need.
    yields: bool,
}

impl Polling {
    /// Counts a poll, which has received packets or not, or did not get the device. Returns what to do if it has received nothing.
    fn record(&self, has_received: Option<bool>, weight: u32) -> Option<Empty> {
        let Polling { unanswered, idle, has_yielded, is_shared, .. } = self;
        let mut most = IDLE_POLLS;
        if let Some(has_received) = has_received {
            if has_yielded.load(Ordering::Relaxed) {
                has_yielded.store(false, Ordering::Relaxed);
                is_shared.store(has_received, Ordering::Relaxed);
            }
            if has_received {
                unanswered.store(0, Ordering::Relaxed);
                idle.store(0, Ordering::Relaxed);
                return None;
            }
            if is_shared.load(Ordering::Relaxed) {
                most = IDLE_POLLS_IF_SHARED;
            }
        }
        let add = |polls: &AtomicU32, more: u32| {
            let count = polls.load(Ordering::Relaxed).wrapping_add(more);
            polls.store(count, Ordering::Relaxed);
            count
        };
        let (kicks, yields) = (add(unanswered, 1) == UNANSWERED_POLLS, add(idle, weight) >= most);
        if yields {
            idle.store(0, Ordering::Relaxed);
        }
        Some(Empty { kicks, yields })
    }

    /// The program is about to sleep. It must not yield before: another thread may then have the processor for milliseconds.
    fn forget_idle(&self) {
        self.idle.store(0, Ordering::Relaxed);
        self.record_yield(LONG_YIELD);
    }

    /// Records a yield and how long it took.
    fn record_yield(&self, took: Duration) {
        let was_long = took >= LONG_YIELD;
        self.has_yielded.store(!was_long, Ordering::Relaxed);
        if was_long {
            self.is_shared.store(false, Ordering::Relaxed);
        } else {
            self.count_polls((took.as_nanos() / YIELD_PER_POLL.as_nanos()) as u32);
        }
    }

    /// Counts polls. A lost count does not matter.
    fn count_polls(&self, polls: u32) {
        self.count.store(self.count.load(Ordering::Relaxed).wrapping_add(polls), Ordering::Relaxed);
    }
}

impl Device {
    /// Makes progress for a thread that polls the completion queue `cq`, unless another thread does or waits for the lock.
    ///
    /// Returns whether an event is held. If the thread leaves completions in the queue, it has to
    /// [release](Device::release_events) the event.
    pub(crate) fn poll(&self, cq: u32) -> bool {
        self.count_polls(1);
        // Leave the lock to threads that wait for it.
        let core = if self.has_waiter.load(Ordering::Relaxed) { None } else { self.try_lock() };
        let (mut holds, mut weight) = (false, 1);
        let has_received = core.map(|mut core| {
            let (now, before) = (self.now(), core.state.shared.packets);
            if core.links.iter().any(|link| link.inbox.polls_udp()) {
                weight = UDP_WEIGHT;
            }
            if !self.server.is_idle() {
                let any = self.progress(&mut core, now, Sources::Recent);
                self.count_packets(&core, before);
                holds = any && core.hold_event(cq);
                // The program may not poll again, so the server has to send the remaining packets. It also has to learn of a timer
                // that was just set.
                self.unlock(core);
                return any;
            }
            // A program that polls all the time polls again. That sends the ACKs and the posts that wait. If the program stops, the
            // server sends them, or the call that ends the queue pair or the program does.
            core.deferral.poll();
            self.polling.sweeps.store(self.sweeps().wrapping_add(1), Ordering::Relaxed);
            core.send_now(now, true);
            let any = core.receive(now, Sources::Recent);
            self.count_packets(&core, before);
            any
        });
        let Some(Empty { kicks, yields }) = self.polling.record(has_received, weight) else { return holds };
        if kicks {
            self.kick();
        }
        if yields {
            self.yield_processor();
        } else {
            std::hint::spin_loop();
        }
        false
    }

    fn yield_processor(&self) {
        let before = self.now();
        std::thread::yield_now();
        self.polling.record_yield(Duration::from_nanos(self.now().0.saturating_sub(before.0)));
    }

    /// Starts work, with `bytes` of data, that this thread has just posted to a queue pair.
    pub(crate) fn start_posted(&self, mut core: Locked<'_>, number: u32, bytes: u64) {
        let state = &mut core.state;
        if check::is_active() {
            if let Some(found) = state.qps.get(&number) {
                observe::posted_sends(found, &state.shared);
            }
        }
        match state.qps.get_mut(&number) {
            Some(found) if found.state == IBV_QPS_ERR => found.fail(&mut state.shared),
            _ => state.mark_ready(number),
        }
        let (now, before) = (self.now(), core.state.shared.packets);
        if self.server.is_idle() && core.defer(number, bytes, now) {
            return self.unlock(core);
        }
        // While a program polls all the time, the server does not send the remaining packets. The program may wait for memory
        // next, so this sends them.
        if self.server.is_idle() {
            core.send_windows(now)
        } else {
            core.send(now)
        }
        core.receive_own(now);
        self.count_packets(&core, before);
        self.unlock(core);
    }

    /// Receives and sends packets for a program that does not poll all the time.
    ///
    /// An ACK is delayed only if that wakes no thread: the server has to wake up in time to send it.
    pub(super) fn progress(&self, core: &mut Core, now: Time, sources: Sources<'_>) -> bool {
        let may_delay = self.server.wakes_before(now + core.state.ack_delay);
        let any = core.receive(now, sources);
        core.send_now(now, may_delay);
        any
    }

    /// The program has armed a completion queue, and is about to wait for its event.
    pub(crate) fn begin_wait(&self) {
        // After a sleep, the kernel usually lets the program run soon. A program that arms and does not sleep never yields.
        self.polling.forget_idle();
        self.server.begin_wait(self.polls());
    }

    pub(super) fn count_polls(&self, polls: u32) {
        self.polling.count_polls(polls);
    }

    /// Adds the packets since `before` to those of this thread. Counts a poll for each [`PACKETS`] of them, because the program
    /// could not poll meanwhile.
    pub(crate) fn count_packets(&self, core: &Core, before: u32) {
        let packets = core.state.shared.packets.wrapping_sub(before);
        if packets != 0 {
            PACKETS_OF_THREAD.set(PACKETS_OF_THREAD.get().wrapping_add(packets));
        }
        let polls = packets / PACKETS;
        if polls > 0 {
            self.count_polls(polls);
        }
    }

    /// Wakes the servers of peers on this host that have not answered. A server may be idle although its program has stopped
    /// polling and waits for memory to change.
    fn kick(&self) {
        if let Some(mut core) = self.try_lock() {
            core.links.iter_mut().for_each(|link| link.outbox.kick());
        }
    }

    pub(crate) fn polls(&self) -> u32 {
        self.polling.count.load(Ordering::Relaxed)
    }

    /// Polls that had the device locked while the server was idle. Each gives all posts that wait a turn.
    pub(super) fn sweeps(&self) -> u32 {
        self.polling.sweeps.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls of a thread that receives nothing, until it yields.
    fn polls_until_yield(polling: &Polling) -> u32 {
        let polls = (1..).find(|_| polling.record(Some(false), 1).unwrap().yields).unwrap();
        polling.record_yield(Duration::ZERO);
        polls
    }

    #[test]
    fn a_thread_whose_peer_needs_its_processor_yields_sooner() {
        let polling = Polling::default();
        for _ in 0..2 {
            for _ in 0..2 {
                assert_eq!(polls_until_yield(&polling), IDLE_POLLS);
            }
            // The packet comes with the yield.
            assert!(polling.record(Some(true), 1).is_none());
            for _ in 0..2 {
                assert_eq!(polls_until_yield(&polling), IDLE_POLLS_IF_SHARED);
                assert!(polling.record(Some(true), 1).is_none());
            }
            assert_eq!(polls_until_yield(&polling), IDLE_POLLS_IF_SHARED);
            // No packet has come with this one.
            assert_eq!(polls_until_yield(&polling), IDLE_POLLS);
            assert!(!polling.record(Some(false), 1).unwrap().yields);
            assert!(polling.record(Some(true), 1).is_none());
            assert_eq!(polls_until_yield(&polling), IDLE_POLLS, "the packet came after the second poll");
            assert!(polling.record(Some(true), 1).is_none());
            // Another program has had the processor.
            assert_eq!(polls_until_yield(&polling), IDLE_POLLS_IF_SHARED);
            polling.record_yield(LONG_YIELD);
            assert!(polling.record(Some(true), 1).is_none());
        }
    }

    #[test]
    fn a_yield_counts_as_polls_unless_another_program_has_had_the_processor() {
        let polling = Polling::default();
        for (took, polls) in [(YIELD_PER_POLL / 2, 0), (5 * YIELD_PER_POLL, 5), (LONG_YIELD, 5)] {
            polling.record_yield(took);
            assert_eq!(polling.count.load(Ordering::Relaxed), polls);
        }
    }

    #[test]
    fn polls_that_do_not_get_the_device_say_nothing_about_a_yield() {
        let polling = Polling::default();
        polls_until_yield(&polling);
        assert!(!polling.record(None, 1).unwrap().yields);
        assert!(polling.record(Some(true), 1).is_none());
        let yields = (1..).find(|_| polling.record(None, 1).unwrap().yields).unwrap();
        assert_eq!(yields, IDLE_POLLS);
        polling.record_yield(Duration::ZERO);
        assert!(polling.record(Some(true), 1).is_none());
        assert_eq!(polls_until_yield(&polling), IDLE_POLLS_IF_SHARED);
    }

    #[test]
    fn peers_that_do_not_answer_are_woken_once() {
        let polling = Polling::default();
        let kicks = (0..3 * UNANSWERED_POLLS).filter(|_| polling.record(Some(false), 1).unwrap().kicks).count();
        assert_eq!(kicks, 1);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_program_that_sleeps_between_its_polls_does_not_yield() {
        /// A device that has received nothing polls its UDP socket.
        const POLLS: u32 = IDLE_POLLS / UDP_WEIGHT - 1;
        // This device has no server thread.
        let device = Device::new().unwrap();
        for _ in 0..2 {
            (0..POLLS).for_each(|_| _ = device.poll(0));
            assert_eq!(device.polling.idle.load(Ordering::Relaxed), POLLS * UDP_WEIGHT);
            device.begin_wait();
        }
        assert_eq!(device.polling.unanswered.load(Ordering::Relaxed), 2 * POLLS, "its peers are still kicked");
    }
}
