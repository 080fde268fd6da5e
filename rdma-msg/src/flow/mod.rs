//! Flow control of one end of a connection. It does no input or output.
//!
//! Each end has a *window*: receives for data packets of the peer. It also has [`CONTROL`] receives for control packets, and
//! [`OFFERS`] receives for answers to its offers, which are never lent to data. A packet carries absolute counts: how many data
//! packets and how many control packets the peer may have sent in total, and how many offers of the peer are done. So a packet
//! that carries counts replaces all earlier ones, and counts need no acknowledgement.
//!
//! All packets arrive in one order and consume the same receive queue. Control packets and answers are handled at once, and their
//! receives are posted again. A data packet occupies its receive until the program returns it.
//!
//! A packet of [`Class::Space`] uses credit for data, but has nothing for the program. Its receive is posted again at once.
//!
//! A data packet can *offer* memory that the peer is to read. The peer answers when it has read it. An answer needs no credit:
//! it uses a receive that the end has reserved for its offer. At most [`OFFERS`] offers are open, so a peer can always answer.
//!
//! | rule | consequence |
//! |---|---|
//! | credits granted never exceed receives posted | the peer never finds the receive queue empty (RNR) |
//! | the send queue has [`CONTROL_SENDS`] entries for control packets | data never delays an update |
//! | an answer to each offer has a receive and an entry of the send queue | an answer never waits for data in the other direction |
//! | an update is due at half a window, or when the peer has no credit left | the peer always learns of a free receive |
//! | an update is due when the peer has sent its last data | the peer knows that all was taken, also if the last ACK is lost |
//! | updates leave credit for one control packet | the last update or an abort can always use it |
//! | only data makes an update due, never an update | two ends do not exchange updates for ever |
//!
//! The acknowledgement of a packet may arrive after the peer's answer to it. So the credit of the peer and the entries of the local
//! send queue are counted separately.
//!
//! The tests explore all orders of events.
//!
//! # Heartbeats
//!
//! The ends take turns to send heartbeats, which show that their programs run. The passive side sends the first one. So at most one
//! heartbeat is in flight, and each end has one receive for it.
//!
//! # Windows that change
//!
//! An end whose receives are shared with other connections starts with a small window. When its peer has used up its credit, the
//! end *grows* the window, if it can reserve further receives. A peer that has sent nothing for a while *waives* credit: it skips
//! these packets in its count, and the receives are free for other connections. So credit is never taken from a peer, and counts
//! stay absolute. Each packet also has the window of its sender, which tells how many packets the sender has taken.

#[cfg(test)]
mod lies;
#[cfg(test)]
mod tests;

use crate::error::Violation;
use crate::wire::Class;

/// Receives for control packets. Updates leave one for the last update or an abort.
pub(crate) const CONTROL: u32 = 3;

/// Entries of the send queue for control packets.
pub(crate) const CONTROL_SENDS: u32 = 1;

/// The most offers of an end that are open, each with a receive for its answer.
pub(crate) const OFFERS: u32 = 2;

/// Entries of the send queue for answers. An answer covers all offers before it.
pub(crate) const ANSWER_SENDS: u32 = 1;

/// Receives for heartbeats.
pub(crate) const HEARTBEATS: u32 = 1;

/// Entries of the send queue for heartbeats.
pub(crate) const HEARTBEAT_SENDS: u32 = 1;

/// Entries of the send queue for an abort.
pub(crate) const ABORT_SENDS: u32 = 1;

/// Counts that each packet carries. They wrap.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Counts {
    /// Receives for data packets at the sender of this.
    pub(crate) window: u32,
    /// Number of data packets that the receiver of this may have sent.
    pub(crate) data: u32,
    /// Number of control packets that the receiver of this may have sent.
    pub(crate) control: u32,
    /// Number of offers of the receiver of this that are done.
    pub(crate) answered: u32,
    /// Whether its sender has no credit left for data.
    pub(crate) is_out_of_credit: bool,
}

/// What the ends agree on when they connect.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Limits {
    /// Initial and smallest window of this end; at least 1.
    pub(crate) window: u32,
    /// Largest window of this end.
    pub(crate) max_window: u32,
    /// Initial and smallest window of the peer; at least 1.
    pub(crate) peer_window: u32,
    /// Largest window of the peer.
    pub(crate) peer_max_window: u32,
    /// Entries of the send queue for data; at least 1.
    pub(crate) sends: u32,
    /// Receives for answers, and so the most offers of this end that are open: 1 to [`OFFERS`].
    pub(crate) offers: u32,
    /// Whether this end has made the connection (the active side). The other end sends the first heartbeat.
    pub(crate) is_active: bool,
}

