//! Posts that wait for the next poll, which sends them together.
//!
//! A packet over UDP costs a system call and a pass through the network stack. Many packets of one length that go to one peer
//! together cost hardly more. A program that polls all the time and serves many connections handles the completions of a poll,
//! posts a reply to each, and polls again. So its posts wait for that poll, which sends all requests and ACKs.
//!
//! If no poll sends them, the server thread does, at one of its next two [checks](super::poll_detector::IDLE_CHECK) whether the
//! program still polls.

use std::time::Duration;

use crate::transport::Time;

/// Every 32nd post since the last poll does not wait. It takes those along that do.
const MOST_POSTS: u32 = 32;

/// Most bytes of data in a post that waits. A longer post is sent at once, so that the peer can begin with it.
const MOST_BYTES: u64 = 16 << 10;

/// When posts have waited for this time, the next one does not wait either. It takes them along.
const LONGEST_WAIT: Duration = Duration::from_micros(50);

/// Decides which posts wait.
#[derive(Debug)]
pub(super) struct Deferral {
    /// The thread that has polled last. Posts of other threads do not wait: they would burden the polling thread.
    poller: usize,
    /// Posts of that thread since its last poll.
    posts: u32,
    /// The queue pair of the last post.
    qp: u32,
    /// Posts since the last poll that went to another queue pair than the post before.
    changes: u32,
    /// The changes before the last poll. Polls without a post before them do not count.
    changes_before: u32,
    /// Since when posts wait.
    waiting_since: Option<Time>,
}

impl Deferral {
    pub(super) fn new() -> Deferral {
        Deferral { poller: 0, posts: 0, qp: 0, changes: 0, changes_before: 0, waiting_since: None }
    }

    /// Notes a post to a queue pair, with `bytes` of data. Returns whether it waits.
    ///
    /// It waits only if posts to other queue pairs probably follow soon, because there were some before the last poll. For a single
    /// queue pair it does not pay to wait: its peer can begin with the first message while the program prepares the next.
    pub(super) fn post(&mut self, number: u32, bytes: u64, now: Time) -> bool {
        if self.poller != thread() {
            return false;
        }
        self.posts = self.posts.wrapping_add(1);
        if self.qp != number {
            self.qp = number;
            self.changes = self.changes.wrapping_add(1);
        }
        let is_late = self.waiting_since.is_some_and(|since| now > since + LONGEST_WAIT);
        let waits = self.changes_before > 1 && self.posts % MOST_POSTS != 0 && bytes <= MOST_BYTES && !is_late;
        if waits {
            self.waiting_since.get_or_insert(now);
        }
        waits
    }

    /// Notes a poll of the calling thread.
    pub(super) fn poll(&mut self) {
        self.poller = thread();
        if std::mem::take(&mut self.posts) != 0 {
            self.changes_before = std::mem::take(&mut self.changes);
        }
    }

    /// Notes that all posts are sent now.
    pub(super) fn end(&mut self) {
        self.waiting_since = None;
    }
}

