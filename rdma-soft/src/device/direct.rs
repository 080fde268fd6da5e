//! Direct channels, whose program is woken by the packets themselves.
//!
//! A packet for a program that sleeps wakes the server thread, and the event that the server raises wakes the program. Where
//! events follow each other closely, the two wake-ups take longer than all the rest. So the completion channel of such a program
//! becomes *direct*: packets wake the thread that waits for the channel, and that thread takes them in `ibv_get_cq_event(3)`.
//!
//! Meanwhile the server thread serves timers and multicast groups, and scans for packets: every
//! [`ACK_DELAY`](super::ack_delay::ACK_DELAY) while it finds some and the program has not run since the last scan. Otherwise the
//! interval doubles up to [`LONGEST_SCAN_INTERVAL`], since a program that runs takes its packets itself. A packet waits at most
//! that long if the program is busy. An ACK is delayed for at most that long. The server ends the direct mode when the program has
//! taken no event for a millisecond. A program that has left packets and has not run since has longer.
//!
//! The descriptor of a direct channel may be readable although `ibv_get_cq_event(3)` fails with `EAGAIN`. Some programs, such as
//! the example in the manual page, treat that as an error. So a channel whose descriptor is non-blocking becomes direct only if its
//! program has got `EAGAIN` before.
//!
//! A poll of the program may raise an event for a completion that it then returns. The program has that completion, so it need not
//! be woken. On a direct channel such an event is *held* until the program asks for it or the server scans: the descriptor does not
//! become readable, which would cost two system calls and wake the program once more.
//!
//! While a channel is direct, peers on this host raise their eventfd with each packet, since no thread calls
//! [`Core::disarm_wakeups`] after [`Core::arm_wakeups`]. The eventfd stays readable until a thread arms again.

mod frequency;
mod held;
mod review;

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(super) use frequency::Frequency;
use frequency::NO_CHANNEL;
use review::{LONGEST_SCAN_INTERVAL, Review};

use super::ack_delay::ACK_DELAY;
use super::blocking_wait;
use super::cancel::Cancel;
use super::channel::{ChannelFds, Pending, take, take_now};
use super::core::{Core, Sources};
use super::epoll::Epoll;
use super::lock::Device;
use crate::net::Readable;
use crate::transport::Time;

/// Longest single wait with signals blocked.
const WAIT_SLICE: Duration = Duration::from_millis(10);

/// How long no channel becomes direct after the program was too busy, or after an attempt has failed.
const BACKOFF: Duration = Duration::from_millis(64);

/// Scans in one call, after which the server takes the remaining packets.
const ROUNDS: usize = 8;

/// The direct channel, if there is one.
#[derive(Debug)]
pub(super) struct Direct {
    current: Option<Current>,
    /// The sockets of the device. Created for the first direct channel.
    sockets: Option<Epoll>,
    /// Earliest time at which a channel may become direct.
    from: Time,
    /// Scratch memory with an entry for each link, so that waiting for an event allocates nothing.
    readable: Vec<Readable>,
}

#[derive(Debug)]
struct Current {
    channel: u32,
    /// Descriptor of the channel, if packets make it readable. `None` if the descriptor is blocking: a program that finds it
    /// readable would block in `ibv_get_cq_event(3)`.
    readable: Option<Arc<Epoll>>,
    review: Review,
}

impl Direct {
    pub(super) fn new(links: usize) -> Direct {
        Direct { current: None, sockets: None, from: Time(0), readable: vec![Readable::default(); links] }
    }

    pub(super) fn is_some(&self) -> bool {
        self.current.is_some()
    }

    fn is(&self, channel: u32) -> bool {
        self.current.as_ref().is_some_and(|current| current.channel == channel)
    }
}

