//! Delayed ACKs, which wait for the program's reply.

use std::time::Duration;

use crate::transport::Time;

/// Longest delay of an ACK, unless a channel is [direct](super::direct). A reply within this time is prompt.
pub(crate) const ACK_DELAY: Duration = Duration::from_micros(200);

/// Replies in a row that the first delay requires.
const REPLIES: u16 = 4;

/// Most replies in a row that a delay may require.
const MOST_REPLIES: u16 = 1024;

/// Decides whether an ACK waits for the queue pair's next request.
///
/// A program that exchanges requests and replies posts soon after a message arrives. A separate ACK then costs both ends a packet,
/// and wakes an end that sleeps. Worse, some programs poll for the completion of their own message and then spin on memory. Such a
/// program stops polling when the ACK arrives, just before the reply. An ACK that is sent with the reply avoids both.
///
/// The history of the queue pair predicts whether the program replies, as with delayed ACKs of TCP. Each delay without a reply
/// doubles the number of replies in a row that the next delay requires.
#[derive(Debug)]
pub(crate) struct AckDelay {
    /// Replies in a row.
    replies: u16,
    /// Replies in a row that a delay requires.
    wanted: u16,
    /// When the last ACK was sent alone, unless a request followed.
    alone_at: Option<Time>,
    /// Whether an ACK is being delayed.
    is_waiting: bool,
    /// Whether a request was just sent, which the ACK that is due follows.
    is_behind_request: bool,
}

impl AckDelay {
    pub(crate) const fn new() -> AckDelay {
        AckDelay { replies: 0, wanted: REPLIES, alone_at: None, is_waiting: false, is_behind_request: false }
    }

    /// Decides whether the ACK that is due is delayed. Returns whether it is.
    pub(crate) fn begin(&mut self) -> bool {
        self.is_waiting |= self.replies >= self.wanted && !self.is_behind_request;
        self.is_waiting
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.is_waiting
    }

    /// Records that a request is sent. If an ACK `is_due`, it is sent after the request, without a delay.
    pub(crate) fn request_sent(&mut self, now: Time, is_due: bool) {
        let was_prompt = self.alone_at.take().is_some_and(|at| now <= at + ACK_DELAY);
        if was_prompt || (is_due && !self.is_behind_request) {
            self.replies = self.replies.saturating_add(1);
            // Many replies make up for earlier delays without one.
            if self.replies >= self.wanted.saturating_mul(16) {
                self.wanted = (self.wanted / 2).max(REPLIES);
                self.replies = self.wanted;
            }
        }
        self.is_behind_request = is_due;
        self.is_waiting = false;
    }

