//! Turning work into requests, and what comes back into completions.

use std::collections::VecDeque;
use std::time::Duration;

use super::host::{Completion, Host, Status};
use super::{Outgoing, Request, Time, Work};
use crate::wire::{Ack, Header, Nak, Operation, Psn, Syndrome};

/// The share of the timeout after which the earliest packet is sent again, to hear sooner what got lost. It is no retry.
const PROBE: u32 = 64;

/// Packets that may be on their way whatever got lost.
const FEWEST: u16 = 2;

/// Peers take so long to answer, also when all is well.
const SOON: Duration = Duration::from_millis(1);

/// What a requester is told when its queue pair becomes ready to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequesterSettings {
    /// The number of its first packet.
    pub psn: Psn,
    /// Most bytes of a packet's payload.
    pub mtu: u32,
    /// Packets that may be on their way unacknowledged: what keeps a path busy, and a receiver can hold. At least 4.
    pub window: u16,
    /// Reads and atomic operations that may be outstanding; at least one where there are any.
    pub reads: u8,
    /// How long an acknowledgement is waited for; for ever unless set.
    pub timeout: Option<Duration>,
    /// How often to send again when none comes, or packets are missing: 0 to 7.
    pub retries: u8,
    /// How often to send again when the peer has no receive: 0 to 6, or without end at 7.
    pub rnr_retries: u8,
}

/// Work with its packets' numbers.
#[derive(Clone, Copy, Debug)]
struct Numbered {
    work: Work,
    psn: Psn,
    packets: u32,
    /// Of a read or an atomic operation: packets that have come back.
    returned: u32,
}

impl Numbered {
    fn awaits_data(&self) -> bool {
        matches!(self.work.request, Request::Read { .. } | Request::CompareSwap(_) | Request::FetchAdd(_))
    }

    fn is_answered(&self) -> bool {
        !self.awaits_data() || self.returned == self.packets
    }

    /// Of the packets from that one on, how many are asked for at once.
    fn part(&self, from: u32, window: u32) -> u32 {
        let most = (window / 2).max(1);
        (most - from % most).min(self.packets - from)
    }

    /// The number of the first packet after it.
    fn end(&self) -> Psn {
        self.psn.add(self.packets)
    }
}

/// The end of a reliable connection that asks.
#[derive(Clone, Debug)]
pub struct Requester {
    settings: RequesterSettings,
    /// Not acknowledged yet, the earliest first. Those before `at` were sent.
    work: VecDeque<Numbered>,
    /// Which is sent next,
    at: usize,
    /// and how many of its packets were.
    sent: u32,
    /// Of the first packet that was never numbered.
    next: Psn,
    /// After all that was ever sent, also if it is being sent again.
    highest: Psn,
    /// Of the first packet that is not acknowledged.
    unacknowledged: Psn,
    /// Packets that may be on their way for now: fewer after losses and refusals, since all that comes after one is sent again.
    limit: u16,
    /// Requests whose data has not come back: each is for a part of what a read is for.
    asked: u32,
    /// Nothing is begun.
    is_held: bool,
    retries: u8,
    rnr_retries: u8,
    /// When an answer must have come.
    deadline: Option<Time>,
    /// When to ask what has become of the earliest packet, and how long to wait for the answer after that.
    probe: Option<(Time, Duration)>,
    is_probe_due: bool,
    /// The packet that it was asked for.
    probed: Option<Psn>,
    /// Until when the peer has asked to be left alone.
    pause: Option<Time>,
    /// An answer is missing, and what asks for it was sent again: what comes after the gap says nothing new.
    has_asked: bool,
    has_failed: bool,
}

impl Requester {
    /// Ready to send.
    #[must_use]
    pub fn new(settings: RequesterSettings) -> Self {
        Requester {
            settings,
            // As long as no more is posted, nothing is allocated later.
            work: VecDeque::with_capacity(settings.window.into()),
            at: 0,
            sent: 0,
            next: settings.psn,
            highest: settings.psn,
            unacknowledged: settings.psn,
            limit: settings.window,
            asked: 0,
            is_held: false,
            retries: settings.retries,
            rnr_retries: settings.rnr_retries,
            deadline: None,
            probe: None,
            is_probe_due: false,
            probed: None,
            pause: None,
            has_asked: false,
            has_failed: false,
        }
    }