/// A number that no other running thread has.
fn thread() -> usize {
    thread_local!(static PLACE: u8 = const { 0 });
    PLACE.with(|place| std::ptr::from_ref(place).addr())
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, UdpSocket};
    use std::time::Instant;

    use rdma_sys::{IBV_QPS_ERR, IBV_QPT_RC};

    use super::*;
    use crate::device::link::Link;
    use crate::device::lock::Device;
    use crate::device::net_address::Destination;
    use crate::device::poll_detector::PollDetector;
    use crate::device::server::WaitSet;
    use crate::device::state::State;
    use crate::device::target::{PEER, Target, post};
    use crate::wire::UDP_PORT;

    /// Time limit for another thread.
    const HANG: Duration = Duration::from_secs(60);

    impl Deferral {
        fn is_waiting(&self) -> bool {
            self.waiting_since.is_some()
        }
    }

    /// A thread that has posted to two queue pairs before its last poll.
    fn busy() -> Deferral {
        Deferral { poller: thread(), changes_before: 2, ..Deferral::new() }
    }

    #[test]
    fn posts_wait_if_there_were_some_to_several_queue_pairs_before_the_last_poll() {
        let mut deferral = Deferral::new();
        assert!(!deferral.post(1, 0, Time(0)), "this thread does not poll");
        deferral.poll();
        for (posts, is_busy) in [(&[1][..], false), (&[1, 2], true), (&[2, 2, 2], false), (&[1, 2], true)] {
            assert!(posts.iter().all(|number| !deferral.post(*number, 0, Time(0))), "{posts:?}");
            deferral.poll();
            // Without a post in between, this poll changes nothing.
            deferral.poll();
            assert_eq!(deferral.post(2, 0, Time(0)), is_busy, "{posts:?}");
            deferral.end();
            assert!(!deferral.is_waiting());
            deferral.poll();
        }
    }

    #[test]
    fn a_long_post_a_late_one_and_every_32nd_do_not_wait() {
        let mut deferral = busy();
        assert!(deferral.post(1, MOST_BYTES, Time(0)) && !deferral.post(1, MOST_BYTES + 1, Time(0)));
        let last = Time(0) + LONGEST_WAIT;
        assert!(deferral.post(1, 0, last) && !deferral.post(1, 0, last + Duration::from_nanos(1)));
        deferral = busy();
        assert!((1..MOST_POSTS).all(|_| deferral.post(1, 0, Time(0))) && !deferral.post(1, 0, Time(0)));
        assert!(deferral.post(1, 0, Time(0)));
    }

    #[test]
    fn posts_of_a_thread_that_does_not_poll_do_not_wait() {
        let mut deferral = busy();
        let waits = std::thread::scope(|scope| scope.spawn(|| deferral.post(1, 0, Time(0))).join().unwrap());
        assert!(!waits && deferral.post(1, 0, Time(0)));
    }

    /// A device without a server thread that is idle for this thread, and two queue pairs with posts for `peer` that wait.
    ///
    /// Each queue pair owes an ACK.
    fn waiting(peer: IpAddr) -> (Device, Box<Target>) {
        let device = Device::new().unwrap();
        assert!(device.server.begin_idle(device.server.waits()));
        let mut target = Target::new(IBV_QPT_RC, 0);
        let numbers = [target.qp, target.add_qp(IBV_QPT_RC)];
        for number in numbers {
            target.qp = number;
            target.arrive(0, Time(0));
        }
        {
            let mut core = device.lock();
            core.state = std::mem::replace(&mut target.state, State::new());
            core.state.shared.packets = 0;
            core.deferral = busy();
        }
        for number in numbers {
            let mut core = device.lock();
            let qp = core.state.qps.get_mut(&number).unwrap();
            qp.peer = Some(Destination { link: 0, address: peer, class: 0 });
            qp.attr.dest_qp_num = number;
            post(qp);
            device.start_posted(core, number, 0);
            // The next post is not late, however slow the machine is.
            let since = &mut device.lock().deferral.waiting_since;
            *since = since.map(|_| device.now() + HANG);
        }
        let core = device.lock();
        assert!(core.deferral.is_waiting() && core.state.shared.packets == 0);
        drop(core);
        (device, target)
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_poll_sends_the_requests_and_the_acks_of_several_queue_pairs_together() {
        const SEND_ONLY: u8 = 4;
        const ACKNOWLEDGE: u8 = 17;
        // No other test sends packets to this address.
        let address = Ipv4Addr::new(127, 1, 1, 2).into();
        let peer = UdpSocket::bind((address, UDP_PORT)).unwrap();
        peer.set_read_timeout(Some(HANG)).unwrap();
        let (device, _target) = waiting(address);
        device.poll(0);
        let opcodes: Vec<u8> = (0..4)
            .map(|_| {
                let mut packet = [0; 64];
                peer.recv(&mut packet).unwrap();
                packet[0]
            })
            .collect();
        // The batch has grouped them. Each queue pair has posted one of both.
        assert_eq!(opcodes, [SEND_ONLY, SEND_ONLY, ACKNOWLEDGE, ACKNOWLEDGE]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn only_posts_of_queue_pairs_that_can_send_wait() {
        let (device, target) = waiting(PEER);
        let core = &mut *device.lock();
        assert!(core.defer(target.qp, 0, Time(0)));
        core.state.qps.get_mut(&target.qp).unwrap().state = IBV_QPS_ERR;
        assert!(!core.defer(target.qp, 0, Time(0)));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn posts_do_not_wait_if_they_go_through_shared_memory() {
        let (device, target) = waiting(PEER);
        let other = Device::new().unwrap();
        let address = other.lock().links[0].socket.address();
        let core = &mut *device.lock();
        core.state.qps.get_mut(&target.qp).unwrap().peer = Some(Destination { link: 0, address, class: 0 });
        assert!(core.defer(target.qp, 0, Time(0)));
        let Link { socket, outbox, .. } = &mut core.links[0];
        outbox.connect(socket, address, device.now());
        assert!(outbox.shares_memory_with(&address));
        assert!(!core.defer(target.qp, 0, Time(0)));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_post_does_not_wait_once_the_server_is_not_idle() {
        let (device, target) = waiting(PEER);
        device.server.leave_idle();
        let mut core = device.lock();
        post(core.state.qps.get_mut(&target.qp).unwrap());
        device.start_posted(core, target.qp, 0);
        let core = device.lock();
        assert!(!core.deferral.is_waiting());
        assert_eq!(core.state.shared.packets, 5, "three messages and two ACKs");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn the_server_sends_posts_that_no_poll_sends() {
        let (device, _target) = waiting(PEER);
        device.server.leave_idle();
        let mut detector = PollDetector::new(&device);
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // These polls do not get the lock.
                while device.lock().deferral.is_waiting() {
                    assert!(start.elapsed() < HANG);
                    device.count_polls(1);
                    std::thread::sleep(Duration::from_micros(50));
                }
            });
            while device.lock().deferral.is_waiting() {
                assert!(start.elapsed() < HANG);
                detector.idle(&device, &mut WaitSet::new());
            }
        });
        assert_eq!(device.lock().state.shared.packets, 4);
    }
}
