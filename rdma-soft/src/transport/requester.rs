//! The requester of a reliable connection: sends requests and handles responses.

use std::collections::VecDeque;
use std::time::Duration;

use super::host::{Completion, Host, Status};
use super::{Outgoing, Request, Time, Work};
use crate::wire::{Ack, Data, Header, Nak, Operation, Psn, Syndrome};

/// Fraction of the ACK timeout after which a probe is sent.
///
/// A probe retransmits the first unanswered packet, which reveals a loss before the timeout. It does not count as a retry.
const PROBE_DIVISOR: u32 = 64;

/// Lower bound for the packets in flight after losses.
const MIN_WINDOW: u16 = 2;

/// Minimum delay before a probe. Peers may take this long to answer without any loss.
const MIN_PROBE_DELAY: Duration = Duration::from_millis(1);

/// Settings of a requester, set when its queue pair enters RTS.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequesterSettings {
    /// PSN of the first packet.
    pub psn: Psn,
    /// Path MTU: maximum payload of a packet, in bytes.
    pub mtu: u32,
    /// Maximum number of unacknowledged packets in flight, at least 4. Limited by the path and by the receiver's buffers.
    pub window: u16,
    /// Maximum number of outstanding reads and atomic operations. At least 1 if there are any.
    pub reads: u8,
    /// ACK timeout. `None` waits forever.
    pub timeout: Option<Duration>,
    /// Number of retries after an ACK timeout or a PSN sequence error: 0 to 7.
    pub retries: u8,
    /// Number of retries after an RNR NAK: 0 to 6. 7 retries forever.
    pub rnr_retries: u8,
}

/// A work queue entry with its PSN range.
#[derive(Clone, Copy, Debug)]
struct Wqe {
    work: Work,
    psn: Psn,
    packets: u32,
    /// Response packets received, for a read or an atomic operation.
    received: u32,
}

impl Wqe {
    fn needs_response_data(&self) -> bool {
        matches!(self.work.request, Request::Read { .. } | Request::CompareSwap(_) | Request::FetchAdd(_))
    }

    fn has_all_data(&self) -> bool {
        !self.needs_response_data() || self.received == self.packets
    }

    /// Number of packets that one read request asks for, starting at packet `from`.
    ///
    /// A read request covers at most half the window.
    fn read_request_packets(&self, from: u32, window: u32) -> u32 {
        let most = (window / 2).max(1);
        (most - from % most).min(self.packets - from)
    }

    /// PSN after the last packet.
    fn end(&self) -> Psn {
        self.psn.add(self.packets)
    }
}

/// The requester of a reliable connection.
///
/// It retransmits with go-back-N: after a loss it sends all unacknowledged packets again, starting with the first.
#[derive(Clone, Debug)]
pub struct Requester {
    settings: RequesterSettings,
    /// Work that is not acknowledged yet, oldest first. Entries before `next_wqe` are sent completely.
    work: VecDeque<Wqe>,
    /// Index of the entry to send next.
    next_wqe: usize,
    /// Packets of that entry that were sent.
    sent_packets: u32,
    /// PSN for the next work that is posted.
    next_psn: Psn,
    /// PSN after the last packet ever sent. A retransmission does not move it back.
    sent_end: Psn,
    /// PSN of the first unacknowledged packet.
    first_unacked: Psn,
    /// Current window. Smaller after losses and RNR NAKs, because go-back-N retransmits everything after a lost packet.
    in_flight_limit: u16,
    /// Outstanding read and atomic requests. A long read takes several requests.
    outstanding_reads: u32,
    /// No new work is started (SQD).
    is_draining: bool,
    retries_left: u8,
    rnr_retries_left: u8,
    /// Expiry of the ACK timeout.
    ack_deadline: Option<Time>,
    /// Time of the next probe, and the delay from it to the following one.
    probe: Option<(Time, Duration)>,
    is_probe_due: bool,
    /// PSN of the last probe since the peer last made progress.
    probed_psn: Option<Psn>,
    /// End of the delay that the peer requested with an RNR NAK.
    rnr_wait_until: Option<Time>,
    /// The request for a missing response was retransmitted. Later responses after the same gap do not trigger another retry.
    has_retried_gap: bool,
    has_failed: bool,
}