/// One end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Flow {
    limits: Limits,
    /// Receives for data at this end.
    window: u32,
    /// Packets sent, or waived.
    sent: Counts,
    /// Packets that the peer allows.
    allowed: Counts,
    /// Entries of the send queue in use, by class.
    in_flight: [u32; 4],
    /// Whether it is the turn of this end to send a heartbeat.
    may_send_heartbeat: bool,
    /// Packets received, or waived.
    received: Counts,
    /// Offers made.
    offers_made: u32,
    /// Offers of the peer.
    offers_received: u32,
    /// Offers of the peer that are done.
    offers_done: u32,
    /// Data packets whose receive is posted again, or that were waived.
    returned: u32,
    /// What the peer was told last.
    told: Counts,
    /// Whether the peer has sent its last data.
    has_ended: bool,
}

impl Flow {
    /// Both ends have posted their receives.
    pub(crate) fn new(limits: Limits) -> Self {
        Flow::starting_at(limits, 0)
    }

    /// All counts start at `start`, to test that they wrap.
    fn starting_at(limits: Limits, start: u32) -> Self {
        let counts = |window: u32, data: u32, control: u32| Counts {
            window,
            data: start.wrapping_add(data),
            control: start.wrapping_add(control),
            answered: start,
            is_out_of_credit: false,
        };
        Flow {
            limits,
            window: limits.window,
            sent: counts(0, 0, 0),
            allowed: counts(limits.peer_window, limits.peer_window, CONTROL),
            in_flight: [0; 4],
            may_send_heartbeat: !limits.is_active,
            received: counts(0, 0, 0),
            offers_made: start,
            offers_received: start,
            offers_done: start,
            returned: start,
            told: counts(limits.window, limits.window, CONTROL),
            has_ended: false,
        }
    }

    /// Number of data packets that can be sent now.
    pub(crate) fn room(&self) -> u32 {
        let entries = self.limits.sends - self.data_in_flight();
        self.credit().min(entries)
    }

    /// Number of data packets for which the peer has receives.
    pub(crate) fn credit(&self) -> u32 {
        self.allowed.data.wrapping_sub(self.sent.data)
    }

    /// The peer has sent its last data.
    pub(crate) fn peer_finished(&mut self) {
        self.has_ended = true;
    }

    /// Number of data packets that were sent or waived.
    pub(crate) fn sent(&self) -> u32 {
        self.sent.data
    }

    /// Whether the peer has said that it has received the first `packets` data packets; `packets` is at most [`Flow::sent`].
    ///
    /// It says so when it has returned as many receives.
    pub(crate) fn has_taken(&self, packets: u32) -> bool {
        let taken = self.allowed.data.wrapping_sub(self.allowed.window);
        self.sent.data.wrapping_sub(taken) <= self.sent.data.wrapping_sub(packets)
    }

    /// Number of data packets in the send queue.
    pub(crate) fn data_in_flight(&self) -> u32 {
        self.in_flight[entry(Class::Data)]
    }

    /// Sends a data packet with these counts. `None` without credit, or if the send queue is full.
    pub(crate) fn send(&mut self) -> Option<Counts> {
        if self.room() == 0 {
            return None;
        }
        self.sent.data = self.sent.data.wrapping_add(1);
        let counts = self.post(Class::Data);
        Some(Counts { is_out_of_credit: self.credit() == 0, ..counts })
    }

    /// Number of data packets that this end can waive: its credit beyond the smallest window of the peer. `None` if there is none,
    /// or if the send queue is full.
    pub(crate) fn waivable(&self) -> Option<u32> {
        let is_elastic = self.limits.peer_max_window != self.limits.peer_window;
        let count = self.credit().saturating_sub(self.limits.peer_window);
        (is_elastic && self.room() != 0 && count != 0).then_some(count)
    }

    /// Sends a packet that waives `count` data packets, at most [`Flow::waivable`]. It uses a receive like data.
    pub(crate) fn waive(&mut self, count: u32) -> Counts {
        self.sent.data = self.sent.data.wrapping_add(count).wrapping_add(1);
        self.post(Class::Waiver)
    }