impl Core {
    /// Makes a channel direct whose events are frequent. Returns whether it is direct.
    fn begin_direct(&mut self, number: u32) -> io::Result<bool> {
        let Some(channel) = self.state.shared.events.channels.get(number) else { return Ok(false) };
        let is_nonblocking = channel.fds().is_nonblocking()?;
        if is_nonblocking && !channel.was_empty {
            return Ok(false);
        }
        let readable = is_nonblocking.then(|| Arc::clone(&channel.epoll));
        if self.direct.sockets.is_none() {
            self.direct.sockets = Some(self.epoll_of_sockets()?);
        }
        if !self.arm_wakeups() {
            // Packets arrive faster than they are taken.
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        if let (Some(epoll), Some(sockets)) = (&readable, &self.direct.sockets) {
            epoll.add(sockets.fd(), 0)?;
        }
        self.direct.current = Some(Current { channel: number, readable, review: Review::new() });
        self.state.ack_delay = LONGEST_SCAN_INTERVAL;
        Ok(true)
    }

    /// Creates a set of the sockets of all links. The name of a socket is twice the index of its link, plus 1 for peers on this
    /// host.
    fn epoll_of_sockets(&self) -> io::Result<Epoll> {
        let epoll = Epoll::new()?;
        for (index, link) in self.links.iter().enumerate() {
            epoll.add(link.socket.fd().as_raw_fd(), 2 * index as u64)?;
            if let Some(shm) = link.socket.shm_fd() {
                epoll.add(shm.as_raw_fd(), 2 * index as u64 + 1)?;
            }
        }
        Ok(epoll)
    }
}

impl Device {
    /// Returns the time until the next scan if a channel is direct. Ends the direct mode if it does not pay any more. Raises the
    /// events that were held.
    ///
    /// The server calls it after a scan of all sources, with the device locked. `has_found` says whether that scan found packets.
    pub(super) fn review_direct(&self, core: &mut Core, has_found: bool, now: Time) -> Option<Duration> {
        let current = core.direct.current.as_mut()?;
        let is_busy = current.review.record(has_found, self.frequency.calls.load(Ordering::Relaxed), self.polls());
        let (channel, review) = (current.channel, &current.review);
        let (interval, scan_interval) = (review.event_interval(), review.scan_interval());
        if !is_busy && self.frequency.was_taken_within(channel, interval, now) {
            core.state.shared.events.release(channel);
            return Some(scan_interval);
        }
        if is_busy {
            core.direct.from = now + BACKOFF;
        }
        self.end_locked(core);
        None
    }

    /// Ends the direct mode of the channel that has it, and raises the events that were held.
    pub(super) fn end_locked(&self, core: &mut Core) {
        if let Some(Current { channel, readable: Some(epoll), .. }) = core.direct.current.take() {
            core.direct.sockets.iter().for_each(|sockets| epoll.remove(sockets.fd()));
            core.state.shared.events.release(channel);
        }
        core.state.ack_delay = ACK_DELAY;
        self.frequency.direct.store(NO_CHANNEL, Ordering::Relaxed);
    }

    /// Ends the direct mode of a channel. The server thread waits for packets again.
    pub(crate) fn end_direct(&self, channel: u32) {
        let mut core = self.lock();
        if core.direct.is(channel) {
            self.end_locked(&mut core);
            drop(core);
            self.server.wake_before(Time(0));
        }
    }

    /// Waits for an event of a completion channel, without the device locked.
    ///
    /// Like `ibv_get_cq_event(3)` it has no deadline, unless the descriptor is non-blocking.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`.
    pub(crate) fn wait_for_event(&self, channel: u32, fds: ChannelFds, cancel: Cancel) -> io::Result<Pending> {
        let mut is_interrupted = false;
        let pending = loop {
            // A lost count does not matter.
            let calls = self.frequency.calls.load(Ordering::Relaxed);
            self.frequency.calls.store(calls.wrapping_add(1), Ordering::Relaxed);
            if self.frequency.direct.load(Ordering::Relaxed) != channel {
                if let Some(pending) = take_now(fds.signal) {
                    break pending;
                }
                if fds.is_nonblocking()? {
                    return Err(self.no_event(channel));
                }
                if is_interrupted {
                    return Err(io::Error::from_raw_os_error(libc::EINTR));
                }
                break cancel.allow(|| take(fds.signal))?;
            }
            if let Some(pending) = self.take_directly(channel, fds) {
                break pending;
            }
            let is_nonblocking = fds.is_nonblocking()?;
            let core = self.lock();
            let Some(current) = core.direct.current.as_ref().filter(|current| current.channel == channel) else {
                continue;
            };
            let is_readable = current.readable.is_some();
            // The set of sockets exists as long as the device.
            let sockets = core.direct.sockets.as_ref().map_or(-1, Epoll::fd);
            drop(core);
            match (is_nonblocking, is_readable) {
                (true, true) => return Err(self.no_event(channel)),
                // The program has made the descriptor blocking, and may have found it readable because of packets.
                (false, true) => is_interrupted = true,
                (true, false) => {}
                (false, false) if is_interrupted => return Err(io::Error::from_raw_os_error(libc::EINTR)),
                (false, false) => {
                    let woken = blocking_wait::wait([fds.signal, sockets], WAIT_SLICE, cancel);
                    is_interrupted = woken.is_interrupted;
                    if woken.is_ready {
                        continue;
                    }
                }
            }
            self.end_direct(channel);
        };
        let now = self.now();
        if self.frequency.record(channel, now) && self.frequency.direct.load(Ordering::Relaxed) == NO_CHANNEL {
            self.begin_direct(channel, now);
        }
        Ok(pending)
    }