    /// Whether work has failed: all work has ended then, and the queue pair goes to the error state.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Whether no work is left.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.work.is_empty()
    }

    /// Begins nothing that was not begun, or goes on: as its queue pair is drained.
    pub fn hold(&mut self, is_held: bool) {
        self.is_held = is_held;
    }

    /// Goes on with other settings, of which the number of the next packet, the MTU and the window stay as they are.
    pub fn change(&mut self, settings: RequesterSettings) {
        let RequesterSettings { psn, mtu, window, .. } = self.settings;
        self.settings = RequesterSettings { psn, mtu, window, ..settings };
        (self.retries, self.rnr_retries) = (settings.retries, settings.rnr_retries);
    }

    /// Whether all work that was begun is done.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.work.front().is_none_or(|first| first.psn.since(self.highest) >= 0)
    }

    /// Adds work. After a failure it is flushed at once.
    pub fn post(&mut self, work: Work, host: &mut impl Host) {
        if self.has_failed {
            host.complete(Completion::Sent { id: work.id, status: Status::Flushed });
            return;
        }
        let packets = work.packets(self.settings.mtu);
        self.work.push_back(Numbered { work, psn: self.next, packets, returned: 0 });
        self.next = self.next.add(packets);
    }

    /// Ends all work that is left, as the queue pair goes to the error state.
    pub fn flush(&mut self, host: &mut impl Host) {
        self.has_failed = true;
        self.await_nothing();
        self.pause = None;
        for numbered in self.work.drain(..) {
            host.complete(Completion::Sent { id: numbered.work.id, status: Status::Flushed });
        }
        (self.at, self.sent) = (0, 0);
    }

    /// When to call [`Requester::expire`].
    #[must_use]
    pub fn wake_at(&self) -> Option<Time> {
        let probe = self.probe.map(|(at, _)| at);
        self.pause.or(probe.into_iter().chain(self.deadline).min())
    }

    /// An answer has to come from now on.
    fn await_answer(&mut self, now: Time) {
        let Some(timeout) = self.settings.timeout else { return };
        self.deadline = Some(now + timeout);
        let wait = timeout / PROBE;
        self.probe = (wait >= SOON).then(|| (now + wait, 2 * wait));
        (self.is_probe_due, self.probed) = (false, None);
    }

    fn await_nothing(&mut self) {
        (self.deadline, self.probe) = (None, None);
        (self.is_probe_due, self.probed) = (false, None);
    }

    /// Does what has become due; whether anything has, so that there may be something to send. All that had arrived by `heard` was
    /// handled: an answer is overdue only if it had not come by then, since what has arrived after that may be it. A pause that the
    /// peer has asked for is over by `now`.
    pub fn expire(&mut self, now: Time, heard: Time, host: &mut impl Host) -> bool {
        let is_over = self.pause.take_if(|pause| *pause <= now).is_some();
        if self.pause.is_some() {
            return false;
        }
        if self.deadline.is_some_and(|deadline| deadline <= heard) {
            self.again(host);
            return true;
        }
        match self.probe {
            Some((at, wait)) if at <= heard => {
                self.probe = Some((now + wait, 2 * wait));
                self.is_probe_due = true;
                true
            }
            _ => is_over,
        }
    }

    /// Sends again what is not acknowledged, or fails when that was done often enough.
    fn again(&mut self, host: &mut impl Host) {
        match self.retries.checked_sub(1) {
            Some(left) => {
                self.retries = left;
                self.shrink();
                self.await_nothing();
                self.has_asked = false;
                self.rewind();
            }
            None => self.fail(Status::RetryExceeded, host),
        }
    }

    /// Something has got lost, or come too early.
    fn shrink(&mut self) {
        self.limit = (self.limit / 2).max(FEWEST);
    }

    /// As [`Requester::again`], once for each gap in the answers.
    fn ask_for_missing(&mut self, host: &mut impl Host) {
        if !self.has_asked {
            self.again(host);
            self.has_asked = true;
        }
    }

    /// The earliest work fails, and what comes after it is flushed.
    fn fail(&mut self, status: Status, host: &mut impl Host) {
        if let Some(first) = self.work.pop_front() {
            host.complete(Completion::Sent { id: first.work.id, status });
        }
        self.flush(host);
    }

    /// Sends all again that was not acknowledged.
    fn rewind(&mut self) {
        self.at = 0;
        self.asked = 0;
        self.sent = match self.work.front() {
            Some(first) if first.awaits_data() => first.returned,
            Some(first) => self.unacknowledged.since(first.psn).max(0) as u32,
            None => 0,
        };
    }

    /// The next packet to send, if there is any.
    pub fn transmit(&mut self, now: Time) -> Option<Outgoing> {
        if self.pause.is_some() {
            return None;
        }
        if std::mem::take(&mut self.is_probe_due) {
            if let Some(probe) = self.earliest() {
                self.probed = Some(probe.psn);
                return Some(probe);
            }
        }
        let numbered = *self.work.get(self.at)?;
        let psn = numbered.psn.add(self.sent);
        let window = i32::from(self.limit);
        if psn.since(self.unacknowledged) >= window {
            return None;
        }
        let is_new = self.sent == 0 && psn.since(self.highest) >= 0;
        let is_late = numbered.awaits_data() && self.asked >= u32::from(self.settings.reads.max(1));
        if is_late || (self.is_held && is_new) || (numbered.work.is_fenced && self.sent == 0 && self.asked > 0) {
            return None;
        }
        let mut outgoing = self.packet(&numbered, self.sent);
        let pace = (u32::from(self.limit) / 4).max(1);
        outgoing.ack_request |= self.sent % pace == pace - 1 || psn.add(1).since(self.unacknowledged) >= window;
        if numbered.awaits_data() {
            self.asked += 1;
            self.sent += numbered.part(self.sent, self.settings.window.into());
        } else {
            self.sent += 1;
        }
        if self.sent >= numbered.packets {
            (self.at, self.sent) = (self.at + 1, 0);
        }
        let frontier = self.frontier();
        if frontier.since(self.highest) > 0 {
            self.highest = frontier;
        }
        let is_answered = outgoing.ack_request || numbered.awaits_data();
        if is_answered && self.deadline.is_none() {
            self.await_answer(now);
        }
        Some(outgoing)
    }

    /// A packet of a piece of work.
    fn packet(&self, numbered: &Numbered, index: u32) -> Outgoing {
        let Numbered { work, psn, packets, .. } = *numbered;
        let mut outgoing = work.packet(index, packets, psn.add(index), self.settings.mtu);
        if let Operation::ReadRequest(range) = &mut outgoing.operation {
            range.len = range.len.min(numbered.part(index, self.settings.window.into()) * self.settings.mtu);
        }
        outgoing
    }

    /// The earliest packet that was sent and is not answered, so that it is answered at once.
    fn earliest(&self) -> Option<Outgoing> {
        let first = self.work.front()?;
        let index =
            if first.awaits_data() { first.returned } else { self.unacknowledged.since(first.psn).max(0) as u32 };
        let was_sent = self.frontier().since(first.psn.add(index)) > 0;
        let outgoing = self.packet(first, index);
        was_sent.then_some(Outgoing { ack_request: true, ..outgoing })
    }

    /// The number of the first packet that was not sent yet.
    fn frontier(&self) -> Psn {
        match self.work.get(self.at) {
            Some(numbered) => numbered.psn.add(self.sent),
            None => self.next,
        }
    }

    /// Takes an answer that has arrived.
    pub fn handle(&mut self, header: &Header, payload: &[u8], now: Time, host: &mut impl Host) {
        if self.has_failed {
            return;
        }
        match header.operation {
            Operation::Acknowledge(Ack { syndrome, .. }) => self.acknowledged(header.psn, syndrome, now, host),
            Operation::AtomicAcknowledge(_, old) => {
                self.returned(header.psn, &old.to_ne_bytes(), true, now, host);
            }
            Operation::ReadFirst(_) | Operation::ReadMiddle => self.returned(header.psn, payload, false, now, host),
            Operation::ReadLast(_) | Operation::ReadOnly(_) => self.returned(header.psn, payload, true, now, host),
            _ => {}
        }
    }

    fn acknowledged(&mut self, psn: Psn, syndrome: Syndrome, now: Time, host: &mut impl Host) {
        // A refusal is of the packet that it numbers, and acknowledges those before it.
        let upto = if matches!(syndrome, Syndrome::Ack(_)) { psn.add(1) } else { psn };
        // Of what was acknowledged already, or never sent.
        if upto.since(self.unacknowledged) < 0 || upto.since(self.highest) > 0 {
            return;
        }
        if upto == self.highest && !matches!(syndrome, Syndrome::Ack(_)) {
            return;
        }
        if !self.advance(upto, now, host) {
            return;
        }
        match syndrome {
            Syndrome::Ack(_) => {}
            Syndrome::ReceiverNotReady(timer) => {
                if self.rnr_retries == 0 {
                    return self.fail(Status::ReceiverNotReadyExceeded, host);
                }
                if self.rnr_retries < 7 {
                    self.rnr_retries -= 1;
                }
                // It answers: what gets lost while it has no receive is not one loss after the other.
                self.retries = self.settings.retries;
                self.shrink();
                self.pause = Some(now + rnr_pause(timer));
                self.await_nothing();
                self.rewind();
            }
            Syndrome::Nak(Nak::SequenceError) => self.again(host),
            Syndrome::Nak(Nak::InvalidRequest) => self.fail(Status::RemoteInvalidRequest, host),
            Syndrome::Nak(Nak::RemoteAccess) => self.fail(Status::RemoteAccess, host),
            Syndrome::Nak(Nak::RemoteOperation) => self.fail(Status::RemoteOperation, host),
        }
    }

    /// All before that number is acknowledged; whether no answer is missing among it.
    fn advance(&mut self, upto: Psn, now: Time, host: &mut impl Host) -> bool {
        let mut is_whole = true;
        while let Some(first) = self.work.front().copied() {
            if first.end().since(upto) > 0 {
                // A read of which the peer has gone on to something later: its answer got lost.
                if first.awaits_data() && upto.since(first.psn.add(first.returned)) > 0 {
                    is_whole = false;
                }
                break;
            }
            if !first.is_answered() {
                is_whole = false;
                break;
            }
            self.work.pop_front();
            match self.at.checked_sub(1) {
                Some(at) => self.at = at,
                // It was being sent again.
                None => self.sent = 0,
            }
            host.complete(Completion::Sent { id: first.work.id, status: Status::Success });
        }
        let reached = match self.work.front() {
            Some(first) if first.awaits_data() => first.psn.add(first.returned),
            _ => upto,
        };
        if let answered @ 1.. = reached.since(self.unacknowledged) {
            self.unacknowledged = reached;
            self.limit = self.settings.window.min(self.limit.saturating_add(answered.min(0xffff) as u16));
            // The peer has waited for just that packet, and has nothing of what came after it, or reads on and is to be let do so.
            let is_lost = self.probed.is_some_and(|probed| reached == probed.add(1))
                && !self.work.front().is_some_and(Numbered::awaits_data);
            // What is sent again need not be, if its answer comes meanwhile.
            if is_lost {
                self.shrink();
            }
            if is_lost || self.frontier().since(reached) < 0 {
                self.rewind();
            }
            self.progressed(now);
        }
        if !is_whole {
            self.ask_for_missing(host);
        }
        is_whole
    }

    /// The peer has answered something new.
    fn progressed(&mut self, now: Time) {
        self.has_asked = false;
        self.retries = self.settings.retries;
        self.rnr_retries = self.settings.rnr_retries;
        if self.frontier().since(self.unacknowledged) > 0 {
            self.await_answer(now);
        } else {
            self.await_nothing();
        }
    }

    /// Data has come back.
    fn returned(&mut self, psn: Psn, data: &[u8], is_last: bool, now: Time, host: &mut impl Host) {
        // Of what was answered long ago: work that is far behind may have the same numbers.
        if psn.since(self.unacknowledged) < 0 || psn.since(self.highest) >= 0 {
            return;
        }
        // It acknowledges what came before the work that it is of.
        let of = self.work.iter().position(|numbered| {
            numbered.awaits_data() && psn.since(numbered.psn) >= 0 && psn.since(numbered.end()) < 0
        });
        let Some(of) = of else { return };
        let start = self.work[of].psn;
        if of > 0 && !self.advance(start, now, host) {
            return;
        }
        let Some(first) = self.work.front_mut() else { return };
        let expected = first.psn.add(first.returned);
        match psn.since(expected) {
            // It was there already.
            ..0 => return,
            0 => {}
            // Those before it got lost.
            1.. => return self.ask_for_missing(host),
        }
        let mtu = self.settings.mtu;
        let offset = first.returned * mtu;
        let is_atomic = !matches!(first.work.request, Request::Read { .. });
        let wanted = if is_atomic { 8 } else { (first.work.len - offset.min(first.work.len)).min(mtu) };
        let ends = first.part(first.returned, self.settings.window.into()) == 1;
        if data.len() as u32 != wanted || is_last != ends {
            return self.fail(Status::BadResponse, host);
        }
        if let Err(status) = host.returned(first.work.id, offset, data) {
            return self.fail(status, host);
        }
        first.returned += 1;
        if ends {
            self.asked = self.asked.saturating_sub(1);
        }
        self.advance(psn.add(1), now, host);
    }
}

/// How long the peer asks to be left alone: table 45 of the specification, `enum ib_rnr_timeout` of Linux.
fn rnr_pause(timer: u8) -> Duration {
    const HUNDREDTHS_OF_MS: [u64; 32] = [
        65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
    ];
    Duration::from_micros(10 * HUNDREDTHS_OF_MS[usize::from(timer & 31)])
}