    /// The peer waives `count` data packets. The receive of the waiver is posted again, and `count` receives are free for others.
    pub(crate) fn waived(&mut self, counts: Counts, count: u32) -> Result<(), Violation> {
        let credit = self.told.data.wrapping_sub(self.received.data);
        if count >= credit || count > self.window - self.limits.window {
            return Err(Violation::ImpossibleWaiver);
        }
        self.window -= count;
        self.received.data = self.received.data.wrapping_add(count);
        self.returned = self.returned.wrapping_add(count).wrapping_add(1);
        self.received(counts)
    }

    /// Receives by which to grow the window after a data packet; 0 unless the peer has used up its credit.
    pub(crate) fn growth(&self) -> u32 {
        if self.allowed.is_out_of_credit { self.window.min(self.limits.max_window - self.window) } else { 0 }
    }

    /// Further receives are posted for data.
    pub(crate) fn grow(&mut self, receives: u32) {
        self.window += receives;
    }

    /// Number of data packets that were received, and whose receives are not posted again.
    pub(crate) fn unreturned(&self) -> u32 {
        self.received.data.wrapping_sub(self.returned)
    }

    /// Whether this end has made the connection.
    pub(crate) fn is_active(&self) -> bool {
        self.limits.is_active
    }

    /// Receives for data at this end.
    pub(crate) fn window(&self) -> u32 {
        self.window
    }

    /// Whether an offer can be added to a data packet.
    pub(crate) fn can_offer(&self) -> bool {
        self.offers_open() < self.limits.offers
    }

    /// Number of offers that the peer has not answered.
    pub(crate) fn offers_open(&self) -> u32 {
        self.offers_made.wrapping_sub(self.allowed.answered)
    }

    /// Adds an offer to a data packet. Only if [`Flow::can_offer`].
    pub(crate) fn offer(&mut self) {
        self.offers_made = self.offers_made.wrapping_add(1);
    }

    /// An offer has arrived.
    pub(crate) fn offer_received(&mut self) -> Result<(), Violation> {
        if self.offers_received.wrapping_sub(self.told.answered) >= OFFERS {
            return Err(Violation::OffersBeyondLimit);
        }
        self.offers_received = self.offers_received.wrapping_add(1);
        Ok(())
    }

    /// The oldest offer of the peer that was not done is done now.
    pub(crate) fn offer_done(&mut self) {
        debug_assert_ne!(self.offers_done, self.offers_received, "it was offered");
        self.offers_done = self.offers_done.wrapping_add(1);
    }

    /// Sends an answer with these counts, if the peer does not know of all offers that are done. `None` if the send queue is full.
    pub(crate) fn answer(&mut self) -> Option<Counts> {
        let is_due = self.offers_done != self.told.answered;
        (is_due && self.in_flight[entry(Class::Answer)] < ANSWER_SENDS).then(|| self.post(Class::Answer))
    }

    /// Receives that were reposted since the last grant.
    fn untold(&self) -> u32 {
        self.grant().data.wrapping_sub(self.told.data)
    }

    /// Whether to tell the peer of its credit, unless a data packet tells it.
    fn is_update_due(&self) -> bool {
        let has_none = self.told.data == self.received.data;
        self.untold() >= self.window.div_ceil(2) || (has_none && self.untold() != 0)
    }

    /// Receives that have to be posted again before an update can be due; at least 1.
    pub(crate) fn returns_until_update(&self) -> u32 {
        let until_half = self.window.div_ceil(2).saturating_sub(self.untold());
        let until_last = if self.has_ended { self.unreturned() } else { u32::MAX };
        let has_none = self.told.data == self.received.data;
        if has_none { 1 } else { until_half.min(until_last).max(1) }
    }

    /// Whether to tell the peer that all its data was taken.
    fn is_last_update_due(&self) -> bool {
        self.has_ended && self.returned == self.received.data && self.untold() != 0
    }

    /// Sends a control packet with these counts, if an update is due. `None` if not, without credit for control packets, or if the
    /// send queue is full.
    pub(crate) fn update(&mut self) -> Option<Counts> {
        let credit = self.allowed.control.wrapping_sub(self.sent.control);
        // The peer need not send anything after the last update, so it has to have credit for it.
        let may_send = (self.is_last_update_due() && credit != 0) || (self.is_update_due() && credit > 1);
        if !may_send || self.in_flight[entry(Class::Control)] >= CONTROL_SENDS {
            return None;
        }
        self.sent.control = self.sent.control.wrapping_add(1);
        Some(self.post(Class::Control))
    }