impl Requester {
    /// Creates a requester that is ready to send.
    #[must_use]
    pub fn new(settings: RequesterSettings) -> Self {
        Requester {
            settings,
            // Posting allocates nothing while no more work than this is queued.
            work: VecDeque::with_capacity(settings.window.into()),
            next_wqe: 0,
            sent_packets: 0,
            next_psn: settings.psn,
            sent_end: settings.psn,
            first_unacked: settings.psn,
            in_flight_limit: settings.window,
            outstanding_reads: 0,
            is_draining: false,
            retries_left: settings.retries,
            rnr_retries_left: settings.rnr_retries,
            ack_deadline: None,
            probe: None,
            is_probe_due: false,
            probed_psn: None,
            rnr_wait_until: None,
            has_retried_gap: false,
            has_failed: false,
        }
    }

    /// Whether work has failed. All work is then completed, and the queue pair enters the error state.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Whether the send queue is empty.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.work.is_empty()
    }

    /// Stops or resumes starting new work while the queue pair drains (SQD).
    ///
    /// Work that has started continues.
    pub fn hold(&mut self, is_draining: bool) {
        self.is_draining = is_draining;
    }

    /// Changes the settings of a running requester.
    ///
    /// The PSN, the MTU and the window keep their values.
    pub fn change(&mut self, settings: RequesterSettings) {
        let RequesterSettings { psn, mtu, window, .. } = self.settings;
        self.settings = RequesterSettings { psn, mtu, window, ..settings };
        (self.retries_left, self.rnr_retries_left) = (settings.retries, settings.rnr_retries);
    }

    /// Whether all work that has started is done.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.work.front().is_none_or(|first| first.psn.since(self.sent_end) >= 0)
    }

    /// Adds work. A failed requester flushes it at once.
    pub fn post(&mut self, work: Work, host: &mut impl Host) {
        if self.has_failed {
            host.complete(Completion::Sent { id: work.id, status: Status::Flushed });
            return;
        }
        let packets = work.packets(self.settings.mtu);
        self.work.push_back(Wqe { work, psn: self.next_psn, packets, received: 0 });
        self.next_psn = self.next_psn.add(packets);
    }

    /// Completes all remaining work as flushed, because the queue pair enters the error state.
    pub fn flush(&mut self, host: &mut impl Host) {
        self.has_failed = true;
        self.stop_timers();
        self.rnr_wait_until = None;
        for wqe in self.work.drain(..) {
            host.complete(Completion::Sent { id: wqe.work.id, status: Status::Flushed });
        }
        (self.next_wqe, self.sent_packets) = (0, 0);
    }

    /// Returns when to call [`Requester::expire`].
    #[must_use]
    pub fn wake_at(&self) -> Option<Time> {
        let probe = self.probe.map(|(at, _)| at);
        self.rnr_wait_until.or(probe.into_iter().chain(self.ack_deadline).min())
    }

    /// Starts the ACK timeout and the probe timer.
    fn start_timers(&mut self, now: Time) {
        let Some(timeout) = self.settings.timeout else { return };
        self.ack_deadline = Some(now + timeout);
        let wait = timeout / PROBE_DIVISOR;
        self.probe = (wait >= MIN_PROBE_DELAY).then(|| (now + wait, 2 * wait));
        (self.is_probe_due, self.probed_psn) = (false, None);
    }

    fn stop_timers(&mut self) {
        (self.ack_deadline, self.probe) = (None, None);
        (self.is_probe_due, self.probed_psn) = (false, None);
    }

    /// Handles expired timers and returns whether any expired. There may then be packets to send.
    ///
    /// `received_until` is the time until which all received packets were handled. A response that arrived later may still be
    /// waiting in a socket, so the ACK timeout and the probe timer are compared with this time. The RNR delay is compared with
    /// `now`.
    pub fn expire(&mut self, now: Time, received_until: Time, host: &mut impl Host) -> bool {
        let is_rnr_wait_over = self.rnr_wait_until.take_if(|rnr_wait_until| *rnr_wait_until <= now).is_some();
        if self.rnr_wait_until.is_some() {
            return false;
        }
        if self.ack_deadline.is_some_and(|ack_deadline| ack_deadline <= received_until) {
            self.retransmit(host);
            return true;
        }
        match self.probe {
            Some((at, wait)) if at <= received_until => {
                self.probe = Some((now + wait, 2 * wait));
                self.is_probe_due = true;
                true
            }
            _ => is_rnr_wait_over,
        }
    }

    /// Retransmits all unacknowledged packets, or fails if no retries are left.
    fn retransmit(&mut self, host: &mut impl Host) {
        match self.retries_left.checked_sub(1) {
            Some(left) => {
                self.retries_left = left;
                self.shrink_window();
                self.stop_timers();
                self.has_retried_gap = false;
                self.rewind();
            }
            None => self.fail(Status::RetryExceeded, host),
        }
    }

    /// Halves the window after a loss or an RNR NAK.
    fn shrink_window(&mut self) {
        self.in_flight_limit = (self.in_flight_limit / 2).max(MIN_WINDOW);
    }

    /// Like [`Requester::retransmit`], but only once per gap in the responses.
    fn retransmit_missing(&mut self, host: &mut impl Host) {
        if !self.has_retried_gap {
            self.retransmit(host);
            self.has_retried_gap = true;
        }
    }

    /// Fails the oldest work and flushes the rest.
    fn fail(&mut self, status: Status, host: &mut impl Host) {
        if let Some(first) = self.work.pop_front() {
            host.complete(Completion::Sent { id: first.work.id, status });
        }
        self.flush(host);
    }

    /// Goes back to the first unacknowledged packet (go-back-N).
    fn rewind(&mut self) {
        self.next_wqe = 0;
        self.outstanding_reads = 0;
        self.sent_packets = match self.work.front() {
            Some(first) if first.needs_response_data() => first.received,
            Some(first) => self.first_unacked.since(first.psn).max(0) as u32,
            None => 0,
        };
    }

    /// Returns the next packet to send, if any.
    pub fn transmit(&mut self, now: Time) -> Option<Outgoing> {
        if self.rnr_wait_until.is_some() {
            return None;
        }
        if std::mem::take(&mut self.is_probe_due) {
            if let Some(probe) = self.first_unanswered() {
                self.probed_psn = Some(probe.psn);
                return Some(probe);
            }
        }
        let wqe = *self.work.get(self.next_wqe)?;
        let psn = wqe.psn.add(self.sent_packets);
        let window = i32::from(self.in_flight_limit);
        if psn.since(self.first_unacked) >= window {
            return None;
        }
        let is_new = self.sent_packets == 0 && psn.since(self.sent_end) >= 0;
        let is_read_limited =
            wqe.needs_response_data() && self.outstanding_reads >= u32::from(self.settings.reads.max(1));
        if is_read_limited
            || (self.is_draining && is_new)
            || (wqe.work.is_fenced && self.sent_packets == 0 && self.outstanding_reads > 0)
        {
            return None;
        }
        let mut outgoing = self.packet(&wqe, self.sent_packets);
        let ack_interval = self.ack_interval();
        outgoing.ack_request |=
            self.sent_packets % ack_interval == ack_interval - 1 || psn.add(1).since(self.first_unacked) >= window;
        if wqe.needs_response_data() {
            self.outstanding_reads += 1;
            self.sent_packets += wqe.read_request_packets(self.sent_packets, self.settings.window.into());
        } else {
            self.sent_packets += 1;
        }
        if self.sent_packets >= wqe.packets {
            (self.next_wqe, self.sent_packets) = (self.next_wqe + 1, 0);
        }
        self.note_sent();
        let expects_response = outgoing.ack_request || wqe.needs_response_data();
        if expects_response && self.ack_deadline.is_none() {
            self.start_timers(now);
        }
        Some(outgoing)
    }

    /// Transmits up to `most` more packets of the run that `first` starts. Returns their number.
    ///
    /// `first` is the packet that was just transmitted. The others have the next PSNs and the next parts of the data, and request
    /// no ACK.
    pub fn extend_run(&mut self, first: &Outgoing, most: u32) -> u32 {
        let Some(wqe) = self.work.get(self.next_wqe) else { return 0 };
        let (at, psn) = (self.sent_packets, wqe.psn.add(self.sent_packets));
        if !first.operation.is_middle() || first.ack_request || first.psn.add(1) != psn {
            return 0;
        }
        // A run ends before the last packet of the message, before one that requests an ACK, and before the end of the window.
        let to_last = wqe.packets - 1 - at;
        let interval = self.ack_interval();
        let to_request = interval - 1 - at % interval;
        let to_window = i32::from(self.in_flight_limit) - 1 - psn.since(self.first_unacked);
        let count = to_last.min(to_request).min(to_window.max(0) as u32).min(most);
        self.sent_packets += count;
        self.note_sent();
        count
    }

    /// Packets per ACK request.
    fn ack_interval(&self) -> u32 {
        (u32::from(self.in_flight_limit) / 4).max(1)
    }

    /// Advances `sent_end` to the next packet to send.
    fn note_sent(&mut self) {
        let next_to_send = self.next_to_send();
        if next_to_send.since(self.sent_end) > 0 {
            self.sent_end = next_to_send;
        }
    }

    /// Builds the packet with this index of a work queue entry.
    fn packet(&self, wqe: &Wqe, index: u32) -> Outgoing {
        let Wqe { work, psn, packets, .. } = *wqe;
        let mut outgoing = work.packet(index, packets, psn.add(index), self.settings.mtu);
        if let Operation::ReadRequest(range) = &mut outgoing.operation {
            range.len = range.len.min(wqe.read_request_packets(index, self.settings.window.into()) * self.settings.mtu);
        }
        outgoing
    }

    /// Returns the first packet that was sent and is not answered, with the request for an ACK.
    fn first_unanswered(&self) -> Option<Outgoing> {
        let first = self.work.front()?;
        let index = if first.needs_response_data() {
            first.received
        } else {
            self.first_unacked.since(first.psn).max(0) as u32
        };
        let was_sent = self.next_to_send().since(first.psn.add(index)) > 0;
        let outgoing = self.packet(first, index);
        was_sent.then_some(Outgoing { ack_request: true, ..outgoing })
    }

    /// PSN of the next packet to send.
    fn next_to_send(&self) -> Psn {
        match self.work.get(self.next_wqe) {
            Some(wqe) => wqe.psn.add(self.sent_packets),
            None => self.next_psn,
        }
    }

    /// Handles a response that has arrived.
    pub fn handle(&mut self, header: &Header, payload: Data<'_>, now: Time, host: &mut impl Host) {
        if self.has_failed {
            return;
        }
        match header.operation {
            Operation::Acknowledge(Ack { syndrome, .. }) => self.handle_ack(header.psn, syndrome, now, host),
            Operation::AtomicAcknowledge(_, old) => {
                self.handle_response_data(header.psn, (&old.to_ne_bytes()).into(), true, now, host);
            }
            Operation::ReadFirst(_) | Operation::ReadMiddle => {
                self.handle_response_data(header.psn, payload, false, now, host)
            }
            Operation::ReadLast(_) | Operation::ReadOnly(_) => {
                self.handle_response_data(header.psn, payload, true, now, host)
            }
            _ => {}
        }
    }

    fn handle_ack(&mut self, psn: Psn, syndrome: Syndrome, now: Time, host: &mut impl Host) {
        // A NAK acknowledges the packets before its PSN. An ACK includes its PSN.
        let acked_end = if matches!(syndrome, Syndrome::Ack(_)) { psn.add(1) } else { psn };
        // Ignore ACKs for packets that were acknowledged before or never sent.
        if acked_end.since(self.first_unacked) < 0 || acked_end.since(self.sent_end) > 0 {
            return;
        }
        if acked_end == self.sent_end && !matches!(syndrome, Syndrome::Ack(_)) {
            return;
        }
        if !self.advance(acked_end, now, host) {
            return;
        }
        match syndrome {
            Syndrome::Ack(_) => {}
            Syndrome::ReceiverNotReady(timer) => {
                if self.rnr_retries_left == 0 {
                    return self.fail(Status::ReceiverNotReadyExceeded, host);
                }
                if self.rnr_retries_left < 7 {
                    self.rnr_retries_left -= 1;
                }
                // The peer has answered. Losses between RNR NAKs are not consecutive losses.
                self.retries_left = self.settings.retries;
                self.shrink_window();
                self.rnr_wait_until = Some(now + rnr_delay(timer));
                self.stop_timers();
                self.rewind();
            }
            Syndrome::Nak(Nak::SequenceError) => self.retransmit(host),
            Syndrome::Nak(Nak::InvalidRequest) => self.fail(Status::RemoteInvalidRequest, host),
            Syndrome::Nak(Nak::RemoteAccess) => self.fail(Status::RemoteAccess, host),
            Syndrome::Nak(Nak::RemoteOperation) => self.fail(Status::RemoteOperation, host),
        }
    }

    /// Acknowledges all packets before `acked_end` and returns whether no response is missing among them.
    fn advance(&mut self, acked_end: Psn, now: Time, host: &mut impl Host) -> bool {
        let mut is_contiguous = true;
        while let Some(first) = self.work.front().copied() {
            if first.end().since(acked_end) > 0 {
                // The peer has answered a later request, so the response to this read was lost.
                if first.needs_response_data() && acked_end.since(first.psn.add(first.received)) > 0 {
                    is_contiguous = false;
                }
                break;
            }
            if !first.has_all_data() {
                is_contiguous = false;
                break;
            }
            self.work.pop_front();
            match self.next_wqe.checked_sub(1) {
                Some(at) => self.next_wqe = at,
                // The entry was being retransmitted.
                None => self.sent_packets = 0,
            }
            host.complete(Completion::Sent { id: first.work.id, status: Status::Success });
        }
        let new_first_unacked = match self.work.front() {
            Some(first) if first.needs_response_data() => first.psn.add(first.received),
            _ => acked_end,
        };
        if let newly_acked @ 1.. = new_first_unacked.since(self.first_unacked) {
            self.first_unacked = new_first_unacked;
            self.in_flight_limit =
                self.settings.window.min(self.in_flight_limit.saturating_add(newly_acked.min(0xffff) as u16));
            // An ACK for exactly the probed packet means that the peer has received nothing after it. If the oldest work is a
            // read, the peer may still be sending its response.
            let is_lost = self.probed_psn.is_some_and(|probed_psn| new_first_unacked == probed_psn.add(1))
                && !self.work.front().is_some_and(Wqe::needs_response_data);
            if is_lost {
                self.shrink_window();
            }
            // A retransmission may be behind the ACK. It then continues after the acknowledged packets.
            if is_lost || self.next_to_send().since(new_first_unacked) < 0 {
                self.rewind();
            }
            self.handle_progress(now);
        }
        if !is_contiguous {
            self.retransmit_missing(host);
        }
        is_contiguous
    }

    /// Resets retries and timers after the peer has answered something new.
    fn handle_progress(&mut self, now: Time) {
        self.has_retried_gap = false;
        self.retries_left = self.settings.retries;
        self.rnr_retries_left = self.settings.rnr_retries;
        if self.next_to_send().since(self.first_unacked) > 0 {
            self.start_timers(now);
        } else {
            self.stop_timers();
        }
    }

    /// Handles the data of a read or atomic response.
    fn handle_response_data(&mut self, psn: Psn, data: Data<'_>, is_last: bool, now: Time, host: &mut impl Host) {
        // Ignore old responses. Work that is queued far behind may have the same PSNs after a wrap.
        if psn.since(self.first_unacked) < 0 || psn.since(self.sent_end) >= 0 {
            return;
        }
        // A response acknowledges all work before the one that it belongs to.
        let index = self
            .work
            .iter()
            .position(|wqe| wqe.needs_response_data() && psn.since(wqe.psn) >= 0 && psn.since(wqe.end()) < 0);
        let Some(index) = index else { return };
        let start = self.work[index].psn;
        if index > 0 && !self.advance(start, now, host) {
            return;
        }
        let Some(first) = self.work.front_mut() else { return };
        let expected = first.psn.add(first.received);
        match psn.since(expected) {
            // Duplicate.
            ..0 => return,
            0 => {}
            // A response before it was lost.
            1.. => return self.retransmit_missing(host),
        }
        let mtu = self.settings.mtu;
        let offset = first.received * mtu;
        let is_atomic = !matches!(first.work.request, Request::Read { .. });
        let expected_len = if is_atomic { 8 } else { (first.work.len - offset.min(first.work.len)).min(mtu) };
        let is_last_expected = first.read_request_packets(first.received, self.settings.window.into()) == 1;
        if data.len() as u32 != expected_len || is_last != is_last_expected {
            return self.fail(Status::BadResponse, host);
        }
        if let Err(status) = host.returned(first.work.id, offset, data) {
            return self.fail(status, host);
        }
        first.received += 1;
        if is_last_expected {
            self.outstanding_reads = self.outstanding_reads.saturating_sub(1);
        }
        self.advance(psn.add(1), now, host);
    }
}

/// Delay that an RNR NAK timer code requests: table 45 of the specification, `enum ib_rnr_timeout` in Linux.
fn rnr_delay(timer: u8) -> Duration {
    const HUNDREDTHS_OF_MS: [u64; 32] = [
        65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
    ];
    Duration::from_micros(10 * HUNDREDTHS_OF_MS[usize::from(timer & 31)])
}