    /// Records that an ACK is sent.
    pub(crate) fn ack_sent(&mut self, now: Time) {
        if std::mem::take(&mut self.is_behind_request) {
            return;
        }
        if self.is_waiting {
            self.wanted = self.wanted.saturating_mul(2).min(MOST_REPLIES);
        }
        // The program did not reply to the previous ACK, or not in time.
        if self.is_waiting || self.alone_at.is_some() {
            self.replies = 0;
        }
        self.is_waiting = false;
        self.alone_at = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use rdma_sys::IBV_QPT_RC;

    use super::*;
    use crate::device::core::{Core, Sources};
    use crate::device::lock::Device;
    use crate::device::qp::{Answers, Sending};
    use crate::device::state::State;
    use crate::device::target::Target;

    /// Sends all packets. Returns for each whether it is an ACK.
    fn sent(target: &mut Target, now: Time) -> Vec<bool> {
        let State { qps, shared, .. } = &mut target.state;
        let qp = qps.get_mut(&target.qp).unwrap();
        let packets = std::iter::from_fn(|| qp.transmit(now, Answers::DelayAcks, shared));
        packets
            .map(|sending| match sending {
                Sending::Packet(_, outgoing) => outgoing.operation.is_answer(),
                Sending::Datagram(_) => unreachable!(),
            })
            .collect()
    }

    #[test]
    fn an_ack_follows_the_reply_unless_the_peer_sends_more() {
        let mut target = Target::new(IBV_QPT_RC, 0);
        for number in 0..3 {
            target.arrive(number, Time(0));
            assert_eq!(sent(&mut target, Time(0)), [true], "nothing is known of the program yet");
            target.post();
            assert_eq!(sent(&mut target, Time(1)), [false]);
        }
        target.arrive(3, Time(0));
        target.post();
        assert_eq!(sent(&mut target, Time(0)), [false, true]);
        target.arrive(4, Time(0));
        assert_eq!(sent(&mut target, Time(0)), [false; 0]);
        target.arrive(5, Time(0));
        assert_eq!(sent(&mut target, Time(0)), [true], "the peer does not wait for a reply");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_delayed_ack_is_sent_at_its_deadline() {
        // This device has no server thread.
        let device = Device::new().unwrap();
        let mut target = Target::new(IBV_QPT_RC, 0);
        reply(&mut target.state.qps.get_mut(&target.qp).unwrap().ack_delay, REPLIES);
        target.arrive(0, Time(0));
        let mut core = device.lock();
        core.state = std::mem::replace(&mut target.state, State::new());
        let is_waiting = |core: &Core| core.state.qps[&target.qp].ack_delay.is_waiting();
        core.progress_from(Time(0), Sources::Readable(&[]));
        assert!(is_waiting(&core));
        assert_eq!(core.wake_at(), Some(Time(0) + ACK_DELAY));
        core.progress_from(Time(0) + ACK_DELAY, Sources::Readable(&[]));
        assert!(!is_waiting(&core));
        assert_eq!(core.wake_at(), None);
    }

    /// Simulates `count` replies, each soon after a separate ACK.
    fn reply(delay: &mut AckDelay, count: u16) {
        for _ in 0..count {
            delay.ack_sent(Time(0));
            delay.request_sent(Time(0) + ACK_DELAY, false);
        }
    }

    #[test]
    fn an_ack_is_delayed_once_the_program_has_replied_often_enough() {
        let mut delay = AckDelay::new();
        reply(&mut delay, REPLIES - 1);
        assert!(!delay.begin());
        reply(&mut delay, 1);
        assert!(delay.begin() && delay.is_waiting());
        delay.request_sent(Time(0), true);
        assert!(!delay.begin(), "it follows the reply");
        delay.ack_sent(Time(0));
        assert!(delay.begin(), "so does the next");
    }

    #[test]
    fn replies_that_take_longer_than_the_delay_do_not_count() {
        let mut delay = AckDelay::new();
        for _ in 0..2 * REPLIES {
            delay.ack_sent(Time(0));
            delay.request_sent(Time(1) + ACK_DELAY, false);
        }
        assert!(!delay.begin());
    }

    #[test]
    fn acks_without_replies_in_between_are_not_delayed() {
        let mut delay = AckDelay::new();
        reply(&mut delay, REPLIES);
        delay.ack_sent(Time(0));
        delay.ack_sent(Time(1));
        assert!(!delay.begin());
    }

    #[test]
    fn each_delay_without_a_reply_doubles_the_required_replies() {
        let mut delay = AckDelay::new();
        let mut wanted = REPLIES;
        for _ in 0..4 {
            reply(&mut delay, wanted - 1);
            assert!(!delay.begin(), "{wanted}");
            reply(&mut delay, 1);
            assert!(delay.begin(), "{wanted}");
            delay.ack_sent(Time(0));
            delay.request_sent(Time(1) + ACK_DELAY, false);
            wanted *= 2;
        }
    }

    #[test]
    fn many_replies_make_up_for_a_delay_without_one() {
        let mut delay = AckDelay::new();
        reply(&mut delay, REPLIES);
        assert!(delay.begin());
        delay.ack_sent(Time(0));
        assert_eq!(delay.wanted, 2 * REPLIES);
        reply(&mut delay, 32 * REPLIES);
        assert_eq!(delay.wanted, REPLIES);
    }
}