    fn no_event(&self, channel: u32) -> io::Error {
        if let Some(channel) = self.lock().state.shared.events.channels.get_mut(channel) {
            channel.was_empty = true;
        }
        io::Error::from_raw_os_error(libc::EAGAIN)
    }

    fn begin_direct(&self, channel: u32, now: Time) {
        let mut core = self.lock();
        // A program that polls all the time takes packets itself.
        if core.direct.is_some() || now < core.direct.from || self.server.is_idle() {
            return;
        }
        match core.begin_direct(channel) {
            Ok(false) => return,
            Ok(true) => self.frequency.direct.store(channel, Ordering::Relaxed),
            // The server continues to take packets.
            Err(_) => core.direct.from = now + BACKOFF,
        }
        drop(core);
        // The server has to wait without the sockets now. If the mode has not begun, `arm_wakeups` may have cleared the eventfd
        // that was to wake it.
        self.server.wake_before(Time(0));
    }

    /// Takes packets, and then an event of a direct channel.
    fn take_directly(&self, channel: u32, fds: ChannelFds) -> Option<Pending> {
        let mut is_taken = false;
        for round in 0..ROUNDS {
            let mut core = self.lock();
            let direct = &mut core.direct;
            if !direct.is(channel) {
                break;
            }
            let mut readable = std::mem::take(&mut direct.readable);
            // Later rounds also scan the rings, since packets in them no longer make a socket readable.
            readable.fill(Readable { udp: false, shm: round > 0 });
            for ready in direct.sockets.iter().flat_map(Epoll::ready) {
                if let Some(link) = readable.get_mut(ready as usize / 2) {
                    *(if ready % 2 == 0 { &mut link.udp } else { &mut link.shm }) = true;
                }
            }
            let has_found = self.progress(&mut core, self.now(), Sources::Readable(&readable));
            // A socket may hold more packets than one scan takes.
            let is_by_udp = has_found && readable.iter().any(|link| link.udp);
            core.direct.readable = readable;
            let events = &mut core.state.shared.events;
            is_taken = is_taken || events.take_unraised(channel);
            let may_be_counted = !is_taken && events.has_completion_event(channel);
            let is_done = core.arm_wakeups() && !is_by_udp;
            self.unlock(core);
            if is_done {
                return match is_taken {
                    true => Some(Pending::Taken),
                    false if may_be_counted => take_now(fds.signal),
                    false => None,
                };
            }
        }
        self.server.wake_before(Time(0));
        if is_taken { Some(Pending::Taken) } else { take_now(fds.signal) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(unsafe_code)]

    use super::frequency::{DELAYED_INTERVAL, FREQUENT_INTERVAL};
    use super::review::REVIEW_SCANS;
    use super::*;
    use crate::device::channel::Channel;
    use crate::device::link::Link;
    use crate::device::poll_detector::PollDetector;
    use crate::device::server::WaitSet;
    use crate::net::{Run, To};

    /// A device without a server thread, and a channel of it.
    fn device() -> (Device, u32, ChannelFds) {
        let device = Device::new().unwrap();
        let (channel, fds) = channel_of(&device);
        (device, channel, fds)
    }

    pub(super) fn channel_of(device: &Device) -> (u32, ChannelFds) {
        let channel = Channel::new().unwrap();
        let fds = channel.fds();
        (device.lock().state.shared.events.channels.insert(channel), fds)
    }

    pub(super) fn set_nonblocking(fds: ChannelFds, nonblocking: bool) {
        let flags = if nonblocking { libc::O_NONBLOCK } else { 0 };
        // SAFETY: the call takes no pointers.
        assert_eq!(unsafe { libc::fcntl(fds.epoll, libc::F_SETFL, flags) }, 0);
    }

    fn raise(device: &Device, channel: u32) {
        device.lock().state.shared.events.notify(channel, 7);
    }

    pub(super) fn take_event(device: &Device, channel: u32, fds: ChannelFds) {
        let pending = device.wait_for_event(channel, fds, Cancel::defer()).unwrap();
        assert_eq!(device.lock().state.shared.events.take_completion_event(channel, pending), Some(7));
    }

    /// Takes events until the channel is direct. On a slow machine the first events may not be frequent.
    fn become_direct(device: &Device, channel: u32, fds: ChannelFds) {
        assert!(!fds.is_nonblocking().unwrap() || would_block(device, channel, fds));
        while !device.lock().direct.is(channel) {
            raise(device, channel);
            take_event(device, channel, fds);
        }
    }

    /// A device without a server thread, and a direct channel of it with a non-blocking descriptor.
    pub(super) fn direct_device() -> (Device, u32, ChannelFds) {
        let (device, channel, fds) = device();
        set_nonblocking(fds, true);
        become_direct(&device, channel, fds);
        (device, channel, fds)
    }

    /// Returns a function that has a second device send a packet.
    fn sender(to: &Device) -> impl FnMut() + use<> {
        let address = to.lock().links[0].socket.address();
        let peer = Device::new().unwrap();
        move || {
            let (mut core, now) = (peer.lock(), peer.now());
            let Link { socket, outbox, .. } = &mut core.links[0];
            // SAFETY: there is no payload.
            unsafe { outbox.push(socket, To { address, class: 0 }, Run::new(&mut [0; 12], &[], 0, 1), now) };
            outbox.flush(socket, now);
        }
    }

    pub(super) fn is_readable(fds: ChannelFds) -> bool {
        let mut polled = libc::pollfd { fd: fds.epoll, events: libc::POLLIN, revents: 0 };
        // SAFETY: the pointer and the length describe one entry.
        (unsafe { libc::poll(&raw mut polled, 1, 0) }) == 1
    }

    pub(super) fn would_block(device: &Device, channel: u32, fds: ChannelFds) -> bool {
        device
            .wait_for_event(channel, fds, Cancel::defer())
            .is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn packets_make_a_direct_channel_readable_and_the_waiting_thread_takes_them() {
        let (device, channel, fds) = device();
        set_nonblocking(fds, true);
        let mut send = sender(&device);
        send();
        assert!(!is_readable(fds), "the server takes it");
        become_direct(&device, channel, fds);
        for _ in 0..3 {
            assert!(would_block(&device, channel, fds));
            assert!(!is_readable(fds));
            send();
            assert!(is_readable(fds));
        }
        device.end_direct(channel);
        assert!(!is_readable(fds));
        raise(&device, channel);
        assert!(is_readable(fds));
        take_event(&device, channel, fds);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_direct_channel_that_becomes_blocking_interrupts_a_wait_without_an_event() {
        let (device, channel, fds) = direct_device();
        sender(&device)();
        assert!(is_readable(fds));
        set_nonblocking(fds, false);
        let ended = device.wait_for_event(channel, fds, Cancel::defer()).unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::Interrupted);
        assert!(!device.lock().direct.is_some());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn only_events_wake_a_blocking_thread_and_make_its_descriptor_readable() {
        let (device, channel, fds) = device();
        become_direct(&device, channel, fds);
        sender(&device)();
        assert!(!is_readable(fds));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| take_event(&device, channel, fds));
            // The thread may wait in either mode.
            raise(&device, channel);
            waiting.join().unwrap();
        });
        set_nonblocking(fds, true);
        assert!(would_block(&device, channel, fds));
        assert!(!device.lock().direct.is_some(), "packets have to wake the server again");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn the_server_takes_over_when_events_are_rare_or_of_several_channels() {
        let (device, channel, fds) = direct_device();
        let taken_at = || Time(device.frequency.taken_at.load(Ordering::Relaxed));
        assert!(device.review_direct(&mut device.lock(), false, taken_at()).is_some());
        assert_eq!(device.review_direct(&mut device.lock(), false, taken_at() + FREQUENT_INTERVAL), None);
        become_direct(&device, channel, fds);
        let (other, others) = channel_of(&device);
        raise(&device, other);
        take_event(&device, other, others);
        assert_eq!(device.review_direct(&mut device.lock(), false, taken_at()), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_program_that_waits_for_a_processor_has_more_time_to_take_its_next_event() {
        let (device, ..) = direct_device();
        let taken_at = Time(device.frequency.taken_at.load(Ordering::Relaxed));
        assert!(
            device.review_direct(&mut device.lock(), false, taken_at).is_some(),
            "the first review only reads the counters"
        );
        assert!(device.review_direct(&mut device.lock(), true, taken_at + FREQUENT_INTERVAL).is_some());
        assert!(device.review_direct(&mut device.lock(), false, taken_at + FREQUENT_INTERVAL).is_some());
        assert_eq!(device.review_direct(&mut device.lock(), false, taken_at + DELAYED_INTERVAL), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn the_server_takes_over_for_a_while_from_a_program_that_leaves_packets() {
        let (device, channel, _) = direct_device();
        let now = Time(device.frequency.taken_at.load(Ordering::Relaxed));
        for _ in 1..REVIEW_SCANS {
            assert!(device.review_direct(&mut device.lock(), true, now).is_some());
        }
        assert_eq!(device.review_direct(&mut device.lock(), true, now), None);
        assert_eq!(device.lock().direct.from, now + BACKOFF);
        device.begin_direct(channel, now);
        assert!(!device.lock().direct.is_some());
        device.begin_direct(channel, now + BACKOFF);
        assert!(device.lock().direct.is_some());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_program_that_polls_takes_its_packets_later() {
        let (device, ..) = direct_device();
        let now = Time(device.frequency.taken_at.load(Ordering::Relaxed));
        for _ in 0..2 * REVIEW_SCANS {
            device.poll(0);
            assert!(device.review_direct(&mut device.lock(), true, now).is_some());
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn the_direct_mode_ends_when_the_server_leaves_the_device_to_a_program_that_polls_all_the_time() {
        let (device, _, fds) = direct_device();
        sender(&device)();
        assert!(is_readable(fds));
        PollDetector::new(&device).idle(&device, &mut WaitSet::new());
        assert!(!device.lock().direct.is_some());
        assert!(!is_readable(fds), "packets wake no thread");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_non_blocking_channel_becomes_direct_only_if_its_program_has_met_eagain() {
        let (device, channel, fds) = device();
        set_nonblocking(fds, true);
        device.begin_direct(channel, device.now());
        assert!(!device.lock().direct.is_some());
        assert!(would_block(&device, channel, fds));
        device.begin_direct(channel, device.now());
        assert!(device.lock().direct.is_some());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn the_server_is_woken_for_a_packet_whose_wakeup_was_cleared() {
        let (device, channel, _) = device();
        let mut send = sender(&device);
        send();
        {
            let mut core = device.lock();
            core.progress(device.now());
            assert!(core.arm_wakeups());
            device.server.waits_until(None);
        }
        send();
        device.begin_direct(channel, device.now());
        assert!(!device.lock().direct.is_some());
        assert!(device.server.was_woken());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_delayed_ack_does_not_wake_the_server_of_a_direct_channel() {
        let (device, channel, fds) = direct_device();
        device.lock().state.delay_ack(0, device.now());
        device.server.waits_until(None);
        assert!(would_block(&device, channel, fds));
        assert!(device.lock().state.ack_deadline.is_none(), "the ACK is sent at once");
        assert!(!device.server.was_woken());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_thread_that_is_cancelled_while_it_waits_leaves_the_device_unlocked() {
        extern "C" fn wait(of: *mut libc::c_void) -> *mut libc::c_void {
            // SAFETY: the test joins this thread before it drops the data.
            let (device, channel, fds) = unsafe { &*of.cast::<(Device, u32, ChannelFds)>() };
            let cancel = Cancel::defer();
            _ = device.wait_for_event(*channel, *fds, cancel);
            std::ptr::null_mut()
        }
        let of = device();
        for _ in 0..10 {
            become_direct(&of.0, of.1, of.2);
            let mut thread = 0;
            // SAFETY: the argument outlives the thread. The thread has nothing to drop where it is cancelled.
            unsafe {
                let argument = (&raw const of).cast_mut().cast();
                assert_eq!(libc::pthread_create(&raw mut thread, std::ptr::null(), wait, argument), 0);
                assert_eq!(libc::pthread_cancel(thread), 0);
                assert_eq!(libc::pthread_join(thread, std::ptr::null_mut()), 0);
            }
            raise(&of.0, of.1);
            take_event(&of.0, of.1, of.2);
        }
    }
}