    /// Sends an abort as a control packet with these counts. `None` without credit for control packets.
    ///
    /// Updates leave credit for it, except for the last update. An abort is the last packet.
    pub(crate) fn abort(&mut self) -> Option<Counts> {
        if self.allowed.control == self.sent.control {
            return None;
        }
        self.sent.control = self.sent.control.wrapping_add(1);
        Some(self.post(Class::Abort))
    }

    /// Sends a heartbeat with these counts. `None` if it is the turn of the peer, or if the send queue is full.
    pub(crate) fn heartbeat(&mut self) -> Option<Counts> {
        if !self.may_send_heartbeat || self.in_flight[entry(Class::Heartbeat)] >= HEARTBEAT_SENDS {
            return None;
        }
        self.may_send_heartbeat = false;
        Some(self.post(Class::Heartbeat))
    }

    /// A heartbeat has arrived. Its receive is posted again.
    pub(crate) fn heartbeat_received(&mut self, counts: Counts) -> Result<(), Violation> {
        if self.may_send_heartbeat {
            return Err(Violation::UnexpectedHeartbeat);
        }
        self.may_send_heartbeat = true;
        self.learn(counts)
    }

    fn post(&mut self, class: Class) -> Counts {
        self.in_flight[entry(class)] += 1;
        self.told = self.grant();
        self.told
    }

    /// The receives that are posted, as counts for the peer.
    fn grant(&self) -> Counts {
        Counts {
            window: self.window,
            data: self.returned.wrapping_add(self.window),
            control: self.received.control.wrapping_add(CONTROL),
            answered: self.offers_done,
            is_out_of_credit: false,
        }
    }

    /// A send has completed.
    pub(crate) fn completed(&mut self, class: Class) {
        let in_flight = &mut self.in_flight[entry(class)];
        *in_flight = in_flight.saturating_sub(1);
    }

    /// A data packet has arrived.
    pub(crate) fn received(&mut self, counts: Counts) -> Result<(), Violation> {
        if self.told.data == self.received.data {
            return Err(Violation::DataBeyondCredit);
        }
        self.received.data = self.received.data.wrapping_add(1);
        self.learn(counts)
    }

    /// The receive of a data packet is posted again.
    pub(crate) fn returned(&mut self) {
        debug_assert_ne!(self.returned, self.received.data, "it was received");
        self.returned = self.returned.wrapping_add(1);
    }

    /// An update has arrived. Its receive is posted again.
    pub(crate) fn updated(&mut self, counts: Counts) -> Result<(), Violation> {
        if self.told.control == self.received.control {
            return Err(Violation::ControlBeyondCredit);
        }
        self.received.control = self.received.control.wrapping_add(1);
        self.learn(counts)
    }

    /// An answer has arrived. Its receive is posted again.
    pub(crate) fn answered(&mut self, counts: Counts) -> Result<(), Violation> {
        if counts.answered == self.allowed.answered {
            return Err(Violation::ImpossibleAnswer);
        }
        self.learn(counts)
    }

    fn learn(&mut self, counts: Counts) -> Result<(), Violation> {
        let Limits { peer_window, peer_max_window, .. } = self.limits;
        if !(peer_window..=peer_max_window).contains(&counts.window) {
            return Err(Violation::ImpossibleCredit);
        }
        let is_possible = |new: u32, old: u32, sent: u32, most: u32| {
            new.wrapping_sub(sent) <= most && new.wrapping_sub(sent) >= old.wrapping_sub(sent)
        };
        let data = is_possible(counts.data, self.allowed.data, self.sent.data, counts.window);
        let control = is_possible(counts.control, self.allowed.control, self.sent.control, CONTROL);
        if !(data && control) {
            return Err(Violation::ImpossibleCredit);
        }
        if counts.answered.wrapping_sub(self.allowed.answered) > self.offers_open() {
            return Err(Violation::ImpossibleAnswer);
        }
        self.allowed = counts;
        Ok(())
    }
}

/// The index of the entries of the send queue that a packet uses.
fn entry(class: Class) -> usize {
    match class {
        Class::Data | Class::Waiver | Class::Space => 0,
        Class::Control | Class::Abort => 1,
        Class::Answer => 2,
        Class::Heartbeat => 3,
    }
}
