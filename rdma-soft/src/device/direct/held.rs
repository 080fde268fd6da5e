//! Events of a direct channel that are held.

use crate::device::core::Core;
use crate::device::lock::Device;

impl Core {
    /// Holds the event that a poll of `cq` has just raised on the direct channel. Returns whether there was one.
    ///
    /// Only if packets make the descriptor readable. Otherwise, a program that waits for it in `poll(2)` would always wait for the
    /// next scan.
    pub(in crate::device) fn hold_event(&mut self, cq: u32) -> bool {
        let current = self.direct.current.as_ref().filter(|current| current.readable.is_some());
        current.is_some_and(|current| self.state.shared.events.hold(current.channel, cq))
    }
}

impl Device {
    /// Raises the events that are held. For a poll that holds one and leaves completions in its queue.
    #[cold]
    pub(crate) fn release_events(&self) {
        let mut core = self.lock();
        if let Some(current) = &core.direct.current {
            let channel = current.channel;
            core.state.shared.events.release(channel);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::tests::{channel_of, direct_device, is_readable, set_nonblocking, take_event, would_block};
    use super::*;
    use crate::device::channel::ChannelFds;
    use crate::device::cq::{Completions, Cq};

    /// The queue whose events [`take_event`] expects.
    const CQ: u32 = 7;

    /// Raises an event of [`CQ`] like a poll of the queue `polled`. Returns whether it is held.
    fn raise_in_poll(device: &Device, channel: u32, polled: u32) -> bool {
        let mut core = device.lock();
        core.state.shared.events.notify(channel, CQ);
        core.hold_event(polled)
    }

    fn device_that_holds() -> (Device, u32, ChannelFds) {
        let (device, channel, fds) = direct_device();
        assert!(raise_in_poll(&device, channel, CQ));
        assert!(!is_readable(fds));
        (device, channel, fds)
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn the_program_gets_a_held_event_when_it_asks_and_is_not_woken_for_it() {
        let (device, channel, fds) = device_that_holds();
        take_event(&device, channel, fds);
        assert!(would_block(&device, channel, fds));
        assert!(!is_readable(fds));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_held_event_makes_the_descriptor_readable_at_a_scan_and_when_completions_are_left_or_the_mode_ends() {
        let releases: [fn(&Device, u32); 3] = [
            |device, _| _ = device.review_direct(&mut device.lock(), false, device.now()),
            |device, _| device.release_events(),
            Device::end_direct,
        ];
        for release in releases {
            let (device, channel, fds) = device_that_holds();
            release(&device, channel);
            assert!(is_readable(fds));
            take_event(&device, channel, fds);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn arming_a_queue_that_has_a_completion_raises_its_held_event() {
        let (device, channel, fds) = device_that_holds();
        let mut cq = Cq {
            completions: Arc::new(Completions::new(1)),
            context: 0,
            channel: Some(channel),
            object: 0,
            users: 0,
            queued_events: 1,
            events: (0, 0),
        };
        cq.notify_armed(CQ, &mut device.lock().state.shared.events);
        assert!(is_readable(fds));
        take_event(&device, channel, fds);
        assert!(would_block(&device, channel, fds), "there was one event");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn only_an_event_of_the_polled_queue_on_the_direct_channel_is_held() {
        let (device, channel, fds) = direct_device();
        assert!(!raise_in_poll(&device, channel, CQ + 1));
        assert!(is_readable(fds));
        take_event(&device, channel, fds);
        let (other, others) = channel_of(&device);
        set_nonblocking(others, true);
        assert!(!raise_in_poll(&device, other, CQ));
        assert!(is_readable(others));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_held_event_of_a_queue_that_is_destroyed_is_gone() {
        let (device, channel, fds) = device_that_holds();
        device.lock().state.shared.events.channels.get_mut(channel).unwrap().remove_cq(CQ);
        assert!(would_block(&device, channel, fds));
        device.end_direct(channel);
        assert!(!is_readable(fds));
    }
}
